"""The two sides of diff."""

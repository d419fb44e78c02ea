"""Build attention layers: one file each, and their catalog."""

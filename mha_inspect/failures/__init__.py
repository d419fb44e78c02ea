"""A forward that raises: where, with what, and why."""

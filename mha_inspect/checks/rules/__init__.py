"""The checks: one file each, named as the check. The docstring of its function is its page."""

"""The attention layers that can be built, one file each, and their catalog."""

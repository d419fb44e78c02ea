"""A module and its arguments, run and recorded."""

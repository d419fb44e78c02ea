"""Run and record a module with its arguments."""

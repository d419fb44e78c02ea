"""See inside attention layers: every shape, every parameter, and what the number of heads changes."""

__version__ = "0.1.0"

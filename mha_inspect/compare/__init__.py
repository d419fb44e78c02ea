"""Compare two runs of attention, and say where and why they differ."""

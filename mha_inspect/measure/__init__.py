"""Measure tensors: differences, statistics, stages side by side."""

"""Measure tensors: differences, statistics and canonical weights."""

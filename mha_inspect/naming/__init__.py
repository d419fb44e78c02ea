"""Name stages, axes and parameters of an attention."""

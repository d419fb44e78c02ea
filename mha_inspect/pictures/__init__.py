"""Pictures of what heads look at: in a terminal, in a page, by matplotlib.

Nothing here is imported before it is asked for. Numbers come in as arrays of numpy, with -inf where a mask is, and the
panels of a picture share one scale.
"""

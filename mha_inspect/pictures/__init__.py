"""Pictures of what heads look at: numbers as arrays of numpy, with -inf where a mask is, on one scale in all panels."""

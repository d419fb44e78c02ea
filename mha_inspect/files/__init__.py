"""Files of tensors, read by their headers: nothing in them is run, and nothing here needs torch."""

"""What the commands answer, as plain frozen data whose field names are the keys of the JSON: no tensors, no torch."""

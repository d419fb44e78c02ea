"""Make the arguments of a forward: tensors and masks, from its signature and the user's options."""

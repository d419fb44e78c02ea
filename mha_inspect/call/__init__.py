"""Make the arguments that a forward is called with: tensors, masks, and what somebody said of them."""

"""Answer questions about checkpoints: their tensors, the roles of these, and the differences of two."""

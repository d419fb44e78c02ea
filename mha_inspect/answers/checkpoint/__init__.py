"""What is told of checkpoints: their tensors, what they are for, and how two of them differ."""

"""Read files of tensors by their headers, without running their code and without importing torch."""

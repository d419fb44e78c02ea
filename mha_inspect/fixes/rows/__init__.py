"""The rows of the grammar, a file for each family of mistakes."""

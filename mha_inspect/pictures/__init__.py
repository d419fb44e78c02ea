"""Draw what each head attends to, as arrays of numpy with -inf for masked elements, on one scale for all panels."""

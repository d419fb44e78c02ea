"""What the parameters of any module are for, read off a recording of it."""

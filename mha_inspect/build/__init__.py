"""Make a module of what was typed: a class, a function or a file, a Hugging Face type, and what --set gives it."""

"""Build a module from the command line: a class, a function, a file or a Hugging Face type, with --set."""

"""Answers in a REPL, a debugger or a notebook."""

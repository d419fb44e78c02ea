"""Fix a mistake in the user's own file: edits of its expressions, each run in memory before it is printed."""

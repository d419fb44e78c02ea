"""Reports as text, as pages, and as files.

Nothing is imported here: a page of help needs the screen alone.
"""

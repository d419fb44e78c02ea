"""Check whether attention that runs is right: run it again with one thing changed, and read the axes of its stages."""

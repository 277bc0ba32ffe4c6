"""Records what was interpreted and repeats it as one Python function, without branches."""

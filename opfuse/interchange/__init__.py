"""Checkpoints of other libraries: their layouts of quantized weights, and what differs between two files."""

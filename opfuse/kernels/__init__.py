"""Functions on plain tensors: casts, layouts, products. Nothing here knows an op, a recipe or a quantizer."""

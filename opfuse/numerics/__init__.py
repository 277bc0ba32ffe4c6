"""What the numbers are: definitions in torch of casts, scales, layouts, chains, norms. Nothing here launches a kernel."""

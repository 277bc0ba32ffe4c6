"""A call as one op in a graph of torch.compile: its saved values and its backward pass outside of autograd."""

"""Programs: what one interpreted run did, repeated in a straight line. Knows tensors and kernels, no op and no recipe."""

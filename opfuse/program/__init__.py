"""Programs: recordings of one interpreted run, repeated without branches. Knows tensors and kernels, but no ops and recipes."""

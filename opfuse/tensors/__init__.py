"""Values that carry quantized data: storages, the quantizers that make them."""

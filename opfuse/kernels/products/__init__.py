"""Products of quantized planes: native where the device has them, emulated elsewhere."""

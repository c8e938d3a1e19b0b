"""Programs in the formats of others: ONNX, compressed-tensors, speculators."""

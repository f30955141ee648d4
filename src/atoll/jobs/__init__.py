"""What a client may hand to the engine; the reference implementation in plain PyTorch."""

"""Stateless fast functions: Triton kernels, unfolded convolutions, each with a reference."""

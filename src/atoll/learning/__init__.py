"""Torch arithmetic: networks, the local training loop, losses, weights; no messages."""

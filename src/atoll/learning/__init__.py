"""Torch arithmetic: networks, losses, penalties, weights; no messages."""

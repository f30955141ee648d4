"""Engines carry messages to where the clients live."""

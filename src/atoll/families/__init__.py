"""Messages and both halves that related methods share, written once."""

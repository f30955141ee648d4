"""The papers' tables, run again: each cell with ours beside theirs, a verdict and the command."""

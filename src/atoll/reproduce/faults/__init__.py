"""Faults of the authors' code as replacements that a run may name; one module for each method."""

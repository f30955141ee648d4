"""A config goes in, a record comes out: stages, rounds, scores, resume."""

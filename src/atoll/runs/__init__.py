"""Runs a config and writes its record: stages, rounds, scores, resume."""

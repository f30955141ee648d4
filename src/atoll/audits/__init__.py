"""Audits: how much a participant learns from the messages of a method, measured during a run."""

"""The command: parse, call, print, nothing else."""

from atoll.cli.command import app, main

__all__ = ["app", "main"]

"""Creates the executor of a run from its options."""

from pathlib import Path

from atoll.compute.executor import Executor
from atoll.runs.config import EngineOptions

__all__ = ["executor_for"]


def executor_for(options: EngineOptions, folder: Path, rounds: int, parts: int = 1) -> Executor:
    """The executor for a run's options; `rounds` is how often jobs with the same key recur."""
    keep = Path(options.keep) if options.keep else None
    return Executor(
        options.mode,
        folder,
        tf32=options.tf32,
        streams=options.streams,
        keep=keep,
        tune=options.tune,
        parts=parts,
        rounds=rounds,
        deterministic=options.deterministic,
        verify=options.verify,
    )

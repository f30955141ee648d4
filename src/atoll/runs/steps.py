"""Counts the gradient steps of a run."""

from collections.abc import Mapping
from typing import Any

from atoll.compute.executor import JobExecutor
from atoll.core.federation import Moment
from atoll.jobs.train import TrainJob

__all__ = ["StepCounter"]


class StepCounter:
    """An executor that counts gradient steps."""

    def __init__(self, executor: JobExecutor) -> None:
        self.executor, self.mode, self.steps = executor, executor.mode, 0

    def do(self, jobs: Mapping[str, Any], moment: Moment | None = None) -> dict[str, Any]:
        """Run jobs and count their steps."""
        self.steps += sum(job.steps for job in jobs.values() if isinstance(job, TrainJob))
        return self.executor.do(jobs, moment)

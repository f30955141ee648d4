"""The registry: which kind of acceleration a type of job has."""

from collections.abc import Callable, Generator
from typing import Any

from atoll.compute.kinds.captured import CapturedPublic, CapturedTraining
from atoll.compute.kinds.early_stopping import EarlyStoppedStacks
from atoll.compute.kinds.evaluate import Tallies
from atoll.compute.kinds.protocol import Capture, CaptureKind, StackKind
from atoll.compute.kinds.split import SplitRounds
from atoll.compute.kinds.train import TrainStacks
from atoll.core.federation import Job
from atoll.jobs.early_stopping import EarlyStoppedJob
from atoll.jobs.public_step import PublicJob
from atoll.jobs.split_round import SplitJob
from atoll.jobs.train import EvalJob, TrainJob

__all__ = ["CAPTURED", "COMPOSED", "STACKED", "Capture", "CaptureKind", "StackKind"]

# jobs of one key in one computation
STACKED: dict[type, StackKind] = {
    TrainJob: TrainStacks(),
    EvalJob: Tallies(),
    SplitJob: SplitRounds(),
    EarlyStoppedJob: EarlyStoppedStacks(),
}
# jobs that are not stacked, each in captured buffers
CAPTURED: dict[type, CaptureKind] = {
    TrainJob: CapturedTraining(),
    PublicJob: CapturedPublic(),
}
# jobs that are neither: the jobs of which each consists run side by side with those of the others
COMPOSED: dict[type, Callable[[Any], Generator[Job, Any, Any]]] = {
    EarlyStoppedJob: EarlyStoppedJob.parts,
}

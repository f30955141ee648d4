"""Training that several runs share runs once, and its result is stored in a file.

Methods that are compared begin with the same model, trained alone. Such a job is `common`; its name
is a hash of all its values, so a file is used only for the very same job on the same kind of
machine. If several processes need the same job at the same time, one runs it and the others wait.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from atoll.compute.cache import cache_key
from atoll.compute.perturb import flattened
from atoll.core.record import locked, write_whole
from atoll.jobs.train import TrainJob, TrainResult, step_key
from atoll.learning.weights import without

__all__ = ["alone", "files_of", "load", "save_as"]


def files_of(jobs: Mapping[str, Any], folder: Path | None, settings: str) -> dict[str, Path]:
    """The files of those jobs that are common; none without a folder."""
    if folder is None:
        return {}
    common = {id: job for id, job in jobs.items() if getattr(job, "common", False)}
    hashes = {id: _hash(job, settings) for id, job in common.items()}
    return {id: folder / f"{name}.safetensors" for id, name in hashes.items() if name}


@contextmanager
def alone(names: Mapping[str, Path]) -> Iterator[None]:
    """Where one of the files is missing, no other process is in here for the same folder."""
    missing = [path for path in names.values() if not path.exists()]
    if not missing:
        yield
        return
    folder = missing[0].parent
    with locked(folder.with_name(f".{folder.name}.lock")):
        yield


def _hash(job: TrainJob, settings: str) -> str:
    """A hash of values, source and machine; empty where the source of a loss is unknown."""
    if job.key() is None:
        return ""
    key = cache_key(
        (step_key(job), len(job.rows), job.epochs, job.stream.key, settings), job.rows.y.device
    )
    if not key.lasting:
        return ""
    digest = hashlib.sha256(key.name.encode())
    rows = {"x": job.rows.x, "own": job.rows.own, "y": job.rows.y}
    rows |= {} if job.rows.share is None else {"share": job.rows.share}
    for tensors in (job.weights, job.moments, rows):
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def save_as(path: Path, result: TrainResult) -> None:
    """Store the result of a job."""
    read = {name: float(loss) for name, loss in result.losses.items()}
    losses = {name: torch.tensor(loss, dtype=torch.float64) for name, loss in read.items()}
    tensors = flattened(weights=result.weights, moments=result.moments, losses=losses)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save({name: t.cpu().contiguous() for name, t in tensors.items()}))


def load(path: Path, job: TrainJob) -> TrainResult:
    """The stored result of a job."""
    tensors = load_file(str(path), str(job.rows.y.device))
    moments = {
        n: t.cpu() if n.startswith("steps/") else t for n, t in without("moments", tensors).items()
    }
    losses = {name: float(loss) for name, loss in without("losses", tensors).items()}
    return TrainResult(without("weights", tensors), moments, losses)

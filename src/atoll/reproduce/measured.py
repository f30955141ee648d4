"""What was measured, kept as one small file each; shared by all papers."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.core.record import disk_errors, locked, write_whole
from atoll.engines.local import LocalEngine
from atoll.runs.loop import Progress
from atoll.runs.result import Run
from atoll.runs.sweep import points, sweep

__all__ = [
    "CHECKPOINTS",
    "file_name",
    "fingerprint",
    "keep",
    "kept",
    "others",
    "swept",
    "swept_together",
    "workplace",
]

CHECKPOINTS = 300.0  # seconds between them: a sweep of text writes some 240 MB a run each time


def fingerprint(asked: Any) -> str:
    """A hash of what was asked for, not of the resolved config.

    An option that is added later, with a default that changes nothing, does not make an old
    measurement another one.
    """
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


def file_name(name: str) -> str:
    """A setting's name as that of a file."""
    return "".join(c if c.isalnum() else "-" for c in name).strip("-").lower()


def keep(folder: Path, name: str, found: Mapping[str, Any]) -> None:
    """Write what was found."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{file_name(name)}.json", json.dumps(found, indent=1).encode())


def kept(folder: Path, name: str, config: str) -> dict[str, Any] | None:
    """What was found before under this name, if the same was asked for."""
    path = folder / f"{file_name(name)}.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found if found["config"] == config else None


def others(folder: Path, names: Sequence[str], config: str) -> list[Path]:
    """The files under these names that hold a measurement of something else."""
    there = [path for name in names if (path := folder / f"{file_name(name)}.json").exists()]
    return [path for path in there if json.loads(path.read_text())["config"] != config]


@contextmanager
def workplace(folder: Path, asked: Any) -> Iterator[Path]:
    """A folder for the runs of a measurement, named by what was asked for.

    It goes when they are done, or have failed. After a kill it is still there, and runs that keep
    checkpoints go on in it. Of two processes that ask for the same, one waits for the other.
    """
    own = folder / "runs" / fingerprint(asked)
    with locked(own.with_name(f".{own.name}.lock")):
        try:
            with disk_errors(own):
                own.mkdir(exist_ok=True)
            yield own
        except Exception:
            shutil.rmtree(own, ignore_errors=True)
            raise
        shutil.rmtree(own, ignore_errors=True)


def swept(
    values: dict[str, Any],
    axes: dict[str, Sequence[Any]],
    folder: Path,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> list[Run]:
    """The runs of a sweep, read from a folder that is not kept."""
    (runs,), _ = swept_together([values], axes, folder, watch)
    return runs


def swept_together(
    several: Sequence[dict[str, Any]],
    axes: dict[str, Sequence[Any]],
    folder: Path,
    watch: Callable[[Progress], None] = lambda progress: None,
    accepted: Callable[[BaseException], bool] = lambda error: False,
) -> tuple[list[list[Run]], dict[int, BaseException]]:
    """Sweeps of several configs as one, so that works of one form are one stack.

    For each config its runs. One with a run that failed has none; its error is given by number if
    it is `accepted`, and raised if it is not.
    """
    with workplace(
        folder, [list(several), {key: list(items) for key, items in axes.items()}]
    ) as own:
        parts = [points(v, axes, own / str(n)) for n, v in enumerate(several)]
        failed: dict[int, BaseException] = {}
        every = [point for part in parts for point in part]
        runs = sweep(every, own, LocalEngine, resume=True, watch=watch, failed=failed)
        for run in runs:
            run.read()  # before the folder goes
        size = len(parts[0])
        errors = {number // size: error for number, error in sorted(failed.items(), reverse=True)}
        for error in errors.values():
            if not accepted(error):
                raise error
    found = {n: [r for r in runs if r.folder.parent.name == str(n)] for n in range(len(parts))}
    return [[] if n in errors else found[n] for n in found], errors

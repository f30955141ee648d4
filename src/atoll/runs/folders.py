"""The folders of runs, runs/NAME-N, and the configs in them."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import UserError
from atoll.core.storage import disk_errors, write_whole
from atoll.runs.config import RunConfig, resolve
from atoll.runs.result import Run

if TYPE_CHECKING:
    from atoll.runs.sweep import Point

__all__ = [
    "fresh_folder", "last_folder", "recorded", "refuse_absent",
    "refuse_other_config", "run_folder", "write_index",
]  # fmt: skip


@contextmanager
def run_folder(name: str, chosen: Path | None, resume: bool) -> Iterator[Path]:
    """The folder of a run: the given one, else the last of its name, else a new one."""
    if chosen is not None or resume:
        yield chosen or last_folder(name)
    else:
        with fresh_folder(name) as folder:
            yield folder


@contextmanager
def fresh_folder(name: str) -> Iterator[Path]:
    """Create the next folder runs/NAME-1, runs/NAME-2, ... at once, to reserve it for this process.

    Removes the folder at the end if it is empty.
    """
    new = not Path("runs").exists()
    number = max((number for number, _ in _folders(name)), default=0) + 1
    while not _claimed(folder := Path("runs") / f"{name}-{number}"):
        number += 1
    try:
        yield folder
    finally:
        with suppress(OSError):  # keep a folder with files
            folder.rmdir()
            if new:
                folder.parent.rmdir()


def _claimed(folder: Path) -> bool:
    """Create the folder; False if it exists."""
    with disk_errors(folder):
        while True:
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.mkdir()
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:  # another process removed the parent, which was empty
                continue


def refuse_absent(folders: Iterable[Path]) -> None:
    """Refuse to continue runs if none of them has written to its folder."""
    every = list(folders)
    for folder in every:
        with disk_errors(folder):
            if folder.is_dir() and any(folder.iterdir()):
                return
    remedy = "name the folder of a run, or leave out --resume to start one"
    raise UserError("no run to continue in this folder", str(every[0]), remedy)


def last_folder(name: str) -> Path:
    """The newest folder runs/NAME-N with files in it."""
    folders = [one for one in _folders(name) if one[1].is_dir() and any(one[1].iterdir())]
    if not folders:
        raise UserError(
            f"no run of '{name}' to go on with", "runs", "leave --resume out, or give --out"
        )
    return max(folders)[1]


def _folders(name: str) -> list[tuple[int, Path]]:
    folders = []
    for path in Path("runs").glob(f"{name}-*"):
        number = path.name.removeprefix(f"{name}-")
        if number.isdigit():
            folders.append((int(number), path))
    return folders


def recorded(folder: Path) -> RunConfig:
    """The config of the run in a folder."""
    return resolve(Run(folder).config, str(folder / "config.toml"))


def refuse_other_config(config: RunConfig, folder: Path) -> None:
    """Refuse to continue a run with another config; accepts a folder without a config."""
    with disk_errors(folder):
        if not (folder / "config.toml").exists():
            return
    before = recorded(folder)
    keys = [key for key in vars(config) if getattr(config, key) != getattr(before, key)]
    if keys:
        what = f"the run in this folder has another '{keys[0]}'"
        raise UserError(what, str(folder), "resume with the config it was started with")


def write_index(members: Sequence["Point"], folder: Path) -> None:
    """Write sweep.json, the folder of each point of a sweep."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    index = [{"folder": point.folder.name, "axes": point.axes} for point in members]
    write_whole(folder / "sweep.json", json.dumps(index, indent=1).encode() + b"\n")

"""Measurements as small files, shared by all papers."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from atoll.core.errors import EXIT_INTERRUPTED, InterruptedRunError
from atoll.core.record import disk_errors, locked, write_whole

__all__ = [
    "CHECKPOINTS",
    "FilePerSeed",
    "Measurement",
    "OneFile",
    "Plan",
    "Storage",
    "file_name",
    "fingerprint",
    "workplace",
    "write",
]

CHECKPOINTS = 300.0  # seconds between them: a sweep of text writes some 240 MB a run each time
Measurement = dict[str, Any]  # plain values: setting, config, facts, runs


class Plan(Protocol):
    """How much is run, and where."""

    @property
    def folder(self) -> Path:
        """Where measurements are stored."""

    @property
    def device(self) -> str:
        """The device of the runs."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of each setting."""

    @property
    def rounds(self) -> int:
        """The rounds of each run."""


def fingerprint(settings: Any) -> str:
    """A hash of what was asked for, not of the resolved config.

    An option that is added later, with a default that changes nothing, does not make an old
    measurement another one.
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def file_name(name: str) -> str:
    """A setting's name as that of a file."""
    return "".join(c if c.isalnum() else "-" for c in name).strip("-").lower()


def _path(folder: Path, name: str) -> Path:
    return folder / f"{file_name(name)}.json"


def write(folder: Path, name: str, measurement: Mapping[str, Any]) -> None:
    """Write a measurement under the name of its setting."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_path(folder, name), json.dumps(measurement, indent=1).encode())


def _read(folder: Path, name: str) -> Measurement | None:
    """The measurement under this name, whatever its config."""
    path = _path(folder, name)
    if not path.exists():
        return None
    measurement: Measurement = json.loads(path.read_text())
    return measurement


def _same(folder: Path, name: str, config: str) -> Measurement | None:
    """The measurement under this name, if it was asked for with this config."""
    measurement = _read(folder, name)
    return measurement if measurement and measurement["config"] == config else None


def _others(folder: Path, names: Sequence[str], config: str) -> list[Path]:
    """The files under these names that hold measurements with another config."""
    measurements = {name: _read(folder, name) for name in names}
    return [_path(folder, n) for n, one in measurements.items() if one and one["config"] != config]


class Storage(Protocol):
    """How the measurement of a setting lies in the plan's folder."""

    @property
    def pairs_seeds(self) -> bool:
        """Whether measurements of different plans may stand in one ledger, paired by seed."""

    def complete(self, name: str, plan: Any, config: str) -> Measurement | None:
        """The measurement of a setting, if it is complete."""

    def partly(self, name: str, plan: Any, config: str) -> Measurement | None:
        """The measurement of a setting, complete or not."""

    def sizes(self, name: str, plan: Any) -> dict[str, tuple[int, ...]]:
        """The seeds that a setting was measured with, as fields of the plan; {} if it was not."""

    def paths(self, name: str, plan: Any) -> list[Path]:
        """The files of a setting."""

    def conflicts(self, name: str, plan: Any, config: str) -> list[Path]:
        """The files that a new measurement of this setting would replace."""

    def write(self, name: str, plan: Any, measurement: Measurement) -> None:
        """Store a complete measurement."""


class OneFile:
    """A setting is one file, written when all of its runs have ended."""

    pairs_seeds = False

    def complete(self, name: str, plan: Plan, config: str) -> Measurement | None:
        """The measurement, if it was asked for with this config."""
        return _same(plan.folder, name, config)

    partly = complete

    def paths(self, name: str, plan: Plan) -> list[Path]:
        """The file of this name."""
        return [_path(plan.folder, name)]

    def sizes(self, name: str, plan: Plan) -> dict[str, tuple[int, ...]]:
        """The seeds of the file's runs, and their feature splits where the plan has some."""
        runs = (_read(plan.folder, name) or {}).get("runs", [])
        fields = {"seeds": "seed", "feature_seeds": "feature_seed"}
        present = {field: key for field, key in fields.items() if hasattr(plan, field) and runs}
        return {
            field: tuple(dict.fromkeys(run[key] for run in runs)) for field, key in present.items()
        }

    def conflicts(self, name: str, plan: Plan, config: str) -> list[Path]:
        """The file of this name, if it has another config."""
        return _others(plan.folder, [name], config)

    def write(self, name: str, plan: Plan, measurement: Measurement) -> None:
        """Write the file."""
        write(plan.folder, name, measurement)


class FilePerSeed:
    """Each seed is one file, written at every test; a run that is cut leaves what it has."""

    pairs_seeds = True

    @staticmethod
    def name(setting: str, seed: int) -> str:
        """The name of a seed's file."""
        return f"{setting} seed {seed}"

    def run(self, name: str, seed: int, plan: Plan, config: str) -> Measurement | None:
        """What is stored of one seed."""
        return _same(plan.folder, self.name(name, seed), config)

    def complete(self, name: str, plan: Plan, config: str) -> Measurement | None:
        """All seeds, if each has as many rounds as the plan."""
        measurement = self.partly(name, plan, config)
        whole = (
            [run for run in measurement["runs"] if run["rounds"] == plan.rounds]
            if measurement
            else []
        )
        return measurement if len(whole) == len(plan.seeds) else None

    def partly(self, name: str, plan: Plan, config: str) -> Measurement | None:
        """The seeds that have all rounds; where none has, those that were begun."""
        runs = [self.run(name, seed, plan, config) for seed in plan.seeds]
        complete = [run for run in runs if run is not None]
        whole = [run for run in complete if run["rounds"] == plan.rounds]
        return {"setting": name, "config": config, "runs": whole or complete} if complete else None

    def paths(self, name: str, plan: Plan) -> list[Path]:
        """The files of all seeds."""
        start = _path(plan.folder, self.name(name, 0)).name.removesuffix("0.json")
        files = plan.folder.glob(f"{start}*.json")
        return [path for path in files if path.stem.removeprefix(start).isdigit()]

    def sizes(self, name: str, plan: Plan) -> dict[str, tuple[int, ...]]:
        """The seeds that have a file."""
        seeds = sorted(int(path.stem.rpartition("-")[2]) for path in self.paths(name, plan))
        return {"seeds": tuple(seeds)} if seeds else {}

    def conflicts(self, name: str, plan: Plan, config: str) -> list[Path]:
        """Files with another config, or with more rounds than the plan."""
        names = [self.name(name, seed) for seed in plan.seeds]
        runs = {one: _same(plan.folder, one, config) for one in names}
        longer = [one for one, run in runs.items() if run and run["rounds"] > plan.rounds]
        return [*_others(plan.folder, names, config), *(_path(plan.folder, n) for n in longer)]

    def write(self, name: str, plan: Plan, measurement: Measurement) -> None:
        """Nothing is left to do: each run writes its own file."""


@contextmanager
def workplace(folder: Path, settings: Any) -> Iterator[Path]:
    """A folder for the runs of a measurement, named by what was asked for.

    It goes when they are done, or have failed. After a kill, and where a cluster was lost, it is
    still there, and runs that keep checkpoints go on in it. Of two processes that ask for the
    same, one waits for the other.
    """
    own = folder / "runs" / fingerprint(settings)
    with locked(own.with_name(f".{own.name}.lock")):
        try:
            with disk_errors(own):
                own.mkdir(exist_ok=True)
            yield own
        except InterruptedRunError:
            raise
        except Exception as error:
            if getattr(error, "exit_code", 0) != EXIT_INTERRUPTED:
                shutil.rmtree(own, ignore_errors=True)
            raise
        shutil.rmtree(own, ignore_errors=True)

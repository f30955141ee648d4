"""Trackers of a run: TensorBoard, MLflow or trackio, behind a small adapter.

Trackers need the extra `track`. They receive the numbers of the record after
each round; a tracker that fails is disabled, and the run continues.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from atoll.core.errors import UserError
from atoll.core.options import nearest
from atoll.core.record import Event, Message, Round, Score
from atoll.runs.config import RunConfig
from atoll.runs.loop import Progress

__all__ = ["Tracker", "checked", "tracked", "values"]

Say = Callable[[str], None]


class Tracker(Protocol):
    """The interface of a tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers after a round; rounds are counted over all stages."""
        ...

    def close(self) -> None:
        """Close the tracker after the run has ended or was interrupted."""
        ...


class TensorBoard:
    """Event files in the run's folder: tensorboard --logdir RUN."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self.writer = writer(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class MLflow:
    """A run of the experiment `atoll`, at MLFLOW_TRACKING_URI, else in the run's folder."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        mlflow = importlib.import_module("mlflow")
        where = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # do not create a database
        self.client = mlflow.MlflowClient(where)
        experiment = self.client.get_experiment_by_name("atoll")
        home = experiment.experiment_id if experiment else self.client.create_experiment("atoll")
        self.id = self.client.create_run(home, run_name=folder.name).info.run_id
        for name, value in _flat(config).items():
            self.client.log_param(self.id, name, value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.client.log_metric(self.id, name, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.id)


class Trackio:
    """A run of the project `atoll` in trackio's own folder (TRACKIO_DIR)."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.trackio = importlib.import_module("trackio")
        self.trackio.init(project="atoll", name=folder.name, config=_flat(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.trackio.log(dict(values), step=step)

    def close(self) -> None:
        self.trackio.finish()


TRACKERS: Mapping[str, tuple[str, Callable[[RunConfig, Path], Tracker]]] = {
    "tensorboard": ("tensorboard", TensorBoard),  # the required module, the adapter
    "mlflow": ("mlflow", MLflow),
    "trackio": ("trackio", Trackio),
}


def _flat(config: RunConfig) -> dict[str, Any]:
    """The config with nested keys flattened."""
    flat: dict[str, Any] = {}
    for name, value in vars(config).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{name}.{key}" if key else name: str(item) for key, item in inner}
    return flat


def values(events: Iterable[Event]) -> dict[str, float]:
    """The named numbers of a round's events: means over sites and tasks."""
    numbers: dict[str, float] = {}
    tests: dict[str, list[float]] = {}
    moved = {"up": 0, "down": 0}
    for event in events:
        if isinstance(event, Round):
            numbers |= {f"round/{name}": value for name, value in event.notes.items()}
        elif isinstance(event, Score) and event.rows:
            model = f" {event.variant}" if event.variant else ""
            for name in (f"{event.name}{model}/all sites", f"{event.name}{model}/{event.client}"):
                tests.setdefault(name, []).append(event.accuracy)
        elif isinstance(event, Message):
            moved["down" if event.sender == "server" else "up"] += event.bytes
    numbers |= {name: sum(hits) / len(hits) for name, hits in tests.items()}
    return numbers | {f"bytes/{way}": float(count) for way, count in moved.items()}


def checked(names: Iterable[str]) -> list[str]:
    """Refuse a tracker that does not exist or is not installed, before the run starts."""
    chosen = list(dict.fromkeys(names))
    for name in chosen:
        if name not in TRACKERS:
            raise UserError(f"unknown tracker '{name}'", "--track", nearest(name, TRACKERS))
        try:
            importlib.import_module(TRACKERS[name][0])
        except ImportError as error:
            remedy = "pip install 'atoll[track]', or leave --track out"
            raise UserError(f"'{name}' is not installed", "--track", remedy) from error
    return chosen


class tracked:  # noqa: N801 - reads as a phrase: with tracked(...) as watch
    """Send the numbers of a run to trackers after each round, and call `watch`."""

    def __init__(
        self,
        names: Iterable[str],
        config: RunConfig,
        folder: Path,
        watch: Callable[[Progress], None],
        say: Say,
    ) -> None:
        self.names, self.config, self.folder = checked(names), config, folder
        self.watch, self.say = watch, say
        self.open: dict[str, Tracker] = {}
        self.begun = False

    def __enter__(self) -> Callable[[Progress], None]:
        return self._tell

    def __exit__(self, *_: object) -> None:
        for name in list(self.open):
            self._safely(name, lambda name=name: self.open[name].close())  # type: ignore[misc]

    def _tell(self, progress: Progress) -> None:
        self.watch(progress)
        if not self.begun:  # the run's folder exists only now
            self.begun = True
            for name in self.names:
                self._safely(name, lambda name=name: self._begin(name))  # type: ignore[misc]
        step, numbers = progress.stage * progress.rounds + progress.round, values(progress.events)
        for name in list(self.open):
            self._safely(name, lambda name=name: self.open[name].log(numbers, step))  # type: ignore[misc]

    def _begin(self, name: str) -> None:
        self.open[name] = TRACKERS[name][1](self.config, self.folder)

    def _safely(self, name: str, work: Callable[[], None]) -> None:
        """Call a tracker; report its first failure once and never stop the run."""
        try:
            work()
        except Exception as error:
            self.open.pop(name, None)
            self.say(f"{name} failed and is left out: {type(error).__name__}: {error}")

"""The results of a sweep: one for each combination of the axes beside the seed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.api.export import arrow_table, pandas_frame
from atoll.api.result import Result
from atoll.runs.result import Run, table
from atoll.runs.sweep import Point

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Setting", "Sweep", "grouped"]


@dataclass(frozen=True)
class Setting:
    """One combination of values, and its result over all seeds."""

    axes: dict[str, Any]
    result: Result


@dataclass(frozen=True, repr=False)
class Sweep:
    """The runs of a sweep, by setting.

    >>> import atoll
    >>> small = {"data": "wine", "clients": 2, "rounds": 1, "widths": [[4]]}
    >>> sweep = atoll.sweep("fedavg", rate=[0.01, 0.1], seeds=range(2), **small)
    >>> [len(setting.result.runs) for setting in sweep.settings]
    [2, 2]
    """

    folder: Path
    settings: tuple[Setting, ...]

    def to_arrow(self) -> "pa.Table":
        """An Arrow table with a row for each setting, seed and variant: axes, then metrics."""
        rows = []
        for setting in self.settings:
            axes = {name: _cell(value) for name, value in setting.axes.items()}
            for seed, run in zip(setting.result.seeds, setting.result.runs, strict=True):
                for variant, metrics in run.metrics.items():
                    rows.append({**axes, "seed": seed, "variant": variant, **metrics})
        return arrow_table(rows)

    def to_pandas(self) -> Any:
        """The same as a pandas DataFrame."""
        return pandas_frame(self.to_arrow())

    def __repr__(self) -> str:
        count = sum(len(setting.result.runs) for setting in self.settings)
        lines = [f"{count} runs of {self.settings[0].result.config['method']['name']}"]
        for setting in self.settings:
            axes = ", ".join(f"{name}={value}" for name, value in setting.axes.items())
            header, rows = table(setting.result.runs)
            headline = next(
                row for row in rows if row[0] == setting.result.headline or len(rows) == 1
            )
            lines.append(f"{axes or 'all'}: {header[1]} {headline[1]}")
        return "\n".join([*lines, f"records: {self.folder}"])


def _cell(value: Any) -> Any:
    """A value of an axis as a cell: lists and tables as JSON."""
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value


def grouped(
    members: Sequence[Point], runs: Sequence[Run], folder: Path, objects: Mapping[str, Any]
) -> Sweep:
    """The runs of a sweep by their place on the axes beside the seed."""
    groups: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for point, run in zip(members, runs, strict=True):
        axes = {name: value for name, value in point.axes.items() if name != "seed"}
        groups.setdefault(json.dumps(axes, sort_keys=True), (axes, []))[1].append(run)
    settings = []
    for axes, several in groups.values():
        home = several[0].folder if len(several) == 1 else folder
        settings.append(Setting(axes, Result(home, tuple(several), objects)))
    return Sweep(folder, tuple(settings))

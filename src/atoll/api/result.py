"""The result of a run in Python: one object for all its seeds, readable in a notebook."""

import csv
import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from atoll.api.errors import keyword_errors
from atoll.api.export import arrow_table, pandas_frame
from atoll.core.errors import UserError
from atoll.core.plugins import objects_in_memory
from atoll.core.record import Event, Score
from atoll.data.own.memory import Images
from atoll.data.own.memory import read as read_memory
from atoll.metrics.scores import spread
from atoll.runs.result import (
    Run,
    absent_run,
    left_out,
    read_answer,
    runs_in,
    shown_metrics,
    text_table,
    title,
    withheld_sites,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from atoll.report.tables import Group

__all__ = ["Plots", "Result", "load"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run, or the runs of several seeds of one config.

    A number is the mean over seeds, and over sites that the answer does not withhold. `runs` has
    the record of each seed, with the results of all sites.

    >>> import atoll
    >>> small = {"clients": 2, "rounds": 1, "widths": [4], "answer": False}
    >>> result = atoll.run("fedavg", data="wine", seeds=range(2), **small)
    >>> result.seeds, result.sites
    ((0, 1), ('site-0', 'site-1'))
    >>> result.to_arrow().num_rows
    4
    >>> print(result)  # doctest: +ELLIPSIS
    fedavg on wine: 2 sites, 2 seeds
    accuracy 0... ± 0...
    record: runs/fedavg-1
    """

    folder: Path  # of the run, or the one above the runs of all seeds
    runs: tuple[Run, ...]  # in the order of their seeds
    # networks that were objects of this session, by the names that they have in the config
    objects: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each run."""
        return tuple(int(run.config["seed"]) for run in self.runs)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config of the first run."""
        return self.runs[0].config

    @property
    def facts(self) -> dict[str, Any]:
        """Versions, machine and data of the first run."""
        return self.runs[0].facts

    @property
    def sites(self) -> tuple[str, ...]:
        """The ids of the sites."""
        return tuple(self.facts["clients"])

    @property
    def variants(self) -> list[str]:
        """The models that the method reports, in the method's own order."""
        return self.runs[0].variants

    @property
    def headline(self) -> str:
        """The variant that stands for the method."""
        return self.runs[0].headline

    @property
    def events(self) -> list[Event]:
        """All events in order, seed after seed."""
        return [event for run in self.runs for event in run.events]

    @property
    def scores(self) -> list[Score]:
        """Every test of every client, seed after seed."""
        return [score for run in self.runs for score in run.scores]

    @cached_property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Every metric of every variant, the mean over seeds; NaN where no seed has it.

        Sites that the answer withholds are left out.
        """
        summaries = self._summaries
        means: dict[str, dict[str, float]] = {}
        for variant in self.variants:
            means[variant] = {}
            for name in self.runs[0].metrics[variant]:
                values = [summary[variant][name] for summary in summaries if variant in summary]
                finite = [value for value in values if math.isfinite(value)]
                means[variant][name] = spread(finite)[0] if finite else math.nan
        return means

    @property
    def _summaries(self) -> list[dict[str, dict[str, float]]]:
        """For each seed every metric of every variant, without withheld sites."""
        return [shown_metrics(run, withheld_sites(self.answer)) for run in self.runs]

    @property
    def accuracy(self) -> float:
        """Final test accuracy of the headline variant, mean over seeds, clients, tasks; or R2."""
        return self.metrics[self.headline]["final_accuracy"]

    @property
    def seconds(self) -> float:
        """How long the rounds of all seeds took."""
        return sum(run.seconds for run in self.runs)

    @cached_property
    def answer(self) -> dict[str, Any]:
        """Whether joining helps, site by site; empty where it was not computed.

        See docs/answer.md; `atoll.answer(result)` computes it.
        """
        home = self.runs[0].folder if len(self.runs) == 1 else self.folder
        return read_answer(home, self.runs) or {}

    def table(self) -> str:
        """The metrics as a text table."""
        return text_table(self.runs, self.answer)

    def to_arrow(self) -> pa.Table:
        """The scores as an Arrow table: a row for each seed, stage, site, task and variant."""
        return arrow_table(list(self._rows()))

    def to_pandas(self) -> Any:
        """The scores as a pandas DataFrame: a row for each seed, stage, site, task and variant."""
        return pandas_frame(self.to_arrow())

    def _rows(self) -> Iterator[dict[str, Any]]:
        tasks = [str(name) for name in self.facts["tasks"]]
        for seed, run in zip(self.seeds, self.runs, strict=True):
            for score in run.scores:
                values = dataclasses.asdict(score)
                errors = values.pop("errors")
                keys = {
                    "seed": seed,
                    "stage": values.pop("stage"),
                    "round": values.pop("round"),
                    "site": values.pop("client"),
                    "task": tasks[values.pop("task")],
                    "variant": values.pop("variant"),
                }
                if errors:
                    rows = {"part": score.part, "rows": score.rows}
                    yield {
                        **keys,
                        **rows,
                        "mse": errors["mse"],
                        "mae": errors["mae"],
                        "r2": score.r2,
                    }
                else:
                    yield {**keys, **values, "accuracy": score.accuracy}

    @property
    def plot(self) -> "Plots":
        """The figures of the result."""
        return Plots(self)

    def report(self, path: str | Path = "") -> Path:
        """Write the HTML report; by default `report.html` in the folder. Returns its path."""
        from atoll.report import page  # noqa: PLC0415 - matplotlib takes a second to import

        with keyword_errors():
            return page.write(self._folders, Path(path or self.folder / "report.html"))

    @property
    def _folders(self) -> list[Path]:
        return [run.folder for run in self.runs]

    def _predictor(self, site: str, model: str, task: str) -> Any:
        """The model of a site; with several seeds, the mean of their probabilities."""
        from atoll.runs.predict.model import Predictor  # noqa: PLC0415 - torch

        if not isinstance(site, str):
            raise UserError(
                "site is not the name of a site", "predict", f"known: {', '.join(self.sites)}"
            )
        first, *others = [Predictor(folder, site, model, task) for folder in self._folders]
        return dataclasses.replace(first, others=tuple(others))

    def predict(self, rows: Any, site: str, model: str = "", task: str = "") -> Array:
        """The class of each row by the model of one site; in regression, its number.

        `rows` is a table in memory as `atoll.run` takes it, or the path of a file. A column that
        is missing, or a word that no training row had, is a warning.
        """
        outputs = self._outputs(rows, site, model, task)
        if self.runs[0].regression:
            return outputs[:, 0]
        classes: Array = np.array(self.runs[0].recipe["classes"])
        return np.asarray(classes[outputs.argmax(1)])

    def predict_proba(self, rows: Any, site: str, model: str = "", task: str = "") -> Array:
        """The probability of each class of each row; classes as `predict` names them."""
        if self.runs[0].regression:
            raise UserError("a number has no classes", "predict_proba", "use predict")
        return self._outputs(rows, site, model, task)

    def _outputs(self, rows: Any, site: str, model: str, task: str) -> Array:
        """A column for each class with its probability; in regression, one with the number."""
        from atoll.runs.predict import images, tables, texts  # noqa: PLC0415 - torch

        with keyword_errors(), objects_in_memory(self.objects), TemporaryDirectory() as home:
            predictor = self._predictor(site, model, task)
            write = {"table": tables.predict, "image": images.predict, "text": texts.predict}
            predictions = Path(home) / "predictions.csv"
            counts = write[predictor.kind](predictor, _file(rows, Path(home)), predictions)
            with predictions.open(encoding="utf-8", newline="") as file:
                lines = list(csv.reader(file))[1:]
        for name in counts.absent:
            warnings.warn(f"no column '{name}': taken as missing", stacklevel=3)
        for name, number in counts.unseen.items():
            words = f"{number} values of '{name}' were never seen: taken as unknown"
            warnings.warn(words, stacklevel=3)
        width = len(predictor.recipe["classes"])  # in regression the label alone
        return np.array([[float(cell) for cell in line[-width:]] for line in lines])

    def export(
        self, folder: str | Path, site: str = "", model: str = "", task: str = ""
    ) -> dict[str, Path]:
        """Write the model of one site, or of every site, with a card; the folder of each site.

        Each site has a folder below `folder`. With several seeds, the first one is exported.
        """
        from atoll.report.departures import departures  # noqa: PLC0415
        from atoll.runs.predict.export import export  # noqa: PLC0415 - torch
        from atoll.runs.predict.model import Predictor  # noqa: PLC0415

        run = self.runs[0]
        sentences = {one.client: one.sentence for one in departures(run)}
        homes = {}
        with keyword_errors(), objects_in_memory(self.objects):
            for name in [site] if site else self.sites:
                predictor = Predictor(run.folder, name, model, task)
                crossed = sentences.get(predictor.site, "nothing")
                homes[name] = export(predictor, Path(folder) / name, crossed)
        return homes

    @property
    def _group(self) -> "Group":
        from atoll.report.tables import gather  # noqa: PLC0415

        return gather(self._folders)[0]

    def __repr__(self) -> str:
        several = f"{len(self.sites)} site{'s' * (len(self.sites) > 1)}"
        seeds = f"{len(self.runs)} seed{'s' * (len(self.runs) > 1)}"
        lines = [f"{title(self.runs[0])}: {several}, {seeds}"]
        if self.variants:
            lines.append(self._scored())
        else:
            lines.append("no scores yet")
        if self.answer:
            lines.append(f"verdict on joining: {self.answer['overall']['verdict']['text']}")
        without = left_out(self.runs, withheld_sites(self.answer))
        lines += [without] if without else []
        return "\n".join([*lines, f"record: {self.folder}"])

    def _scored(self) -> str:
        """The score of the headline variant, in words."""
        model, headline = self.runs[0].score_name, self.headline
        summaries = [one[headline] for one in self._summaries if headline in one]
        if not summaries:
            return "no results that are not withheld"
        mean, deviation = spread(one["final_accuracy"] for one in summaries)
        model += f" of '{headline}'" if headline else ""
        return f"{model} {mean:.4f}" + (f" ± {deviation:.4f}" if len(summaries) > 1 else "")

    def _repr_html_(self) -> str:
        """The verdict card and the gain plot, for a notebook."""
        from atoll.report.notebook import display  # noqa: PLC0415 - matplotlib

        return display(self._group)


@dataclass(frozen=True)
class Plots:
    """The figures of a result, as Matplotlib figures."""

    result: Result

    def gain(self) -> "Figure":
        """The gain of joining by site, with its interval; needs the answer."""
        from atoll.report.verdict import gain_figure  # noqa: PLC0415 - matplotlib

        figure = gain_figure(self.result._group)
        if figure is None:
            remedy = "compute it with atoll.answer(result)"
            raise UserError("no answer for these runs", str(self.result.folder), remedy)
        return figure


def load(folder: str | Path, model: Any = None) -> Result:
    """The result in a folder: a run, or the runs of several seeds of one config.

    `model` is the network of a run that was given an object of a Python session.

    >>> import atoll
    >>> run = atoll.run("fedavg", "here", data="wine", clients=2, rounds=1, answer=False)
    >>> load("here") == run
    True
    """
    home = Path(folder)
    runs = [Run(path) for path in runs_in(home)]
    if not runs or any(_but_seed(run) != _but_seed(runs[0]) for run in runs):
        raise absent_run(home)
    objects = {} if model is None else {str(runs[0].config["model"]["name"]): model}
    return Result(home, tuple(sorted(runs, key=lambda run: int(run.config["seed"]))), objects)


def _but_seed(run: Run) -> dict[str, Any]:
    """The config of a run, without what differs between seeds."""
    return {key: value for key, value in run.config.items() if key not in ("seed", "engine")}


def _file(rows: Any, home: Path) -> Path:
    """The file that has the rows; a table in memory is written there."""
    if isinstance(rows, str | Path):
        return Path(rows)
    table = read_memory(rows, "label")
    if isinstance(table, Images):
        np.savez(home / "rows.npz", x=table.x)
        return home / "rows.npz"
    if not isinstance(table, pa.Table):
        what = f"rows are a {type(rows).__name__}"
        remedy = "give a DataFrame, an Arrow table, an array, a dataset, or the path of a file"
        raise UserError(what, "rows", remedy)
    pyarrow.parquet.write_table(table, home / "rows.parquet")
    return home / "rows.parquet"

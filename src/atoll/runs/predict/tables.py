"""Predictions with what a run left: one site's model, its own columns, the same preparation."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors.numpy import save

from atoll import methods
from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.messages import Tensors
from atoll.core.method import Method
from atoll.core.options import nearest
from atoll.core.outputs import may_write
from atoll.core.record import disk_errors, read_checkpoint, write_whole
from atoll.core.rows import Rows
from atoll.core.storage import temporary_name
from atoll.data.dataset import Dataset, file_fingerprint
from atoll.data.own.encoding import LARGEST, Block, as_dates, as_numbers, encoded
from atoll.data.own.sheets import Sheet, batches, line_of, opened
from atoll.data.scenario import Holding, Scenario
from atoll.data.site import filled
from atoll.learning.weights import without
from atoll.metrics import client_accuracy, primary
from atoll.runs.config import RunConfig
from atoll.runs.folders import absent_run, recorded
from atoll.runs.parts import Parts
from atoll.runs.result import Run, plain

__all__ = [
    "Array",
    "Exported",
    "Predicted",
    "Predictor",
    "ended_state",
    "export",
    "growing",
    "header",
    "labels",
    "numbers",
    "predict",
    "recorded_on_cpu",
    "refuse_other",
    "refuse_taken",
    "restored",
]

Array = np.ndarray[Any, Any]


@dataclass
class Predicted:
    """What came of a file: how many rows, how many right where the label is known, and remarks."""

    rows: int = 0
    judged: int = 0  # rows whose label is a class of the model
    right: int | None = None  # of these; none where there are none
    unlabelled: int = 0  # rows of a file with labels that have none
    foreign: int = 0  # rows whose label is no class of the model
    unseen: dict[str, int] = field(default_factory=dict)  # column -> values that no row had
    absent: tuple[str, ...] = ()  # columns that the file lacks
    lacking: dict[str, list[str]] = field(default_factory=dict)  # parties' file -> ids not in it

    def judge(
        self, said: Sequence[str], labels: Sequence[str | None], classes: Sequence[str]
    ) -> None:
        """Count what is right, where the label is a class that could have been said."""
        for guess, label in zip(said, labels, strict=True):
            if label is None:
                self.unlabelled += 1
            elif label not in classes:
                self.foreign += 1
            else:
                self.judged += 1
                self.right = (self.right or 0) + (guess == label)


@dataclass(frozen=True)
class Predictor:
    """One site's model out of a run's folder."""

    folder: Path
    site: str
    variant: str

    @cached_property
    def run(self) -> Run:
        """The run's record."""
        return Run(self.folder)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """How a file becomes what the model reads."""
        if not (self.folder / "config.toml").exists():
            raise absent_run(self.folder)
        if self.run.recipe:
            return self.run.recipe
        if "vectors" in self.run.facts:  # runs on texts have these
            remedy = "use a run on own tables or images"
            raise UserError("there are no predictions for texts yet", str(self.folder), remedy)
        raise UserError(
            "this run was made neither on your own tables nor on images",
            str(self.folder),
            "predictions need a run with data = { files = [...] } or { parties = [...] }, or on"
            " images",
        )

    @cached_property
    def blocks(self) -> list[Block]:
        """The columns of a file that this site's model reads."""
        found = [Block.of(block) for block in self.recipe["blocks"]]
        places = {*self.recipe["common"], *self._mine["own"]}
        return [block for block in found if block.start in places]

    @property
    def width(self) -> int:
        """The columns of numbers of all sites together."""
        return sum(Block.of(block).width for block in self.recipe["blocks"])

    @property
    def _mine(self) -> dict[str, Any]:
        sites = self.recipe["sites"]
        if self.site not in sites:
            raise UserError(
                f"no site '{self.site}' in this run", "--site", nearest(self.site, sites)
            )
        mine: dict[str, Any] = sites[self.site]
        return mine

    @property
    def chosen(self) -> str:
        """The variant to predict with: the one asked for, else the method's headline."""
        if self.variant and self.variant not in self.run.variants:
            raise UserError(
                f"this run has no model '{self.variant}'", "--model",
                nearest(self.variant, self.run.variants),
            )  # fmt: skip
        if not self.run.variants:
            remedy = "restore it from a copy, or run it again in another folder"
            raise UserError("no scores in the record", str(self.folder / "events.jsonl"), remedy)
        return self.variant or self.run.headline

    @cached_property
    def method(self) -> Method:
        """The method, if its sites have models to predict with."""
        name = str(self.run.config["method"]["name"])
        method = methods.load(name)
        if not hasattr(method.client, "predict"):
            raise UserError(
                f"'{name}' has no model that a site could predict with", str(self.folder),
                "use a run of chfl, fedavg, alone, or on images fccl, fedmd, fedmatch or fml",
            )  # fmt: skip
        return method

    @cached_property
    def _client(self) -> tuple[Any, Tensors]:
        """The client as the run left it, and the server's state."""
        if "parties" not in self.recipe:
            self._mine  # noqa: B018 - refuses a site that the run does not have
        state = ended_state(self.folder)
        client = _bare(recorded_on_cpu(self.folder), self.recipe, self.site).client(self.site)
        restored(client, self.site, without(f"client/{self.site}", state), self.folder)
        return client, without("server", state)

    @cached_property
    def model(self) -> Tensors:
        """The weights of the model."""
        self.method  # noqa: B018 - refuses a method without models
        client, shared = self._client
        model: Tensors = client.final_model(shared, self.chosen)
        return model

    @property
    def reads(self) -> dict[str, Any]:
        """How a file becomes what the model reads, for the card."""
        return {
            "classes": self.recipe["classes"],
            "reads": [dataclasses.asdict(block) for block in self.blocks],
            "columns": [name for block in self.blocks for name in block.names],
            "common": self.recipe["common"],
            **{key: self._mine[key] for key in ("own", "scaling")},
        }

    def probabilities(self, x: Array) -> Array:
        """The probability of each class for rows of encoded columns, those of all sites."""
        read = sorted([*self.recipe["common"], *self._mine["own"]])
        with torch.no_grad():
            return np.asarray(self.spoken(torch.from_numpy(x[:, read])).numpy())

    def spoken(self, x: torch.Tensor) -> torch.Tensor:
        """The same for the columns that this site's model reads, ascending, as torch has it."""
        common, own = self.recipe["common"], self._mine["own"]
        read, scaling = sorted([*common, *own]), self._mine["scaling"]
        inputs = x.to(getattr(torch, str(self.run.config["dtype"])))
        parts = [
            filled(
                inputs[:, [read.index(place) for place in columns]],
                torch.tensor(scaling[part], dtype=torch.float64),
            )
            for part, columns in (("common", common), ("own", own))
        ]
        rows = Rows(parts[0], parts[1], torch.zeros_like(inputs[:, 0], dtype=torch.int64))
        logits = self._client[0].predict(self.model, rows)
        return torch.softmax(logits.double(), -1)

    def held_out(self, sheet: Sheet) -> Array:
        """The rows of the file that the run kept for its tests."""
        counted, known = sum(len(batch) for batch in batches(sheet, ())), self._pieces(sheet)
        if counted not in [rows for _, rows, _ in known]:
            raise UserError(
                f"the file has {counted:,} rows, the run read {known[-1][1]:,}",
                str(sheet.path), "give the file that the run was made with",
            )  # fmt: skip
        here = file_fingerprint(sheet.path)
        same = [first for first, rows, kept in known if rows == counted and kept in ("", here)]
        if not same:
            refuse_other(sheet.path)
        found = np.unique(np.concatenate([np.array(part) for part in self._mine["held_out"]]))
        return found[(found >= same[-1]) & (found < same[-1] + counted)] - same[-1]

    def _pieces(self, sheet: Sheet) -> list[tuple[int, int, str]]:
        """Where such a file may begin among its site's rows, how many it has, its fingerprint."""
        read = self.recipe.get("fingerprints", [])  # older runs have none
        prints = [kept for site, _, kept in read if site == self.site or len(read) == 1]
        pieces = self.recipe.get("files", {}).get(self.site)
        if not pieces:
            return [(0, int(self._mine["rows"]), *(prints or [""]))]
        prints = prints or [""] * len(pieces)
        found = [
            (start - pieces[0][1], rows, kept)
            for (name, start, rows), kept in zip(pieces, prints, strict=True)
            if name == sheet.path.name
        ]
        if not found:
            what = f"the run did not read a file of this name at '{self.site}'"
            names = [name for name, _, _ in pieces]
            raise UserError(what, str(sheet.path), nearest(sheet.path.name, names))
        return found


def refuse_other(path: Path) -> NoReturn:
    """Refuse a file that has as many rows as the one that the run read, but other ones."""
    what = "the file is not the one that the run read, or has changed since"
    raise UserError(what, str(path), "give the file that the run was made with")


def ended_state(folder: Path) -> Tensors:
    """What the parts of a run knew in the end."""
    if not (folder / "result.json").exists():
        raise UserError("the run has not ended", str(folder), "go on with --resume")
    tensors, head = read_checkpoint(folder)
    known, saved = Run(folder).integrity.as_json(), head.get("files", {})
    if any(saved[name] != known[name] for name in known.keys() & saved.keys()):
        remedy = "restore the folder from one copy, or run it again in another folder"
        raise UserError("the checkpoint is not of this run's end", str(folder), remedy)
    return {name: torch.from_numpy(array) for name, array in tensors.items()}


def restored(client: Any, site: str, state: Tensors, folder: Path) -> None:
    """Let a client go on from what it knew in the end, if a folder has it."""
    if state:
        client.restore(state)
    elif client.state():
        raise UserError(
            f"the model of '{site}' is not in this folder", str(folder),
            "it stayed at its site: predict with the folder that is there",
        )  # fmt: skip


def recorded_on_cpu(folder: Path) -> RunConfig:
    """The config of a run, for this machine's CPU."""
    config = recorded(folder)
    return dataclasses.replace(config, engine={**config.engine, "device": "cpu"})


def _bare(config: RunConfig, recipe: Mapping[str, Any], site: str) -> Parts:
    """The parts of a run without its data: shapes alone."""
    width = sum(Block.of(block).width for block in recipe["blocks"])
    classes, none = tuple(recipe["classes"]), np.empty(0, dtype=np.int64)
    dataset = Dataset(
        "", "table", np.zeros((1, width), dtype=np.float32), np.zeros(1, dtype=np.int64),
        (), classes, "",
    )  # fmt: skip
    holdings = {
        id: (Holding(np.zeros(1, dtype=np.int64), none, np.array(one["own"], dtype=np.int64)),)
        for id, one in recipe["sites"].items()
    }
    common = np.array(recipe["common"], dtype=np.int64)
    ids = tuple(sorted(holdings))
    tests = dict.fromkeys(ids, (none,))
    return Parts(config, dataset, Scenario(ids, holdings, common, tests, ("all",), (0,)))


def predict(predictor: Predictor, file: Path, out: Path, held_out: bool = False) -> Predicted:
    """Write a CSV with a prediction for each row: its number, the class, every probability."""
    if "parties" in predictor.recipe:
        raise UserError(
            "parties hold columns of the same rows here", str(file), "give --data for each party"
        )
    names = header("row", predictor.recipe)
    refuse_taken(out, [file], predictor.folder, names)
    sheet = opened(file, *(predictor.recipe.get(key, "") for key in ("delimiter", "encoding")))
    chosen = set(predictor.held_out(sheet).tolist()) if held_out else None
    columns = {block.column for block in predictor.blocks}
    absent = tuple(sorted(columns - {*sheet.columns}))
    if len(absent) == len(columns):
        raise UserError(
            "the file has none of the columns that the model reads", str(file),
            f"it reads {', '.join(sorted(columns)[:8])}",
        )  # fmt: skip
    done = Predicted(absent=absent)
    with growing(out) as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        _predict(predictor, sheet, writer, chosen, done)
    return done


def header(first: str, recipe: Mapping[str, Any]) -> list[str]:
    """The names of the columns of predictions."""
    return [first, "prediction", *(f"p {name}" for name in recipe["classes"])]


def refuse_taken(out: Path, inputs: Sequence[Path], run: Path, names: Sequence[str]) -> None:
    """Refuse to write over an input, the run, or anything but predictions of the same columns."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(names)
    ours = line.getvalue().encode()
    may_write(out, inputs, [run], lambda head: head.startswith(ours))


@contextmanager
def growing(out: Path) -> Iterator[TextIO]:
    """A file that is written piece by piece, and is there whole or not at all."""
    temporary = temporary_name(out)
    with disk_errors(out):
        try:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                yield file
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)


def _predict(
    predictor: Predictor, sheet: Sheet, writer: Any, chosen: set[int] | None, done: Predicted
) -> None:
    """Write the predictions, a piece of the file at a time."""
    classes, label = predictor.recipe["classes"], predictor.recipe["label"]
    for first, batch in _pieces(sheet, predictor.recipe["missing"]):
        kept = [i for i in range(len(batch)) if chosen is None or first + i in chosen]
        if not kept:
            continue
        x = numbers(predictor.blocks, predictor.width, sheet, batch, first, done)[kept]
        found = predictor.probabilities(x)
        said = [classes[place] for place in found.argmax(1)]
        for place, name, row in zip(kept, said, found, strict=True):
            writer.writerow([first + place + 1, name, *(f"{p:.6f}" for p in row)])
        done.rows += len(kept)
        if label in sheet.columns:
            done.judge(said, labels(batch.column(label), kept, classes), classes)
    if not done.rows:
        remedy = "give a file with rows"
        raise UserError("no rows to predict", str(sheet.path), remedy, EXIT_DATA_MISSING)


def labels(column: pa.Array, kept: Sequence[int], classes: Sequence[str]) -> list[str | None]:
    """The labels of some rows as the classes are called; 1 and 1.0 are one unless both are there.

    Tables call a class 1 whose labels are 1.0; the parties of one table keep what is written.
    """
    known = dict(zip(_whole(pa.array(classes, pa.string())), classes, strict=True))
    known |= {name: name for name in classes}
    written = column.to_pylist()
    found = [known.get(a, known.get(b, a)) for a, b in zip(written, _whole(column), strict=True)]
    return [found[place] for place in kept]


def _whole(text: pa.Array) -> list[str | None]:
    """Text, in which 1.0 is 1."""
    found: list[str | None] = pc.replace_substring_regex(
        text, r"^(-?[0-9]+)\.0+$", r"\1"
    ).to_pylist()
    return found


def _pieces(sheet: Sheet, missing: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    first = 0
    for batch in batches(sheet, missing):
        yield first, batch
        first += len(batch)


def numbers(
    blocks: Sequence[Block],
    width: int,
    sheet: Sheet,
    batch: pa.RecordBatch,
    first: int,
    done: Predicted,
) -> Array:
    """Some columns of a file as numbers, of the rows of a piece."""
    x = np.zeros((len(batch), width), dtype=np.float32)
    for block in blocks:
        if block.column in sheet.columns:
            text = batch.column(block.column)
            _fits(block, text, sheet, first)
            _unseen(block, text, done)
        else:
            text = pa.nulls(len(batch), pa.string())
        x[:, block.start : block.start + block.width] = encoded(block, text, sheet.comma)
    return x


def _fits(block: Block, text: pa.Array, sheet: Sheet, first: int) -> None:
    """Refuse a word where the model reads numbers, or too large a number, by its line."""
    if block.kind == "text":
        return
    values = as_numbers(text, sheet.comma) if block.kind == "number" else as_dates(text)
    wrong = pc.and_(text.is_valid(), values.is_null()).to_numpy(zero_copy_only=False)
    large = np.abs(pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False)) > LARGEST
    if not (wrong | large).any():
        return
    place = int(np.argmax(wrong | large))
    value, where = str(text[place].as_py())[:40], line_of(sheet, first + place)
    if large[place]:
        what = f"'{value}' in the column '{block.column}' is too large a number"
        raise UserError(what, where, "write it in another unit", EXIT_DATA_MISSING)
    what = f"'{value}' in the column '{block.column}' is no {block.kind}"
    raise UserError(what, where, "mend it, or leave it empty", EXIT_DATA_MISSING)


def _unseen(block: Block, text: pa.Array, done: Predicted) -> None:
    if block.kind == "text":
        known = pc.is_in(text, pa.array(block.levels, pa.string()))
        count = int(pc.sum(pc.and_(text.is_valid(), pc.invert(known))).as_py() or 0)
        if count:
            done.unseen[block.column] = done.unseen.get(block.column, 0) + count


class Exported(Protocol):
    """A site's model that can be written."""

    @property
    def run(self) -> Run:
        """The run's record."""
        ...

    @property
    def site(self) -> str:
        """Whose model it is."""
        ...

    @property
    def chosen(self) -> str:
        """Which of the run's models it is."""
        ...

    @property
    def model(self) -> Tensors:
        """The weights."""
        ...

    @property
    def reads(self) -> dict[str, Any]:
        """How files become what the model reads."""
        ...


def export(predictor: Exported, out: Path, crossed: str) -> Path:
    """Write a site's model and its card: weights as safetensors, the rest as JSON."""
    weights = {n: np.asarray(t.cpu().numpy(), order="C") for n, t in predictor.model.items()}
    run = predictor.run
    result = primary(run.events, predictor.chosen, run.facts["known_at"])
    card = {
        "method": run.config["method"],
        "variant": predictor.chosen,
        "model": run.config["model"],
        "site": predictor.site,
        **predictor.reads,
        "data": run.facts["data"],
        "accuracy": client_accuracy(result).get(predictor.site),
        "metrics_of_all_sites": run.metrics[predictor.chosen],
        "what_left_the_site": crossed,
        "atoll": run.facts["atoll"],
    }
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    may_write(out / "card.json", [], [run.folder], lambda head: b'"what_left_the_site"' in head)
    for name in ("model.safetensors", "model.onnx"):
        may_write(out / name, [], [run.folder], lambda _: (out / "card.json").exists())
    write_whole(out / "model.safetensors", save(weights))
    write_whole(out / "card.json", json.dumps(plain(card), indent=1).encode() + b"\n")
    return out

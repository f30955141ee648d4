"""One lying site among honest ones, for tests and for the figures of docs/network.md.

The lie is told on the way from a client of the local engine to the server, so the method and the
rule that judges answers are the real ones. As a script it prints what honest sites lose:

    OMP_NUM_THREADS=1 .venv/bin/python -m tests.attacks.poison --method fedavg chfl
    OMP_NUM_THREADS=1 .venv/bin/python -m tests.attacks.poison --honest
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from atoll import methods
from atoll.core.annotations import RowCount, Update, marked
from atoll.core.errors import BadMessageError
from atoll.core.federation import Moment, actions, kinds
from atoll.core.influence import Guard
from atoll.core.messages import Packet, pack, unpack
from atoll.core.record import Event, Exclusion, Record, Score, read_events
from atoll.engines.local import LocalEngine
from atoll.runs import loop
from atoll.runs.config import RunConfig, change, presets, read, resolve, to_toml
from atoll.runs.facts import facts
from atoll.runs.parts import Parts, parts

Numbers = torch.Tensor | dict[str, torch.Tensor]
Lie = Callable[[Any, Any], Any]  # (request, honest reply) -> what is sent

TABLE: dict[str, Any] = {
    "rounds": 6,
    "data": "digits-table",
    "scenario": {"split": "rows", "clients": 4},
    "model": {"widths": [32]},
    "engine": {"mode": "loop", "threads": 1},
    "checkpoint_seconds": 0,
}
IMAGES: dict[str, Any] = {
    **TABLE,
    "rounds": 3,
    "data": "digits-shifted",
    "scenario": {"split": "domains", "train": 1.0, "valid": 0.0},
    "public": {"name": "digits-public", "rows": 256},
    "models": ["cnn", "cnn-deep", "cnn", "cnn-deep"],
    "model": {"name": "cnn-plain"},
}
VERTICAL: dict[str, Any] = {
    **TABLE,
    "rounds": 2,
    "model": {},
    "data": "digits",
    "scenario": {"split": "parties", "clients": 4, "cut": "quadrants", "train": 0.1},
}
_PUBLIC = {"rate": 0.003, "batch": 32, "epochs": 3, "pretrain_epochs": 15}
_STEPS = {"public_batch": 64, "public_epochs": 2}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {
        **TABLE,
        "method": {"name": "fedavg", "rate": 0.005, "epochs": 3, "weighting": "rows"},
    },
    "chfl": {
        **TABLE,
        "scenario": {"split": "columns", "clients": 4, "ratio": 0.4},
        "method": {"name": "chfl", "rate": 0.003, "epochs": 3, "batch": 32, "mu": [0.1, 1.0]},
    },
    **{
        name: {**IMAGES, "method": {"name": name, **_PUBLIC, **_STEPS}}
        for name in ("fccl", "fedmd", "fedmatch")
    },
    "fml": {**IMAGES, "method": {"name": "fml", **_PUBLIC}},
    "splitnn": {**VERTICAL, "method": {"name": "splitnn", "batch": 16, "width": 12}},
    "vleto": {**VERTICAL, "method": {"name": "vleto", "rate": 0.1, "batch": 16, "width": 12}},
}


def config(method: str, **changes: Any) -> RunConfig:
    """A run of seconds on scikit-learn's digits with four sites."""
    return resolve(change(METHODS[method], changes), "tests.attacks.poison")


def _each(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Lie:
    """A lie about every floating-point field: of (base, honest value), where base may be zero."""

    def lie(request: Any, reply: Any) -> Any:
        bases = {name: getattr(request, m.of) for name, m in marked(type(reply), Update).items()}
        return dataclasses.replace(
            reply,
            **{
                field.name: _changed(getattr(reply, field.name), bases.get(field.name), change)
                for field in dataclasses.fields(reply)
                if isinstance(getattr(reply, field.name), torch.Tensor | dict)
            },
        )

    return lie


def _changed(value: Any, base: Any, change: Callable[..., torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(torch.zeros_like(value), value) if value.is_floating_point() else value
    named = {n: t for n, t in value.items() if isinstance(t, torch.Tensor)}
    start = base or {n: torch.zeros_like(t) for n, t in named.items()}
    floats = {n: change(start[n], t) for n, t in named.items() if t.is_floating_point()}
    return {**value, **floats}


def times(factor: float) -> Lie:
    """The honest update times a factor; outputs and whole weights themselves."""
    return _each(lambda base, honest: base + factor * (honest - base))


def _noise(base: torch.Tensor, honest: torch.Tensor) -> torch.Tensor:
    draw = torch.randn(honest.shape, generator=torch.Generator().manual_seed(honest.numel()))
    return base + draw.to(honest)


def _rows(request: Any, reply: Any) -> Any:
    return dataclasses.replace(reply, **dict.fromkeys(marked(type(reply), RowCount), 10**15))


LIES: dict[str, Lie] = {
    "noise": _each(_noise),
    "x100": times(100),
    "x-10": times(-10),
    "x-100": times(-100),
    "nan": times(float("nan")),
    "1e30": _each(lambda base, honest: torch.full_like(honest, 1e30)),
    "shape": _each(lambda base, honest: honest.flatten()[:1].repeat(3)),
    "rows": _rows,
}
WITHIN = {"x-4": times(-4)}  # what the default factor lets through


class LyingEngine(LocalEngine):
    """The local engine with one site that lies whenever it sends a tensor or a number of rows."""

    def __init__(self, made: Parts, lie: Lie | None, since: int = 0) -> None:
        """`since`: the number of the exchange from which on it lies."""
        super().__init__(made)
        self.lie, self.liar, self.left = lie, made.scenario.clients[-1], since
        self.client = methods.load(made.config.method["name"]).client

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """The answers, that of the liar replaced."""
        answers = dict(super().carry(action, moment, packets))
        self.left -= 1
        if self.lie is not None and self.left < 0 and self.liar in answers:
            request, reply = kinds(actions(self.client)[action])
            asked: Any = unpack(packets[self.liar], request, "server")
            honest: Any = unpack(answers[self.liar], reply, self.liar)
            answers[self.liar] = pack(self.lie(asked, honest))
        return answers


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    liar: str
    ratios: Mapping[str, float]
    error: Exception | None = None

    @property
    def events(self) -> list[Event]:
        """The record."""
        return read_events(self.folder)

    @property
    def exclusions(self) -> list[Exclusion]:
        """Who was left out."""
        return [event for event in self.events if isinstance(event, Exclusion)]

    @property
    def accuracy(self) -> float:
        """Mean accuracy of the honest sites at the end, of the method's headline."""
        chosen = resolve(read(str(self.folder / "config.toml")), "")
        scores = [event for event in self.events if isinstance(event, Score)]
        headline = methods.load(chosen.method["name"]).headline
        last = [e for e in scores if e.variant == headline] or scores
        end = max((e.stage, e.round) for e in last)
        mine = [e for e in last if (e.stage, e.round) == end and e.client != self.liar]
        return float(np.mean([e.correct / e.rows for e in mine]))


def run(
    chosen: RunConfig, folder: Path, lie: Lie | None = None, since: int = 0, made: Any = None
) -> Outcome:
    """A run with a site that lies; an error that names a site is part of the outcome."""
    torch.set_num_threads(chosen.engine_options().threads or torch.get_num_threads())
    made = made or parts(chosen)
    engine = LyingEngine(made, lie, since)
    if folder.exists():
        record = Record.reopen(folder)
    else:
        record = Record.create(folder, to_toml(chosen), facts(made))
    guards: list[Guard] = []

    def noted(*arguments: Any) -> Guard:
        guards.append(Guard(*arguments))
        return guards[-1]

    error: Exception | None = None
    try:
        with record, mock.patch.object(loop, "Guard", noted):
            loop.go(made, engine, record, lambda progress: None, lambda: False)
    except BadMessageError as caught:
        error = caught
    return Outcome(folder, engine.liar, guards[0].ratios if guards else {}, error)


def flipped(chosen: RunConfig) -> Parts:
    """The parts of a run whose last site learns from the labels in reverse order."""
    made = parts(chosen)
    liar, y = made.scenario.clients[-1], made.dataset.y.copy()
    for held in made.scenario.holdings[liar]:
        y[held.train] = len(made.dataset.classes) - 1 - made.dataset.y[held.train]
    return Parts(chosen, dataclasses.replace(made.dataset, y=y), made.scenario)


def honest_runs() -> dict[str, RunConfig]:
    """Runs in which nobody lies: demos, attack targets, uneven and non-IID splits, few rows."""
    found = {name: resolve(read(name), name) for name in presets() if name.startswith("demo")}
    found |= {f"target {name}": config(name) for name in METHODS}
    for name in ("fedmd", "fccl", "fedmatch"):
        found[f"{name} untrained"] = config(name, seed=1, **{"method.pretrain_epochs": 0})
    for alpha in (0.05, 0.5):
        for name, clients in (("fedavg", 8), ("chfl", 4)):
            uneven = {"split": "columns", "clients": clients, "rows": "dirichlet", "alpha": alpha}
            chosen = config(name, scenario=uneven, **{"method.batch": 8})
            found[f"{name} alpha={alpha}"] = chosen
    return found


def _show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _print_honest(names: Sequence[str]) -> None:
    """The largest size by reference of each field, over honest runs."""
    for name, chosen in honest_runs().items():
        if names and not any(word in name for word in names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = run(chosen, Path(folder) / "run")
            left_out = found.error or len(found.exclusions)
        shown = ", ".join(f"{field} {ratio:.2f}" for field, ratio in found.ratios.items())
        _show(f"{name}: {shown}; left out: {left_out}")


def _print_attacks(method: str, lies: Sequence[str], rule: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        chosen = config(method, **{"robust.rule": rule})
        honest = run(chosen, Path(folder) / "honest")
        _show(f"| {method} | honest | {honest.accuracy:.3f} | |")
        for name in lies:
            to = Path(folder) / name.replace(" ", "-")
            if name == "labels":
                found = run(chosen, to, made=flipped(chosen))
            else:
                found = run(chosen, to, (LIES | WITHIN)[name])
            ends = str(found.error) if found.error else f"{found.accuracy:.3f}"
            rounds = len({(e.stage, e.round) for e in found.exclusions})
            named = sorted({e.client for e in found.exclusions})
            _show(f"| {method} | {name} | {ends} | {rounds} rounds {named} |")


def main() -> None:
    """Print figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", nargs="*", default=list(METHODS))
    parser.add_argument("--lie", nargs="*", default=[*LIES, *WITHIN, "labels"])
    parser.add_argument("--rule", default="exclude")
    parser.add_argument("--honest", nargs="*")
    given = parser.parse_args()
    if given.honest is not None:
        _print_honest(given.honest)
        return
    for method in given.method:
        _print_attacks(method, given.lie, given.rule)


if __name__ == "__main__":
    main()

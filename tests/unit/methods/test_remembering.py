"""Clients that remember earlier stages, in whole runs: stacked, stopped and resumed, rebuilt."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from atoll.core.errors import InterruptedRunError
from atoll.core.federation import Clients, Moment, answer
from atoll.core.messages import Packet
from atoll.core.record import read_events
from atoll.engines.local import local_engine
from atoll.metrics import scores as metrics
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.parts import Parts, parts

CASES: dict[str, dict[str, Any]] = {
    "none": {"method": "fedavg"},
    "proximal": {"method": "fedavg", "penalty": "proximal", "strength": 3.0},
    "ewc": {"method": "fedavg", "penalty": "ewc", "strength": 3.0},
    "si": {"method": "fedavg", "penalty": "si", "strength": 3.0},
    "lwf": {"method": "fedavg", "penalty": "lwf", "strength": 3.0},
    "random replay": {"method": "replay", "memory": 40},
    "herding": {"method": "replay", "memory": 40, "choice": "herding"},
    "fot": {"method": "fot", "energy": 0.8},
    "low rank": {"method": "lowrank", "rank": 3},
    "LoRM": {"method": "lowrank", "rank": 3, "merging": "closed"},
    "target": {"method": "target", "synthetic": 30, "steps": 5, "width": 16, "latent": 4},
    "anchors": {"method": "target", "synthetic": 30, "steps": 5, "latent": 4, "anchors": 0.5},
}
REMEMBERING = [name for name in CASES if name not in ("none", "proximal")]
remembering = pytest.mark.parametrize("name", REMEMBERING)


def small(name: str, **options: Any) -> RunConfig:
    given = {
        "data": "digits-table", "split": "classes", "stages": 3, "clients": 4, "rounds": 2,
        "rows": "dirichlet", "alpha": 1.0, "widths": [12], "epochs": 2, "batch": 16,
        "dtype": "float64", "engine.mode": "loop", "checkpoint_seconds": 0,
    }  # fmt: skip
    case = dict(CASES[name])
    return resolve(change({"method": case.pop("method")}, {**given, **case, **options}), "test")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load((folder / "checkpoint.safetensors").read_bytes())


@remembering
def test_a_stack_gives_what_clients_give_one_by_one(name: str, tmp_path: Path) -> None:
    for mode in ("loop", "stacked"):
        execute(small(name, **{"engine.mode": mode}), tmp_path / mode, local_engine)
    torch.testing.assert_close(
        tensors(tmp_path / "stacked"), tensors(tmp_path / "loop"), rtol=1e-9, atol=1e-9
    )
    choices = json.loads((tmp_path / "stacked" / "engine.json").read_text()).values()
    assert {choice["mode"] for choice in choices} == {"stacked"}


@remembering
@pytest.mark.parametrize("after", [2, 3])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(
    name: str, after: int, tmp_path: Path
) -> None:
    execute(small(name), tmp_path / "whole", local_engine)
    calls: list[int] = []

    def stopping() -> bool:
        calls.append(1)
        return len(calls) == after

    with pytest.raises(InterruptedRunError):
        execute(small(name), tmp_path / "cut", local_engine, stopping=stopping)
    execute(small(name), tmp_path / "cut", local_engine, resume=True)
    whole, cut = tensors(tmp_path / "whole"), tensors(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    events = [(tmp_path / part / "events.jsonl").read_bytes() for part in ("whole", "cut")]
    assert events[0] == events[1]


class Rebuilding:
    """A transport that builds a client anew from its state before every message."""

    def __init__(self, made: Parts, rebuild: bool) -> None:
        self.made, self.rebuild = made, rebuild
        self.clients = {id: made.client(id) for id in made.scenario.clients}

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        for id in packets if self.rebuild else ():
            state = {key: tensor.clone() for key, tensor in self.clients[id].state().items()}
            self.clients[id] = self.made.client(id)
            self.clients[id].restore(state)
        return {id: answer(self.clients[id], action, moment, p) for id, p in packets.items()}


@remembering
def test_clients_rebuilt_before_every_message_give_the_same_weights(name: str) -> None:
    made, ends = parts(small(name)), []
    for rebuild in (False, True):
        server, transport = made.server(), Rebuilding(made, rebuild)
        for stage in range(3):
            for number in range(2):
                moment = Moment(stage, number, 2)
                server.round(Clients(made.scenario.clients, transport, moment), moment)
        ends.append(server.state())
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_each_trains_other_weights_after_the_first_stage(tmp_path: Path) -> None:
    ends = {}
    for name in CASES:
        execute(small(name), tmp_path / name, local_engine)
        checkpoint = tensors(tmp_path / name)
        whole = name in ("fot", "target", "anchors", "low rank", "LoRM")
        prefix = "server/weights/" if whole else "server/"
        ends[name] = checkpoint[f"{prefix}weight1"]
    names = list(ends)
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            assert float((ends[one] - ends[other]).abs().max()) > 1e-6, (one, other)


@pytest.mark.parametrize("name", ["lwf", "random replay", "herding"])
def test_less_is_forgotten_than_by_plain_averaging(name: str, tmp_path: Path) -> None:
    accuracies = {}
    for one in ("none", name):
        execute(small(one, rounds=6, rows="even", rate=0.01), tmp_path / one, local_engine)
        accuracies[one] = metrics.summary(read_events(tmp_path / one), "")["final_accuracy"]
    assert accuracies[name] > accuracies["none"] + 0.1

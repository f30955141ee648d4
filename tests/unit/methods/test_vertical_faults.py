"""A party that stops answering in the middle of a batch: named, waited for, nothing done twice."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from atoll.core.errors import BadMessageError, ClientFailedError
from atoll.core.federation import Clients, Moment, actions, answer, kinds
from atoll.core.messages import Packet, Tensors, pack, unpack
from atoll.core.record import Record
from atoll.engines.local import LocalEngine, local_engine
from atoll.runs.config import RunConfig, change, resolve, to_toml
from atoll.runs.execute import execute
from atoll.runs.facts import facts
from atoll.runs.loop import go
from atoll.runs.parts import Parts, parts

SMALL: dict[str, Any] = {
    "name": "faults",
    "rounds": 2,
    "data": {"name": "digits"},
    "scenario": {"split": "parties", "clients": 4, "cut": "quadrants", "train": 0.1,
                 "mode": "classes", "window": 4, "stages": 2},
    "method": {"name": "vleto", "rate": 0.1, "batch": 16, "width": 12, "fisher_rows": 32,
               "lmo_rule": "quantile", "gamma": 0.5},
    "engine": {"mode": "loop"},
    "checkpoint_seconds": 0,
}  # fmt: skip
SPLITNN = {"method": {"name": "splitnn", "rate": 0.01, "batch": 16, "width": 12, "replay": "pass"}}
both = pytest.mark.parametrize("how", [{}, SPLITNN], ids=["vleto", "splitnn"])


def config(how: dict[str, Any]) -> RunConfig:
    return resolve(change(SMALL, how), "test")


@dataclasses.dataclass
class Dying:
    """An engine in which site-2 falls silent at some exchange, after the others have answered.

    `waits`: it is rebuilt from its state, and everybody gets the same messages again.
    """

    made: Parts
    left: int
    waits: bool
    states: dict[str, Tensors] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clients = {id: self.made.client(id) for id in self.made.scenario.clients}

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        self.left -= 1
        if self.left:
            return {id: answer(self.clients[id], action, moment, p) for id, p in packets.items()}
        for id, packet in packets.items():
            if id != "site-2":
                answer(self.clients[id], action, moment, packet)  # its answer is lost
        if not self.waits:
            raise ClientFailedError("site-2", action, "it did not answer")
        kept = {name: tensor.clone() for name, tensor in self.clients["site-2"].state().items()}
        self.clients["site-2"] = self.made.client("site-2")
        self.clients["site-2"].restore(kept)
        return {id: answer(self.clients[id], action, moment, p) for id, p in packets.items()}

    def states_of(self) -> dict[str, Tensors]:
        return {id: client.state() for id, client in self.clients.items()}


def trained(made: Parts, engine: Any) -> Any:
    server = made.server()
    for stage in range(2):
        for number in range(2):
            moment = Moment(stage, number, 2)
            tasks = made.scenario.tasks_at(stage)
            server.round(Clients(made.scenario.clients, engine, moment, tasks), moment)
    return server


@both
@pytest.mark.parametrize("at", [3, 11, 24])
def test_a_batch_is_done_again_when_a_party_is_back_and_nobody_steps_twice(
    how: dict[str, Any], at: int
) -> None:
    made = parts(config(how))
    plain, broken = LocalEngine(made), Dying(made, at, waits=True)
    one, other = trained(made, plain), trained(made, broken)
    assert broken.left < 0  # it did fall silent
    for name, tensor in one.state().items():
        assert torch.equal(tensor, other.state()[name]), name
    for id, state in broken.states_of().items():
        mine = plain._client(id).state()
        assert all(torch.equal(mine[name], tensor) for name, tensor in state.items()), id


@both
def test_a_party_that_stays_away_is_named_and_the_run_can_go_on_later(
    how: dict[str, Any], tmp_path: Path
) -> None:
    made = parts(config(how))
    record = Record.create(tmp_path / "cut", to_toml(made.config), facts(made))
    engine = LocalEngine(made)
    carried = engine.carry
    left = [14]

    def falls_silent(action: str, moment: Moment, packets: Mapping[str, Packet]) -> Any:
        left[0] -= 1
        answers = dict(carried(action, moment, packets))
        if left[0] == 0:
            del answers["site-2"]
        return answers

    engine.carry = falls_silent  # type: ignore[method-assign]
    answers_stop = pytest.raises(
        ClientFailedError, match="site-2 failed in learn: it did not answer"
    )
    with record, answers_stop:
        go(made, engine, record, lambda progress: None, lambda: False)
    execute(config(how), tmp_path / "cut", local_engine, resume=True)
    execute(config(how), tmp_path / "whole", local_engine)
    events = [(tmp_path / part / "events.jsonl").read_bytes() for part in ("cut", "whole")]
    assert events[0] == events[1]
    ends = [load((tmp_path / p / "checkpoint.safetensors").read_bytes()) for p in ("cut", "whole")]
    assert ends[0].keys() == ends[1].keys()
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


@both
@pytest.mark.parametrize("rows", [15, 17, 0])
def test_a_party_that_answers_for_other_rows_is_named_and_no_step_is_made_of_it(
    how: dict[str, Any], rows: int
) -> None:
    made = parts(config(how))
    engine, server, moment = LocalEngine(made), made.server(), Moment(0, 0, 2)
    carried, left = engine.carry, [3]

    def other_rows(action: str, moment: Moment, packets: Mapping[str, Packet]) -> Any:
        answers = dict(carried(action, moment, packets))
        left[0] -= 1
        if left[0] == 0:
            kind = kinds(actions(type(engine._client("site-2")))[action])[1]
            reply: Any = unpack(answers["site-2"], kind, "site-2")
            wrong = torch.zeros((rows, reply.embedding.shape[1]))
            answers["site-2"] = pack(dataclasses.replace(reply, embedding=wrong))
            before.update({name: t.clone() for name, t in server.state().items()})
        return answers

    before: Tensors = {}
    engine.carry = other_rows  # type: ignore[method-assign]
    with pytest.raises(BadMessageError, match=r"from site-2 refused: .*rows not aligned"):
        server.round(Clients(made.scenario.clients, engine, moment, (0,)), moment)
    assert left == [0]  # nobody was asked anything after that
    assert all(torch.equal(tensor, before[name]) for name, tensor in server.state().items())

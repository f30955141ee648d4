"""What a client of `replay` remembers, and what its epochs go through."""

from typing import Any

import torch

from atoll.core.federation import Clients, Moment
from atoll.engines.local import LocalEngine
from atoll.runs.config import change, resolve
from atoll.runs.parts import Parts, parts


def made(**options: Any) -> Parts:
    small = {
        "data": "digits-table", "split": "classes", "clients": 2, "stages": 5, "widths": [8],
        "epochs": 1, "memory": 40, "engine.mode": "loop",
    }  # fmt: skip
    return parts(resolve(change({"method": "replay"}, {**small, **options}), "test"))


def after(found: Parts, rounds: list[tuple[int, int]]) -> Any:
    """The first client after these rounds (stage, round) of two a stage."""
    server, engine = found.server(), LocalEngine(found)
    for stage, number in rounds:
        moment = Moment(stage, number, 2)
        server.round(Clients(found.scenario.clients, engine, moment), moment)
    client = found.client("site-0")
    client.restore(engine.states("")["site-0"])
    return client


def test_rows_are_chosen_at_the_end_of_a_stage_and_make_room_for_later_ones() -> None:
    found = made()
    assert after(found, [(0, 0)]).memory == {}
    first = after(found, [(0, 0), (0, 1)])
    assert {key: len(rows) for key, rows in first.memory.items()} == {(0, 0): 20, (1, 0): 20}
    second = after(found, [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert {key: len(rows) for key, rows in second.memory.items()} == dict.fromkeys(
        [(0, 0), (1, 0), (2, 1), (3, 1)], 10
    )
    assert second.memory[0, 0] == first.memory[0, 0][:10]
    for (kind, stage), rows in second.memory.items():
        assert set(second.site.train(stage).y[rows].tolist()) == {kind}
        assert len(set(rows)) == 10


def test_an_epoch_goes_through_the_stage_and_the_memory_in_equal_parts() -> None:
    client = after(made(), [(0, 0), (0, 1)])
    stage, epoch = client.site.train(1), client._rows(1)
    assert len(epoch) == 2 * len(stage)
    assert torch.equal(epoch.x[: len(stage)], stage.x)
    assert set(epoch.y[len(stage) :].tolist()) == {0, 1}
    assert len(epoch.x[len(stage) :].unique(dim=0)) == 40


def test_without_memory_an_epoch_has_the_rows_of_the_stage() -> None:
    for options in ({"memory": 0}, {"share": 0.0}):
        client = after(made(**options), [(0, 0), (0, 1)])
        assert client._rows(1) is client.site.train(1)


def test_herding_and_chance_choose_other_rows() -> None:
    ends = [after(made(choice=choice), [(0, 1)]).memory for choice in ("random", "herding")]
    assert ends[0].keys() == ends[1].keys()
    assert ends[0] != ends[1]

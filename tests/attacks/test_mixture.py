"""Rows that a method adds to a site's own hide none of these: synthetic rows and repeated ones.

The coordinator makes the generator of synthetic rows, and so knows them. A unit that one own row
reaches beside them has that row and known ones in its update.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.errors import BadMessageError
from atoll.core.federation import Moment
from atoll.core.messages import Tensors
from atoll.core.rng import Stream
from atoll.engines.network import egress
from atoll.engines.network.drafts import drafted_contract, written
from atoll.engines.network.mixture import own_rows
from atoll.learning.synthesis import draw_generator
from atoll.methods.target import Lesson

from .row_recovery import STAGED, Coordinator, run_config, site

ANY: dict[str, Any] = {"initial_weights": "any", "move": 0.0, "drift": 0.0}
COMMON: dict[str, Any] = {**STAGED, "widths": [8], "rounds": 2, "batch": 64}
CASES: dict[str, dict[str, Any]] = {
    "target": {**COMMON, "synthetic": 60, "share": 0.5, "batch": 1024},
    "replay": {**COMMON, "memory": 8, "share": 0.9, "batch": 1024},
}


def opened(folder: Path, method: str, **changes: Any) -> Coordinator:
    """A coordinator that may send any weights, at the second stage of a run."""
    config = run_config({**CASES[method], **changes}, method)
    terms = replace(drafted_contract(config), **ANY)
    coordinator = Coordinator(site(folder, written(terms), 83, "phase"))
    assert coordinator.open("attack", config), coordinator.refusals
    first = coordinator.first
    assert coordinator.fit(first, 0) is not None
    assert coordinator.fit(first, 1) is not None
    if method == "target":
        how = coordinator.config.options().synthesis
        lesson = Lesson(draw_generator(6, 2, how, Stream.of("attack")), torch.tensor([True, True]))
        lesson.generator["row_weight"] *= 8  # rows as wide as those of a site
        assert coordinator.ask("receive", Moment(1, 0, 2), lesson) is not None
    return coordinator


def reached_by_one(weights: Tensors, candidates: Tensor, every: Tensor) -> Tensors:
    """Weights whose first unit one of the candidates reaches, and no other row."""
    for row in candidates:
        direction = row - every.mean(0)
        reach, order = (every @ direction).sort()
        second, first = reach[-2:]
        if torch.equal(every[order[-1]], row) and float(first - second) > 0.01:
            made = {name: tensor.clone() for name, tensor in weights.items()}
            made["weight0"][0], made["bias0"][0] = direction, -(first + second) / 2
            return made
    raise AssertionError("no row lies outside")


def refused(coordinator: Coordinator) -> bool:
    log = egress.lines(coordinator.path.parent / "store" / "egress.jsonl")
    words = "the weights single out rows of this site in 1 units"
    return any(words in line.words for line in log)


def test_synthetic_rows_hide_no_row(tmp_path: Path) -> None:
    coordinator = opened(tmp_path, "target")
    rows = coordinator.rows(1)
    weights = reached_by_one(coordinator.first, rows, rows)
    assert coordinator.fit(weights, 0, stage=1) is None
    together = coordinator.gate._client._rows(1).x
    reached = (together @ weights["weight0"][0] + weights["bias0"][0]) > 0
    assert int(reached.sum()) >= 3  # as many as the contract wants, and one of them is its own
    assert refused(coordinator)


def test_a_row_of_the_memory_counts_once(tmp_path: Path) -> None:
    coordinator = opened(tmp_path, "replay")
    memory = [row for rows in coordinator.gate._client.memory.values() for row in rows]
    kept = coordinator.rows(0)[memory]
    every = torch.cat([kept, coordinator.rows(1)])
    weights = reached_by_one(coordinator.first, kept, every)
    assert coordinator.fit(weights, 0, stage=1) is None
    assert refused(coordinator)


def test_a_generator_of_another_form_is_refused(tmp_path: Path) -> None:
    """Its hidden layer, and so the memory that it takes, is of the coordinator's making."""
    coordinator = opened(tmp_path, "target")
    how = coordinator.config.options().synthesis
    good = draw_generator(6, 2, how, Stream.of("attack"))
    wide = draw_generator(6, 2, replace(how, width=5000), Stream.of("attack"))
    both, nothing = torch.tensor([True, True]), torch.tensor([False, False])
    for lesson in (Lesson(wide, both), Lesson(good, nothing), Lesson(good, both[:1])):
        with pytest.raises(BadMessageError, match="a generator of another form"):
            coordinator.ask("receive", Moment(1, 0, 2), lesson)


@pytest.mark.parametrize("method", list(CASES))
def test_honest_weights_pass(method: str, tmp_path: Path) -> None:
    coordinator = opened(tmp_path, method)
    assert coordinator.fit(coordinator.first, 0, stage=1) is not None, coordinator.refusals


def test_a_run_whose_steps_have_few_own_rows_does_not_begin(tmp_path: Path) -> None:
    config = run_config({**CASES["target"], "synthetic": 1000, "batch": 64}, "target")
    coordinator = Coordinator(site(tmp_path, written(drafted_contract(config)), 83, "phase"))
    assert not coordinator.open("attack", config)
    assert "1 own rows in a step beside others; the contract wants at least 8" in str(
        coordinator.refusals
    )


def test_steps_with_few_own_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.engines.network.policy.unfit", lambda *_: "")
    coordinator = opened(tmp_path, "target", synthetic=1000, batch=64)
    assert coordinator.fit(coordinator.first, 0, stage=1) is None
    assert "1 rows in a step; the contract wants at least 8" in str(coordinator.refusals)


def test_own_rows_are_counted_as_often_as_they_are_known() -> None:
    known = torch.arange(12.0).view(4, 3)
    known[3] = known[2]
    strange = torch.full((2, 3), 0.5)
    rows = torch.cat([known[[0, 0, 2, 2, 2]], strange])
    assert own_rows(rows, [known[:2], known[2:]]).tolist() == known[[0, 2, 2]].tolist()
    assert len(own_rows(strange, [known])) == 0

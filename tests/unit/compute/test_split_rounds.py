"""A round in one computation gives what the exchange message by message gives, and its ledger."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from atoll.compute import split_rounds
from atoll.compute.choice_files import choices
from atoll.compute.split_rounds import WAYS
from atoll.core.record import Message, Round, Score, read_events
from atoll.core.rng import Stream, below, normals, uniforms
from atoll.engines.local import LocalEngine, local_engine
from atoll.learning.split_nets import bottom
from atoll.runs.config import change, resolve
from atoll.runs.execute import execute
from atoll.runs.sweep import points, sweep

pytestmark = pytest.mark.numerics

SMALL: dict[str, Any] = {
    "rounds": 2,
    "dtype": "float64",
    "data": {"name": "digits"},
    "scenario": {"split": "parties", "clients": 4, "cut": "quadrants", "train": 0.2,
                 "mode": "classes", "window": 4, "stages": 3},
    "method": {"name": "vleto", "rate": 0.05, "batch": 16, "width": 12, "fisher_rows": 64},
}  # fmt: skip
STRIPS = {"scenario.mode": "columns", "scenario.cut": "strips", "scenario.window": 0,
          "scenario.stages": 1}  # fmt: skip
SPLITNN = {"method": {"name": "splitnn", "rate": 0.01, "batch": 16, "width": 12}}
UNEQUAL = {"data": "digits-table", "scenario.cut": "contiguous", "scenario.clients": 3}
WAYS_TO_LEARN: dict[str, dict[str, Any]] = {
    "vleto": {},
    "vleto, two passes": {"epochs": 2, "score_every": 1},
    "vleto, part held back, drift": {
        "lmo_rule": "quantile",
        "rho": 0.3,
        "gamma": 1.0,
        "drift": "vector",
    },
    "vleto, scalar drift, mean": {"lmo_rule": "off", "gamma": 0.3, "agg": "mean"},
    "vleto, dropout": {"network": "mlp"},
    "vleto, convolutions": {"network": "lenet2", "scenario.cut": "strips", "scenario.clients": 1},
    "vleto, guarded": {"clip": 0.01, "noise": 0.01, "digits": 2, "seen_mask": True},
    "vleto, P1": STRIPS,
    "vleto, P1, stream": {**STRIPS, "stream": True},
    "vleto, P2": {**STRIPS, "protocol": "P2"},
    "vleto, table": UNEQUAL,
    "splitnn": SPLITNN,
    "splitnn, concat": {**SPLITNN, "agg": "concat"},
    "splitnn, P1, concat": {**SPLITNN, **STRIPS, "agg": "concat"},
    "splitnn, fresh": {**SPLITNN, "fresh": True},
    "pass": {**SPLITNN, "rate": 0.003, "replay": "pass"},  # at 0.01 it amplifies rounding errors
    "fedspace": {**SPLITNN, "replay": "fedspace"},
    "fedprok": {**SPLITNN, "replay": "fedprok"},
    "fedprok, P1": {**SPLITNN, **STRIPS, "replay": "fedprok"},
}


def values(how: dict[str, Any], **more: Any) -> dict[str, Any]:
    first = {key: value for key, value in how.items() if key == "method"}
    rest = {key: value for key, value in how.items() if key != "method"}
    return change(change(SMALL, first), {**rest, **more})


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    found = load((folder / "checkpoint.safetensors").read_bytes())
    return found, list(read_events(folder))


def same(one: Path, other: Path) -> None:
    """To 1e-10 in double precision; scores and the ledger exactly."""
    (weights, events), (others, told) = outcome(one), outcome(other)
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-10, atol=1e-10)
    for kind in (Score, Message):
        first, second = ([e for e in part if isinstance(e, kind)] for part in (events, told))
        assert first
        assert first == second
    notes = [[e.notes for e in part if isinstance(e, Round)] for part in (events, told)]
    for left, right in zip(*notes, strict=True):
        assert left == pytest.approx(right, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", WAYS_TO_LEARN)
def test_a_round_in_one_computation_is_the_round_message_by_message(
    name: str, tmp_path: Path
) -> None:
    for mode in ("loop", "stacked"):
        config = resolve(values(WAYS_TO_LEARN[name], **{"engine.mode": mode}), "test")
        execute(config, tmp_path / mode, local_engine)
    assert not (tmp_path / "loop" / "engine.json").exists()
    assert {c.mode for c in choices(tmp_path / "stacked").values()} == {"stacked"}
    same(tmp_path / "loop", tmp_path / "stacked")


def test_pass_in_single_precision_is_not_led_by_rounding_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first step of a stage the old and the new network are the same: nothing pulls.

    Whether two computations of one embedding differ in the last bit depends on the CPU, so here
    all of the stack's do.
    """
    embed_all = split_rounds._Halves._fill

    def one_bit_off(halves: Any, tables: list[torch.Tensor], *rest: Any) -> None:
        embed_all(halves, tables, *rest)
        for table in tables:
            table.copy_(torch.nextafter(table, torch.full_like(table, torch.inf)))

    monkeypatch.setattr(split_rounds._Halves, "_fill", one_bit_off)
    weights, losses = {}, {}
    for mode in ("loop", "stacked"):
        how = values(WAYS_TO_LEARN["pass"], **{"engine.mode": mode, "dtype": "float32"})
        execute(resolve(how, "test"), tmp_path / mode, local_engine)
        weights[mode], events = outcome(tmp_path / mode)
        losses[mode] = [e.notes["loss"] for e in events if isinstance(e, Round)]
    for first, second in zip(losses["loop"][::2], losses["loop"][1::2], strict=True):
        assert second < first, "training that diverges would amplify rounding errors"
    assert losses["stacked"] == pytest.approx(losses["loop"], rel=1e-3)
    for name, tensor in weights["loop"].items():
        torch.testing.assert_close(weights["stacked"][name], tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["vleto, part held back, drift", "vleto, P2", "pass", "fedspace"])
def test_several_runs_in_one_computation_are_what_each_is_alone(name: str, tmp_path: Path) -> None:
    stacked = values(WAYS_TO_LEARN[name], **{"engine.mode": "stacked"})
    found = points(stacked, {"seed": [0, 1, 2]}, tmp_path / "sweep")
    sweep(found, tmp_path / "sweep", LocalEngine)
    for number, point in enumerate(found):
        alone = change(stacked, {"seed": number, "engine.mode": "loop"})
        execute(resolve(alone, "test"), tmp_path / f"alone-{number}", local_engine)
        same(tmp_path / f"alone-{number}", point.folder)


def test_weights_of_terms_can_differ_within_one_computation(tmp_path: Path) -> None:
    stacked = values({}, **{"engine.mode": "stacked"})
    found = points(stacked, {"lambda_a": [0.2, 0.8], "k0": [5.0, 15.0]}, tmp_path / "sweep")
    sweep(found, tmp_path / "sweep", LocalEngine)
    assert {c.members for c in choices(tmp_path / "sweep").values()} == {4}
    for number, point in enumerate(found):
        alone = change(stacked, {**point.axes, "engine.mode": "loop"})
        execute(resolve(alone, "test"), tmp_path / f"alone-{number}", local_engine)
        same(tmp_path / f"alone-{number}", point.folder)


def test_a_trial_chooses_a_way_and_keeps_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    how = WAYS_TO_LEARN["vleto, convolutions"] | {"scenario.clients": 1}
    execute(
        resolve(values(how, **{"engine.mode": "auto"}), "test"), tmp_path / "auto", local_engine
    )
    found = list(choices(tmp_path / "auto").values())
    assert found
    assert {choice.way for choice in found} <= set(WAYS)
    reasons = [choice.reason for choice in found]
    assert [reason for reason in reasons if reason.startswith("the fastest of each")]
    assert "nothing moves at the clients" in reasons  # from the second stage on
    assert all(choice.difference <= choice.tolerance for choice in found)
    execute(
        resolve(values(how, **{"engine.mode": "loop"}), "test"), tmp_path / "loop", local_engine
    )
    same(tmp_path / "loop", tmp_path / "auto")


@pytest.mark.parametrize("blocks", ["lenet3", "lenet2", "dense"])
def test_halves_in_one_product_are_the_halves_one_by_one(blocks: Any) -> None:
    shape = (2, 9, 8)
    made = [bottom(blocks, shape, 5, Stream.of(number)).double() for number in range(3)]
    x = torch.rand(3, 4, *shape, dtype=torch.float64)
    stacked = {
        name: torch.stack([dict(m.named_parameters())[name] for m in made])
        for name, _ in made[0].named_parameters()
    }
    alone = torch.stack([m(part) for m, part in zip(made, x, strict=True)])
    together = made[0].unfolded(stacked, x)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    g = torch.rand_like(alone)
    one = torch.autograd.grad(alone, list(stacked.values()) and [
        p for m in made for p in m.parameters()], g)  # fmt: skip
    leaves = {n: w.detach().requires_grad_() for n, w in stacked.items()}
    other = torch.autograd.grad(made[0].unfolded(leaves, x), list(leaves.values()), g)
    count = len(leaves)
    for number, found in enumerate(other):
        expected = torch.stack([one[member * count + number] for member in range(3)])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_draws_of_a_key_are_even_and_normal() -> None:
    key = torch.tensor(12345)
    flat = uniforms(key, (100, 200))
    assert float(flat.min()) > 0
    assert float(flat.max()) < 1
    assert torch.histc(flat, 10, 0, 1) == pytest.approx(torch.full((10,), 2000.0), rel=0.1)
    normal = normals(key, (40_000,))
    assert float(normal.mean()) == pytest.approx(0, abs=0.02)
    assert float(normal.std()) == pytest.approx(1, abs=0.02)
    assert float((normal**4).mean()) == pytest.approx(3, abs=0.15)
    counts = torch.bincount(below(5, key, 10_000), minlength=5)
    assert counts == pytest.approx(torch.full((5,), 2000), rel=0.1)
    assert not torch.equal(normals(torch.tensor(12346), (10,)), normal[:10])


@pytest.mark.parametrize("mode", ["auto", "stacked"])
def test_a_way_that_is_wrong_once_biases_are_not_zero_is_never_taken(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways but `each` take every member's biases from the first: at the start all are zero."""
    embed = split_rounds._Halves._embed

    def wrong(self: Any, weights: Any, x: Any) -> Any:
        if self.way != "each":
            first = {n: w[:1].expand_as(w) for n, w in weights.items() if n.endswith("bias")}
            weights = {**weights, **first}
        return embed(self, weights, x)

    monkeypatch.setattr(split_rounds._Halves, "_embed", wrong)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    execute(resolve(values({}, **{"engine.mode": mode}), "test"), tmp_path / mode, local_engine)
    proved = [c for c in choices(tmp_path / mode).values() if c.tolerance]
    assert proved
    assert {c.way for c in proved} == {"each"}


def test_a_round_in_one_computation_that_goes_wrong_is_done_by_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second round that is checked has other embeddings than the clients would send."""
    rounds, wrong = [0], [False]
    call, embed = split_rounds.SplitStack.run, split_rounds._Halves._embed

    def counted(self: Any, jobs: Any, probe: Any = None) -> Any:
        rounds[0] += probe is not None
        wrong[0] = probe is not None and rounds[0] == 2
        try:
            return call(self, jobs, probe)
        finally:
            wrong[0] = False

    def doubled(self: Any, weights: Any, x: Any) -> Any:
        return embed(self, weights, x) * (1 + wrong[0])

    monkeypatch.setattr(split_rounds.SplitStack, "run", counted)
    monkeypatch.setattr(split_rounds._Halves, "_embed", doubled)
    for mode in ("loop", "stacked"):
        how = {"engine.mode": mode, "engine.verify": "always"}
        execute(resolve(values({}, **how), "test"), tmp_path / mode, local_engine)
    same(tmp_path / "loop", tmp_path / "stacked")
    refuted = [c.refuted for c in choices(tmp_path / "stacked").values() if c.refuted]
    assert len(refuted) == 1
    assert refuted[0].startswith("round 2 of stage 1")

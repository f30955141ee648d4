"""One lying site of four: the run goes on without it, names it, and honest sites lose little."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from atoll.core.errors import UserError
from atoll.core.influence import RobustOptions
from atoll.engines.local import local_engine
from atoll.runs.config import RunConfig
from atoll.runs.execute import execute
from atoll.runs.result import Run

from .poison import LIES, METHODS, WITHIN, config, flipped, honest_runs, run

LOSS = 0.03  # of accuracy, that honest sites may lose
SEVERAL = ("fedavg", "chfl", "fml", "fedmd", "fccl", "fedmatch")
VERTICAL = ("splitnn", "vleto")
VERTICAL_LONG = ("x100", "x-100", "1e30")
PUBLIC = ("fedmd", "fccl", "fedmatch")
UNSEEN = {(method, "rows") for method in ("fml", *PUBLIC)}  # their answers have no row counts
QUICK = [
    *(("fedavg", lie) for lie in LIES),
    *((method, lie) for method in SEVERAL[1:] for lie in ("x-10", "shape")),
    *((method, "noise") for method in PUBLIC),
]
LONG = [(m, lie) for m in SEVERAL for lie in LIES if (m, lie) not in QUICK]
slow = (pytest.mark.process, pytest.mark.long)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], float]:
    """The accuracy of a method's three honest sites when nobody lies."""

    @cache
    def accuracy(method: str) -> float:
        return run(config(method), tmp_path_factory.mktemp("honest") / "run").accuracy

    return accuracy


@pytest.mark.parametrize(
    ("method", "lie"), [*QUICK, *(pytest.param(*case, marks=slow) for case in LONG)]
)
def test_the_run_goes_on_without_the_liar(
    method: str, lie: str, honest: Callable[[str], float], tmp_path: Path
) -> None:
    found = run(config(method), tmp_path / "run", LIES[lie])
    assert found.error is None
    assert found.accuracy >= honest(method) - LOSS
    rounds = {event.round for event in found.exclusions}
    assert {event.client for event in found.exclusions} <= {found.liar}
    assert rounds == (set() if (method, lie) in UNSEEN else set(range(config(method).rounds)))


def test_a_run_says_in_one_sentence_who_was_left_out(tmp_path: Path) -> None:
    found = run(config("fedavg", rounds=2), tmp_path / "run", LIES["nan"])
    (sentence,) = Run(found.folder).exclusions
    assert sentence.startswith(f"{found.liar} was left out of 2 rounds (fit): tensor")


@pytest.mark.parametrize("rule", ["clip", "trimmed-mean", "median"])
def test_an_option_also_holds_against_a_lie_below_the_factor(
    rule: str, honest: Callable[[str], float], tmp_path: Path
) -> None:
    found = run(config("fedavg", **{"robust.rule": rule}), tmp_path / "run", WITHIN["x-4"])
    assert not found.exclusions
    assert found.accuracy >= honest("fedavg") - LOSS


@pytest.mark.parametrize("rule", ["exclude", "median"])
def test_flipped_labels_at_one_site_cost_little(
    rule: str, honest: Callable[[str], float], tmp_path: Path
) -> None:
    chosen = config("fedavg", **{"robust.rule": rule})
    found = run(chosen, tmp_path / "run", made=flipped(chosen))
    assert found.accuracy >= honest("fedavg") - LOSS


@pytest.mark.parametrize("method", VERTICAL)
@pytest.mark.parametrize(
    "lie",
    [*("noise", "x-10", "nan", "shape"), *(pytest.param(n, marks=slow) for n in VERTICAL_LONG)],
)
def test_a_vertical_run_stops_names_the_party_and_goes_on_later(
    method: str, lie: str, tmp_path: Path
) -> None:
    """The lie begins in the second round; the checkpoint is that of the first."""
    chosen = config(method)
    found = run(chosen, tmp_path / "run", LIES[lie], since=20)
    assert found.error is not None
    assert found.liar in str(found.error)
    assert len([e for e in found.events if type(e).__name__ == "Round"]) == 1
    resumed_is_honest(chosen, tmp_path)


@pytest.mark.parametrize("method", ["fedavg", "chfl"])
def test_a_poisoned_mean_is_never_saved_even_where_all_are_trusted(
    method: str, tmp_path: Path
) -> None:
    chosen = config(method, **{"robust.rule": "none"})
    with pytest.raises(UserError, match="implausible and was not saved"):
        run(chosen, tmp_path / "run", LIES["1e30"], since=2)
    resumed_is_honest(chosen, tmp_path)


def resumed_is_honest(chosen: RunConfig, folder: Path) -> None:
    """Without the liar the run goes on from its checkpoint and ends as an honest one."""
    execute(chosen, folder / "run", local_engine, resume=True)
    execute(chosen, folder / "whole", local_engine)
    one, other = (folder / part / "events.jsonl" for part in ("run", "whole"))
    assert one.read_bytes() == other.read_bytes()
    ends = [load((folder / p / "checkpoint.safetensors").read_bytes()) for p in ("run", "whole")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.parametrize("method", ["fedavg", "chfl"])
def test_the_rule_does_not_change_an_honest_run(method: str, tmp_path: Path) -> None:
    for rule in ("exclude", "none"):
        execute(config(method, rounds=2, **{"robust.rule": rule}), tmp_path / rule, local_engine)
    one, other = (tmp_path / rule / "events.jsonl" for rule in ("exclude", "none"))
    assert one.read_bytes() == other.read_bytes()


def _runs() -> list[Any]:
    quick = ("fedavg alpha=0.05", "target splitnn")
    return [name if name in quick else pytest.param(name, marks=slow) for name in honest_runs()]


@pytest.mark.parametrize("name", _runs())
def test_nobody_is_left_out_of_an_honest_run(name: str, tmp_path: Path) -> None:
    """The factor has a margin of at least a half over the largest honest ratio."""
    found = run(honest_runs()[name], tmp_path / "run")
    assert found.error is None
    assert not found.exclusions
    assert 1.5 * max(found.ratios.values()) <= RobustOptions().factor


def test_every_method_with_updates_or_outputs_is_tried() -> None:
    assert {*SEVERAL, *VERTICAL} == set(METHODS)

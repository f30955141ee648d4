"""The rules of a proof, on jobs that are numbers: which way is taken, and why none is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.compute import proof
from atoll.compute.accelerated import Candidate
from atoll.compute.perturb import ACTUAL, DRAWS, Draw
from atoll.compute.proof import Verdict, prove, sampled


@dataclass(frozen=True)
class Work:
    """A number as a draw moves it."""

    value: float
    number: int
    draw: Draw


Rule = Callable[[Work], float]


def doubled(work: Work) -> float:
    return 2 * work.value


@dataclass
class Numbers:
    """Jobs are numbers, their result is their double; each way has a rule of its own."""

    ways: dict[str, Rule]
    rule: Rule = doubled
    constants: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Tensor] = field(default_factory=dict)
    asked: list[tuple[str, list[Work]]] = field(default_factory=list)

    def sample(self, jobs: Sequence[Any], draws: Sequence[Draw]) -> Sequence[Any]:
        return jobs

    def exact(self, job: float, number: int, draw: Draw) -> Work:
        return Work(job + draw.scale, number, draw)

    def reference(self, job: Work) -> dict[str, Tensor]:
        return self._result(self.rule(job))

    def candidates(self, way: str) -> Sequence[Candidate]:
        return [Candidate(name, self._runner(name, rule)) for name, rule in self.ways.items()]

    def _runner(self, name: str, rule: Rule) -> Callable[[Sequence[Any]], Sequence[Any]]:
        def run(works: Sequence[Any]) -> Sequence[Any]:
            self.asked.append((name, list(works)))
            return [self._result(rule(work)) for work in works]

        return run

    def _result(self, value: float) -> dict[str, Tensor]:
        result = {"weights/w": torch.tensor([value], dtype=torch.float64)}
        return result | {f"weights/{n}": t for n, t in self.constants.items()} | self.extra

    def values(self, result: dict[str, Tensor]) -> dict[str, Tensor]:
        return result

    def start(self, job: Work) -> dict[str, Tensor]:
        return {"weights/w": torch.tensor([job.value], dtype=torch.float64)}

    def weights(self, job: Work) -> dict[str, Tensor]:
        return {"w": torch.tensor([job.value], dtype=torch.float64), **self.constants}


def judged(kind: Any, jobs: Sequence[float], draws: Sequence[Draw] = DRAWS) -> Verdict:
    """The proof of a kind that has what a proof asks for, and no more."""
    return prove(kind, jobs, draws)


def fails(work: Work) -> float:
    raise ValueError("no such way")


def test_a_sample_is_evenly_spaced_from_one_of_the_jobs() -> None:
    assert sampled(range(3)) == [0, 1, 2]
    assert sampled(range(3), first=2) == [2, 0, 1]
    assert sampled(range(16)) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert sampled(range(16), first=5) == [5, 7, 9, 11, 13, 15, 1, 3]
    assert sampled(range(12)) == [0, 1, 3, 4, 6, 7, 9, 10]


def test_the_first_way_that_gives_the_references_numbers_is_taken() -> None:
    ways: dict[str, Rule] = {"bad": lambda w: 2.5 * w.value, "fails": fails, "good": doubled}
    kind = Numbers({**ways, "later": doubled})
    verdict = judged(kind, [1.0, 2.0])
    assert (verdict.way, verdict.difference, verdict.reason) == ("good", 0.0, "")
    assert verdict.holds
    assert "later" not in {way for way, _ in kind.asked}


def test_where_no_way_is_right_each_is_named_with_what_is_wrong() -> None:
    kind = Numbers({"fails": fails, "bad": lambda w: 2.5 * w.value})
    verdict = judged(kind, [1.0, 2.0], ACTUAL)
    assert not verdict.holds
    assert verdict.difference == pytest.approx(0.5)  # of what the number moved by
    assert verdict.reason == (
        "fails: ValueError: no such way; bad: the result differs by 5.0e-01, more than 1e-08"
    )


def test_the_member_that_is_furthest_off_counts() -> None:
    kind = Numbers({"bad": lambda w: 2 * w.value + (w.number == 1) * 0.5})
    assert judged(kind, [1.0, 2.0, 4.0], ACTUAL).difference == pytest.approx(0.25)


def test_an_error_at_the_tolerance_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "TOLERANCE", 0.5)
    at = Numbers({"at": lambda w: 2.5 * w.value})
    assert judged(at, [1.0], ACTUAL) == Verdict("at", 0.5, "")


def test_the_first_draw_at_which_the_reference_is_finite_is_taken() -> None:
    def small_alone(work: Work) -> float:
        if work.draw.scale > 0.05:
            raise ArithmeticError("too large")
        return 2 * work.value if work.draw.scale < 0.005 else math.nan

    kind = Numbers({"way": small_alone}, rule=small_alone)
    assert judged(kind, [1.0]).way == "way"
    assert kind.asked[0][1] == [Work(1.001, 0, DRAWS[3])]


def test_without_a_draw_that_the_reference_bears_there_is_no_proof() -> None:
    def nowhere(work: Work) -> float:
        return math.inf if work.value > 1 else 2 * work.value

    verdict = judged(Numbers({"way": doubled}, rule=nowhere), [1.0])
    wanted = "no proof: perturbed values give numbers that are not finite"
    assert verdict == Verdict("", math.inf, wanted)
    verdict = judged(Numbers({"way": doubled}, rule=fails), [1.0])
    assert verdict.reason == "no proof: perturbed values give ValueError: no such way"


def test_long_errors_are_cut() -> None:
    def long(work: Work) -> float:
        raise ValueError("x" * 300)

    cut = "ValueError: " + "x" * 300
    reason = judged(Numbers({"way": doubled}, rule=long), [1.0]).reason
    assert reason == "no proof: perturbed values give " + cut[:200]
    assert judged(Numbers({"way": long}), [1.0], ACTUAL).reason == f"way: {cut}"[:200]


def test_a_way_must_be_right_for_the_values_as_given_too() -> None:
    kind = Numbers({"way": lambda w: 2 * w.value + (w.draw.scale == 0)})
    verdict = judged(kind, [1.0, 2.0])
    assert not verdict.holds
    assert verdict.difference == pytest.approx(1.0)


def test_only_the_first_four_members_start_from_what_is_given() -> None:
    kind = Numbers({"way": doubled})
    judged(kind, [1.0] * 6)
    assert [len(works) for _, works in kind.asked] == [6, 4, 2]


def test_values_as_given_that_are_not_finite_prove_nothing_and_refuse_nothing() -> None:
    def not_at_zero(work: Work) -> float:
        return 2 * work.value if work.draw.scale or not work.draw.double else math.nan

    kind = Numbers({"way": not_at_zero}, rule=not_at_zero)
    assert judged(kind, [1.0]).way == "way"
    assert [works[0].draw.scale for _, works in kind.asked] == [0.1, 0.0]  # the last: rounding


def test_draws_of_ones_own_are_the_only_ones_and_nothing_is_rounded() -> None:
    kind = Numbers({"way": lambda w: 2 * w.value + (not w.draw.double) * 0.1})
    assert judged(kind, [1.0, 2.0], ACTUAL) == Verdict("way", 0.0, "")
    assert [works[0].draw for _, works in kind.asked] == [ACTUAL[0]]


def test_rounding_is_the_largest_of_two_members_in_the_runs_own_type() -> None:
    apart = (0.1, 0.4, 9.0)  # of values that move by 1, 2 and 1
    kind = Numbers({"way": lambda w: 2 * w.value + (not w.draw.double) * apart[w.number]})
    verdict = judged(kind, [1.0, 2.0, 1.0])
    assert (verdict.way, verdict.difference) == ("way", 0.0)
    assert verdict.rounding == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("constants", "extra", "proved"),
    [
        ({"never": [math.inf, 1.0]}, {}, True),  # as it was before any training
        ({}, {"at/first": [math.nan]}, True),  # where something is, if it is anywhere
        ({"finite": [1.0]}, {"weights/other": [math.inf, 1.0]}, False),
        ({"never": [math.nan]}, {"losses/sum": [math.nan]}, False),
    ],
)
def test_results_must_be_finite_but_for_what_never_was(
    constants: dict[str, list[float]], extra: dict[str, list[float]], proved: bool
) -> None:
    held = {name: torch.tensor(values) for name, values in constants.items()}
    more = {name: torch.tensor(values) for name, values in extra.items()}
    assert judged(Numbers({"way": doubled}, constants=held, extra=more), [1.0]).holds is proved

"""The proof: an accelerated way must agree with the plain loop, near the actual values.

Both run a few steps in double precision, from values that are perturbed for each member
independently (perturb.py). Every kind of job and every candidate goes through `prove`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.compute.accelerated import Candidate, Kind
from atoll.compute.compare import max_relative_error, norm_errors
from atoll.compute.perturb import ACTUAL, AS_RUN, DRAWS, Draw
from atoll.compute.probe import Seen
from atoll.kernels.batched_layers import torch_convolutions

__all__ = ["SAMPLE", "TOLERANCE", "Verdict", "prove", "sampled"]

TOLERANCE = 1e-8  # relative, in double precision, after the steps of a proof
SAMPLE = 8  # members that a proof takes
UNPERTURBED = 4  # of them that also start from the values that they have
ROUNDED = 2  # of them that show what rounding does in the run's own type


@dataclass(frozen=True)
class Verdict:
    """The first candidate that agrees with the reference; without one, the reason."""

    way: str  # empty: none
    difference: float
    reason: str
    rounding: float = 0.0  # relative difference in the run's own type, unperturbed

    @property
    def holds(self) -> bool:
        """Whether a candidate is proved."""
        return bool(self.way)


Case = tuple[Sequence[Any], Sequence[Any]]  # jobs, and the reference's results


def sampled(jobs: Sequence[Any], first: int = 0) -> list[Any]:
    """At most SAMPLE jobs, evenly spaced from one of them."""
    count = min(len(jobs), SAMPLE)
    return [jobs[(first + place * len(jobs) // count) % len(jobs)] for place in range(count)]


def prove(kind: Kind, jobs: Sequence[Any], draws: Sequence[Draw] = DRAWS, way: str = "") -> Verdict:
    """Compare the kind's candidates with the reference until one agrees."""
    members, candidates = kind.sample(jobs, draws), kind.candidates(way)
    if draws is not DRAWS:
        return _prove(kind, members, candidates, draws)
    with torch_convolutions():
        verdict = _prove(kind, members, candidates, draws)
        for candidate in candidates:
            if candidate.way == verdict.way:
                return replace(verdict, rounding=_rounding(kind, members[:ROUNDED], candidate))
    return verdict


def _prove(
    kind: Kind, jobs: Sequence[Any], candidates: Sequence[Candidate], draws: Sequence[Draw]
) -> Verdict:
    wrong = ""
    for draw in draws:
        try:
            exact = [kind.exact(job, number, draw) for number, job in enumerate(jobs)]
            expected = [kind.reference(job) for job in exact]
        except Exception as error:  # a loss may fail in any way on values that it does not expect
            wrong = f"{type(error).__name__}: {error}"[:200]
            continue
        if _finite(kind, exact, expected):
            unperturbed = _unperturbed_cases(kind, jobs) if draws is DRAWS else []
            return _first_equal(kind, [(exact, expected), *unperturbed], candidates)
        wrong = "numbers that are not finite"
    return Verdict("", math.inf, f"no proof: perturbed values give {wrong}")


def _unperturbed_cases(kind: Kind, jobs: Sequence[Any]) -> list[Case]:
    """The jobs from the values that they have: there a maximum may have exact ties."""
    exact = [kind.exact(job, number, ACTUAL[0]) for number, job in enumerate(jobs[:UNPERTURBED])]
    expected = [kind.reference(job) for job in exact]
    return [(exact, expected)] if _finite(kind, exact, expected) else []


def _first_equal(kind: Kind, cases: Sequence[Case], candidates: Sequence[Candidate]) -> Verdict:
    wrong, error = [], math.inf
    for candidate in candidates:
        try:
            error = max(_error(kind, candidate, *case) for case in cases)
        except Exception as failure:  # a loss may fail in any way on what it was not written for
            wrong.append(f"{candidate.way}: {type(failure).__name__}: {failure}"[:200])
            continue
        if error <= TOLERANCE:
            return Verdict(candidate.way, error, "")
        wrong.append(
            f"{candidate.way}: the result differs by {error:.1e}, more than {TOLERANCE:.0e}"
        )
    return Verdict("", error, "; ".join(wrong))


def _error(kind: Kind, candidate: Candidate, jobs: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest error of a candidate over the jobs."""
    return max(
        max_relative_error(kind.values(one), kind.values(other), kind.start(job))
        for job, one, other in zip(jobs, expected, candidate.run(jobs), strict=True)
    )


def _rounding(kind: Kind, jobs: Sequence[Any], candidate: Candidate) -> float:
    """The rounding error between a correct candidate and the reference, in the run's own type."""
    error = 0.0
    works = [kind.exact(job, number, AS_RUN) for number, job in enumerate(jobs)]
    for work, other in zip(works, candidate.run(works), strict=True):
        before, one, two = kind.start(work), kind.values(kind.reference(work)), kind.values(other)
        expected, actual = (Seen({n: part[n] for n in before}, {}) for part in (one, two))
        error = max(error, norm_errors(before, expected, actual)[0])
    return error


def _finite(kind: Kind, jobs: Sequence[Any], results: Sequence[Any]) -> bool:
    """Whether all results are finite, but for constants that never were and names under at/."""
    for job, result in zip(jobs, results, strict=True):
        weights = kind.weights(job)
        never = {f"weights/{n}" for n, t in weights.items() if not bool(t.isfinite().all())}
        for name, tensor in kind.values(result).items():
            exempt = name in never or name.startswith("at/")
            if not exempt and not bool(tensor.isfinite().all()):
                return False
    return True

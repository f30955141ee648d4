"""V-LETO's claims: what a measurement gives for each stage, and the expectations held to it."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from atoll.reproduce.ledger import Claim
from atoll.reproduce.measured import Measurement
from atoll.reproduce.paper import Measured
from atoll.reproduce.vleto_tables import LAMBDAS, PRINTED, STAGES, THRESHOLDS, sweep_name

__all__ = ["after", "average", "by_stage", "claims"]


def after(found: Measurement, task: int | None, stage: int) -> list[float]:
    """For each seed the accuracy on a task after a stage, or on all classes so far (None)."""
    return [_after(run, task, stage) for run in found["runs"]]


def _after(run: dict[str, Any], task: int | None, stage: int) -> float:
    if task is None and str(stage) in run["union"]:
        return float(run["union"][str(stage)])
    tasks = run["tasks"]
    if task is None:  # columns by stage: one task; standalone: its own; joint: one stage
        places = [f"{stage}|{stage}", f"1|{stage}", "1|1"]
        return float(next(tasks[place] for place in places if place in tasks))
    return float(tasks[f"{task}|{stage}"])


def by_stage(found: Measurement) -> list[float]:
    """The means over seeds, a number for each stage: the columns of Table 1."""
    return [float(np.mean(after(found, None, stage))) for stage in range(1, STAGES + 1)]


def average(found: Measurement) -> list[float]:
    """For each seed the plain mean over stages."""
    rows = [after(found, None, stage) for stage in range(1, STAGES + 1)]
    return [float(v) for v in np.mean(rows, axis=0)]


# The eleven expectations of the specification's section i


def claims(measured: Measured) -> list[Claim]:
    """Every expectation of section i, on MNIST and on FMNIST."""
    found: list[Claim] = []
    for data in ("MNIST", "FMNIST"):
        for check in (_c1, _c2, _c3, _c4, _c5, _c6, _c7, _c8, _c9, _c10, _c11, _oracle, _all_held):
            try:
                found += check(data, measured)
            except KeyError as lacking:
                words = (check.__doc__ or "").strip()
                why = f"not run yet: atoll reproduce vleto --only {lacking}"
                if data != "MNIST" or "FMNIST alone" not in words:
                    found.append(Claim(f"{words} ({data})", None, why, open=True))
    return found


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * value:.1f}" for value in values)


def _c1(data: str, of: Measured) -> Iterator[Claim]:
    """1 CIL: PyVertical near 4/6, 4/8, 4/10 of the single task, at 0 on classes long unseen."""
    one, alone = of[f"{data} CIL PyVertical"], of[f"{data} CIL Standalone"]
    union, single = by_stage(one), by_stage(alone)
    expected = [single[t] * 4 / (2 * t + 4) for t in (1, 2, 3)]
    near = all(abs(u - e) < 0.05 for u, e in zip(union[1:], expected, strict=True))
    gone = [float(np.mean(after(one, task, stage))) for task, stage in ((1, 3), (1, 4), (2, 4))]
    yield Claim(
        f"1 {data} CIL: PyVertical after tasks 2, 3, 4 is near 4/6, 4/8, 4/10 of the single task "
        "(within 5 points), and at 0 on classes unseen for two tasks",
        near and max(gone) < 0.05,
        f"{_listed(union[1:])} (expected {_listed(expected)}); gone: {_listed(gone)}",
    )


def _c2(data: str, of: Measured) -> Iterator[Claim]:
    """2 CIL: V-LETO above PyVertical after every task but the first, AVG by 15 points."""
    one, other = of[f"{data} CIL V-LETO"], of[f"{data} CIL PyVertical"]
    gaps = [a - b for a, b in zip(by_stage(one), by_stage(other), strict=True)]
    gain = np.array(average(one)) - np.array(average(other))
    yield Claim(
        f"2 {data} CIL: V-LETO above PyVertical after every task but the first, AVG by 15 points",
        min(gaps[1:]) > 0 and float(gain.mean()) >= 0.15,
        f"gaps {_listed(gaps)}; AVG {100 * gain.mean():+.1f}, by seed {_listed(gain.tolist())}",
    )


def _c3(data: str, of: Measured) -> Iterator[Claim]:
    """3 CIL: without L_A, and without LMO, it falls back to about PyVertical."""
    base, full = (float(np.mean(average(of[f"{data} CIL {n}"]))) for n in ("PyVertical", "V-LETO"))
    for name in ("w/o L_A", "w/o LMO"):
        mean = float(np.mean(average(of[f"{data} CIL {name}"])))
        text = f"3 {data} CIL: {name} falls back to about PyVertical (AVG within 5 points)"
        evidence = f"{_listed([mean])}, PyVertical {_listed([base])}, V-LETO {_listed([full])}"
        yield Claim(text, abs(mean - base) <= 0.05, evidence)


def _c4(data: str, of: Measured) -> Iterator[Claim]:
    """4 CIL: raising lambda_A raises old tasks and lowers the current one; FMNIST alone."""
    found = [of[f"{data} {sweep_name('lambda_A', w)}"] for w in LAMBDAS]
    old = [float(np.mean([after(one, t, 4) for t in (1, 2, 3)])) for one in found]
    new = [float(np.mean(after(one, 4, 4))) for one in found]
    yield Claim(
        f"4 {data} CIL: raising lambda_A raises old tasks and lowers the current one, after task 4",
        all(a < b for a, b in pairwise(old)) and all(a > b for a, b in pairwise(new)),
        f"lambda_A {', '.join(map(str, LAMBDAS))}: old {_listed(old)}; current {_listed(new)}",
    )


def _c5(data: str, of: Measured) -> Iterator[Claim]:
    """5 CIL: k0 and alpha change nothing; FMNIST alone."""
    found = {k: of[f"{data} {sweep_name('k0', k)}"] for k, _ in THRESHOLDS}
    exact = [bool(one["engine"].get("tf32")) for one in found.values()]
    usual = exact.count(True) > exact.count(False)  # what was rounded otherwise cannot be equal
    averages = {k: average(one) for k, one in found.items()}
    same = [a for a, tf32 in zip(averages.values(), exact, strict=True) if tf32 == usual]
    apart = max(abs(a - b) for other in same for a, b in zip(same[0], other, strict=True))
    others = [str(k) for k, tf32 in zip(found, exact, strict=True) if tf32 != usual]
    left = f"; k0 {', '.join(others)} was measured in another precision" if others else ""
    yield Claim(
        f"5 {data} CIL: k0 and alpha change nothing",
        apart < 1e-9,
        f"AVG {_listed([float(np.mean(a)) for a in averages.values()])};"
        f" {len(same)} of them apart by {apart:.1e} at most{left}",
    )


def _c6(data: str, of: Measured) -> Iterator[Claim]:
    """6 CIL: Standalone above V-LETO."""
    alone, full = by_stage(of[f"{data} CIL Standalone"]), by_stage(of[f"{data} CIL V-LETO"])
    yield Claim(
        f"6 {data} CIL: Standalone above V-LETO after every task but the first (AVG too)",
        all(a > b for a, b in zip(alone[1:], full[1:], strict=True)),
        f"Standalone {_listed(alone)}; V-LETO {_listed(full)}",
    )


def _c7(data: str, of: Measured) -> Iterator[Claim]:
    """7 FIL: the outer strips alone are weaker than the inner ones."""
    alone = by_stage(of[f"{data} FIL Standalone"])
    yield Claim(
        f"7 {data} FIL: the outer strips alone are weaker than the inner ones",
        max(alone[0], alone[3]) < min(alone[1:3]),
        _listed(alone),
    )


def _c8(data: str, of: Measured) -> Iterator[Claim]:
    """8 FIL: PyVertical rises, then drops at the weak last strip."""
    rows = by_stage(of[f"{data} FIL PyVertical"])
    text = f"8 {data} FIL: PyVertical rises, then drops at the weak last strip"
    yield Claim(text, rows[0] < rows[1] < rows[2] > rows[3], _listed(rows))


def _c9(data: str, of: Measured) -> Iterator[Claim]:
    """9 FIL: V-LETO does not drop at the weak last strip and ends above PyVertical."""
    full, base = by_stage(of[f"{data} FIL V-LETO"]), by_stage(of[f"{data} FIL PyVertical"])
    yield Claim(
        f"9 {data} FIL: V-LETO does not drop at the weak last strip and ends above PyVertical",
        full[3] >= full[2] - 0.005 and full[3] > base[3],
        f"V-LETO {_listed(full)}; PyVertical {_listed(base)}",
    )


def _c10(data: str, of: Measured) -> Iterator[Claim]:
    """10 FIL: P2 rises with every strip and comes near Joint."""
    rows, joint = (
        by_stage(of[f"{data} FIL P2"]),
        float(np.mean(after(of[f"{data} FIL Joint"], None, 1))),
    )
    yield Claim(
        f"10 {data} FIL: P2 rises with every strip and comes near Joint (within 5 points)",
        all(a < b for a, b in pairwise(rows)) and joint - rows[3] < 0.05,
        f"{_listed(rows)}; Joint {_listed([joint])}",
    )


def _c11(data: str, of: Measured) -> Iterator[Claim]:
    """11 FIL: no honest variant is above Joint (leakage alarm)."""
    joint = float(np.mean(after(of[f"{data} FIL Joint"], None, 1)))
    ends = {
        name.removeprefix(f"{data} FIL "): by_stage(one)[3]
        for name, one in of.items()
        if name.startswith(f"{data} FIL ")
        and not name.endswith(("Joint", "label_oracle", "Standalone"))
    }
    if not ends:
        raise KeyError(f"{data} FIL P2")
    best = max(ends, key=lambda name: ends[name])
    yield Claim(
        f"11 {data} FIL: no honest variant is above Joint by 2 points (leakage alarm)",
        ends[best] <= joint + 0.02,
        f"best of {len(ends)}: {best} {_listed([ends[best]])}; Joint {_listed([joint])}",
    )


def _oracle(data: str, of: Measured) -> Iterator[Claim]:
    """FIL: the published test, which reads labels, ends above a model with all columns."""
    joint = float(np.mean(after(of[f"{data} FIL Joint"], None, 1)))
    rows = by_stage(of[f"{data} FIL label_oracle"])
    paper = [value / 100 for value in PRINTED[data]["V-LETO"][1]]
    yield Claim(
        f"{data} FIL: the published test, which reads labels, ends above a model with all columns",
        rows[3] > joint,
        f"{_listed(rows)}; Joint {_listed([joint])}; the paper {_listed(paper)}",
    )


def _all_held(data: str, of: Measured) -> Iterator[Claim]:
    """CIL: the published threshold holds back every weight from task 2 on."""
    shares = [list(run["frozen"].values()) for run in of[f"{data} CIL V-LETO"]["runs"]]
    yield Claim(
        f"{data} CIL: the published threshold holds back every weight from task 2 on",
        all(share[1:] == [1.0] * (STAGES - 1) for share in shares),
        f"shares by stage: {_listed(shares[0])}",
    )

"""V-LETO's claims as comparisons of paired seeds."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from atoll.reproduce.claims import Claim, Part, Series, above, mean_of, near
from atoll.reproduce.margins import ABOUT, SIMILAR, SIZE
from atoll.reproduce.measured import Measurement
from atoll.reproduce.paper import Measured
from atoll.reproduce.vleto_tables import LAMBDAS, STAGES, THRESHOLDS, sweep_name

__all__ = ["after", "average", "by_stage", "claims", "forgetting"]


def after(result: Measurement, task: int | None, stage: int) -> list[float]:
    """For each seed the accuracy on a task after a stage, or on all classes so far (None)."""
    return [_after(run, task, stage) for run in result["runs"]]


def _after(run: dict[str, Any], task: int | None, stage: int) -> float:
    if task is None and str(stage) in run["union"]:
        return float(run["union"][str(stage)])
    tasks = run["tasks"]
    if task is None:  # columns by stage: one task; standalone: its own; joint: one stage
        places = [f"{stage}|{stage}", f"1|{stage}", "1|1"]
        return float(next(tasks[place] for place in places if place in tasks))
    return float(tasks[f"{task}|{stage}"])


def by_stage(result: Measurement) -> list[float]:
    """The means over seeds, a number for each stage: the columns of Table 1."""
    return [float(np.mean(after(result, None, stage))) for stage in range(1, STAGES + 1)]


def average(result: Measurement) -> list[float]:
    """For each seed the plain mean over stages."""
    rows = [after(result, None, stage) for stage in range(1, STAGES + 1)]
    return [float(v) for v in np.mean(rows, axis=0)]


def _series(result: Measurement, values: list[float]) -> Series:
    return dict(zip((run["seed"] for run in result["runs"]), values, strict=True))


def _at(result: Measurement, stage: int, task: int | None = None) -> Series:
    """The accuracy after a stage by seed, of a task or of all classes so far."""
    return _series(result, after(result, task, stage))


def _mean(result: Measurement) -> Series:
    """The mean over stages by seed: AVG."""
    return _series(result, average(result))


def forgetting(result: Measurement) -> Series:
    """By seed, how far earlier tasks fell from their own stage to the last one, on average."""
    falls = [
        [a - b for a, b in zip(after(result, t, t), after(result, t, STAGES), strict=True)]
        for t in range(1, STAGES)
    ]
    return _series(result, [float(value) for value in np.mean(falls, axis=0)])


class _Data:
    """The measurements of one data set; what is missing is a KeyError with its setting."""

    def __init__(self, data: str, measured: Measured) -> None:
        self.name, self.measured = data, measured

    def __getitem__(self, setting: str) -> Measurement:
        return self.measured[f"{self.name} {setting}"]

    @property
    def obstacle(self) -> str:
        """Whether the set is here in part, or was run in small."""
        every = [one for name, one in self.measured.items() if name.startswith(f"{self.name} ")]
        if any(one["miniature"] for one in every):
            return "a miniature"
        parts = [one["facts"]["data"]["partial"] for one in every]
        return f"partial: {parts[0]}" if parts and parts[0] else ""


Check = Callable[[_Data], Iterator[Claim]]
REHEARSALS = ("Pass+VFL", "FedSpace+VFL", "FedProK+VFL")
OTHERS = ("PyVertical", *REHEARSALS)
ALL = ("MNIST", "FMNIST", "CIFAR-10", "CINIC-10")


def claims(measured: Measured) -> Iterator[Claim]:
    """Every claim of the paper, then the expectations of the specification's section i."""
    several: tuple[tuple[tuple[str, ...], tuple[Check, ...]], ...] = (
        (ALL, (_best_by_classes, _best_at_the_end, _best_by_columns, _forgets_less, _declines,
               _keeps_rising)),
        (("CIFAR-10",), (_headline_classes, _headline_average, _headline_columns)),
        (("FMNIST",), (_ablations, _ablations_by_columns, _trade, _threshold, _weight)),
        (("MNIST", "FMNIST"), (_c1, _c2, _c3, _c5, _c6, _c7, _c8, _c9, _c10, _c11, _oracle,
                               _freezing)),
        (("MNIST", "FMNIST"), (_protocols, _printed_rate)),
    )  # fmt: skip
    for sets, checks in several:
        for check in checks:
            for name in sets:
                yield from _checked(check, _Data(name, measured))


def _checked(check: Check, of: _Data) -> Iterator[Claim]:
    """The claims of a check; one that says what is missing, if something is."""
    words, _, source = (check.__doc__ or "").strip().rstrip(".").rpartition("; ")
    if of.name != "FMNIST" and check is _c5:
        return
    try:
        for claim in [*check(of)]:
            yield Claim(claim.text, claim.source, claim.parts, of.obstacle, claim.missing,
                        claim.note)  # fmt: skip
    except KeyError as lacking:
        why = f"not run yet: atoll reproduce vleto --only {lacking}"
        yield Claim(f"{of.name} {words}", source, (), of.obstacle, why)


def _each(of: _Data, kind: str, compare: Callable[[str, Measurement], Part]) -> dict[str, Any]:
    """A part for each other method that was measured, and what is missing."""
    by_name = {name: of.measured.get(f"{of.name} {kind} {name}") for name in OTHERS}
    parts = [compare(name, one) for name, one in by_name.items() if one is not None]
    lacking = [f"'{of.name} {kind} {name}'" for name, one in by_name.items() if one is None]
    missing = f"not run yet: atoll reproduce vleto --only {'; '.join(lacking)}" if lacking else ""
    return {"parts": tuple(parts), "missing": missing}


def _over(of: _Data, kind: str, values: Callable[[Measurement], Series]) -> dict[str, Any]:
    full = values(of[f"{kind} V-LETO"])
    return _each(of, kind, lambda name, one: above(f"over {name}", full, values(one)))


def _best_by_classes(of: _Data) -> Iterator[Claim]:
    """CIL: V-LETO above all other continual methods, AVG; abstract, conclusion, Table 1."""
    text = f"{of.name} CIL: V-LETO above all other continual methods, AVG"
    yield Claim(text, "abstract, conclusion, Table 1", **_over(of, "CIL", _mean))


def _best_at_the_end(of: _Data) -> Iterator[Claim]:
    """CIL: V-LETO above all other continual methods after task 4; Section 5.1."""
    text = f"{of.name} CIL: V-LETO above all other continual methods after task 4"
    yield Claim(text, "Section 5.1", **_over(of, "CIL", lambda one: _at(one, STAGES)))


def _best_by_columns(of: _Data) -> Iterator[Claim]:
    """FIL: V-LETO above all other methods after task 4; abstract, conclusion, Table 1."""
    text = f"{of.name} FIL: V-LETO above all other methods after task 4, tested without labels"
    compared = _over(of, "FIL", lambda one: _at(one, STAGES))
    yield Claim(text, "abstract, conclusion, Table 1", **compared)


def _forgets_less(of: _Data) -> Iterator[Claim]:
    """CIL: V-LETO forgets less than all other continual methods; abstract, conclusion."""
    full = forgetting(of["CIL V-LETO"])
    compared = _each(of, "CIL", lambda name, one: above(f"{name} over it", forgetting(one), full))
    text = f"{of.name} CIL: V-LETO forgets less than all other continual methods"
    yield Claim(text, "abstract, conclusion", **compared)


def _declines(of: _Data) -> Iterator[Claim]:
    """CIL: the other continual methods decline from task 1 to task 4; Section 5.1."""
    compared = _each(of, "CIL", lambda name, one: above(name, _at(one, 1), _at(one, STAGES)))
    text = f"{of.name} CIL: the other continual methods decline from task 1 to task 4"
    yield Claim(text, "Section 5.1", **compared)


def _rising(result: Measurement) -> tuple[Part, ...]:
    stages = {stage: _at(result, stage) for stage in range(1, STAGES + 1)}
    return tuple(above(f"task {b} over {a}", stages[b], stages[a]) for a, b in pairwise(stages))


def _keeps_rising(of: _Data) -> Iterator[Claim]:
    """FIL: V-LETO rises with every task; Section 5.1."""
    text = f"{of.name} FIL: V-LETO rises with every task, tested without labels"
    yield Claim(text, "Section 5.1", _rising(of["FIL V-LETO"]))


def _relative(one: Series, other: Series) -> Series:
    return {seed: one[seed] / other[seed] - 1 for seed in sorted(one.keys() & other.keys())}


def _headline_classes(of: _Data) -> Iterator[Claim]:
    """CIL: V-LETO above FedProK by 10.39 % after task 4, relative; abstract."""
    gains = _relative(_at(of["CIL V-LETO"], 4), _at(of["CIL FedProK+VFL"], 4))
    text = f"{of.name} CIL: V-LETO above FedProK by 10.39 % after task 4, relative"
    yield Claim(text, "abstract", (near("relative", gains, at=0.1039, margin=SIZE),))


def _headline_average(of: _Data) -> Iterator[Claim]:
    """CIL: V-LETO above PASS by 32.27 % in AVG, relative; Section 5.1."""
    gains = _relative(_mean(of["CIL V-LETO"]), _mean(of["CIL Pass+VFL"]))
    text = f"{of.name} CIL: V-LETO above PASS by 32.27 % in AVG, relative"
    yield Claim(text, "Section 5.1", (near("relative", gains, at=0.3227, margin=SIZE),))


def _headline_columns(of: _Data) -> Iterator[Claim]:
    """FIL: V-LETO above PASS by 35.15 % after task 4, relative; abstract."""
    gains = _relative(_at(of["FIL V-LETO"], 4), _at(of["FIL Pass+VFL"], 4))
    text = f"{of.name} FIL: V-LETO above PASS by 35.15 % after task 4, relative, without labels"
    yield Claim(text, "abstract", (near("relative", gains, at=0.3515, margin=SIZE),))


def _current(result: Measurement, stage: int) -> Series:
    return _at(result, stage, stage)


def _old(result: Measurement, stage: int = STAGES) -> Series:
    """The mean accuracy on earlier tasks after a stage."""
    return mean_of(*(_at(result, stage, task) for task in range(1, stage)))


def _ablations(of: _Data) -> Iterator[Claim]:
    """CIL: what L_CE, L_A and LMO are for; Section 5.3, Table 2."""
    full, source = of["CIL V-LETO"], "Section 5.3, Table 2"
    without = of["CIL w/o L_CE"]
    parts = [
        above(f"task {t}", _current(full, t), _current(without, t)) for t in range(2, STAGES + 1)
    ]
    yield Claim(f"{of.name} CIL: without L_CE the current task falls", source, tuple(parts))
    for name in ("w/o L_A", "w/o LMO"):
        parts = [
            above(f"after {t}", _old(full, t), _old(of[f"CIL {name}"], t))
            for t in range(2, STAGES + 1)
        ]
        yield Claim(f"{of.name} CIL: {name} earlier tasks fall", source, tuple(parts))


def _ablations_by_columns(of: _Data) -> Iterator[Claim]:
    """FIL: what L_F and LMO are for; Section 5.3, Table 3."""
    full = _at(of["FIL V-LETO"], STAGES)
    for name, words in (("w/o L_F", "without L_F"), ("sum at the test", "without LMO")):
        part = above("after task 4", full, _at(of[f"FIL {name}"], STAGES))
        text = f"{of.name} FIL: {words} accuracy is lower, tested without labels"
        yield Claim(text, "Section 5.3, Table 3", (part,))


def _trade(of: _Data) -> Iterator[Claim]:
    """CIL: raising lambda_A raises old tasks and lowers the current one; Section 5.4, Table 4."""
    by_weight = {weight: of[sweep_name("lambda_A", weight)] for weight in LAMBDAS}
    parts = []
    for a, b in pairwise(LAMBDAS):
        parts.append(above(f"old, {b} over {a}", _old(by_weight[b]), _old(by_weight[a])))
        current = _current(by_weight[a], STAGES), _current(by_weight[b], STAGES)
        parts.append(above(f"current, {a} over {b}", *current))
    text = (
        f"{of.name} CIL: raising lambda_A raises old tasks and lowers the current one, after task 4"
    )
    yield Claim(text, "Section 5.4, Table 4", tuple(parts))


def _threshold(of: _Data) -> Iterator[Claim]:
    """CIL: k0 = 15 is the best threshold, by 9 points after task 4; Section 5.4, Table 5."""
    full = _at(of["CIL V-LETO"], STAGES)
    parts = [
        near(f"over k0 = {k}", full, _at(of[sweep_name("k0", k)], STAGES), at=0.094, margin=SIZE)
        for k, _ in THRESHOLDS
        if k != 15
    ]
    text = f"{of.name} CIL: k0 = 15 is the best threshold, by 9 points after task 4"
    yield Claim(text, "Section 5.4, Table 5", tuple(parts))


def _weight(of: _Data) -> Iterator[Claim]:
    """FIL: lambda_F = 0.5 is the best weight; Section 5.4, Figure 4."""
    full = _at(of["FIL V-LETO"], STAGES)
    parts = [
        above(f"over {weight}", full, _at(of[sweep_name("lambda_F", weight)], STAGES))
        for weight in LAMBDAS
        if weight != 0.5
    ]
    text = f"{of.name} FIL: lambda_F = 0.5 is the best weight, tested without labels"
    yield Claim(text, "Section 5.4, Figure 4", tuple(parts))


def _c1(of: _Data) -> Iterator[Claim]:
    """1 CIL: PyVertical near 4/6, 4/8, 4/10 of one task, near 0 on classes unseen; expectation."""
    one, alone = of["CIL PyVertical"], of["CIL Standalone"]
    parts = []
    for stage in (2, 3, 4):
        share = 4 / (2 * stage + 2)
        expected = {seed: share * value for seed, value in _at(alone, stage).items()}
        part = near(f"task {stage} to expected", _at(one, stage), expected, margin=ABOUT)
        parts.append(part)
    for task, stage in ((1, 3), (1, 4), (2, 4)):
        parts.append(near(f"task {task} after {stage}", _at(one, stage, task), margin=ABOUT))
    text = f"1 {of.name} CIL: PyVertical falls to about 4/6, 4/8, 4/10 of the single task"
    text += ", and to about 0 on classes unseen for two tasks"
    yield Claim(text, "expectation", tuple(parts))


def _c2(of: _Data) -> Iterator[Claim]:
    """2 CIL: V-LETO above PyVertical after every task but the first, AVG by 15; expectation."""
    one, other = of["CIL V-LETO"], of["CIL PyVertical"]
    parts = [above(f"task {t}", _at(one, t), _at(other, t)) for t in (2, 3, 4)]
    parts.append(above("AVG", _mean(one), _mean(other), at=0.15))
    text = f"2 {of.name} CIL: V-LETO above PyVertical after tasks 2 to 4, AVG by over 15 points"
    yield Claim(text, "expectation", tuple(parts))


def _c3(of: _Data) -> Iterator[Claim]:
    """3 CIL: without L_A, and without LMO, it falls back to about PyVertical; expectation."""
    base = _mean(of["CIL PyVertical"])
    for name in ("w/o L_A", "w/o LMO"):
        part = near("AVG", _mean(of[f"CIL {name}"]), base, margin=ABOUT)
        text = f"3 {of.name} CIL: {name} falls back to about PyVertical (AVG within 5 points)"
        yield Claim(text, "expectation", (part,))


def _c5(of: _Data) -> Iterator[Claim]:
    """5 CIL: k0 and alpha change nothing; expectation."""
    by_threshold = {k: of[sweep_name("k0", k)] for k, _ in THRESHOLDS}
    parts = [
        near(f"AVG, k0 = {k}", _mean(one), _mean(by_threshold[15]), margin=SIMILAR)
        for k, one in by_threshold.items()
        if k != 15
    ]
    text = f"5 {of.name} CIL: k0 and alpha change nothing (AVG within one point)"
    yield Claim(text, "expectation", tuple(parts), note=_bits(by_threshold))


def _bits(results: dict[int, Measurement]) -> str:
    """The largest difference of averages that were measured in one precision."""
    exact = [bool(result["engine"].get("tf32")) for result in results.values()]
    usual = exact.count(True) > exact.count(False)  # other roundings cannot give equal numbers
    same = [
        average(one) for one, tf32 in zip(results.values(), exact, strict=True) if tf32 == usual
    ]
    apart = max(abs(a - b) for other in same for a, b in zip(same[0], other, strict=True))
    return f"{len(same)} of them, measured in one precision, are apart by {apart:.1e} at most"


def _c6(of: _Data) -> Iterator[Claim]:
    """6 CIL: Standalone above V-LETO after every task but the first; expectation."""
    alone, full = of["CIL Standalone"], of["CIL V-LETO"]
    parts = tuple(above(f"task {t}", _at(alone, t), _at(full, t)) for t in (2, 3, 4))
    text = f"6 {of.name} CIL: Standalone above V-LETO after every task but the first"
    yield Claim(text, "expectation", parts)


def _c7(of: _Data) -> Iterator[Claim]:
    """7 FIL: the outer strips alone are weaker than the inner ones; expectation."""
    alone = of["FIL Standalone"]
    parts = [
        above(f"strip {inner} over {outer}", _at(alone, inner), _at(alone, outer))
        for inner in (2, 3)
        for outer in (1, 4)
    ]
    text = f"7 {of.name} FIL: the outer strips alone are weaker than the inner ones"
    yield Claim(text, "expectation", tuple(parts))


def _c8(of: _Data) -> Iterator[Claim]:
    """8 FIL: PyVertical rises, then drops at the weak last strip; expectation."""
    one = of["FIL PyVertical"]
    parts = (*_rising(one)[:2], above("task 3 over 4", _at(one, 3), _at(one, 4)))
    text = f"8 {of.name} FIL: PyVertical rises, then drops at the weak last strip"
    yield Claim(text, "expectation", parts)


def _c9(of: _Data) -> Iterator[Claim]:
    """9 FIL: V-LETO does not drop at the last strip and ends above PyVertical; expectation."""
    full, base = of["FIL V-LETO"], of["FIL PyVertical"]
    parts = (
        above("task 4 over 3", _at(full, 4), _at(full, 3), at=-0.005),
        above("over PyVertical", _at(full, 4), _at(base, 4)),
    )
    text = f"9 {of.name} FIL: V-LETO does not drop by half a point at the weak last strip"
    text += ", and ends above PyVertical"
    yield Claim(text, "expectation", parts)


def _joint(of: _Data) -> Series:
    return _at(of["FIL Joint"], 1)


def _c10(of: _Data) -> Iterator[Claim]:
    """10 FIL: P2 rises with every strip and comes near Joint; expectation."""
    one = of["FIL P2"]
    joint = above("to Joint", _at(one, 4), _joint(of), at=-ABOUT)
    text = f"10 {of.name} FIL: P2 rises with every strip and comes near Joint (within 5 points)"
    yield Claim(text, "expectation", (*_rising(one), joint))


def _c11(of: _Data) -> Iterator[Claim]:
    """11 FIL: no honest variant is above Joint by 2 points (leakage alarm); expectation."""
    joint, prefix = _joint(of), f"{of.name} FIL "
    out = ("Joint", "label_oracle", "Standalone")
    names = [n.removeprefix(prefix) for n in of.measured if n.startswith(prefix)]
    honest = [name for name in names if not name.endswith(out)]
    if not honest:
        raise KeyError(f"{prefix}P2")
    parts = tuple(above(f"Joint over {n}", joint, _at(of[f"FIL {n}"], 4), at=-0.02) for n in honest)
    text = f"11 {of.name} FIL: no honest variant is above Joint by 2 points (leakage alarm)"
    yield Claim(text, "expectation", parts)


def _oracle(of: _Data) -> Iterator[Claim]:
    """FIL: the published test, which reads labels, ends above a model with all columns; study."""
    part = above("over Joint", _at(of["FIL label_oracle"], 4), _joint(of))
    text = f"{of.name} FIL: the published test, which reads labels, ends above Joint"
    yield Claim(text, "study", (part,))


def _freezing(of: _Data) -> Iterator[Claim]:
    """CIL: the published threshold holds back every weight from task 2 on; study."""
    result = of["CIL V-LETO"]
    shares = [min(list(run["frozen"].values())[1:], default=0.0) for run in result["runs"]]
    part = near("smallest share minus 1", _series(result, [s - 1 for s in shares]), margin=0.001)
    text = f"{of.name} CIL: the published threshold holds back every weight from task 2 on"
    yield Claim(text, "study", (part,))


def _protocols(of: _Data) -> Iterator[Claim]:
    """FIL: protocol P2 ends above P1; study."""
    part = above("P2 over P1", _at(of["FIL P2"], 4), _at(of["FIL V-LETO"], 4))
    yield Claim(f"{of.name} FIL: protocol P2 ends above P1", "study", (part,))


def _printed_rate(of: _Data) -> Iterator[Claim]:
    """CIL: at the printed rate 0.001 V-LETO is above PyVertical, AVG; study."""
    full, base = (_mean(of[f"CIL {name}, rate 0.001"]) for name in ("V-LETO", "PyVertical"))
    text = f"{of.name} CIL: at the printed rate 0.001 V-LETO is above PyVertical, AVG"
    yield Claim(text, "study", (above("AVG", full, base),))

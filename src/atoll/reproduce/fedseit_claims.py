"""FedSeIT's claims as comparisons of paired seeds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from atoll.reproduce.claims import Claim, Part, Series, above, mean_of, near
from atoll.reproduce.margins import SIMILAR, SIZE
from atoll.reproduce.measured import Measurement

__all__ = ["claims", "orders", "relative", "series"]

SETS = ("R8", "TMN", "TREC6", "TREC50", "SUBJ")
STRENGTHS = ("1.0", "0.1")
# relative gains in the text, means over the five sets: better, other, by strength, where
GAINS = (
    ("FedSeIT", "FedWeIT", {"1.0": 0.064, "0.1": 0.124}, "abstract, conclusion, Section 3.1 (1)"),
    ("SIT K=5", "FedWeIT", {"1.0": 0.068, "0.1": 0.125}, "Section 3.1 (2)"),
    ("FedSeIT", "FedSeIT+DLS", {"1.0": 0.044, "0.1": 0.191}, "Section 3.1 (3)"),
)
Lookup = Callable[[str, str, str], Measurement | None]  # (set, method, strength)


def series(measurement: Measurement) -> Series:
    """The mean accuracy over all tasks, by seed."""
    return {run["seed"]: run["accuracy"] for run in measurement["runs"]}


def relative(one: Measurement, other: Measurement) -> Series:
    """The relative gain of one over the other, by seed."""
    first, second = series(one), series(other)
    return {seed: first[seed] / second[seed] - 1 for seed in sorted(first.keys() & second.keys())}


@dataclass(frozen=True)
class _Pair:
    """Two methods on several sets, as far as both were measured."""

    better: str
    other: str
    strength: str
    find: Lookup

    def measured(self) -> dict[str, tuple[Measurement, Measurement]]:
        """By set, the two measurements."""
        pairs = {}
        for data in SETS:
            one = self.find(data, self.better, self.strength)
            other = self.find(data, self.other, self.strength)
            if one is not None and other is not None:
                pairs[data] = one, other
        return pairs

    def lacking(self) -> str:
        """The sets that were not measured."""
        sets = [data for data in SETS if data not in self.measured()]
        return f"not measured: {self.better} or {self.other} on {', '.join(sets)}" if sets else ""


def claims(find: Lookup, end: str = "", source: str = "") -> Iterator[Claim]:
    """The claims of abstract, Section 3 and conclusion; `end` names a profile, `source` a study."""
    for better, other, sizes, where in GAINS:
        for strength, size in sizes.items():
            yield from _gain(_Pair(better, other, strength, find), size, source or where, end)
    for strength in STRENGTHS:
        yield _everywhere(_Pair("FedSeIT", "FedWeIT", strength, find), source, end)
        yield _everywhere(_Pair("FedSeIT", "FedSeIT+DLS", strength, find), source, end)
        yield _similar(_Pair("SIT K=3", "FedSeIT", strength, find), source, end)
        yield _larger_window(_Pair("SIT K=5", "SIT K=3", strength, find), source, end)
    yield from (_forgets(other, find, source, end) for other in ("FedWeIT", "FedSeIT+DLS"))
    yield from _figure_5(find, source, end)


def _gain(pair: _Pair, size: float, source: str, end: str) -> Iterator[Claim]:
    """The mean relative gain over the five sets: that there is one, and its size."""
    about = f"lambda2 = {pair.strength}{end}: {pair.better} over {pair.other}, mean over the sets"
    texts = (f"{about}: a gain", f"{about}: {100 * size:.1f} % relative")
    pairs = pair.measured()
    if not pairs:
        yield from (Claim(text, source, missing=pair.lacking()) for text in texts)
        return
    gains = mean_of(*(relative(*both) for both in pairs.values()))
    where = f"relative, over {len(pairs)} sets"
    parts = above(where, gains), near(where, gains, at=size, margin=SIZE)
    for text, part in zip(texts, parts, strict=True):
        yield Claim(text, source, (part,), missing=pair.lacking())


def _parts(pair: _Pair, margin: float | None = None) -> tuple[Part, ...]:
    parts = []
    for data, (one, other) in pair.measured().items():
        parts.append(Part(data, above("", series(one), series(other)).gains, margin=margin))
    return tuple(parts)


def _everywhere(pair: _Pair, source: str, end: str) -> Claim:
    text = f"lambda2 = {pair.strength}{end}: {pair.better} above {pair.other} on all five sets"
    return Claim(text, source or "Section 3.1", _parts(pair), missing=pair.lacking())


def _similar(pair: _Pair, source: str, end: str) -> Claim:
    about = f"lambda2 = {pair.strength}{end}: {pair.better}"
    text = f"{about} within one point of {pair.other} on all five sets"
    return Claim(text, source or "Section 3.1 (2)", _parts(pair, SIMILAR), missing=pair.lacking())


def _larger_window(pair: _Pair, source: str, end: str) -> Claim:
    text = f"lambda2 = {pair.strength}{end}: K = 5 improves on K = 3, mean over the sets"
    pairs = pair.measured()
    if not pairs:
        return Claim(text, source or "Section 3.1 (2)", missing=pair.lacking())
    ours = mean_of(*(series(one) for one, _ in pairs.values()))
    theirs = mean_of(*(series(other) for _, other in pairs.values()))
    part = above(f"over {len(pairs)} sets", ours, theirs)
    return Claim(text, source or "Section 3.1 (2)", (part,), missing=pair.lacking())


def _forgets(other: str, find: Lookup, source: str, end: str) -> Claim:
    """A lower lambda2 costs another method more than FedSeIT."""
    text = f"{other} loses more than FedSeIT{end} from lambda2 = 1.0 to 0.1, mean over the sets"
    losses, lacking = [], []
    for data in SETS:
        four = [find(data, method, s) for method in (other, "FedSeIT") for s in STRENGTHS]
        complete = [series(one) for one in four if one is not None]
        if len(complete) < 4:
            lacking.append(data)
            continue
        strong, weak, own_strong, own_weak = complete
        units = set.intersection(*(set(one) for one in complete))
        losses.append({u: strong[u] - weak[u] - own_strong[u] + own_weak[u] for u in units})
    missing = f"not measured on {', '.join(lacking)}" if lacking else ""
    parts = (above(f"over {len(losses)} sets", mean_of(*losses)),) if losses else ()
    return Claim(text, source or "Table 2", parts, missing=missing)


def _tasks(one: Measurement) -> int:
    """The tasks whose accuracy was kept after each round."""
    return min(len(run.get("course", ())) for run in one["runs"])


def _course(one: Measurement, task: int, place: int) -> Series:
    """The accuracy of the last client's task after its first (0) or last (-1) round, by seed."""
    return {run["seed"]: run["course"][task][place] for run in one["runs"]}


def _figure_5(find: Lookup, source: str, end: str) -> Iterator[Claim]:
    """Figure 5: client 3 on R8 at lambda2 = 1.0."""
    texts = (
        f"Figure 5{end}: after round 1 FedSeIT is above FedWeIT in tasks 1, 3, 4 and 5",
        f"Figure 5{end}: in task 2 FedWeIT is above FedSeIT after round 1",
        f"Figure 5{end}: in task 2 both end equal (within one point)",
    )
    one, other = find("R8", "FedSeIT", "1.0"), find("R8", "FedWeIT", "1.0")
    if one is None or other is None or min(map(_tasks, (one, other))) < 5:
        yield from (Claim(text, source or "Section 3.2", missing="not measured") for text in texts)
        return
    first = [
        above(f"task {task + 1}", _course(one, task, 0), _course(other, task, 0))
        for task in (0, 2, 3, 4)
    ]
    second = above("task 2, FedWeIT over FedSeIT", _course(other, 1, 0), _course(one, 1, 0))
    last = near("task 2, last round", _course(one, 1, -1), _course(other, 1, -1), margin=SIMILAR)
    for text, parts in zip(texts, (first, [second], [last]), strict=True):
        yield Claim(text, source or "Section 3.2, Figure 5", tuple(parts))


def orders(find: Lookup, printed: Callable[[str, str, str], float], end: str) -> Iterator[Claim]:
    """That a method stands to FedWeIT as in the table, cell by cell."""
    for strength in STRENGTHS:
        for data in SETS:
            base = find(data, "FedWeIT", strength)
            for method in ("FedSeIT", "SIT K=3", "SIT K=5", "FedSeIT+DLS", "DLS, SIT K=3",
                           "DLS, SIT K=5"):  # fmt: skip
                one = find(data, method, strength)
                if one is None or base is None:
                    continue
                theirs = printed(data, method, strength) - printed(data, "FedWeIT", strength)
                yield _order(f"{data}, lambda2 = {strength}{end}", method, theirs, one, base)


def _order(place: str, method: str, theirs: float, one: Measurement, base: Measurement) -> Claim:
    ours, other = series(one), series(base)
    if theirs == 0:
        part = near("difference", ours, other, margin=SIMILAR)
        return Claim(f"{place}: {method} level with FedWeIT", "order", (part,))
    if theirs < 0:
        return Claim(f"{place}: {method} below FedWeIT ({theirs:+.1f} points)", "order",
                     (above("FedWeIT over it", other, ours),))  # fmt: skip
    return Claim(f"{place}: {method} above FedWeIT ({theirs:+.1f} points)", "order",
                 (above("over FedWeIT", ours, other),))  # fmt: skip

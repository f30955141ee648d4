"""Bounded influence: which answers of a round are excluded, and how far the others may reach.

The rule reads the marks of message fields (`atoll.core.annotations`) and knows no method. It is
applied where answers arrive, so a local run and a run between sites follow the same rule. If no
answer is excluded and the rule is `exclude`, the server gets the answers unchanged.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from atoll.core.annotations import Bounded, Outputs, RowCount, SharedWeights, Update, marked
from atoll.core.errors import BadMessageError
from atoll.core.messages import Tensors, contents
from atoll.core.options import NotNegativeInt

__all__ = ["Guard", "RobustOptions", "implausible_state"]

FEWEST = 3  # answers from which one liar cannot choose the median
LARGEST = 1e12  # norm of a message or a state above which its values cannot come from training
MOST_ROWS = 10**9  # training rows of one site
MOST_TIMES_ROWS = 1000  # rows of one site as a multiple of the round's median
TAIL = 20  # times the median row that a row of heavy-tailed outputs may be
MOST_SCALE = 4.0  # largest factor on an update's limit for rows that only the site itself reports
DEVIATIONS = 4.0  # of the correlation of random numbers: a larger one is agreement
FLAT = 0.9  # of the flatness of random numbers, above which a spectrum is one of noise
FEWEST_CLASSES = 6  # with fewer, honest outputs have a flat spectrum too
FEWEST_ROWS = 12  # of embeddings in one exchange, for the same reason
ROWS_PER_CLASS = 4  # in one exchange; with fewer, chance decides about spectrum and correlation
Rule = Literal["exclude", "clip", "trimmed-mean", "median", "none"]


@dataclass(frozen=True)
class RobustOptions:
    """How a run treats implausible answers of a site."""

    rule: Rule = (
        "exclude"  # exclude implausible answers; others also bound updates; none: trust all
    )
    factor: Annotated[float, Field(gt=1)] = (
        5.0  # an update is implausible if its norm is this many times the median
    )
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.25  # trimmed-mean: share removed at each end
    at_least: NotNegativeInt = 0  # fewest remaining sites; 0: more than half, at least two


class Guard:
    """Judges the answers of a run, exchange by exchange."""

    def __init__(
        self,
        options: RobustOptions,
        quorum: bool,
        rows: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`quorum`: a round can do without a site. `rows`: training rows by stage, where known."""
        self.options, self.quorum = options, quorum
        self.ratios: dict[str, float] = {}  # largest size by reference of each field, for studies
        self._rows = rows or {}
        self._declared: dict[tuple[int, str], int] = {}  # by stage and sender
        self._largest: dict[tuple[str, str], float] = {}  # accepted sizes by field and sender
        self._medians: dict[str, float] = {}  # the largest of a round, of fields with tails
        self._base: Tensors = {}
        self._reach = math.inf  # how far a mean of the last updates may be from their base

    def least(self, sampled: int) -> int:
        """The smallest number of answers with which a round continues."""
        return self.options.at_least or max(2, sampled // 2 + 1)

    def faults(
        self, action: str, stage: int, requests: Mapping[str, Any], replies: Mapping[str, Any]
    ) -> dict[str, BadMessageError]:
        """The answers that are implausible, each with an error that names its sender."""
        if not replies:
            return {}
        kind = type(next(iter(replies.values())))
        reasons = {id: self._reason(stage, id, reply, replies) for id, reply in replies.items()}
        reasons = {id: reason for id, reason in reasons.items() if reason}
        for field in _compared(kind):
            rest = {id: reply for id, reply in replies.items() if id not in reasons}
            reasons |= _other_forms({id: getattr(r, field) for id, r in rest.items()}, field)
            rest = {id: reply for id, reply in rest.items() if id not in reasons}
            scales = self._scales(stage, rest) if field in marked(kind, Update) else {}
            sizes, tails = _sizes(field, requests, rest), _has_tails(kind, field)
            reasons |= self._too_large(f"{action}.{field}", sizes, scales, tails)
            rest = {id: reply for id, reply in rest.items() if id not in reasons}
            reasons |= _noise_of(kind, {id: getattr(r, field) for id, r in rest.items()}, field)
        self._remember(kind, action, requests, [id for id in replies if id not in reasons])
        return {id: BadMessageError(id, reason) for id, reason in reasons.items()}

    def bounded(self, requests: Mapping[str, Any], replies: Mapping[str, Any]) -> dict[str, Any]:
        """The answers with their updates clipped, trimmed or replaced by the median, if asked."""
        answers, rule = dict(replies), self.options.rule
        if rule in ("exclude", "none") or not replies:
            return answers
        for field, mark in marked(type(next(iter(replies.values()))), Update).items():
            bases = {id: getattr(requests[id], mark.of) for id in replies}
            fields = {id: getattr(reply, field) for id, reply in replies.items()}
            updates = {id: _difference(fields[id], bases[id]) for id in replies}
            if rule == "clip":
                updates = _clipped(updates)
            else:
                count = len(updates)
                cut = (count - 1) // 2 if rule == "median" else int(self.options.trim * count)
                updates = dict.fromkeys(updates, _middle(list(updates.values()), cut))
            for id, update in updates.items():
                weights = {**fields[id], **{n: _moved(bases[id][n], u) for n, u in update.items()}}
                answers[id] = replace(answers[id], **{field: weights})
        return answers

    def beyond(
        self, state: Mapping[str, Tensor], shared: Mapping[str, Tensors] | None = None
    ) -> str:
        """Why a server's state cannot be a mean of the last updates; empty if it can.

        `shared` are the server's shared weights, where the method names them: a state may have
        other tensors with the names of weights, such as control variates or moments. A mean over
        some clients alone is known to be of this round's answers only where a method can do without
        the others.
        """
        if not self.quorum:
            return ""
        prefixes, declared = _weights_in(state, self._base, shared or {})
        most = self.options.factor * self._reach
        most += 1e-5 * _norm(_difference(self._base, {}).values())  # for rounding
        distances = []
        for prefix in prefixes:
            weights = {name: state[prefix + name] for name in self._base}
            distances.append(_norm(_difference(weights, self._base).values()))
        # where the method names none, one set must be the weights
        judged = max if declared else min
        if distances and judged(distances) > most:
            moved = judged(distances)
            return f"its weights moved by {moved:.3g}, far more than any accepted update"
        return ""

    def _reason(self, stage: int, id: str, reply: Any, replies: Mapping[str, Any]) -> str:
        """Why an answer is implausible regardless of the others; empty if it is not."""
        size = _magnitude(contents(reply).values())
        if not size <= LARGEST:
            return f"values as large as {size:.3g}; if training diverges, use a smaller rate"
        for field, mark in marked(type(reply), Bounded).items():
            values = getattr(reply, field)
            if values.numel() and not mark.low <= float(values.min()) <= float(values.max()) <= (
                mark.high
            ):
                return f"'{field}' is not between {mark.low:g} and {mark.high:g}"
        for field in marked(type(reply), RowCount):
            counts = [getattr(one, field) for one in replies.values()]
            return self._wrong_rows(stage, id, getattr(reply, field), counts)
        return ""

    def _known(self, stage: int, id: str) -> int:
        """The training rows of a site, where the coordinator knows them itself; else 0."""
        rows = self._rows.get(id, ())
        return rows[stage] if stage < len(rows) else 0

    def _scales(self, stage: int, replies: Mapping[str, Any]) -> dict[str, float]:
        """How much longer an update may be at sites with more rows than the median: more steps."""
        rows = {id: self._known(stage, id) or self._declared.get((stage, id), 0) for id in replies}
        usual = median_low(rows.values()) if rows else 0
        scales = {id: math.sqrt(max(1.0, count / max(1, usual))) for id, count in rows.items()}
        return {
            id: scale if self._known(stage, id) else min(scale, MOST_SCALE)
            for id, scale in scales.items()
        }

    def _wrong_rows(self, stage: int, id: str, rows: int, counts: Sequence[int]) -> str:
        """Why a number of training rows is impossible; stores the first plausible one."""
        expected = self._known(stage, id)
        most = expected or self._declared.get((stage, id), MOST_ROWS)
        if not expected and len(counts) >= FEWEST:
            most = min(most, MOST_TIMES_ROWS * max(1, median_low(counts)))
        if not 0 <= rows <= most:
            return f"{str(rows)[:20]} rows, more than the {most} that it can have"
        self._declared.setdefault((stage, id), rows)
        return ""

    def _too_large(
        self, field: str, sizes: Mapping[str, float], scales: Mapping[str, float], tails: bool
    ) -> dict[str, str]:
        """The senders whose sizes are beyond the factor; accepted sizes are remembered.

        With tails a last, small batch may have a low median: the largest one so far counts.
        """
        moving = [size for size in sizes.values() if size > 0]
        usual = median_low(moving) if len(moving) >= FEWEST else 0.0
        if usual and tails:
            usual = self._medians[field] = max(usual, self._medians.get(field, 0.0))
        reasons = {}
        for id, size in sizes.items():
            reference = usual * scales.get(id, 1.0) or self._largest.get((field, id), 0.0)
            ratio = size / reference if reference else 0.0
            self.ratios[field] = max(ratio, self.ratios.get(field, 0.0))
            if ratio > self.options.factor:
                than = "the round's median" if usual else "its largest before"
                name = field.partition(".")[2]
                reasons[id] = f"its '{name}' are {ratio:.3g} times as large as {than}"
            else:
                self._largest[field, id] = max(size, self._largest.get((field, id), 0.0))
        return reasons

    def _remember(
        self, kind: type, action: str, requests: Mapping[str, Any], accepted: Sequence[str]
    ) -> None:
        """Remember the base of updates, and how far a mean of them can be from it."""
        for field, mark in marked(kind, Update).items():
            if accepted:
                self._base = getattr(requests[accepted[0]], mark.of)
                self._reach = max(self._largest[f"{action}.{field}", id] for id in accepted)


def implausible_state(state: Mapping[str, Tensor]) -> str:
    """Why a state must not be saved; empty if it may be."""
    for name, tensor in state.items():
        size = _magnitude([tensor])
        if not size <= LARGEST:
            return f"'{name}' has values that are not finite or as large as {size:.3g}"
    return ""


def _compared(kind: type) -> list[str]:
    """The fields whose sizes are compared between senders."""
    return [field for mark in (Update, SharedWeights, Outputs) for field in marked(kind, mark)]


def _has_tails(kind: type, field: str) -> bool:
    mark = marked(kind, Outputs).get(field)
    return mark is not None and mark.tails


def _noise_of(kind: type, values: Mapping[str, Tensor], field: str) -> dict[str, str]:
    """The senders of noise, by the test that the field's mark calls for."""
    mark = marked(kind, Outputs).get(field)
    if mark is not None and mark.common:
        return _noise(values, field)
    return _aligned_noise(values, field) if mark is not None and mark.aligned else {}


def _sizes(field: str, requests: Mapping[str, Any], replies: Mapping[str, Any]) -> dict[str, float]:
    """How large each answer's field is: the norm of an update, the root mean square of outputs."""
    if not replies:
        return {}
    kind = type(next(iter(replies.values())))
    fields = {id: getattr(reply, field) for id, reply in replies.items()}
    if _has_tails(kind, field):
        return {id: _row_size(value) for id, value in fields.items()}
    if field in marked(kind, Outputs):
        return {id: _mean_square(_listed(value)) for id, value in fields.items()}
    update = marked(kind, Update).get(field)
    if update is not None:
        bases = {id: getattr(requests[id], update.of) for id in replies}
    elif len(fields) >= FEWEST and len({_form(value) for value in fields.values()}) == 1:
        # whole weights: how far they are from what most have
        centre = _middle(list(fields.values()), (len(fields) - 1) // 2)
        bases = dict.fromkeys(fields, centre)
    else:
        bases = dict.fromkeys(fields, Tensors())
    return {id: _norm(_difference(fields[id], bases[id]).values()) for id in fields}


def _other_forms(values: Mapping[str, Any], field: str) -> dict[str, str]:
    """The senders whose tensors do not have the form that most have."""
    forms = {id: _form(value) for id, value in values.items()}
    if len(forms) < FEWEST:
        return {}
    usual, count = Counter(forms.values()).most_common(1)[0]
    if 2 * count <= len(forms):
        return {}
    other = f"'{field}' has other names, types or shapes than those of most sites"
    return {id: other for id, form in forms.items() if form != usual}


def _noise(values: Mapping[str, Tensor], field: str) -> dict[str, str]:
    """The senders whose outputs for common rows are indistinguishable from noise.

    Two conditions must hold together. The correlation with the mean of the others is what random
    numbers have by chance, and the spectrum of the outputs is as flat as that of random numbers:
    the outputs of a network concentrate in few directions, also where it disagrees with all others.
    """
    shapes = {tuple(value.shape) for value in values.values()}
    if len(values) < FEWEST or len(shapes) > 1 or len(*shapes) != 2:
        return {}
    rows, classes = shapes.pop()
    if classes < FEWEST_CLASSES or rows < ROWS_PER_CLASS * classes:
        return {}
    chance = DEVIATIONS / math.sqrt((rows - 1) * (classes - 1))
    units = {id: _standardised(value) for id, value in values.items()}
    total = torch.stack(list(units.values())).sum(0)
    reasons = {}
    for id, own in units.items():
        others = total - own
        correlation = float((own * others).sum() / others.norm().clamp(min=1e-30))
        if abs(correlation) < chance and _flatness(own, classes - 1) > FLAT:
            reasons[id] = f"its '{field}' are noise: correlation with others {correlation:.2g}"
    return reasons


def _aligned_noise(values: Mapping[str, Tensor], field: str) -> dict[str, str]:
    """The senders whose embeddings of aligned rows are indistinguishable from noise.

    Coordinates have no common meaning, so similarities of rows are compared: rows that are alike
    for the others are alike for an honest site too. Both conditions of `_noise` must hold.
    """
    shapes = {tuple(value.shape) for value in values.values()}
    if len(values) < FEWEST or len(shapes) > 1 or len(*shapes) != 2:
        return {}
    rows, width = shapes.pop()
    if width < FEWEST_CLASSES or rows < FEWEST_ROWS:
        return {}
    units = {id: _centred(value) for id, value in values.items()}
    flat = [id for id, own in units.items() if _flatness(own, width) > FLAT]
    reasons = {}
    for id in flat:
        others = torch.cat([value for other, value in units.items() if other != id], 1)
        deviations = _association(units[id], others)
        if abs(deviations) < DEVIATIONS:
            detail = f"association with others {deviations:.2g} deviations"
            reasons[id] = f"its '{field}' are noise: {detail}"
    return reasons


def _centred(outputs: Tensor) -> Tensor:
    """Outputs without the mean of each column, of norm 1."""
    centred = outputs.detach().double().cpu()
    centred = centred - centred.mean(0, keepdim=True)
    length: Tensor = centred.norm().clamp(min=1e-30)
    return centred / length


def _association(first: Tensor, second: Tensor) -> float:
    """How far the similarities of rows agree, in standard deviations of unrelated rows.

    The numerator of the RV coefficient, tr(AB) with A = XX' and B = YY' of centred X and Y; its
    mean and variance for rows paired at random, without the term of fourth moments (Kazi-Aoual
    et al., 1995).
    """
    degrees = len(first) - 1
    both = (first.T @ second).square().sum()  # tr(AB), without matrices of rows by rows
    spreads = [(x.square().sum(), (x.T @ x).square().sum()) for x in (first, second)]
    mean = spreads[0][0] * spreads[1][0] / degrees
    excess = [degrees * squares - trace.square() for trace, squares in spreads]
    variance = 2 * excess[0] * excess[1] / (degrees**2 * (degrees + 2) * (degrees - 1))
    return float((both - mean) / variance.clamp(min=1e-60).sqrt())


def _standardised(outputs: Tensor) -> Tensor:
    """Outputs without the mean of each row and each column, of norm 1."""
    centred = outputs.detach().double().cpu()
    centred = centred - centred.mean(1, keepdim=True)
    centred = centred - centred.mean(0, keepdim=True)
    length: Tensor = centred.norm().clamp(min=1e-30)
    return centred / length


def _flatness(centred: Tensor, width: int) -> float:
    """The share of directions that the variance fills: 1 for random numbers, 1/width for one.

    The participation ratio (sum e)^2 / (k sum e^2) of the eigenvalues e of the k x k covariance.
    Random numbers in n rows have 1 / (1 + k/n), so the ratio is divided by that. `width` is k: the
    columns, less one if the mean of each row was subtracted.
    """
    rows = centred.shape[0] - 1
    covariance = centred.T @ centred
    ratio = covariance.trace() ** 2 / (width * covariance.square().sum()).clamp(min=1e-30)
    return float(ratio) * (1 + width / rows)


def _form(value: Any) -> Any:
    """What answers must share: type and width of rows; of named tensors those without rows."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape[1:])
    if any(name.rpartition("/")[2] in ("values", "bits", "places") for name in value):
        return None  # sparse: each sender has its own
    return tuple((name, t.dtype, tuple(t.shape)) for name, t in sorted(value.items()))


def _listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value.values())


def _difference(weights: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Tensors:
    """The floating-point part of an update."""
    floats = {name: t for name, t in weights.items() if t.is_floating_point()}
    return {n: t - base[n].to(t.device) if n in base else t for n, t in floats.items()}


def _moved(base: Tensor, update: Tensor) -> Tensor:
    return (base.to(update.device) + update).to(base.dtype)


def _norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all numbers together, in double precision: squares of 1e30 are still finite."""
    norms = [_one_norm(tensor) for tensor in tensors]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _one_norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
    return norm.cpu()


def _magnitude(tensors: Iterable[Tensor]) -> float:
    """The norm of floats, or the largest whole number; NaN if one of them is NaN."""
    listed = [tensor for tensor in tensors if tensor.numel()]
    size = _norm(tensor for tensor in listed if tensor.is_floating_point())
    whole = [t for t in listed if not t.is_floating_point() and t.dtype != torch.bool]
    return max([size, *(float(t.double().abs().max()) for t in whole)], key=_order)


def _order(size: float) -> float:
    return math.inf if math.isnan(size) else size


def _mean_square(tensors: Sequence[Tensor]) -> float:
    """The root mean square of all floats."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return _norm(floats) / math.sqrt(max(1, sum(tensor.numel() for tensor in floats)))


def _row_size(rows: Tensor) -> float:
    """The root mean square of the median row, or a share of the largest one if that is more."""
    if not rows.numel():
        return 0.0
    flat = rows.detach().reshape(len(rows) if rows.dim() else 1, -1)
    sizes = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64) / math.sqrt(flat.shape[1])
    return max(float(sizes.median()), float(sizes.max()) / TAIL)


def _clipped(updates: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """No update longer than the median of all."""
    sizes = {id: _norm(update.values()) for id, update in updates.items()}
    most = median_low(sizes.values())
    return {
        id: {n: t * (most / sizes[id]) for n, t in update.items()} if sizes[id] > most else update
        for id, update in updates.items()
    }


def _middle(items: Sequence[Mapping[str, Tensor]], cut: int) -> Tensors:
    """Coordinate by coordinate, the mean without the `cut` smallest and largest numbers."""
    means = {}
    for name, first in items[0].items():
        if first.is_floating_point():
            ordered = torch.stack([item[name].to(first.device) for item in items]).sort(0).values
            means[name] = ordered[cut : len(items) - cut].double().mean(0).to(first.dtype)
    return means


def _prefixes(state: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> list[str]:
    """Under which prefixes a state has all tensors of a base."""
    if not base:
        return []
    first = min(base)
    starts = [name.removesuffix(first) for name in state if name.endswith(first)]
    starts = [start for start in starts if not start or start.endswith("/")]
    return [s for s in starts if all(s + n in state for n in base)]


def _weights_in(
    state: Mapping[str, Tensor], base: Mapping[str, Tensor], shared: Mapping[str, Tensors]
) -> tuple[list[str], bool]:
    """The prefixes of weights like a base, and whether these are the shared weights themselves."""
    prefixes = _prefixes(state, base)
    declared = [
        prefix for prefix in prefixes if any(_holds(state, prefix, w) for w in shared.values())
    ]
    return declared or prefixes, bool(declared)


def _holds(state: Mapping[str, Tensor], prefix: str, weights: Mapping[str, Tensor]) -> bool:
    """Whether a state has these very weights under a prefix."""
    return all(
        prefix + name in state and torch.equal(state[prefix + name].cpu(), tensor.cpu())
        for name, tensor in weights.items()
    )

"""Sums of products over training rows: with fewer rows than columns they determine the rows.

The Gram matrix F'F of n rows of features has the span of these n rows. If it has more columns than
n, few other rows have features in that span, so a coordinator finds each row by a search.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from atoll import methods
from atoll.core.annotations import RowSums, marked
from atoll.core.federation import Moment, actions, kinds
from atoll.runs.parts import Parts

__all__ = ["sends_sums", "too_few", "unfit_sums"]


def sends_sums(method: str, allowed: Collection[str] | None = None) -> bool:
    """Whether the clients of a method answer with sums over rows, by the allowed actions."""
    available = actions(methods.load(method).client)
    names = available if allowed is None else available.keys() & set(allowed)
    return any(marked(kinds(available[name])[1], RowSums) for name in names)


def too_few(reply: Any, moment: Moment, rows: Callable[[int], int]) -> str:
    """Why sums in an answer have too few rows behind them; empty where they have enough.

    Each stage counts by itself: a coordinator can subtract the sums of others.
    """
    for name, mark in marked(type(reply), RowSums).items():
        columns = _columns(getattr(reply, name))
        stages = getattr(reply, mark.stages) if mark.stages else (moment.stage,)
        left_out = getattr(reply, mark.left_out) if mark.left_out else 0
        fewest = min((rows(stage) for stage in stages), default=0) - left_out
        if columns and fewest < columns:
            return _reason(columns, fewest)
    return ""


def unfit_sums(parts: Parts, client: str) -> str:
    """Why the sums of a stage would be refused later in this run; empty where they would not."""
    summed = methods.load(str(parts.config.method["name"])).summed
    stages = summed(parts.config.options(), parts.site(client)) if summed else ()
    for stage, (columns, rows) in enumerate(stages):
        if 0 < rows < columns:
            return f"{_reason(columns, rows)}, at stage {stage + 1}"
    return ""


def _columns(tensors: Mapping[str, Tensor]) -> int:
    """The most columns whose products are summed up, of matrices that are not 0."""
    return max((len(t) for t in tensors.values() if t.dim() == 2 and bool(t.any())), default=0)


def _reason(columns: int, rows: int) -> str:
    few = f"sums of {columns} columns over {max(0, rows)} training rows"
    return f"{few}; the contract wants at least as many rows as columns"

"""Which rows of a piece of training are this site's own, where a method adds others to them.

`target` adds synthetic rows, and the coordinator made their generator; `replay` repeats rows of
earlier stages. What a contract bounds are a site's own rows, each counted once: beside rows that
the coordinator knows, few rows are few however long a step is.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["own_rows", "own_share"]


def own_rows(rows: Tensor, known: Iterable[Tensor]) -> Tensor:
    """Those of the rows that are known, each as often as it is known at most."""
    left = Counter(key for part in known for key in _keys(part))
    places = []
    for place, key in enumerate(_keys(rows)):
        if left[key] > 0:
            left[key] -= 1
            places.append(place)
    return rows[places]


def _keys(rows: Tensor) -> list[bytes]:
    plain = rows.detach().cpu().contiguous().flatten(1)
    return [row.tobytes() for row in plain.view(torch.uint8).numpy()]


def own_share(options: Any, rows: int, before: int) -> float:
    """The share of distinct own rows in an epoch of a stage; `before`: rows of earlier stages."""
    if not before or not getattr(options, "share", 0) or not rows:
        return 1.0
    repeated: int = round(rows * options.share / (1 - options.share))
    if hasattr(options, "synthetic"):
        return rows / (rows + max(int(options.synthetic), repeated))
    memory: int = min(getattr(options, "memory", 0), before)
    return (rows + memory) / (rows + max(memory, repeated)) if memory else 1.0

"""Determines which training rows are this site's own if a method adds other rows.

`target` adds synthetic rows, whose generator the coordinator trained; `replay` repeats rows of
earlier stages. A contract limits a site's own rows, each counted once: rows that the coordinator
knows do not protect the others, however many rows a step has.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["own_rows"]


def own_rows(rows: Tensor, known: Iterable[Tensor]) -> Tensor:
    """The rows that are known; each at most as often as it is known."""
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

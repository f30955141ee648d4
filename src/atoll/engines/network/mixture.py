"""Which rows of a piece of training are this site's own, where a method adds others to them.

`target` adds synthetic rows, and the coordinator made their generator; `replay` repeats rows of
earlier stages. What a contract bounds are a site's own rows, each counted once: beside rows that
the coordinator knows, few rows are few however long a step is.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["own_rows"]


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

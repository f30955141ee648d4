"""Selects the rows of an exemplar memory: by class and stage, in order of importance.

Herding: Welling 2009; Rebuffi et al., iCaRL: Incremental Classifier and Representation Learning,
CVPR 2017.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.rows import Rows

__all__ = ["Groups", "from_table", "herding_order", "joined", "repeated", "shortened", "to_table"]

Groups = Mapping[tuple[int, int], list[int]]  # class and stage -> rows of the stage, best first


def herding_order(features: Tensor, count: int) -> list[int]:
    """The first rows of an order whose running means approximate the mean: (rows, width).

    Features have unit length. The next row is the one that brings the mean of the selected rows
    closest to the mean of all rows; ties go to the first.
    """
    unit = F.normalize(features.double(), dim=1)
    target, chosen = unit.mean(0), list[int]()
    total, left = torch.zeros_like(target), torch.ones(len(unit), dtype=torch.bool)
    for size in range(1, min(count, len(unit)) + 1):
        distances = (target - (total + unit) / size).norm(dim=1).cpu()
        best = int(torch.where(left, distances, torch.inf).argmin())
        chosen.append(best)
        total, left[best] = total + unit[best], False
    return chosen


def shortened(groups: Groups, memory: int) -> dict[tuple[int, int], list[int]]:
    """Split the memory equally among all groups; the remainder is unused.

    With less memory than groups, nothing is stored.
    """
    quota = memory // max(1, len(groups))
    return {key: rows[:quota] for key, rows in groups.items() if quota}


def to_table(groups: Groups) -> Tensor:
    """Groups as integers (class, stage, row), in order."""
    lines = [(*key, row) for key, rows in groups.items() for row in rows]
    return torch.tensor(lines, dtype=torch.int64).view(-1, 3)


def from_table(table: Tensor) -> dict[tuple[int, int], list[int]]:
    """The groups that `to_table` wrote."""
    groups: dict[tuple[int, int], list[int]] = {}
    for kind, stage, row in table.tolist():
        groups.setdefault((kind, stage), []).append(row)
    return groups


def joined(parts: list[Rows]) -> Rows:
    """Concatenate rows."""
    x, own, y = (torch.cat([getattr(part, name) for part in parts]) for name in ("x", "own", "y"))
    shares = [part.share for part in parts if part.share is not None]  # all have some, or none
    return Rows(x, own, y, torch.cat(shares) if shares else None)


def repeated(memory: Rows, rows: int, share: float) -> Rows:
    """Repeat memory rows until they are this share of an epoch with `rows` other rows.

    Uses each of them at least once.
    """
    count = max(len(memory), round(rows * share / (1 - share)))
    return memory.at(torch.arange(count, device=memory.y.device) % max(1, len(memory)))

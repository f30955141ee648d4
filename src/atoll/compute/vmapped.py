"""The losses of many members by torch.func: for a loss that was written for one client alone.

Such a loss knows nothing of padding, so members whose batches have the same number of rows are
mapped together, with exactly those rows.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from atoll.core.rows import Rows

__all__ = ["each", "size"]

Loss = Callable[[Mapping[str, Tensor], Rows], Tensor]


def size(rows: int, batch: int, step: int) -> int:
    """The rows of a batch: all are full but the last of an epoch."""
    batches = -(-rows // batch)
    return min(batch, rows - step % batches * batch)


def each(
    loss: Loss, weights: Mapping[str, Tensor], batch: Rows, sizes: Sequence[int], weighted: bool
) -> Tensor:
    """The loss of each member on the first rows of its batch, as many as it has: (members,).

    `weighted`: rows have weights of their own; else shares are those of a padded batch.
    """
    tensors = [batch.x, batch.own, batch.y]
    if weighted and batch.share is not None:
        tensors.append(batch.share)

    def total(own: dict[str, Tensor], x: Tensor, more: Tensor, y: Tensor, *share: Tensor) -> Tensor:
        return loss(own, Rows(x, more, y, *share)).sum()

    losses, places = [], []
    for rows in sorted(set(sizes)):
        where = [place for place, count in enumerate(sizes) if count == rows]
        # one slice where all are alike: nothing is copied
        pick = (
            slice(None) if len(where) == len(sizes) else torch.tensor(where, device=batch.y.device)
        )
        own = {name: tensor[pick] for name, tensor in weights.items()}
        losses.append(torch.vmap(total)(own, *(t[pick][:, :rows] for t in tensors)))
        places += where
    order = sorted(range(len(places)), key=lambda i: places[i])
    joined = torch.cat(losses)
    return joined if len(losses) == 1 else joined[torch.tensor(order, device=joined.device)]

"""Snapshots of split learning for figures: embeddings, and which weights are frozen."""

from torch import Tensor

from atoll.core.federation import SERVER, Moment
from atoll.core.messages import Tensors
from atoll.core.record import Snapshot
from atoll.data.vertical_site import VerticalSite
from atoll.learning.knowledge import share

__all__ = ["embeddings_snapshot", "frozen_snapshot"]


def embeddings_snapshot(
    site: VerticalSite, moment: Moment, name: str, rows: Tensor, y: Tensor
) -> Snapshot:
    """Embeddings with the names of their classes, as short numbers."""
    classes = tuple(str(site.classes[kind]) for kind in y.tolist())
    columns = tuple(f"e{number}" for number in range(rows.shape[1]))
    values = tuple(tuple(float(f"{value:.4g}") for value in row) for row in rows.tolist())
    return Snapshot(moment.stage, SERVER, name, classes, columns, values)


def frozen_snapshot(site: VerticalSite, moment: Moment, masks: Tensors) -> Snapshot:
    """The share of frozen entries of each weight, and its size."""
    values = tuple((share({name: mask}), float(mask.numel())) for name, mask in masks.items())
    columns = ("share", "weights")
    return Snapshot(moment.stage, site.id, "held back", tuple(masks), columns, values)

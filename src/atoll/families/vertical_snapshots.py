"""Snapshots of split learning for figures: embeddings, and which weights are frozen."""

from collections.abc import Mapping

from torch import Tensor

from atoll.core.federation import SERVER, Moment
from atoll.core.messages import Tensors
from atoll.core.record import Snapshot
from atoll.data.vertical_site import VerticalSite
from atoll.learning.knowledge import share

__all__ = ["embeddings_snapshot", "frozen_snapshots", "moved_snapshots"]


def embeddings_snapshot(
    site: VerticalSite, moment: Moment, name: str, rows: Tensor, y: Tensor
) -> Snapshot:
    """Embeddings with the names of their classes, in regression of the label, as short numbers."""
    kinds = [0] * len(y) if y.is_floating_point() else y.tolist()
    classes = tuple(str(site.classes[kind]) for kind in kinds)
    columns = tuple(f"e{number}" for number in range(rows.shape[1]))
    values = tuple(tuple(float(f"{value:.4g}") for value in row) for row in rows.tolist())
    return Snapshot(moment.stage, SERVER, name, classes, columns, values)


def moved_snapshots(moment: Moment, distances: Mapping[str, float]) -> list[Snapshot]:
    """How far a stage moved the prototype of each class; nothing where it moved none."""
    values = tuple((distance,) for distance in distances.values())
    snapshot = Snapshot(moment.stage, SERVER, "mixed", tuple(distances), ("moved",), values)
    return [snapshot] if distances else []


def frozen_snapshots(site: VerticalSite, moment: Moment, masks: Tensors) -> list[Snapshot]:
    """The share of frozen entries of each weight, and its size; nothing without masks."""
    values = tuple((share({name: mask}), float(mask.numel())) for name, mask in masks.items())
    columns = ("share", "weights")
    snapshot = Snapshot(moment.stage, site.id, "held back", tuple(masks), columns, values)
    return [snapshot] if masks else []

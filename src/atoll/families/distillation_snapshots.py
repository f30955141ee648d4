"""Snapshots of distillation: correlations of classes, and features of test rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.core.federation import Moment
from atoll.core.messages import Tensors
from atoll.core.record import Snapshot
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.learning.models import Architecture, features

__all__ = ["features_snapshot", "matrix_snapshot", "principal"]

FEATURES, COMPONENTS = 40, 20  # rows of each domain, and principal components of each row


def matrix_snapshot(site: Site, moment: Moment, name: str, m: Tensor) -> Snapshot:
    """A matrix of classes by classes."""
    classes = tuple(str(number) for number in range(len(m)))
    return Snapshot(moment.stage, site.id, name, classes, classes, _rounded(m))


def features_snapshot(
    site: Site, moment: Moment, network: Architecture, weights: Tensors, tests: Sequence[Rows]
) -> list[Snapshot]:
    """The principal components of what the last layer reads of some test rows of each domain."""
    some = [rows.at(slice(0, FEATURES)) for rows in tests]
    x = torch.cat([rows.x for rows in some])
    inputs = features(network, weights, x) if len(x) > 2 else None
    if inputs is None:
        return []
    points, labels = principal(inputs), []
    for domain, rows in zip(site.tasks, some, strict=True):
        labels += [f"{domain}|{int(y)}" for y in rows.y]
    columns = tuple(f"component {i + 1}" for i in range(points.shape[1]))
    table = (tuple(labels), columns, _rounded(points))
    return [Snapshot(moment.stage, site.id, "features", *table)]


def principal(x: Tensor) -> Tensor:
    """The first principal components of rows, each with the sign that makes its extreme positive.

    If several values are equally large up to rounding, the first decides.
    """
    centred = (x - x.mean(0)).double()
    u, size, _ = torch.linalg.svd(centred, full_matrices=False)
    points: Tensor = (u * size)[:, :COMPONENTS]
    sizes = points.abs()
    largest = (sizes >= (1 - 1e-9) * sizes.amax(0)).byte().argmax(0, keepdim=True)
    return points * points.gather(0, largest).sign()


def _rounded(table: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(value, 4) for value in row) for row in table.tolist())

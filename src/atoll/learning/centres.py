"""Describes a task by a few vectors, none of which represents a single text."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

__all__ = ["Task", "centres", "nearest_tasks", "normalised", "product", "similarity", "unit_mean"]

Task = tuple[int, str]  # stage and client
SEED = 42  # of the first centres: the same in every run


def centres(vectors: Tensor, most: int, least: int) -> Tensor:
    """Centres of at most `most` clusters, each of at least `least` different vectors.

    k-means that merges small clusters into the nearest other cluster. Zero vectors are
    excluded and equal ones count once: otherwise two copies of one text would form a centre.
    With fewer than `least` different vectors, there is no centre.
    """
    rows = np.unique(vectors.detach().cpu().double().numpy(), axis=0)
    rows = rows[np.abs(rows).sum(1) > 0]
    count = min(most, len(rows) // 2 if least > 1 else len(rows))
    if len(rows) < least:
        return vectors.new_zeros((0, vectors.shape[1]))
    means = KMeans(count, n_init=3, max_iter=100, random_state=SEED)
    with threadpool_limits(1):  # sums in a fixed order
        member = means.fit(rows).labels_
    member = _merged(rows, member, least)
    means_by_cluster = np.stack([rows[member == cluster].mean(0) for cluster in np.unique(member)])
    return torch.from_numpy(means_by_cluster).to(vectors.device, vectors.dtype)


def _merged(
    rows: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    member: np.ndarray[tuple[int], np.dtype[np.int32]],
    least: int,
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The cluster of each row, after merging the smallest clusters until each has `least` rows."""
    member = member.copy()
    sizes = np.bincount(member)
    sums = np.zeros((len(sizes), rows.shape[1]))
    np.add.at(sums, member, rows)
    while True:
        names = np.flatnonzero(sizes)
        if len(names) == 1 or sizes[names].min() >= least:
            return member
        small = names[sizes[names].argmin()]
        others = names[names != small]
        middles = sums[others] / sizes[others, None]
        distance = ((middles - sums[small] / sizes[small]) ** 2).sum(1)
        into = others[distance.argmin()]
        member[member == small] = into
        sums[into] += sums[small]
        sizes[into], sizes[small] = sizes[into] + sizes[small], 0


def unit_mean(vectors: Tensor) -> Tensor:
    """The mean of unit-length centres, without zero vectors: (centres, D) -> (1, D).

    The dot product of two of them is the mean cosine over all pairs of centres.
    """
    real = vectors[vectors.abs().sum(1) > 0]
    if not len(real):
        return vectors.new_zeros((1, vectors.shape[1]))
    return F.normalize(real.double(), dim=1).mean(0, keepdim=True).to(vectors.dtype)


def product(one: Tensor, other: Tensor) -> float:
    """The dot product of two unit means, in double precision."""
    return float((one.double() * other.double()).sum())


def similarity(one: Tensor, other: Tensor, threshold: float | None = None) -> float:
    """The mean cosine over all pairs; with a threshold, smaller cosines count as zero."""
    if threshold is None:
        return product(unit_mean(one), unit_mean(other))
    real = [part[part.abs().sum(1) > 0] for part in (one, other)]
    if not (len(real[0]) and len(real[1])):
        return 0.0
    cosines = F.normalize(real[0].double(), dim=1) @ F.normalize(real[1].double(), dim=1).T
    return float(torch.where(cosines > threshold, cosines, 0).mean())


def nearest_tasks(scored: Mapping[Task, float], count: int) -> tuple[list[Task], list[float]]:
    """The tasks with the highest scores; ties go to the newer task, then the lower client."""
    order = sorted(scored, key=lambda task: (-scored[task], -task[0], task[1]))[:count]
    return order, [scored[task] for task in order]


def normalised(scores: Sequence[float]) -> Tensor:
    """Non-negative scores that sum to 1; equal scores if all are zero."""
    clipped = torch.tensor(scores, dtype=torch.float64).clamp(min=0)
    total = float(clipped.sum())
    shares = clipped / total if total > 0 else torch.full_like(clipped, 1 / max(1, len(clipped)))
    return shares.float()

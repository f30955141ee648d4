"""Accuracies of FCCL's runs: of every client on every domain, on its own and on others."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.reproduce.claims import Series
from atoll.reproduce.measured import Measurement

__all__ = ["after", "by_domain", "last", "means", "means_of", "series", "tested"]

Matrix = Sequence[Sequence[float]]  # accuracy by client and domain


def by_domain(matrix: Matrix, kind: str, domains: int = 0) -> list[float]:
    """A client's accuracy on its own domain, or the plain mean over the others.

    With `domains`, of the first so many clients on the first so many domains alone.
    """
    cells = np.asarray(matrix)
    if domains:
        cells = cells[:domains, :domains]
    own = cells.diagonal()
    others = (cells.sum(1) - own) / (cells.shape[1] - 1)
    return [float(value) for value in (own if kind == "intra" else others)]


def means_of(matrix: Matrix) -> dict[str, float]:
    """The means over clients, on other domains and on the own."""
    return {kind: float(np.mean(by_domain(matrix, kind))) for kind in ("intra", "inter")}


def tested(measurement: Measurement) -> set[str]:
    """The rounds after which all seeds of a setting were tested."""
    return set.intersection(*(set(run["matrix"]) for run in measurement["runs"]))


def after(*measurements: Measurement) -> str:
    """The last round at which all runs were tested, so that they can be compared."""
    common = set.intersection(*(tested(measurement) for measurement in measurements))
    return max(common, key=int) if common else "0"


def last(run: dict[str, Any], variant: str, at: str = "") -> list[list[float]]:
    """The matrix of a run's own model, or of another one, after a round."""
    matrix: list[list[float]] = run["matrix"][at or str(run["rounds"])][variant or run["headline"]]
    return matrix


def means(measurement: Measurement, kind: str, variant: str = "", at: str = "") -> list[float]:
    """The mean over domains of a setting's model, or of another one, seed by seed."""
    return [means_of(last(run, variant, at))[kind] for run in measurement["runs"]]


def series(
    measurement: Measurement,
    kind: str,
    at: str,
    variant: str = "",
    domains: int = 0,
    place: int | None = None,
) -> Series:
    """The mean over domains, or the value of one (`place`), by seed."""
    values = {}
    for run in measurement["runs"]:
        listed = by_domain(last(run, variant, at), kind, domains)
        values[run["seed"]] = float(np.mean(listed)) if place is None else listed[place]
    return values

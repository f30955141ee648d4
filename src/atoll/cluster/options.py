"""Options of the cluster that a sweep runs on."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atoll.core.errors import UserError

__all__ = ["ClusterOptions", "cluster_options", "ray_installed"]

FORM = "write ray, or ray://HOST:PORT with the address that the head prints"


@dataclass(frozen=True)
class ClusterOptions:
    """A cluster, and what each block takes of it."""

    address: str = ""  # HOST:PORT of the head; empty: the cluster of this machine, or a new one
    gpus: float | None = (
        None  # of a block; None: 1 where the cluster has GPUs and a run may use one
    )
    points: int = 0  # of a block, at most; 0: by the size of the cluster
    shared: bool = True  # write into the sweep's folder where a node sees it; false: always send

    @property
    def name(self) -> str:
        """The name of the cluster, as in `--on`."""
        return f"ray://{self.address}" if self.address else "ray"


def cluster_options(
    on: str, gpus: float | None = None, points: int = 0, shared: bool = True
) -> ClusterOptions:
    """Parse the cluster and its options, as the command line spells them.

    >>> cluster_options("ray://10.0.0.1:6379").address
    '10.0.0.1:6379'
    """
    match = re.fullmatch(r"ray(?:://(?P<address>(?:\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}))?", on)
    if match is None:
        raise UserError(f"'{on}' is no cluster", "--on", FORM)
    if gpus is not None and not _is_share(gpus):
        remedy = "write 0, a part of one GPU such as 0.5, or a whole number"
        raise UserError(f"a block cannot have {gpus:g} GPUs", "--gpus-per-block", remedy)
    if points < 0:
        remedy = "write 1 or more, or leave it out"
        raise UserError(f"a block cannot have {points} points", "--points-per-block", remedy)
    return ClusterOptions(match["address"] or "", gpus, points, shared)


def _is_share(gpus: float) -> bool:
    """Whether Ray can assign this many GPUs to a block: a fraction below 1, or a whole number."""
    return math.isfinite(gpus) and gpus >= 0 and (gpus <= 1 or gpus == int(gpus))


@contextmanager
def ray_installed() -> Iterator[None]:
    """Wrap the import of `cluster.ray`; the error without Ray says how to install it."""
    try:
        yield
    except ImportError as error:
        raise UserError("Ray is not installed", str(error), "pip install 'atoll[ray]'") from error

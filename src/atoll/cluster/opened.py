"""Opens a cluster for sweeps; Ray is imported here, when `--on` asks for it, and not before."""

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.cluster.driver import ClusterSweep, Watch
from atoll.cluster.options import ClusterOptions
from atoll.core.errors import UserError

__all__ = ["cluster_sweep"]


@contextmanager
def cluster_sweep(
    options: ClusterOptions, show: Watch = lambda table: None, count_steps: bool = False
) -> Iterator[ClusterSweep]:
    """What runs sweeps on a cluster, while the connection is open."""
    try:
        from atoll.cluster.ray import connected  # noqa: PLC0415 - only where it is asked for
    except ImportError as error:
        raise UserError("Ray is not installed", str(error), "pip install 'atoll[ray]'") from error
    with connected(options) as backend:
        yield ClusterSweep(backend, options, show, count_steps)

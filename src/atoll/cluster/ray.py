"""Connects to a Ray cluster, runs blocks as tasks and the collector as an actor.

The only module that imports Ray. A task is one importable function, and its arguments and results
are `str` and `bytes`; Ray serialises them.
"""

import json
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from atoll.cluster.collector import Collector
from atoll.cluster.driver import ClusterSweep, Watch
from atoll.cluster.failures import NodeError, as_text
from atoll.cluster.options import ClusterOptions
from atoll.core.errors import EXIT_INTERRUPTED, UserError, printable

__all__ = ["RayBackend", "check_node", "cluster_sweep", "connected", "run_task"]

CONNECT = 5.0  # timeout in seconds for the head to answer
CHECK = 300.0  # timeout in seconds for all nodes to load the data
STORE = 80 << 20  # object store size in bytes of a cluster that this process starts
RETRIES = 10  # retries of a block after its worker or node has died
STARTS = 3  # times that the collector is started
NAMESPACE = "atoll"
TINY = 1e-9  # tolerance for the rounding of a quotient

GONE = (
    exceptions.RaySystemError, exceptions.RayActorError, exceptions.RpcError, ConnectionError,
)  # fmt: skip


def check_node(spec: str) -> str:
    """The task that checks each node before training starts."""
    from atoll.cluster.node import check  # noqa: PLC0415 - torch, not for the driver's actor

    return json.dumps(check(json.loads(spec)))


def run_task(spec: str) -> str:
    """The task that runs a block."""
    request = json.loads(spec)
    if not request["gpus"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA starts: not the GPUs of others
        request["share"] = request["threads"] / (os.cpu_count() or 1)
    from atoll.cluster.node import run_block  # noqa: PLC0415

    context = ray.get_runtime_context()
    where = f"{ray.util.get_node_ip_address()} {context.get_node_id()[:8]}"
    driver = _Remote(ray.get_actor(request["collector"], NAMESPACE))
    return json.dumps(run_block(request, driver, where))


class _Remote:
    """A proxy of the collector on a node."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def begin(self, block: str, attempt: str, where: str) -> str:
        """See `Collector.begin`."""
        return str(ray.get(self.actor.begin.remote(block, attempt, where)))

    def fetch(self, path: str) -> bytes:
        """See `Collector.fetch`."""
        return bytes(ray.get(self.actor.fetch.remote(path)))

    def put(self, block: str, attempt: str, path: str, parcel: bytes) -> str:
        """See `Collector.put`."""
        return str(ray.get(self.actor.put.remote(block, attempt, path, parcel)))

    def report(self, block: str, attempt: str, rounds: str, of: str) -> str:
        """See `Collector.report`."""
        return str(ray.get(self.actor.report.remote(block, attempt, rounds, of)))


class RayBackend:
    """A cluster that this process is connected to."""

    def __init__(self, options: ClusterOptions) -> None:
        self.options = options
        self.collector: Any = None
        self.name = ""

    def slots(self, threads: int, gpus: float) -> int:
        """The number of blocks that can run at the same time, summed over nodes."""
        return sum(_fitting(node["Resources"], threads, gpus) for node in self._alive())

    def has_gpus(self) -> bool:
        """Whether any node has a GPU."""
        return any(node["Resources"].get("GPU", 0.0) > 0 for node in self._alive())

    def check(self, spec: str) -> Mapping[str, str]:
        """The check result of each node that a block fits on; raises if a node does not answer."""
        request = json.loads(spec)
        tasks = {}
        # a worker that has used a GPU would keep it, whichever GPU its next block is given
        calls = 1 if self.has_gpus() else 0
        check = ray.remote(num_cpus=0, max_retries=0, max_calls=calls)(check_node)
        for node in self._alive():
            if _fitting(node["Resources"], request["threads"], request["gpus"]):
                task = check.options(scheduling_strategy=_on(node["NodeID"]))
                name = f"node {node['NodeManagerAddress']} {node['NodeID'][:8]}"
                tasks[name] = task.remote(spec)
        answers = {}
        for name, handle in tasks.items():
            try:
                answers[name] = str(ray.get(handle, timeout=CHECK))
            except exceptions.RayError as error:
                answers[name] = json.dumps({"error": _reason(error), "source": ""})
        return answers

    def open(self, folder: Path) -> None:
        """Start the collector and wait until it answers; blocks look it up by name."""
        with _reachable(self.options):
            for _ in range(STARTS - 1):
                with suppress(exceptions.RayActorError):  # Ray may drop a new actor
                    self._start(folder)
                    return
            self._start(folder)

    def _start(self, folder: Path) -> None:
        """Start the collector on this node; Ray restarts it if it dies."""
        self.name = f"collector-{secrets.token_hex(8)}"
        actor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Collector)
        strategy = _on(ray.get_runtime_context().get_node_id())
        factory = actor.options(name=self.name, namespace=NAMESPACE, scheduling_strategy=strategy)
        self.collector = factory.remote(str(folder))
        ray.get(self.collector.states.remote())

    def submit(self, spec: str, threads: int, gpus: float) -> Any:
        """Queue a block."""
        # a worker that has used a GPU would keep it, whichever GPU its next block is given
        calls = 1 if gpus else 0
        task: Any = ray.remote(
            num_cpus=threads, num_gpus=gpus, max_calls=calls,
            max_retries=RETRIES, retry_exceptions=False,
        )(run_task)  # fmt: skip
        with _reachable(self.options):
            return task.remote(json.dumps({**json.loads(spec), "collector": self.name}))

    def ended(self, handles: Sequence[Any], seconds: float) -> list[tuple[Any, str]]:
        """Finished blocks; a task that Ray gave up becomes an error of its block."""
        with _reachable(self.options):
            ready, _ = ray.wait(list(handles), num_returns=len(handles), timeout=seconds)
        return [(handle, _result(handle)) for handle in ready]

    def states(self) -> str:
        """The states reported by the nodes; empty while the collector restarts."""
        with _reachable(self.options):
            try:
                return str(ray.get(self.collector.states.remote(), timeout=CHECK))
            except (exceptions.RayActorError, exceptions.GetTimeoutError):
                return "{}"

    def stop(self, waiting: Sequence[Any]) -> None:
        """Ask running blocks to save and end; queued blocks do not start."""
        with _reachable(self.options):
            ray.get(self.collector.stop.remote())
            for handle in waiting:
                ray.cancel(handle)

    def close(self) -> None:
        """Stop the collector; works even if the cluster is gone."""
        with suppress(Exception):
            ray.kill(self.collector)

    def _alive(self) -> list[dict[str, Any]]:
        """The nodes of the cluster, in a fixed order."""
        with _reachable(self.options):
            nodes = [node for node in ray.nodes() if node["Alive"]]
        return sorted(nodes, key=lambda node: str(node["NodeID"]))


def _fitting(resources: Mapping[str, float], threads: int, gpus: float) -> int:
    """The number of blocks that fit on a node; a fraction of a GPU comes from a single GPU."""
    blocks, has = int(resources.get("CPU", 0.0) / threads), resources.get("GPU", 0.0)
    if not gpus:
        return blocks
    fit = int(has) * int(1 / gpus + TINY) if gpus < 1 else int(has / gpus + TINY)
    return min(blocks, fit)


def _result(handle: Any) -> str:
    try:
        return str(ray.get(handle))
    except exceptions.TaskCancelledError:
        return json.dumps({"failed": {}, "interrupted": True})
    except exceptions.RayError as error:
        return json.dumps({"error": _reason(error), "interrupted": False})


def _reason(error: BaseException) -> str:
    """The first line of a Ray error."""
    words = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    kind, last = type(error).__name__, words[-1] if "Task" in type(error).__name__ else words[0]
    return as_text(NodeError(f"{kind}, {printable(last.strip())}"))


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


@contextmanager
def cluster_sweep(
    options: ClusterOptions, show: Watch = lambda table: None, count_steps: bool = False
) -> Iterator[ClusterSweep]:
    """A function that runs sweeps on a cluster while the connection is open."""
    with connected(options) as backend:
        yield ClusterSweep(backend, options, show, count_steps)


@contextmanager
def connected(options: ClusterOptions) -> Iterator[RayBackend]:
    """Connect to a cluster, or start one on this machine that ends with the connection.

    Reuses an open connection of this process and leaves it open.
    """
    if ray.is_initialized():
        if options.address:
            what, remedy = "this process has a connection to Ray", "write on='ray' to use it"
            raise UserError(what, options.name, f"{remedy}, or call ray.shutdown() first")
        yield RayBackend(options)
        return
    if options.address:
        _refuse_silent(options)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        _init(options, quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise _refused(options, error) from error
    try:
        yield RayBackend(options)
    finally:
        ray.shutdown()


@contextmanager
def _reachable(options: ClusterOptions) -> Iterator[None]:
    """Turn the loss of the cluster into an error; the same command then resumes the sweep."""
    try:
        yield
    except GONE as error:
        what, remedy = "the Ray cluster is gone", "start it, and the same command again"
        raise UserError(what, options.name, remedy, EXIT_INTERRUPTED) from error


def _init(options: ClusterOptions, quiet: Mapping[str, Any]) -> None:
    """Connect to the address, else to the cluster of this machine, else start one."""
    if options.address:
        ray.init(address=options.address, **quiet)
        return
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        ray.init(include_dashboard=False, object_store_memory=STORE, **quiet)


def _refuse_silent(options: ClusterOptions) -> None:
    """Refuse an address at which nothing listens; Ray itself waits for minutes."""
    host, _, port = options.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except (OSError, OverflowError) as error:
        what = f"no Ray cluster answers: {printable(str(error))}"
        remedy = "check that the head runs, and the address that it prints"
        raise UserError(what, options.name, remedy) from error


def _refused(options: ClusterOptions, error: Exception) -> UserError:
    """Convert an error of `ray.init` to an error of three lines."""
    words = " ".join(str(error).split())
    if "Version mismatch" in words:
        start = words.index("Version mismatch")
        remedy = "install the same Ray and Python on every machine"
        return UserError(printable(words[start:]), options.name, remedy)
    remedy = "check the address; this machine must be a node of it, see docs/how-to/cluster.md"
    return UserError(f"cannot use this Ray cluster: {printable(words)}", options.name, remedy)

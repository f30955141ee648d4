"""What atoll hands to Ray; skipped where Ray is not installed. No cluster is started."""

import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs the extra ray: make cluster")

from atoll.cluster import ray as ours  # noqa: E402
from atoll.cluster.collector import Collector  # noqa: E402
from atoll.cluster.options import ClusterOptions  # noqa: E402
from atoll.core.errors import UserError  # noqa: E402


@pytest.mark.parametrize("function", [ours.run_task, ours.check_node])
def test_a_task_is_sent_as_a_name(function: Any) -> None:
    content = ray.cloudpickle.dumps(function)
    assert function.__name__.encode() in content
    assert len(content) < 100  # a name; the code itself would be thousands of bytes


def test_tasks_and_the_collector_take_and_give_text_and_bytes() -> None:
    names = ("begin", "fetch", "put", "report", "stop", "states")
    functions = [ours.run_task, ours.check_node]
    functions += [getattr(Collector, name) for name in names]
    for function in functions:
        kinds = {**function.__annotations__}
        assert set(kinds.values()) <= {str, bytes}, function
    assert {name for name in vars(Collector) if not name.startswith("_")} == set(names)


def test_an_address_at_which_nothing_listens_is_refused_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and not listening
        port = closed.getsockname()[1]
        with (
            pytest.raises(UserError, match="no Ray cluster answers") as caught,
            ours.connected(ClusterOptions(f"127.0.0.1:{port}")),
        ):
            raise AssertionError
    assert caught.value.where == f"ray://127.0.0.1:{port}"
    assert not ray.is_initialized()


def test_another_version_of_ray_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**given: Any) -> None:
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.12.1\n"
        )

    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(UserError) as caught,
        ours.connected(ClusterOptions()),
    ):
        raise AssertionError
    assert caught.value.what == (
        "Version mismatch: The cluster was started with: Ray: 2.50.0 Python: 3.12.1"
    )


def test_a_dead_worker_is_one_line() -> None:
    text = ours._reason(ray.exceptions.WorkerCrashedError())
    kind, words, _ = json.loads(text)
    assert kind == "NodeError"
    assert words.startswith("WorkerCrashedError, ")
    assert "\n" not in words


NODES = [
    {
        "Alive": True, "NodeID": "a" * 56, "NodeManagerAddress": "10.0.0.1",
        "Resources": {"CPU": 64.0},
    },
    {
        "Alive": True, "NodeID": "b" * 56, "NodeManagerAddress": "10.0.0.2",
        "Resources": {"CPU": 64.0, "GPU": 2.0},
    },
]  # fmt: skip


class Asked:
    """Stands for `ray.remote`: what is asked for, and where."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.sent: list[str] = []
        self.nodes: list[str] = []

    def remote(self, **options: Any) -> Any:
        self.options |= options
        return lambda function: self.Task(self)

    class Task:
        def __init__(self, asked: "Asked") -> None:
            self.asked = asked

        def options(self, scheduling_strategy: Any) -> "Asked.Task":
            self.asked.nodes.append(scheduling_strategy.node_id)
            return self

        def remote(self, spec: str) -> str:
            self.asked.sent.append(spec)
            return "{}"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(ray, "remote", asked.remote)
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    monkeypatch.setattr(ray, "get", lambda handle, timeout=None: handle)
    return asked


@pytest.mark.parametrize(("gpus", "calls"), [(1.0, 1), (0.5, 1), (0.0, 0)])
def test_a_worker_with_a_gpu_runs_one_block(asked: Asked, gpus: float, calls: int) -> None:
    ours.RayBackend(ClusterOptions()).submit("{}", 2, gpus)
    assert asked.options["max_calls"] == calls
    assert (asked.options["num_cpus"], asked.options["num_gpus"]) == (2, gpus)
    assert asked.options["max_retries"] == ours.RETRIES


@pytest.mark.parametrize(("gpus", "nodes"), [(0.0, ["a", "b"]), (1.0, ["b"]), (4.0, [])])
def test_only_nodes_on_which_a_block_fits_are_checked(
    asked: Asked, gpus: float, nodes: list[str]
) -> None:
    ours.RayBackend(ClusterOptions()).check(json.dumps({"threads": 1, "gpus": gpus}))
    assert [name[0] for name in asked.nodes] == nodes


@pytest.mark.parametrize(("gpus", "slots"), [(0.1, 20), (0.6, 2), (1.0, 2), (2.0, 1), (0.0, 128)])
def test_slots_are_those_that_ray_can_fill(asked: Asked, gpus: float, slots: int) -> None:
    assert ours.RayBackend(ClusterOptions()).slots(1, gpus) == slots


@pytest.mark.parametrize("lost", [ray.exceptions.RaySystemError("gone"), ConnectionError("gone")])
def test_the_loss_of_the_head_is_a_user_error(
    lost: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*given: Any, **named: Any) -> None:
        raise lost

    backend = ours.RayBackend(ClusterOptions())
    monkeypatch.setattr(ray, "nodes", gone)
    monkeypatch.setattr(ray, "get", gone)
    backend.collector = SimpleNamespace(states=SimpleNamespace(remote=lambda: None))
    for step in (backend.has_gpus, lambda: backend.slots(1, 0), backend.states):
        with pytest.raises(UserError, match="the Ray cluster is gone"):
            step()


def test_a_connection_of_the_caller_is_used_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Any, **named: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "init", never)
    monkeypatch.setattr(ray, "shutdown", never)
    with ours.connected(ClusterOptions()) as backend:
        assert isinstance(backend, ours.RayBackend)
    with (
        pytest.raises(UserError, match="this process has a connection to Ray"),
        ours.connected(ClusterOptions("127.0.0.1:1")),
    ):
        raise AssertionError

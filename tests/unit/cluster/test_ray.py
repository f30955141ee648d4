"""What atoll hands to Ray; skipped where Ray is not installed. No cluster is started."""

import json
import socket
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

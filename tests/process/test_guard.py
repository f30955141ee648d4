"""The filter's own parts, on messages that no process has sent: sizes, tokens, lines of the log."""

import logging
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process

SECOND = "a site of this name is connected already"
JOB = "9ed80a6e-fb83-4a5d-b303-0e6b87c52e97"


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Any:
    from nvflare.fuel.f3.streaming.byte_receiver import RxTask  # noqa: PLC0415 - only where it is

    from atoll.engines.network.guard import Guard  # noqa: PLC0415

    monkeypatch.setattr(RxTask, "rx_task_map", {})
    return Guard("client_job", Path("kit"), limit=100)


class Task:
    """A stream that is being received."""

    def __init__(self, all_tasks: dict[Any, Any]) -> None:
        self.completed, self.failed, self.stopped = False, False, ""
        self.channel, self.topic, self.origin = "collab", "call", f"server.{JOB}"
        self.chunks: list[bytes] = []
        self.out_seq_chunks: dict[int, bytes] = {}
        all_tasks[id(self)] = self

    def stop(self, error: Exception) -> None:
        self.failed, self.stopped = True, str(error)


def received(guard: Any, task: Task, size: int) -> bool:
    """Whether a piece of a stream was taken."""

    def take(task: Task, message: Any) -> bool:
        task.chunks.append(message.payload)
        return True

    return bool(guard._process_chunk(take, task, SimpleNamespace(payload=bytes(size))))


def tasks() -> dict[Any, Any]:
    from nvflare.fuel.f3.streaming.byte_receiver import RxTask  # noqa: PLC0415

    found: dict[Any, Any] = RxTask.rx_task_map
    return found


def test_a_stream_that_announces_less_than_it_sends_is_cut(
    guard: Any, caplog: pytest.LogCaptureFixture
) -> None:
    task = Task(tasks())
    with caplog.at_level(logging.WARNING):
        assert received(guard, task, 60)
        assert not received(guard, task, 60)
    assert task.stopped == "refused: more than 100 bytes"
    assert task.chunks == []
    assert f"refused collab:call from server.{JOB}: more than 100 bytes" in caplog.text


@pytest.mark.parametrize("topic", ["sm__ACK", "sm__ERROR"])
def test_only_the_receiver_of_a_stream_acknowledges_or_ends_it(topic: str) -> None:
    """NVFlare finds a stream by its number, which any site can guess."""
    from nvflare.fuel.f3.message import Message  # noqa: PLC0415
    from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer  # noqa: PLC0415
    from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey  # noqa: PLC0415

    from atoll.engines.network.deny import Route  # noqa: PLC0415
    from atoll.engines.network.guard import _foreign_stream  # noqa: PLC0415

    own, number = f"server.{JOB}", 4711

    def refused(origin: str, asked: Any = number) -> str:
        route = Route(own, "server", "", "req", "sm__STREAM", topic, origin, own)
        return str(_foreign_stream(route, Message({StreamHeaderKey.STREAM_ID: asked})))

    ByteStreamer.tx_task_map[number] = SimpleNamespace(target=f"bern.{JOB}")
    try:
        assert refused(f"basel.{JOB}") == "the stream goes to another receiver"
        assert refused(f"bern.{JOB}") == ""
        assert bool(refused("server")) == (topic == "sm__ACK")  # it says who cannot be reached
        assert refused(f"basel.{JOB}", number + 1) == ""  # of no stream that there is
        assert refused(f"basel.{JOB}", ["a list"]) == ""
    finally:
        del ByteStreamer.tx_task_map[number]


def test_old_jobs_do_not_fill_the_disk_of_a_site(tmp_path: Path) -> None:
    """NVFlare keeps a folder of every job; the newest stay, and all else that is in the kit."""
    from atoll.engines.network.guard import KEPT_JOBS, _forget_jobs  # noqa: PLC0415

    jobs = [str(uuid.UUID(int=number)) for number in range(KEPT_JOBS + 3)]
    for number, name in enumerate((*jobs, "startup", "local")):
        (tmp_path / name / "app").mkdir(parents=True)
        os.utime(tmp_path / name, (number, number))
    _forget_jobs(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*jobs[3:], "startup", "local"}


def test_many_jobs_at_once_do_not_fill_the_memory_of_a_site(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every job is a process of its own, and a coordinator may start what it likes."""
    from nvflare.apis.fl_constant import FLContextKey  # noqa: PLC0415

    from atoll.engines.network.guard import MODULE, MOST_JOBS, Guard  # noqa: PLC0415

    arguments: dict[str, Any] = {FLContextKey.JOB_PROCESS_ARGS: {}}
    context = SimpleNamespace(get_prop=arguments.get)
    guard, started = Guard("client", tmp_path), list[subprocess.Popen[bytes]]()
    waiting = (sys.executable, "-c", "import time; time.sleep(100)")

    def start(launcher: Any, job_meta: Any, fl_ctx: Any) -> None:
        command = [*waiting, "-m", MODULE, "client_job", "-m", str(tmp_path)]
        started.append(subprocess.Popen(command))

    try:
        for _ in range(MOST_JOBS):
            guard._launch(start, None, {}, context)
        with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="too many jobs"):
            guard._launch(start, None, {}, context)
        assert len(started) == MOST_JOBS
        assert f"refused a job: {MOST_JOBS} are running here" in caplog.text
        started[0].kill()
        started[0].wait()
        guard._launch(start, None, {}, context)
        Guard("client", tmp_path / "another kit")._launch(start, None, {}, context)
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_many_streams_together_hold_no_more_than_two_messages(guard: Any) -> None:
    open_tasks = [Task(tasks()) for _ in range(5)]
    assert [received(guard, task, 50) for task in open_tasks] == [True] * 4 + [False]
    open_tasks[0].completed = True
    assert received(guard, Task(tasks()), 50)


def test_the_coordinators_job_takes_answers_of_its_run_and_names_who_sends_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One site's unfinished messages take nothing from another's."""
    from nvflare.fuel.f3.streaming.byte_receiver import RxTask  # noqa: PLC0415

    from atoll.engines.network import limits  # noqa: PLC0415
    from atoll.engines.network.guard import Guard  # noqa: PLC0415

    monkeypatch.setattr(RxTask, "rx_task_map", {})
    monkeypatch.setenv(limits.ANSWERS, "")  # so that it is as before in the end
    monkeypatch.delenv(limits.ANSWERS)
    guard = Guard("server_job", tmp_path)
    assert guard._most == limits.JOB_BYTES
    assert Guard("server", tmp_path)._most == limits.SERVER_BYTES
    limits.expect(100)
    senders = [Task(tasks()) for _ in range(6)]
    for number, task in enumerate(senders):
        task.origin = f"{'oslo' if number < 3 else 'bern'}.{JOB}"
    assert [received(guard, task, 90) for task in senders] == [True, True, False] * 2
    (first, second) = guard.notices.new()
    assert first.words == "refused a message from oslo: more than 100 bytes"
    assert "from bern" in second.words
    monkeypatch.setenv(limits.ENVIRONMENT, "1000")
    assert guard._most == 1000


def test_an_announced_size_is_checked_whatever_it_is_made_of(guard: Any) -> None:
    from nvflare.fuel.f3.message import Message  # noqa: PLC0415

    route = SimpleNamespace(topic="sm__DATA")
    for size, fits in ((100, True), (101, False), ("7", False), (None, False), (1e300, False)):
        assert (guard._oversize(route, Message({"sm__sz": size})) == "") is fits, size
    assert guard._oversize(route, Message({})) == ""
    assert guard._oversize(SimpleNamespace(topic="sm__ACK"), Message({"sm__sz": 10**9})) == ""


def test_the_server_knows_a_sites_token_or_refuses_it() -> None:
    from nvflare.fuel.f3.message import Message  # noqa: PLC0415

    from atoll.engines.network.guard import Guard  # noqa: PLC0415

    clients = {"token-1": SimpleNamespace(name="basel")}
    server = SimpleNamespace(client_manager=SimpleNamespace(clients=clients))
    guard = Guard("server", Path("kit"), server=server)

    def stranger(site: str, token: str, key: tuple[str, str] = ("task", "quit")) -> str:
        route: Any = SimpleNamespace(certificate=site, key=key)
        return guard._stranger(route, Message({"__token__": token}))

    assert stranger("basel", "token-1") == ""
    assert stranger("bern", "token-1") == "its token is unknown"
    assert stranger("basel", "token-0") == "its token is unknown"
    assert stranger("basel", "token-0", ("task", "heart_beat")) == ""


def test_a_refusal_is_one_line_of_the_log_whatever_the_sender_writes(
    guard: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            guard._say("refused x from oslo\nrefused \x1b[2Jy")
    assert [record.getMessage() for record in caplog.records] == [
        "refused x from oslo\\nrefused \\x1b[2Jy"
    ]


def greeted(presence: Any, manager: Any, name: str, certificate: str, active: float) -> Any:
    """A connection that has said its name; `active` is when it was heard last."""
    properties = {"peer_cn": certificate, "peer_addr": "10.0.0.7:4000"}
    connection = SimpleNamespace(get_conn_properties=lambda: properties, closing=False)
    wrapped = SimpleNamespace(conn=connection, last_activity=active, sfm_endpoint=None)

    def take(manager: Any, wrapped: Any, data: dict[str, Any]) -> None:
        manager.sfm_endpoints[data["endpoint_name"]] = SimpleNamespace(connections=[wrapped])

    presence.greeted(take, manager, wrapped, {"endpoint_name": name})
    return wrapped


@pytest.fixture
def presence(tmp_path: Path) -> Any:
    from atoll.engines.network.listed import Listed  # noqa: PLC0415
    from atoll.engines.network.notices import Notices  # noqa: PLC0415
    from atoll.engines.network.presence import Presence  # noqa: PLC0415

    (tmp_path / "sites.json").write_text('{"sites": ["basel", "bern"]}')
    return Presence(Listed(tmp_path / "sites.json"), Notices(tmp_path))


def held(manager: Any, name: str = "bern") -> Any:
    """The connection that has a name."""
    return manager.sfm_endpoints[name].connections[0]


def test_a_second_connection_takes_nothing_from_the_first(presence: Any) -> None:
    manager, route = SimpleNamespace(sfm_endpoints={}), bern()
    first = greeted(presence, manager, "bern", "bern", time.time())
    second = greeted(presence, manager, "bern", "bern", time.time())
    assert held(manager) is first
    assert second.sfm_endpoint.connections == []
    assert presence.refusal(route, first.conn, False) == ""
    assert presence.refusal(route, second.conn, False) == SECOND
    assert presence.second("bern") == "10.0.0.7"
    assert presence.second("bern") == "", "it is told once"
    assert [notice.words for notice in presence.notices.new()] == [
        "refused a second connection of bern from 10.0.0.7"
    ]


def test_a_copy_that_goes_on_trying_is_told_of_once(
    presence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends hear of it again after a while, and of another address at once."""
    from atoll.engines.network import presence as module  # noqa: PLC0415

    manager = SimpleNamespace(sfm_endpoints={})
    greeted(presence, manager, "bern", "bern", time.time())
    second = greeted(presence, manager, "bern", "bern", time.time())
    heard = []
    for _ in range(5):
        assert presence.refusal(bern(), second.conn, False) == SECOND
        heard.append(presence.second("bern"))
    assert heard == ["10.0.0.7", "", "", "", ""]
    assert len(list(presence.notices.new())) == 1
    second.conn.get_conn_properties()["peer_addr"] = "10.0.0.8:4000"
    assert presence.refusal(bern(), second.conn, False) == SECOND
    assert presence.second("bern") == "10.0.0.8"
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.0)
    assert presence.refusal(bern(), second.conn, False) == SECOND
    assert presence.second("bern") == "10.0.0.8"
    assert len(list(presence.notices.new())) == 2


def test_a_site_on_a_new_line_takes_the_place_of_its_old_one(presence: Any) -> None:
    """It has its token; the server has not noticed yet that the old line is dead."""
    manager = SimpleNamespace(sfm_endpoints={})
    greeted(presence, manager, "bern", "bern", time.time())
    second = greeted(presence, manager, "bern", "bern", time.time())
    assert presence.refusal(bern(), second.conn, True) == ""
    assert held(manager) is second
    assert presence.refusal(bern(), second.conn, False) == ""


def test_a_silent_or_closed_connection_holds_no_name(presence: Any) -> None:
    for ago, closing in ((60.0, False), (0.0, True)):
        manager = SimpleNamespace(sfm_endpoints={})
        first = greeted(presence, manager, "bern", "bern", time.time() - ago)
        first.conn.closing = closing
        second = greeted(presence, manager, "bern", "bern", time.time())
        assert held(manager) is second
    waits = greeted(presence, manager, "bern", "bern", time.time())
    assert presence.refusal(bern(), waits.conn, False) == SECOND
    second.last_activity -= 60
    assert presence.refusal(bern(), waits.conn, False) == "", "it waited long enough"
    assert held(manager) is waits


def test_jobs_have_names_of_their_own_and_only_listed_sites_are_heard(presence: Any) -> None:
    manager = SimpleNamespace(sfm_endpoints={})
    greeted(presence, manager, "bern", "bern", time.time())
    job = greeted(presence, manager, f"bern.{JOB}", "bern", time.time())
    assert held(manager, f"bern.{JOB}") is job
    again = greeted(presence, manager, f"bern.{JOB}", "bern", time.time())
    assert held(manager, f"bern.{JOB}") is job
    assert presence.refusal(bern(f"bern.{JOB}"), again.conn, False) == SECOND
    assert presence.second("bern") == "", "a job's second line is told to the coordinator alone"
    zug = greeted(presence, manager, "zug", "zug", time.time())
    words = "'zug' is not in the list of sites"
    assert presence.refusal(bern("zug", "zug"), zug.conn, True) == words
    assert presence.refusal(bern("_admin_1", "coordinator@atoll.local"), None, False) == ""


def bern(peer: str = "bern", certificate: str = "bern") -> Any:
    return SimpleNamespace(peer=peer, certificate=certificate)

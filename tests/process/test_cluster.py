"""A sweep on a real Ray cluster: raylets on this machine whose workers and nodes are killed."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

import atoll
from atoll.engines.local import LocalEngine
from atoll.runs.config import assignment, change, read
from atoll.runs.sweep import Point, points, sweep

pytest.importorskip("ray", reason="needs the extra ray: make cluster")
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]

COMMAND = Path(sys.executable).with_name("atoll")
KILLS = 20
SEEDS = 200
ROUNDS = 4
SMALL = [
    "data=wine", "clients=2", "widths=[4]", "epochs=1", "checkpoint_seconds=0", "threads=1",
    "dtype=float64", "engine.packing=false", f"rounds={ROUNDS}",
]  # fmt: skip
# a machine with much other work starts a worker in minutes, not in seconds
PATIENT = {
    "RAY_worker_register_timeout_seconds": "900",
    "RAY_health_check_timeout_ms": "120000",
    "RAY_raylet_start_wait_time_s": "300",
}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head and a second node, each with one CPU, and a small object store."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - reads the environment

        node = {"num_cpus": 1, "object_store_memory": 80 << 20}
        made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        made.add_node(**node, wait=False)
        try:
            yield made
        finally:
            made.shutdown()


def start(address: str, mode: str, seeds: int, out: Path, *more: str) -> subprocess.Popen[str]:
    words = [word for text in (*SMALL, f"engine.mode={mode}") for word in ("--set", text)]
    axis = ["--axis", f"seed=0..{seeds - 1}"]
    place = ["--on", f"ray://{address}", "--out", str(out)]
    return subprocess.Popen(
        [str(COMMAND), "sweep", "fedavg", *axis, *words, *place, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def local(mode: str, seeds: int, out: Path, rounds: int = ROUNDS) -> list[Point]:
    """The same sweep in this process."""
    changes = dict(assignment(text) for text in (*SMALL, f"engine.mode={mode}"))
    changes["rounds"] = rounds
    every = points(change(read("fedavg"), changes), {"seed": list(range(seeds))}, out)
    sweep(every, out, LocalEngine)
    return every


def rounds(out: Path) -> int:
    """Rounds that the points of a sweep have behind them."""
    return sum(path.read_bytes().count(b"\n") for path in out.glob("point-*/times.jsonl"))


def parent(pid: int) -> int:
    """The process that started a process; 0 where it is gone."""
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def workers() -> list[int]:
    """The processes of this test's raylets that run a block now, by the title Ray gives them."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            title = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        pid = int(entry.name)
        if title.startswith(b"ray::run_task") and parent(parent(pid)) == os.getpid():
            found.append(pid)
    return found


def disturb(cluster: Any, process: subprocess.Popen[str], out: Path, whole: int) -> list[int]:
    """Kill a worker at each of 20 random moments, add a node, remove one; whom it killed."""
    draws = random.Random(25)
    moments = sorted(draws.randrange(1, whole * 9 // 10) for _ in range(KILLS))
    killed: list[int] = []
    nodes = {"added": False, "removed": False}
    while process.poll() is None:
        done = rounds(out)
        if done > whole * 0.3 and not nodes["added"]:
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20, wait=False)
            nodes["added"] = True
        if done > whole * 0.5 and not nodes["removed"]:
            (second, *_) = cluster.worker_nodes
            cluster.remove_node(second, allow_graceful=False)
            nodes["removed"] = True
        victims = [pid for pid in workers() if pid not in killed]
        if len(killed) < KILLS and victims and done >= moments[len(killed)]:
            victim = draws.choice(victims)
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)
        time.sleep(0.05)
    assert all(nodes.values())
    return killed


def tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return dict(load((folder / "checkpoint.safetensors").read_bytes()))


def numbers(folder: Path) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", read_text(folder))]


def read_text(folder: Path) -> str:
    return (folder / "events.jsonl").read_text() + (folder / "result.json").read_text()


def compare(mode: str, mine: Path, other: Path) -> None:
    """Equal to the last bit in loop mode, else to 1e-10."""
    assert (mine / "config.toml").read_bytes() == (other / "config.toml").read_bytes()
    first, second = tensors(mine), tensors(other)
    assert first.keys() == second.keys()
    if mode == "loop":
        assert read_text(mine) == read_text(other)
        assert all(first[name].tobytes() == second[name].tobytes() for name in first)
        return
    assert len(numbers(mine)) == len(numbers(other))
    np.testing.assert_allclose(numbers(mine), numbers(other), rtol=1e-10, atol=1e-10)
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=1e-10, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "further"),
    [("loop", []), ("stacked", []), ("loop", ["--no-shared-folder"])],
    ids=["loop", "stacked", "sent"],
)
def test_a_sweep_survives_killed_workers_and_nodes(
    mode: str, further: list[str], cluster: Any, tmp_path: Path
) -> None:
    out = tmp_path / "cluster"
    limit = ["--points-per-block", "10", *further]
    process = start(cluster.address, mode, SEEDS, out, *limit)
    killed = disturb(cluster, process, out, SEEDS * ROUNDS)
    printed, complaint = process.communicate()
    assert process.returncode == 0, complaint[-3000:]
    assert "200 records are in" in printed
    assert len(set(killed)) == KILLS
    done = json.loads((out / "blocks.json").read_text())
    assert {block["state"] for block in done} == {"done"}
    assert sum(block["attempts"] for block in done) > len(done)
    assert sorted(number for block in done for number in block["points"]) == list(range(SEEDS))
    names = [f"point-{number:04d}" for number in range(SEEDS)]
    assert sorted(path.name for path in out.glob("point-*")) == names
    every = local(mode, SEEDS, tmp_path / "local")
    for point in every:
        compare(mode, out / point.folder.name, point.folder)


def three_lines(process: subprocess.Popen[str], code: int) -> list[str]:
    """What, where and what to do, as printed; nothing else, and nothing trained."""
    printed, complaint = process.communicate(timeout=900)
    lines = complaint.splitlines()[-3:]
    assert process.returncode == code, complaint
    assert printed == ""
    assert [line.partition(": ")[0] for line in lines] == ["error", "where", "to do"]
    return [line.partition(": ")[2] for line in lines]


def as_command(prelude: str, words: list[str], **environment: str) -> subprocess.Popen[str]:
    """The command, after some Python."""
    code = (
        f"import sys; sys.argv = ['atoll', *{words!r}]; {prelude}; import atoll.cli as c; c.main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_errors_before_anything_trains(cluster: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    place = ["--on", f"ray://{cluster.address}", "--out", str(out)]
    words = ["sweep", "fedavg", "--axis", "seed=0,1", "--set", "data=wine", *place]

    what, where, _ = three_lines(as_command("import ray; ray.__version__ = '2.0.0'", words), 2)
    assert "Version mismatch" in what
    assert "2.0.0" in what
    assert where == f"ray://{cluster.address}"

    other = tmp_path / "src"
    shutil.copytree(Path(atoll.__file__).parent, other / "atoll")
    with (other / "atoll" / "__init__.py").open("a") as file:
        file.write("# another source\n")
    path = f"import sys; sys.path.insert(0, {str(other)!r})"
    what, where, _ = three_lines(as_command(path, words), 2)
    assert what.startswith("a node has another atoll: source ")
    assert where.startswith("node ")

    config = tmp_path / "own.toml"
    config.write_text('[data]\nfiles = ["nowhere.csv"]\nlabel = "y"\n[method]\nname = "fedavg"\n')
    own = ["sweep", str(config), "--axis", "seed=0,1", *place]
    what, where, _ = three_lines(as_command("pass", own), 3)
    assert what == "no such file"
    assert where.startswith("node ")
    assert "nowhere.csv" in where
    assert not out.exists()


def test_ctrl_c_leaves_a_folder_that_goes_on(cluster: Any, tmp_path: Path) -> None:
    out, seeds = tmp_path / "cluster", 8
    process = start(cluster.address, "loop", seeds, out, "--set", "rounds=300")
    while rounds(out) < 20 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    what, where, remedy = three_lines(process, 130)
    assert (what, where, remedy) == (
        "interrupted; the state is saved", str(out), "continue with --resume",
    )  # fmt: skip
    assert 0 < rounds(out) < seeds * 300
    process = start(cluster.address, "loop", seeds, out, "--set", "rounds=300")
    _, complaint = process.communicate(timeout=900)
    assert process.returncode == 0, complaint[-2000:]
    for point in local("loop", seeds, tmp_path / "local", 300):
        compare("loop", out / point.folder.name, point.folder)


def test_the_same_command_goes_on_after_the_head_has_died(cluster: Any, tmp_path: Path) -> None:
    out, seeds = tmp_path / "cluster", 8
    process = start(cluster.address, "loop", seeds, out, "--set", "rounds=300")
    while rounds(out) < 20 and process.poll() is None:
        time.sleep(0.02)
    cluster.shutdown()
    _, complaint = process.communicate(timeout=600)
    assert process.returncode != 0, complaint[-2000:]
    done = rounds(out)
    assert 0 < done < seeds * 300
    again = type(cluster)(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False},
    )
    try:
        process = start(again.address, "loop", seeds, out, "--set", "rounds=300")
        _, complaint = process.communicate(timeout=900)
    finally:
        again.shutdown()
    assert process.returncode == 0, complaint[-2000:]
    for point in local("loop", seeds, tmp_path / "local", 300):
        compare("loop", out / point.folder.name, point.folder)

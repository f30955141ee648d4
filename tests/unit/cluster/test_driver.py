"""A sweep on a cluster that is one process: the driver, the collector and the node, without Ray."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

import atoll
from atoll.cli import run
from atoll.cluster import driver, node
from atoll.cluster.collector import Collector
from atoll.cluster.driver import ClusterSweep
from atoll.cluster.failures import NodeError, as_text
from atoll.cluster.options import ClusterOptions, cluster_options
from atoll.core.errors import InterruptedRunError, UserError
from atoll.core.storage import FolderLock
from atoll.engines.local import LocalEngine
from atoll.runs.parts import parts
from atoll.runs.sweep import Point, points, sweep

VALUES: dict[str, Any] = {
    "name": "small", "rounds": 3, "dtype": "float64", "checkpoint_seconds": 0,
    "data": {"name": "wine"},
    "scenario": {"split": "rows", "clients": 2},
    "model": {"widths": [4]},
    "method": {"name": "fedavg", "epochs": 1},
    "engine": {"mode": "loop", "packing": False, "threads": 1},
}  # fmt: skip
SAME = ("config.toml", "events.jsonl", "result.json")


class Here:
    """A cluster in this process: a block runs when the driver waits for it."""

    def __init__(self, lose: int = 0) -> None:
        self.lose = lose  # blocks that are run, and then again as if their worker had died
        self.specs: list[str] = []
        self.collector: Collector
        self.source = ""

    def slots(self, threads: int, gpus: float) -> int:
        return 1

    def has_gpus(self) -> bool:
        return False

    def check(self, spec: str) -> Mapping[str, str]:
        answer = node.check(json.loads(spec))
        return {"node a": json.dumps(answer | ({"source": self.source} if self.source else {}))}

    def open(self, folder: Path) -> None:
        self.collector = Collector(str(folder))

    def submit(self, spec: str, threads: int, gpus: float) -> Any:
        self.specs.append(spec)
        return len(self.specs) - 1

    def ended(self, handles: Sequence[Any], seconds: float) -> list[tuple[Any, str]]:
        spec = json.loads(self.specs[handles[0]])
        if self.lose:
            self.lose -= 1
            node.run_block(spec, self.collector, "a node that dies")
        return [(handles[0], json.dumps(node.run_block(spec, self.collector, "node a")))]

    def states(self) -> str:
        return self.collector.states()

    def stop(self, waiting: Sequence[Any]) -> None:
        self.collector.stop()

    def close(self) -> None:
        pass


def members(folder: Path, **axes: list[Any]) -> list[Point]:
    return points(VALUES, axes or {"seed": [0, 1, 2], "rate": [0.1, 0.2]}, folder)


def outcome(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: (folder / name).read_bytes() for name in SAME}
    tensors = load((folder / "checkpoint.safetensors").read_bytes())
    return found | {name: array.tobytes() for name, array in tensors.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    every = members(folder)
    sweep(every, folder, LocalEngine)
    return [outcome(point.folder) for point in every]


@pytest.mark.parametrize("shared", [True, False])
def test_blocks_have_the_bits_of_one_process(
    shared: bool, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    every = members(tmp_path)
    cluster = ClusterSweep(Here(lose=2), ClusterOptions(points=2, shared=shared))
    runs = cluster(every, tmp_path)
    assert [outcome(run.folder) for run in runs] == whole
    done = json.loads((tmp_path / "blocks.json").read_text())
    assert [block["state"] for block in done] == ["done"] * 3
    assert [block["attempts"] for block in done] == [2, 2, 1]
    index = json.loads((tmp_path / "sweep.json").read_text())
    assert [entry["axes"] for entry in index] == [point.axes for point in every]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["blocks.json", *(p.folder.name for p in every), "sweep.json"]


@pytest.mark.parametrize("shared", [True, False])
def test_a_second_call_runs_only_what_is_missing(
    shared: bool, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    every, backend = members(tmp_path), Here()
    cluster = ClusterSweep(backend, ClusterOptions(points=1, shared=shared))
    cluster(every, tmp_path)
    shutil.rmtree(every[3].folder)
    times = {
        p.folder: (p.folder / "result.json").stat().st_mtime_ns for p in every if p != every[3]
    }
    backend.specs.clear()
    cluster(every, tmp_path)
    assert [json.loads(spec)["numbers"] for spec in backend.specs] == [[3]]
    assert times == {folder: (folder / "result.json").stat().st_mtime_ns for folder in times}
    assert [outcome(point.folder) for point in every] == whole
    backend.specs.clear()
    cluster(every, tmp_path)
    assert backend.specs == []


@pytest.mark.parametrize("shared", [True, False])
def test_a_sweep_that_was_stopped_goes_on(
    shared: bool, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    every, backend = members(tmp_path), Here()
    cluster = ClusterSweep(backend, ClusterOptions(points=2, shared=shared))
    with pytest.raises(InterruptedRunError):
        cluster(every, tmp_path, stopping=lambda: True)
    assert not all((point.folder / "result.json").exists() for point in every)
    cluster(every, tmp_path)
    assert [outcome(point.folder) for point in every] == whole


class Cut(Collector):
    """Asks a block to stop as soon as one of its points has a checkpoint."""

    def report(self, block: str, attempt: str, rounds: str, of: str) -> str:
        self.stopping = True
        return super().report(block, attempt, rounds, of)


def test_a_checkpoint_travels_to_the_driver_and_to_the_next_node(
    whole: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "BETWEEN", 0.0)
    every, backend = members(tmp_path), Here()
    cluster = ClusterSweep(backend, ClusterOptions(points=6, shared=False))
    backend.open = lambda folder: setattr(backend, "collector", Cut(str(folder)))  # type: ignore[method-assign]
    with pytest.raises(InterruptedRunError):
        cluster(every, tmp_path)
    assert any((p.folder / "checkpoint.safetensors").exists() for p in every)
    assert not any((p.folder / "result.json").exists() for p in every)
    ClusterSweep(Here(), ClusterOptions(points=6, shared=False))(every, tmp_path)
    assert [outcome(point.folder) for point in every] == whole


def test_points_that_fail_are_named_and_the_others_end(tmp_path: Path) -> None:
    every = members(tmp_path, seed=[0], rate=[0.1, 1e30, 0.2])
    failed: dict[int, BaseException] = {}
    runs = ClusterSweep(Here(), ClusterOptions())(every, tmp_path, failed=failed)
    assert list(failed) == [1]
    assert [run.folder for run in runs] == [every[0].folder, every[2].folder]
    with pytest.raises(type(failed[1])):
        ClusterSweep(Here(), ClusterOptions())(every, tmp_path)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_point_that_cannot_begin_does_not_stop_its_block(
    bad: int, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = members(tmp_path, seed=[0, 1, 2])

    def refusing(config: Any, *given: Any, **named: Any) -> Any:
        if config.seed == bad:
            raise UserError("no rows for a site", "seed", "choose another")
        return parts(config, *given, **named)

    monkeypatch.setattr(Here, "check", lambda self, spec: {})
    monkeypatch.setattr("atoll.runs.execute.parts", refusing)
    monkeypatch.setattr(node, "parts", refusing)
    failed: dict[int, BaseException] = {}
    options = ClusterOptions(gpus=1, shared=shared)  # one block
    runs = ClusterSweep(Here(), options)(every, tmp_path, failed=failed)
    assert list(failed) == [bad]
    assert [run.folder for run in runs] == [p.folder for p in every if p.config.seed != bad]
    assert all((run.folder / "result.json").exists() for run in runs)


@pytest.mark.parametrize("first", [True, False])
def test_a_node_decides_once_whether_it_sees_the_folder(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, answers = members(tmp_path, seed=[0, 1]), iter([first, not first])
    monkeypatch.setattr(Here, "check", lambda self, spec: {})
    monkeypatch.setattr(node, "_sees_folder", lambda spec: next(answers))
    runs = ClusterSweep(Here(), ClusterOptions(gpus=1))(every, tmp_path)
    assert all((run.folder / "result.json").exists() for run in runs)
    assert next(answers) is not first


class Forgetful(Here):
    """Blocks end, and leave nothing."""

    def ended(self, handles: Sequence[Any], seconds: float) -> list[tuple[Any, str]]:
        return [(handles[0], json.dumps({"failed": {}, "interrupted": False}))]


def test_a_point_without_a_record_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "APPEARS", 0.0)
    every = members(tmp_path, seed=[0, 1])
    failed: dict[int, BaseException] = {}
    assert ClusterSweep(Forgetful(), ClusterOptions())(every, tmp_path, failed=failed) == []
    assert sorted(failed) == [0, 1]
    assert "no record of this point" in str(failed[0])


class Restarted(Here):
    """A collector that is started again after the user has asked to stop."""

    def stop(self, waiting: Sequence[Any]) -> None:
        super().stop(waiting)
        if not self.stops:
            self.open(self.collector.folder)
        self.stops += 1

    stops = 0


def test_a_collector_that_starts_again_hears_that_the_user_stops(tmp_path: Path) -> None:
    every = members(tmp_path, seed=[0, 1, 2])
    cluster = ClusterSweep(Restarted(), ClusterOptions(points=1))
    with pytest.raises(InterruptedRunError):
        cluster(every, tmp_path, stopping=lambda: True)
    ended = [(point.folder / "result.json").exists() for point in every]
    assert ended == [True, True, False]


def test_a_new_attempt_waits_for_the_lock_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = members(tmp_path, seed=[0])
    monkeypatch.setattr(node, "PATIENCE", 0.0)
    every[0].folder.mkdir()
    cluster = ClusterSweep(Here(), ClusterOptions(), count_steps=True)
    with FolderLock(every[0].folder), pytest.raises(UserError, match="another process is writing"):
        cluster(every, tmp_path)
    cluster(every, tmp_path)
    assert (every[0].folder / "result.json").exists()


class Dead(Here):
    """Every worker dies until Ray gives up."""

    def ended(self, handles: Sequence[Any], seconds: float) -> list[tuple[Any, str]]:
        error = as_text(NodeError("WorkerCrashedError, the worker died"))
        return [(handles[0], json.dumps({"error": error, "interrupted": False}))]


def test_a_block_without_a_worker_fails_with_all_its_points(tmp_path: Path) -> None:
    every = members(tmp_path)
    failed: dict[int, BaseException] = {}
    assert ClusterSweep(Dead(), ClusterOptions())(every, tmp_path, failed=failed) == []
    assert {str(error) for error in failed.values()} == {"WorkerCrashedError, the worker died"}
    assert sorted(failed) == list(range(6))


def test_steps_are_those_of_one_whole_attempt(tmp_path: Path) -> None:
    every = members(tmp_path, seed=[0, 1])
    cluster = ClusterSweep(Here(lose=2), ClusterOptions(points=1), count_steps=True)
    cluster(every, tmp_path)
    assert len(set(cluster.steps.values())) == 1
    assert set(cluster.steps) == {0, 1}
    assert cluster.steps[0] > 0


def refused(every: Sequence[Point], folder: Path, backend: Here | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        ClusterSweep(backend or Here(), ClusterOptions())(every, folder)
    assert not any((point.folder / "config.toml").exists() for point in every)
    return caught.value


def test_a_node_with_another_source_is_refused_before_anything_trains(tmp_path: Path) -> None:
    backend = Here()
    backend.source = "0123456789ab"
    error = refused(members(tmp_path), tmp_path, backend)
    assert (error.what[:49], error.where) == (
        "a node has another atoll: source 0123456789ab, he", "node a",
    )  # fmt: skip


def test_a_node_without_the_data_is_refused_before_anything_trains(tmp_path: Path) -> None:
    values = {**VALUES, "data": {"files": ["nowhere/a.csv"], "label": "y"}, "scenario": {}}
    every = points(values, {"seed": [0, 1]}, tmp_path)
    error = refused(every, tmp_path)
    assert (error.what, error.exit_code) == ("no such file", 3)
    assert error.where.startswith("node a, nowhere")


def test_an_object_of_this_session_is_refused(tmp_path: Path) -> None:
    every = members(tmp_path)
    own = replace(every[0].config, model={**every[0].config.model, "name": "memory:net"})
    assert "cannot go to a cluster" in refused([replace(every[0], config=own)], tmp_path).what


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    every = members(tmp_path)

    class Twice(Here):
        def open(self, folder: Path) -> None:
            super().open(folder)
            with pytest.raises(UserError, match="another process is writing"):
                ClusterSweep(Here(), ClusterOptions())(every, tmp_path)

    assert len(ClusterSweep(Twice(), ClusterOptions())(every, tmp_path)) == 6


def test_another_config_in_the_folder_is_refused(tmp_path: Path) -> None:
    ClusterSweep(Here(), ClusterOptions())(members(tmp_path, seed=[0]), tmp_path)
    with pytest.raises(UserError, match="another 'method'"):
        ClusterSweep(Here(), ClusterOptions())(members(tmp_path, rate=[0.5]), tmp_path)


def test_memory_of_the_node_splits_a_block(
    whole: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(stack: Sequence[Point], *given: Any, **named: Any) -> Any:
        sizes.append(len(stack))
        return sweep(stack, *given, **named)

    monkeypatch.setattr(node, "FEWEST", 0)
    monkeypatch.setattr(node, "points_per_stack", lambda *_: 4)
    monkeypatch.setattr(node, "sweep", counted)
    every = members(tmp_path)
    ClusterSweep(Here(), ClusterOptions(gpus=1))(every, tmp_path)  # one block for a GPU
    assert [outcome(point.folder) for point in every] == whole
    assert sizes == [4, 2]


def without_ray(words: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys\n{words}\nprint(sorted({{'ray', 'atoll.cluster.ray'}} & {{*sys.modules}}))"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


@pytest.mark.parametrize(
    "words",
    [
        "import atoll\n"
        "atoll.sweep('fedavg', data='wine', clients=2, rounds=1, seeds=[0], out={out})",
        "import atoll.cli.network, atoll.cli.run, atoll.engines.network.coordinator,"
        " atoll.engines.network.site, atoll.engines.local",
    ],
    ids=["a sweep without on", "sites and coordinators"],
)
def test_ray_is_not_imported_without_being_asked_for(words: str, tmp_path: Path) -> None:
    ended = without_ray(words.format(out=repr(str(tmp_path / "s"))))
    assert ended.stdout.splitlines()[-1] == "[]"


Run = Callable[..., int]


def test_options_of_blocks_need_a_cluster(call: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (["--gpus-per-block", "1"], ["--points-per-block", "2"], ["--no-shared-folder"]):
        assert call("sweep", "fedavg", "--axis", "seed=0", *flag) == 2
        assert capsys.readouterr().err.splitlines()[2] == "to do: add --on ray"


@pytest.mark.parametrize(
    "words",
    ["reproduce chfl --render --on ray", "reproduce chfl --verify 1 --on ray"],
)
def test_a_cluster_is_refused_where_none_is_used(
    words: str, call: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words.split()) == 2
    assert "does not run on a cluster" in capsys.readouterr().err


def test_a_page_is_not_written_on_a_cluster(call: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("bench", "fcl", "--render", "--on", "ray") == 2
    assert "does not run on a cluster" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [float("nan"), float("inf"), -1.0, 1.5])
def test_impossible_numbers_of_gpus_are_refused(gpus: float) -> None:
    with pytest.raises(UserError, match="a block cannot have"):
        cluster_options("ray", gpus)


def test_gpus_of_a_block_need_a_cluster_in_python_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gpus_per_block"):
        atoll.sweep("fedavg", out=tmp_path, data="wine", clients=2, seeds=[0], gpus_per_block=1)


def test_a_result_is_printed_after_the_live_table(
    call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    @contextmanager
    def cluster(*given: Any, **named: Any) -> Iterator[ClusterSweep]:
        yield ClusterSweep(Here(), ClusterOptions())
        order.append("table ends")

    monkeypatch.setattr(run, "on_cluster", cluster)
    monkeypatch.setattr(run, "_print_sweep", lambda *given: order.append("result"))
    words = ["fedavg", "--set", "data.name=wine", "--set", "scenario.clients=2"]
    words += ["--set", "rounds=1", "--axis", "seed=0", "--on", "ray", "--quiet"]
    assert call("sweep", *words, "--out", str(tmp_path / "s")) == 0
    assert order == ["table ends", "result"]

"""The package as a user of Python sees it."""

import ast
import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.core.errors import UserError
from atoll.core.record import Score

SOURCE = Path(atoll.__file__).parent
MODULES = sorted(
    module.name for module in pkgutil.walk_packages([str(SOURCE)], "atoll.")
)  # fmt: skip
NEEDS_NVFLARE = tuple(
    f"atoll.engines.network.{name}"
    for name in (
        *("certificates", "guard", "nvflare", "presence", "provision"),
        *("remote", "session", "standing", "wire"),
    )
)
NEEDS = dict.fromkeys(NEEDS_NVFLARE, "nvflare") | {"atoll.cluster.ray": "ray"}  # extras
TINY: dict[str, Any] = {
    "data": "wine",
    "clients": 2,
    "rounds": 2,
    "widths": [4],
    "engine.mode": "loop",
    "seed": 0,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_in_a_few_lines(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = atoll.run("chfl", **TINY, mu=[0.1])
    assert 0 < run.accuracy < 1
    assert run.accuracy == run.metrics["auto"]["final_accuracy"]
    assert run.variants == ["common", "local", "mu=0", "mu>0", "concat", "auto"]
    assert run.seconds > 0
    lines = run.table().splitlines()
    assert lines[0] == "chfl on wine"
    assert lines[1].split() == ["1", "seed", "accuracy", "macro-F1", "worst", "client"]
    assert [line.split()[0] for line in lines[2:]] == run.variants
    assert f"{run.accuracy:.4f}" == lines[-1].split()[1]
    assert run.folder == Path("runs/chfl-1")
    assert capfd.readouterr() == ("", "")  # the library returns and records; it does not print


def test_the_accuracy_is_the_mean_of_the_scores() -> None:
    run = atoll.run("fedavg", **TINY)
    assert [type(score) for score in run.scores] == [Score, Score]
    assert run.accuracy == pytest.approx(sum(score.accuracy for score in run.scores) / 2)


def test_a_run_goes_where_it_is_told(here: Path) -> None:
    run = atoll.run("fedavg", out=here / "a" / "b", **TINY)
    assert run.folder == here / "a" / "b"
    assert (run.folder / "result.json").exists()
    with pytest.raises(UserError, match="not empty"):
        atoll.run("fedavg", out=str(here / "a" / "b"), **TINY)


def test_a_table_of_options_is_given_as_a_dictionary() -> None:
    run = atoll.run("fedavg", **TINY, method={"name": "fedavg", "rate": 0.5, "epochs": 1})
    assert run.config["method"]["rate"] == 0.5
    assert run.config["method"]["epochs"] == 1


def test_an_unknown_name_is_answered_with_the_nearest(here: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'clients'"):
        atoll.run("fedavg", data="wine", klients=2)
    assert list(here.iterdir()) == []


def test_the_version_is_that_of_the_package() -> None:
    assert atoll.__version__ == importlib.metadata.version("atoll")
    assert sorted(atoll.__all__) == [
        "Comparison", "FederatedClassifier", "Result", "Stream", "Sweep", "UserError",
        "__version__", "answer", "compare", "load", "run", "stream", "sweep",
    ]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_every_name_that_a_module_makes_public_exists(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"needs the extra {NEEDS[name]}")
    module = importlib.import_module(name)
    public = getattr(module, "__all__", [])
    assert [item for item in public if not hasattr(module, item)] == []
    assert len(set(public)) == len(public)


def imported(path: Path) -> list[tuple[str, str]]:
    """What a source file takes from other modules of the package: (module, name)."""
    nodes = ast.walk(ast.parse(path.read_text()))
    found = [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "")[:5] == "atoll"]
    return [(str(node.module), alias.name) for node in found for alias in node.names]


def reached(path: Path) -> list[str]:
    """What a source file reads of other modules by their names that is not public: module._name."""
    modules = {name for module, name in imported(path) if f"{module}.{name}" in MODULES}
    nodes = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
    ]
    return [
        f"{node.value.id}.{node.attr}"
        for node in nodes
        if isinstance(node.value, ast.Name) and node.value.id in modules and node.attr[0] == "_"
    ]


def _public_names(module: str) -> list[str]:
    """What a module makes public, read from its source where its extra may not be installed."""
    if module not in NEEDS:
        return list(getattr(importlib.import_module(module), "__all__", []))
    path = SOURCE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def test_modules_take_from_each_other_only_what_is_public() -> None:
    private = []
    for path in sorted(SOURCE.rglob("*.py")):
        for module, name in imported(path):
            public = _public_names(module)
            if name not in public and f"{module}.{name}" not in MODULES:
                private.append(f"{path.relative_to(SOURCE)}: {module}.{name}")
        private += [f"{path.relative_to(SOURCE)}: {name}" for name in reached(path)]
    allowed = "atoll.core.VERSION"
    assert [line for line in private if not line.endswith(allowed)] == []


@pytest.mark.process
def test_importing_any_module_prints_and_writes_nothing(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """But for matplotlib's own cache of fonts, which it writes when figures are imported."""
    fonts = str(tmp_path_factory.mktemp("fonts"))
    there = importlib.util.find_spec("ray") is not None
    names = [name for name in MODULES if there or NEEDS.get(name) != "ray"]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    variables = ("HOME", "XDG_CACHE_HOME", "ATOLL_DATA", "TMPDIR")
    folders = {name: str(here / name) for name in variables}
    for folder in folders.values():
        Path(folder).mkdir()
    ended = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", code],
        env={**os.environ, **folders, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": fonts},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert sorted(path.name for path in here.rglob("*")) == sorted(variables)

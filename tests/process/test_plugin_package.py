"""Packages outside of the repository: installed in a folder, tested by atoll.testing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.testing import checks

pytestmark = pytest.mark.process

ATOLL = Path(sys.executable).with_name("atoll")
OWN = '''
"""A data set, a split and a pretrained network beside the method."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from atoll.core.options import AtLeastOne
from atoll.data.dataset import Dataset
from atoll.data.scenario import Holding, Scenario, Split


def blobs(rows: AtLeastOne = 300) -> Dataset:
    """Three clouds of points."""
    draws = np.random.default_rng(0)
    y = draws.integers(3, size=rows)
    x = draws.normal(0, 1, (rows, 6))
    x[:, :3] += 2 * np.eye(3)[y]
    names = tuple(f"x{number}" for number in range(6))
    return Dataset("blobs", "table", x.astype(np.float32), y, names, ("a", "b", "c"), "made up")


@dataclass(frozen=True)
class Options:
    """How many clients there are."""

    clients: AtLeastOne = 3  # number of clients


def deal(dataset: Dataset, options: Options, seed: int) -> Scenario:
    """Deal rows in turns; the last 60 are the test rows of all."""
    rows, columns = np.arange(len(dataset)), np.arange(dataset.x.shape[1])
    train, test = rows[:-60], rows[-60:]
    none = np.empty(0, dtype=np.int64)
    clients = tuple(f"site-{number}" for number in range(options.clients))
    holdings = {
        id: (Holding(train[number :: options.clients], none, none),)
        for number, id in enumerate(clients)
    }
    return Scenario(clients, holdings, columns, dict.fromkeys(clients, (test,)), ("all",), (0,))


SPLIT = Split(Options, deal)


def pretrained(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A layer with values of its own, as if they came from a file, and one to train."""
    layer = nn.Linear(shape[0], 24)
    values = torch.from_numpy(np.random.default_rng(7).normal(0, 0.5, (24, shape[0] + 1)))
    with torch.no_grad():
        layer.weight.copy_(values[:, 1:])
        layer.bias.copy_(values[:, 0])
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(24, classes))
'''
ENTRIES = """
[project.entry-points."atoll.datasets"]
blobs = "my_parts:blobs"

[project.entry-points."atoll.splits"]
turns-of-mine = "my_parts:SPLIT"

[project.entry-points."atoll.models"]
backbone = "my_parts:pretrained"
"""
CASES = """[
    Case("my-mean", {
        "data": "blobs", "split": "turns-of-mine",
        "model.name": "backbone", "model.initial": "own", "model.frozen": ["0"],
    }),
], network_engine=True"""


def call(folder: Path, *command: str) -> str:
    """Run a command with the installed package on the path."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "installed"), "OMP_NUM_THREADS": "1"}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    ended = subprocess.run(
        command, cwd=folder / "my-mean", env=environment, check=False, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package that `atoll new method` has written."""
    pytest.importorskip("setuptools", minversion="77", reason="builds a package without network")
    subprocess.run([str(ATOLL), "new", "method", "my-mean"], cwd=tmp_path, check=True)
    return tmp_path / "my-mean"


def install(package: Path) -> None:
    """Install a package into a folder: the environment of these tests stays as it is."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--no-build-isolation", "--target", str(package.parent / "installed")]
    subprocess.run([*pip, "."], cwd=package, check=True)


def test_a_scaffolded_method_runs_as_its_readme_says(package: Path) -> None:
    install(package)
    printed = call(package.parent, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert f"{len(checks()) - 1} passed, 1 skipped" in printed  # classes are not weighed
    line = next(
        one for one in (package / "README.md").read_text().splitlines() if one.startswith("atoll")
    )
    assert line == "atoll run my-mean --set data=digits-table --set rounds=5"
    printed = call(package.parent, str(ATOLL), *line.split()[1:], "--quiet")
    assert "my-mean on digits-table" in printed


def test_a_package_with_all_four_kinds_passes_under_both_engines(package: Path) -> None:
    (package / "my_parts.py").write_text(OWN)
    project = (package / "pyproject.toml").read_text()
    project = project.replace('["my_mean"]', '["my_mean", "my_parts"]')
    (package / "pyproject.toml").write_text(
        project.replace("[tool.setuptools]", ENTRIES + "\n[tool.setuptools]")
    )
    test = package / "tests" / "test_my_mean.py"
    test.write_text(test.read_text().replace('[Case("my-mean")]', CASES))
    install(package)
    printed = call(package.parent, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert f"{len(checks())} passed, 1 skipped" in printed  # the network engine, too

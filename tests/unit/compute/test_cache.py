"""A choice is made again when anything that it depends on has changed."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.compute import autotune
from atoll.compute.cache import UnresolvedError, cache_key, fingerprint
from atoll.compute.compare import max_relative_error
from atoll.compute.executor import Executor
from atoll.compute.proof import prove
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.train import Optimiser, Phase, TrainJob

CPU = torch.device("cpu")
HELPER = """
def term(weights):
    return 0 * weights["weight"].sum((-1, -2))
"""
WRONG = """
def term(weights):
    return weights["weight"].sum() ** 2
"""
LOSS = """
from {package}.helper import term

def loss(weights, batch):
    predicted = (batch.x @ weights["weight"].mT)
    return (predicted ** 2).mean((-1, -2)) + term(weights)
"""


class Term:
    """Can be called, and has nothing that could be looked at."""

    __slots__ = ()

    def __call__(self, weights: Any) -> int:
        return 0


class Package:
    """A package of two files in a folder of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder / name, name
        self.folder.mkdir()
        (self.folder / "__init__.py").write_text("")
        self.write("helper", HELPER)
        self.write("loss", LOSS.format(package=name))

    def write(self, module: str, text: str) -> None:
        (self.folder / f"{module}.py").write_text(text)

    def load(self, module: str = "loss") -> Any:
        """The module as its files are now."""
        for known in [n for n in sys.modules if n.split(".")[0] == self.name]:
            del sys.modules[known]
        importlib.invalidate_caches()
        return importlib.import_module(f"{self.name}.{module}")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files of one second have one time
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield Package(tmp_path, "some_method")
    for known in [n for n in sys.modules if n.split(".")[0] == "some_method"]:
        del sys.modules[known]


def jobs(loss: Any, count: int = 4) -> dict[str, TrainJob]:
    found = {}
    for number in range(count):
        draw = torch.Generator().manual_seed(number)
        rows = Rows(torch.randn(24, 4, generator=draw), torch.zeros(24, 0), torch.zeros(24))
        weights = {"weight": torch.randn(3, 4, generator=draw)}
        phase = Phase("loss", ("weight",), loss, Optimiser("sgd", 0.01))
        found[str(number)] = TrainJob(weights, {}, (phase,), rows, 8, 1, Stream.of(number))
    return found


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is proved, as it happens."""
    found: list[str] = []

    def counted(*given: Any, **named: Any) -> Any:
        found.append("proof")
        return prove(*given, **named)

    monkeypatch.setattr(autotune, "prove", counted)
    return found


def run(loss: Any, folder: Path) -> Executor:
    """A run whose results are held to the loop's."""
    folder.mkdir(exist_ok=True)
    works, asked = Executor("auto", folder), jobs(loss)
    done = works.do(asked)
    for id, job in asked.items():
        assert max_relative_error(job.run().weights, done[id].weights) < 1e-5
    return works


def test_a_helper_in_another_file_that_was_edited_is_proved_again(
    package: Package, proofs: list[str], tmp_path: Path
) -> None:
    first = run(package.load().loss, tmp_path / "run")
    run(package.load().loss, tmp_path / "other")  # the same source, loaded again
    assert len(proofs) == 1
    resumed = run(package.load().loss, tmp_path / "run")
    assert resumed.choices == first.choices
    package.write("helper", WRONG)
    for folder, count in (("run", 2), ("other", 2), ("new", 2)):  # resumed, and with the cache
        works = run(package.load().loss, tmp_path / folder)
        assert len(proofs) == count
        assert list(works.choices.values())[-1].way != "batched"


def test_a_constant_that_a_closure_holds_is_part_of_the_key(package: Package) -> None:
    package.write(
        "helper",
        "def scaled(factor):\n"
        "    def term(weights):\n"
        "        return factor * weights['weight'].sum((-1, -2))\n"
        "    return term\n",
    )
    text = "from some_method.helper import scaled\nterm = scaled({})\n"
    keys = set()
    for factor in ("0.0", "1.0", "1.0"):
        body = LOSS.format(package="some_method").replace(
            "from some_method.helper import term", text.format(factor)
        )
        package.write("loss", body)
        module = package.load()
        keys.add(fingerprint(module.loss))
        module.term = module.scaled(7.0)  # by hand, in no file
        keys.add(fingerprint(module.loss))
    assert len(keys) == 4


def test_a_lambda_and_a_global_constant_are_part_of_the_key(package: Package) -> None:
    found = []
    for change in ("term = lambda w: 0", "term = lambda w: 1", "SIZE = 3\nterm = lambda w: SIZE"):
        package.write("helper", change + "\n")
        found.append(fingerprint(package.load().loss))
    vars(sys.modules["some_method.helper"])["SIZE"] = 4
    found.append(fingerprint(sys.modules["some_method.loss"].loss))
    assert len(set(found)) == 4


def test_a_loss_that_closes_over_something_is_not_stacked(
    package: Package, proofs: list[str], tmp_path: Path
) -> None:
    """Also under a name that a decorator gave it: each client may have another one."""
    package.write(
        "loss",
        "from functools import wraps\n"
        "def loss(weights, batch):\n"
        "    return (batch.x @ weights['weight'].mT).square().mean()\n"
        "def times(factor):\n"
        "    @wraps(loss)\n"
        "    def inner(weights, batch):\n"
        "        return factor * loss(weights, batch)\n"
        "    return inner\n",
    )
    module = package.load()
    asked = {}
    for id, job in jobs(None).items():
        (phase,) = job.phases
        scaled = Phase(phase.name, phase.moves, module.times(float(id)), phase.optimiser)
        asked[id] = TrainJob(job.weights, {}, (scaled,), job.rows, 8, 1, job.stream)
    done = Executor("stacked", tmp_path).do(asked)
    assert all(
        max_relative_error(job.run().weights, done[id].weights) == 0 for id, job in asked.items()
    )
    assert not proofs
    run(lambda weights, batch: 2 * module.loss(weights, batch), tmp_path / "lambda")
    assert not proofs


def test_what_cannot_be_resolved_is_proved_in_every_run(
    package: Package, proofs: list[str], tmp_path: Path
) -> None:
    module = package.load()
    module.term = iter([])  # an object without value and without source
    with pytest.raises(UnresolvedError):
        fingerprint(module.loss)
    assert not cache_key(module.loss, CPU).lasting
    module.term = Term()
    for _ in range(2):
        run(module.loss, tmp_path / "run")
    assert len(proofs) == 2
    assert not (tmp_path / "cache" / "atoll").exists() or not list(
        (tmp_path / "cache" / "atoll" / "choices").glob("unresolved*")
    )


def test_keys_are_the_same_in_another_process() -> None:
    code = (
        "import sys; from functools import partial\n"
        "from atoll.compute.cache import fingerprint\n"
        "from atoll.learning.losses import plain\n"
        "from atoll.learning.models import MLP, skeleton\n"
        "from atoll.core.rng import Stream\n"
        "model = skeleton(MLP((4,), (3,), 2, Stream.of(0)), True)\n"
        "sys.stdout.write(fingerprint((partial(plain, model), frozenset({'a', 'b'}), 1.5)))\n"
    )
    command = [sys.executable, "-c", code]
    found = {
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)
    }
    assert len(found) == 1
    assert found != {""}


def test_machine_and_precision_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    about = ("work", partial(max_relative_error, {}))
    monkeypatch.delenv("MKL_CBWR", raising=False)  # an emulated CPU may set it
    keys = {cache_key(about, CPU).name}
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    keys.add(cache_key(about, CPU).name)
    for tf32 in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        keys.add(cache_key(about, CPU).name)
    assert len(keys) == 3

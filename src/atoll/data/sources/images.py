"""Images: one function a data set, its files and official source in one list.

Files kept by hand are `.npz` without pickles: x_train, y_train, x_test, y_test, images uint8 as
N x H x W or N x H x W x 3. Official files (IDX, the CIFAR binaries, SVHN's Matlab files, the USPS
text, the zip archives of SYN, Office-Home and Tiny-ImageNet) are read as they are. `test` is the
split that comes with the files; where that is not the official one, `partial` or `source` says so.
"""

import gzip
import struct
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from atoll.core.options import AtLeastOne, NotNegative
from atoll.core.rng import Stream
from atoll.data.dataset import Dataset
from atoll.data.pictures import fitted, noisy, patches, rotated, thick
from atoll.data.sources import archives
from atoll.data.sources.fetch import File, Group, obtain, reading, refused, trust

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

IDX = (
    *("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    *("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
)
MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"
MNIST_HASHES = (
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
FASHION_HASHES = (
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
CIFAR = "https://www.cs.toronto.edu/~kriz"
SVHN = "http://ufldl.stanford.edu/housenumbers"
USPS = "https://hastie.su.domains/ElemStatLearn/datasets"


def _idx_files(place: str, url: str, hashes: tuple[str, ...]) -> Group:
    files = zip(IDX, hashes, strict=True)
    return tuple(File(f"images/{place}/{name}", sha256, f"{url}/{name}") for name, sha256 in files)


def _npz_file(name: str, sha256: str | None, page: str = "") -> Group:
    return (File(f"images/{name}.npz", sha256, page=page),)


# For each set its alternatives, the best first; `*_complete.npz` is a complete copy of one's own.
# Pins of the IDX and CIFAR files are those that several projects publish for them.
FILES: dict[str, tuple[Group, ...]] = {
    "mnist": (
        _npz_file("mnist", "094b831e432331f1f6d6829ab9bfff4551410a81e1f816c9cce482d3e9b3ba57"),
        _idx_files("mnist", MNIST, MNIST_HASHES),
    ),
    "fashion-mnist": (
        _npz_file(
            "fashion_mnist", "c2c37d617253c9f5a6fc23ba8553045734f3682da04a81934b27e6c7c2363beb"
        ),
        _idx_files("fashion-mnist", FASHION, FASHION_HASHES),
    ),
    "usps": (
        _npz_file("usps", "b41b4ded34b54aef8f8e86043bc5bdfa229cdc4528cbe6ec9c91101a8d32221f"),
        (
            File("images/usps/zip.train.gz", None, f"{USPS}/zip.train.gz"),
            File("images/usps/zip.test.gz", None, f"{USPS}/zip.test.gz"),
        ),
    ),
    "svhn": (
        _npz_file("svhn_complete", None, SVHN),
        (
            File(
                "images/svhn/train_32x32.mat",
                "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                f"{SVHN}/train_32x32.mat",
            ),
            File(
                "images/svhn/test_32x32.mat",
                "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
                f"{SVHN}/test_32x32.mat",
            ),
        ),
        _npz_file("svhn", "05357ddc5915cb730d70746fd1e6c436c4d5dd4c19d81fbe3ce8c960e67b6bab"),
    ),
    "mnist-m": (
        _npz_file("mnist_m_complete", None, "https://arxiv.org/abs/1505.07818"),
        _npz_file("mnist_m", "370d7ec44c1572977054c1f536bf811514f79409decfa2249b532ef04e021124"),
    ),
    "cifar10": (
        (
            File(
                "images/cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                f"{CIFAR}/cifar-10-binary.tar.gz",
            ),
        ),
        _npz_file("cifar10", "53757eaff01003aff0728ce95ed0f6d8a919a682689d263e8a384391d6475897"),
    ),
    "cifar100": (
        (
            File(
                "images/cifar-100-binary.tar.gz",
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                f"{CIFAR}/cifar-100-binary.tar.gz",
            ),
        ),
        _npz_file("cifar100", "ac63994d10b7b9451137e51f702c42551dad734fd187e29bf5cb29f45d3f6e67"),
    ),
    "office-caltech10": (
        _npz_file(
            "office_caltech10",
            "faa9e2f0d5275928dda5afab68b3a0d3657caf9bc76e0c2c49a6570aaaa3524a",
            "https://github.com/ChristophRaab/Office_Caltech_DA_Dataset",
        ),
    ),
    "office-home": (
        (
            File(
                "images/OfficeHomeDataset_10072016.zip",
                page="https://www.hemanthdv.org/officeHomeDataset.html",
                md5="b1c14819770c4448fd5b6d931031c91c",
            ),
        ),
    ),
    "synthetic-digits": (
        (
            File(
                "images/synthetic-digits.zip",
                page="https://www.kaggle.com/datasets/prasunroy/synthetic-digits, which wants an "
                "account: kaggle datasets download -d prasunroy/synthetic-digits",
            ),
        ),
    ),
    "tiny-imagenet": (
        (
            File(
                "images/tiny-imagenet-200.zip",
                "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            ),
        ),
    ),
    "cinic10": (
        _npz_file("cinic10_complete", None, "https://github.com/BayesWatch/cinic-10"),
        _npz_file(
            "cinic10_sample", "22f14d9fd3b7315b08028ae2381f42eb717498d00bf99fc3be785d27a29cdab6"
        ),
    ),
}
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
class Parts:
    """Images and labels of the two parts of a set, and where each image comes from if known."""

    x_train: Array  # (rows, channels, height, width) uint8
    y_train: Array
    x_test: Array
    y_test: Array
    group: Array | None = None  # train rows first
    groups: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # empty where the files do not say


@dataclass(frozen=True)
class Facts:
    """What a set must be, and what is said about it."""

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
    found = archives.labelled(path, r"imgs_(?P<part>train|valid)/(?P<label>[0-9])/(?P<file>[^/]+)$")
    _counted(path, (len(found.of("train")), len(found.of("valid"))), COUNTS["synthetic-digits"])
    x = archives.pictures(path, found.members, (3, 32, 32))
    trust(path)  # nobody has published its hash
    return Dataset(
        "synthetic-digits",
        "image",
        x,
        np.array([int(label) for label in found.labels], dtype=np.int64),
        (),
        TEN,
        "Synthetic digits (Roy et al. 2018), licence at its source; scaled to 32x32",
        test=np.array([part == "valid" for part in found.parts]),
    )


def office_home(size: AtLeastOne = 32) -> Dataset:
    """65 kinds of objects in four domains, 3x32x32; no test rows."""
    (path,) = obtain("office-home", FILES["office-home"])
    names = "|".join(OFFICE_HOME)
    found = archives.labelled(path, rf"/(?P<part>{names})/(?P<label>[^/]+)/(?P<file>[^/]+)$")
    counts = tuple(len(found.of(name)) for name in OFFICE_HOME)
    _counted(path, counts, COUNTS["office-home"])
    classes = tuple(sorted({*found.labels}))
    if len(classes) != CLASSES["office-home"]:
        raise refused(path, f"has {len(classes)} classes, expected {CLASSES['office-home']}")
    return Dataset(
        "office-home",
        "image",
        archives.pictures(path, found.members, (3, size, size)),
        np.array([classes.index(label) for label in found.labels], dtype=np.int64),
        (),
        classes,
        f"Office-Home (Venkateswara et al. 2017), research use; scaled to {size}x{size}",
        group=np.array([OFFICE_HOME.index(part) for part in found.parts], dtype=np.int64),
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
        here, wanted = (" + ".join(f"{n:,}" for n in several) for several in (counts, expected))
        raise refused(path, f"holds {here} images, expected {wanted}")


def digits_domains(fourth: Literal["mnist-m", "synthetic-digits"] = "mnist-m") -> Dataset:
    """Digits in four domains, 3x32x32: MNIST, USPS, SVHN, and SYN or MNIST-M in its stead."""
    shown = {"mnist": mnist(), "usps": usps(), "svhn": svhn()}
    if fourth == "mnist-m":
        # Image i of MNIST-M shows the digit of MNIST's image i: those rows of MNIST are left out.
        last = _first_rows(mnist_m(), (10_000, 2_000))  # the sizes of SYN
        counts = (int((~_test(last)).sum()), int(_test(last).sum()))
        shown["mnist"] = _without_first(shown["mnist"], counts)
    else:
        last = synthetic_digits()
    shown[fourth] = last
    parts, instead = list(shown.values()), fourth == "mnist-m"
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
        groups=tuple(shown),
    )


def _test(dataset: Dataset) -> Array:
    assert dataset.test is not None  # all sets that come in two parts say which is which
    return dataset.test


def _first_rows(dataset: Dataset, counts: tuple[int, int]) -> Dataset:
    train, test = np.flatnonzero(~_test(dataset)), np.flatnonzero(_test(dataset))
    return dataset.only(np.concatenate([train[: counts[0]], test[: counts[1]]]))


def _without_first(dataset: Dataset, counts: tuple[int, int]) -> Dataset:
    train, test = np.flatnonzero(~_test(dataset)), np.flatnonzero(_test(dataset))
    return dataset.only(np.concatenate([train[counts[0] :], test[counts[1] :]]))


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
    name: str, which: slice, how: tuple[float, float, int], seed: int, turn: int = 0
) -> Dataset:
    """Some of scikit-learn's digits, each in one of the four shifts, no digit in two of them."""
    plain, (degrees, noise, size) = digits(), how
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
) -> Dataset:
    """Made up: a pattern of 1x8x8 for each class, each domain with its own contrast and shift."""
    stream = Stream.of(seed, "synthetic-images", rows, classes, domains)
    draws = stream.child("labels").numpy()
    y, group = draws.integers(classes, size=rows), draws.integers(domains, size=rows)
    coarse = stream.child("patterns").numpy().choice([-1.0, 1.0], size=(classes, 4, 4))
    patterns = coarse.repeat(2, axis=1).repeat(2, axis=2)
    views = stream.child("views").numpy()
    gains = views.uniform(30, 90, size=domains)
    shifts = views.integers(2, size=(domains, 2))
    shown = np.stack([np.roll(patterns, tuple(shift), axis=(1, 2)) for shift in shifts])
    grey = 128 + gains[group, None, None] * shown[group, y]
    grey += noise * stream.child("noise").numpy().normal(size=grey.shape)
    return Dataset(
        "synthetic-images",
        "image",
        np.clip(np.round(grey), 0, 255).astype(np.uint8)[:, None],
        y.astype(np.int64),
        (),
        tuple(f"class {number}" for number in range(classes)),
        f"made up, seed {seed}",
        group=group.astype(np.int64),
        groups=tuple(f"domain {number}" for number in range(domains)),
    )


def _build(name: str, facts: Facts) -> Dataset:
    """Read the files that are at hand, check them, and put train before test."""
    paths = obtain(name, FILES[name])
    with reading(paths[0]):
        parts = _read(paths)
    whole = _complete(paths[0], parts, facts)
    shown = f"{facts.part[0]:,} + {facts.part[1]:,} of {facts.counts[0]:,} + {facts.counts[1]:,}"
    return Dataset(
        name,
        "image",
        np.concatenate([parts.x_train, parts.x_test]),
        np.concatenate([parts.y_train, parts.y_test]).astype(np.int64),
        (),
        facts.classes,
        facts.source,
        "" if whole else f"{shown} images{facts.note}",
        test=np.arange(len(parts.y_train) + len(parts.y_test)) >= len(parts.y_train),
        group=parts.group,
        groups=parts.groups,
    )


def _complete(path: Path, parts: Parts, facts: Facts) -> bool:
    """Whether all images are there; neither all nor the known part is refused."""
    counts = (len(parts.x_train), len(parts.x_test))
    if counts not in (facts.counts, facts.part):
        known = [counted for counted in (facts.counts, facts.part) if any(counted)]
        words = " or ".join(f"{train:,} + {test:,}" for train, test in known)
        raise refused(path, f"holds {counts[0]:,} + {counts[1]:,} images, expected {words}")
    if parts.classes not in ((), facts.classes):
        raise refused(path, f"has classes {', '.join(parts.classes)}")
    for x, y in ((parts.x_train, parts.y_train), (parts.x_test, parts.y_test)):
        if x.dtype != np.uint8 or x.shape[1:] != facts.shape or y.shape != x.shape[:1]:
            raise refused(path, f"holds images of shape {x.shape[1:]}, expected {facts.shape}")
        if y.min() < 0 or y.max() >= len(facts.classes):
            raise refused(path, f"holds labels outside 0..{len(facts.classes) - 1}")
    return counts == facts.counts


def _read(paths: list[Path]) -> Parts:
    """The parts in whichever of the known formats these files have."""
    if paths[0].suffix == ".npz":
        return _npz(paths[0])
    if paths[0].name.startswith("cifar-"):
        return _cifar(paths[0], labels=2 if "100" in paths[0].name else 1)
    pairs = {".mat": _matlab, ".gz": _zip_code}
    if paths[0].suffix == ".mat" or paths[0].name.startswith("zip."):
        (x_train, y_train), (x_test, y_test) = (pairs[path.suffix](path) for path in paths)
        return Parts(x_train, y_train, x_test, y_test)
    arrays = [_idx(path) for path in paths]
    return Parts(arrays[0][:, None], arrays[1], arrays[2][:, None], arrays[3])


def _npz(path: Path) -> Parts:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        domains, classes = (
            tuple(arrays[key].tolist()) if key in arrays else ()
            for key in ("domain_names", "class_names")
        )
        return Parts(
            _channels_first(arrays["x_train"]),
            arrays["y_train"],
            _channels_first(arrays["x_test"]),
            arrays["y_test"],
            np.concatenate([arrays["d_train"], arrays["d_test"]]) if domains else None,
            domains,
            classes,
        )


def _channels_first(x: Array) -> Array:
    """N x H x W or N x H x W x C becomes N x C x H x W."""
    return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def _idx(path: Path) -> Array:
    """The array in a gzipped IDX file: two zeros, 8 for bytes, the dimensions, sizes, content."""
    with reading(path):
        content = gzip.decompress(path.read_bytes())
        zeros, kind, dimensions = struct.unpack_from(">HBB", content)
        if zeros != 0 or kind != 8:
            raise ValueError("not an IDX file of bytes")
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _cifar(path: Path, labels: int) -> Parts:
    """A binary CIFAR archive: a record is its labels (the fine one last) and 3,072 bytes."""
    with tarfile.open(path, "r:gz") as archive:
        blobs = {
            Path(member.name).name: np.frombuffer(stream.read(), dtype=np.uint8)
            for member in archive
            if member.name.endswith(".bin") and (stream := archive.extractfile(member)) is not None
        }
    sides: list[Array] = []
    for test in (False, True):
        names = [name for name in sorted(blobs) if name.startswith("test") is test]
        records = np.concatenate([blobs[name] for name in names]).reshape(-1, labels + 3_072)
        sides += [records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1]]
    return Parts(sides[0], sides[1], sides[2], sides[3])


def _matlab(path: Path) -> tuple[Array, Array]:
    """SVHN as Matlab has it: X is (height, width, channels, rows), y has 10 for the digit 0."""
    from scipy.io import loadmat  # type: ignore[import-untyped]  # noqa: PLC0415 (few runs need it)

    with reading(path):
        held = loadmat(str(path), variable_names=("X", "y"))
        x, y = held["X"], held["y"].ravel().astype(np.int64)
        return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10


def _zip_code(path: Path) -> tuple[Array, Array]:
    """USPS as text: the digit, then 256 numbers from -1 to 1, parted by blanks."""
    with reading(path):
        lines = [line.split() for line in gzip.decompress(path.read_bytes()).splitlines()]
        table = np.array(lines, dtype=np.float64)
        x = np.round((table[:, 1:] + 1) * 127.5).astype(np.uint8)
        return x.reshape(-1, 1, 16, 16), table[:, 0].astype(np.int64)

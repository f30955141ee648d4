"""Images: official formats in small, embedded sets, checks of shape and count."""

import gzip
import io
import os
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from atoll import data
from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.data.dataset import Dataset
from atoll.data.sources import fetch, image_formats, images

Array = np.ndarray[Any, Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    (tmp_path / "images").mkdir()
    return tmp_path / "images"


def idx(path: Path, array: Array) -> Path:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))
    return path


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(f"cifar/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def npz(path: Path, train: int, test: int, size: int = 32, **others: Any) -> Path:
    np.savez(
        path,
        x_train=np.zeros((train, size, size, 3), np.uint8),
        y_train=np.zeros(train, np.int64),
        x_test=np.ones((test, size, size, 3), np.uint8),
        y_test=np.zeros(test, np.int64),
        **others,
    )
    return path


def test_idx_files_give_train_and_test(tmp_path: Path) -> None:
    x = np.arange(5 * 28 * 28).reshape(5, 28, 28) % 256
    paths = [
        idx(tmp_path / "train-images-idx3-ubyte.gz", x[:3]),
        idx(tmp_path / "train-labels-idx1-ubyte.gz", np.array([7, 0, 9])),
        idx(tmp_path / "t10k-images-idx3-ubyte.gz", x[3:]),
        idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.array([1, 2])),
    ]
    parts = image_formats.read_parts(paths)
    assert parts.x_train.shape == (3, 1, 28, 28)
    assert np.array_equal(parts.x_test[:, 0], x[3:])
    assert parts.y_train.tolist() == [7, 0, 9]
    assert parts.y_test.tolist() == [1, 2]


def test_matlab_files_of_svhn_have_rows_last_and_ten_for_zero(tmp_path: Path) -> None:
    x = np.arange(5 * 3 * 32 * 32, dtype=np.int64).reshape(5, 3, 32, 32).astype(np.uint8)
    y = np.array([10, 1, 9, 2, 10])
    paths = [tmp_path / "train_32x32.mat", tmp_path / "test_32x32.mat"]
    for path, rows in zip(paths, (slice(0, 3), slice(3, 5)), strict=True):
        savemat(str(path), {"X": x[rows].transpose(2, 3, 1, 0), "y": y[rows, None]})
    parts = image_formats.read_parts(paths)
    assert np.array_equal(parts.x_train, x[:3])
    assert np.array_equal(parts.x_test, x[3:])
    assert parts.y_train.tolist() == [0, 1, 9]
    assert parts.y_test.tolist() == [2, 0]
    paths[0].write_bytes(paths[0].read_bytes()[:200])
    with pytest.raises(UserError, match=r"train_32x32\.mat cannot be read"):
        image_formats.read_parts(paths)


@pytest.mark.parametrize("cut", [2, 30, 200])
def test_a_truncated_idx_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = idx(tmp_path / "train-images-idx3-ubyte.gz", np.arange(2 * 28 * 28).reshape(2, 28, 28))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz cannot be read"):
        image_formats._idx(path)


@pytest.mark.parametrize(
    "content", [b"", b"\0\0", b"\0\0\x0d\1\0\0\0\1\0", b"\0\0\x08\1\0\0\0\5abc"]
)
def test_what_is_no_idx_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=r"x\.gz cannot be read"):
        image_formats._idx(path)


def test_mnist_with_a_wrong_hash_is_refused(folder: Path) -> None:
    (folder / "mnist").mkdir()
    for name in [Path(file.path).name for file in images.FILES["mnist"][1]]:
        idx(folder / "mnist" / name, np.zeros((2, 28, 28)))
    with pytest.raises(UserError, match="expected 440fcabf73cc546f") as caught:
        data.load("mnist")
    assert caught.value.exit_code == EXIT_DATA_MISSING


def test_cifar10_records_are_a_label_and_three_planes(tmp_path: Path) -> None:
    record = np.arange(3_072) % 256
    first = np.concatenate([[3], record, [9], record[::-1]]).astype(np.uint8)
    last = np.concatenate([[1], record]).astype(np.uint8)
    members = {"data_batch_2.bin": last.tobytes(), "data_batch_1.bin": first.tobytes()}
    path = archive(
        tmp_path / "cifar-10-binary.tar.gz",
        {**members, "test_batch.bin": last.tobytes(), "batches.meta.txt": b"airplane\n"},
    )
    parts = image_formats.read_parts([path])
    assert parts.y_train.tolist() == [3, 9, 1]
    assert parts.y_test.tolist() == [1]
    assert np.array_equal(parts.x_train[0], record.reshape(3, 32, 32))


def test_cifar100_takes_the_fine_label(tmp_path: Path) -> None:
    content = np.concatenate([[11, 99], np.zeros(3_072)]).astype(np.uint8).tobytes()
    path = archive(
        tmp_path / "cifar-100-binary.tar.gz", {"train.bin": content * 2, "test.bin": content}
    )
    parts = image_formats.read_parts([path])
    assert parts.y_train.tolist() == [99, 99]
    assert parts.x_test.shape == (1, 3, 32, 32)
    assert len(images.CIFAR100_CLASSES) == 100
    assert list(images.CIFAR100_CLASSES) == sorted(set(images.CIFAR100_CLASSES))


def test_usps_text_goes_from_minus_one_to_one(tmp_path: Path) -> None:
    line = "6.0000 " + "-1.0000 " * 255 + "1.0000 \n"
    paths = [tmp_path / "zip.train.gz", tmp_path / "zip.test.gz"]
    for path in paths:
        path.write_bytes(gzip.compress(line.encode()))
    parts = image_formats.read_parts(paths)
    assert parts.x_train.shape == (1, 1, 16, 16)
    assert (parts.x_train[0, 0, 0, 0], parts.x_train[0, 0, 15, 15]) == (0, 255)
    assert parts.y_train.tolist() == [6]


def test_an_npz_of_full_size_is_complete_and_a_part_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npz(folder / "x.npz", 4, 2)
    monkeypatch.setitem(images.FILES, "x", ((fetch.File("images/x.npz"),),))
    facts = images.Facts((4, 2), (3, 32, 32), images.TEN, "made for a test")
    whole = images._build("x", facts)
    assert whole.x.shape == (6, 3, 32, 32)
    assert whole.partial == ""
    assert whole.test is not None
    assert whole.test.tolist() == [False] * 4 + [True] * 2
    part = images.Facts((40, 20), (3, 32, 32), images.TEN, "made for a test", (4, 2), ", ours")
    assert images._build("x", part).partial == "4 + 2 of 40 + 20 images, ours"


def test_domains_in_an_npz_become_groups(tmp_path: Path) -> None:
    path = npz(
        *(tmp_path / "x.npz", 2, 1),
        d_train=np.array([1, 0]),
        d_test=np.array([1]),
        domain_names=np.array(["a", "b"]),
    )
    parts = image_formats._npz(path)
    assert parts.groups == ("a", "b")
    assert parts.group is not None
    assert parts.group.tolist() == [1, 0, 1]


def test_other_counts_shapes_labels_and_classes_are_refused(folder: Path) -> None:
    path = npz(folder / "svhn_complete.npz", 3, 2)
    with pytest.raises(UserError, match=r"holds 3 \+ 2 images, expected 73,257 \+ 26,032 or 6,000"):
        data.load("svhn")
    parts = image_formats._npz(path)
    with pytest.raises(UserError, match=r"shape \(3, 32, 32\), expected \(1, 28, 28\)"):
        images._complete(path, parts, images.Facts((3, 2), (1, 28, 28), images.TEN, ""))
    parts.y_train[0] = 10
    with pytest.raises(UserError, match=r"labels outside 0\.\.9"):
        images._complete(path, parts, images.Facts((3, 2), (3, 32, 32), images.TEN, ""))
    named = image_formats._npz(npz(folder / "named.npz", 3, 2, class_names=np.array(["a", "b"])))
    with pytest.raises(UserError, match="has classes a, b"):
        images._complete(path, named, images.Facts((3, 2), (3, 32, 32), images.TEN, ""))


def test_a_truncated_or_pickled_npz_is_refused(folder: Path) -> None:
    path = npz(folder / "svhn_complete.npz", 3, 2)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(UserError, match="cannot be read"):
        data.load("svhn")
    objects = np.array([{"a": 1}], dtype=object)
    np.savez(path, x_train=objects, y_train=objects, x_test=objects, y_test=objects)
    with pytest.raises(UserError, match=r"cannot be read.*allow_pickle"):
        data.load("svhn")


@pytest.mark.parametrize(
    ("name", "rows", "classes"), [("digits", 1_797, 10), ("synthetic-images", 1_000, 4)]
)
def test_embedded_images_are_always_the_same(name: str, rows: int, classes: int) -> None:
    first, again = data.load(name), data.load(name)
    assert first.x.shape == (rows, 1, 8, 8)
    assert first.x.dtype == np.uint8
    assert first.x.max() == 255
    assert len(first.classes) == classes == len(set(first.y.tolist()))
    assert first.fingerprint == again.fingerprint


def test_synthetic_images_have_domains() -> None:
    made = data.load("synthetic-images", domains=3, rows=100)
    assert made.groups == ("domain 0", "domain 1", "domain 2")
    assert made.group is not None
    assert sorted(set(made.group.tolist())) == [0, 1, 2]
    assert (
        made.fingerprint != data.load("synthetic-images", domains=3, rows=100, seed=1).fingerprint
    )


@pytest.mark.parametrize("name", sorted(images.FILES))
def test_real_images_that_are_here_load(name: str) -> None:
    if "ATOLL_DATA" not in os.environ or data.about(name).presence != "found":
        pytest.skip(f"ATOLL_DATA does not name a folder that holds {name}")
    found = data.load(name)
    assert found.x.dtype == np.uint8
    assert found.x.flags.c_contiguous
    assert found.test is not None
    assert 0 < found.test.sum() < len(found)
    assert set(found.y.tolist()) == set(range(len(found.classes)))


# Archives as their authors give them


def drawn(value: int, size: int = 8) -> bytes:
    """A picture of one grey as JPEG."""
    file = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), value, np.uint8)).save(file, format="JPEG")
    return file.getvalue()


def zipped(path: Path, members: dict[str, bytes | str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Miniatures of the archives may be read: their counts, and no published hash."""
    counts = {"synthetic-digits": (20, 10), "office-home": (6, 6, 6, 6), "tiny-imagenet": (4, 2)}
    monkeypatch.setattr(images, "COUNTS", counts)
    monkeypatch.setattr(images, "CLASSES", {"office-home": 3})
    for name in ("office-home", "tiny-imagenet"):
        file = images.FILES[name][0][0]
        monkeypatch.setitem(images.FILES, name, ((fetch.File(file.path, page=file.page),),))
    return folder


def syn(path: Path, train: int = 2) -> Path:
    """Ten digits; the archive has everything twice, as the one at its source."""
    shown = {
        f"{root}synthetic_digits/imgs_{part}/{digit}/{digit}_{n}.jpg": drawn(20 * digit + n)
        for root in ("", "data/")
        for part, count in (("train", train), ("valid", 1))
        for digit in range(10)
        for n in range(count)
    }
    return zipped(path, {"synthetic_digits/": b"", "__MACOSX/imgs_train/0/._x.jpg": b"", **shown})


def test_synthetic_digits_are_read_once_each_with_their_split(small: Path) -> None:
    path = syn(small / "synthetic-digits.zip")
    made = data.load("synthetic-digits")
    assert made.x.shape == (30, 3, 32, 32)
    assert made.test is not None
    assert made.test.sum() == 10
    assert np.bincount(made.y).tolist() == [3] * 10
    assert np.abs(made.x.mean((1, 2, 3)) - 20 * made.y).max() < 4
    assert made.partial == ""
    kept = (small / "synthetic-digits.zip.sha256").read_text()
    assert kept.endswith("  synthetic-digits.zip\n")
    zipped(path, {"other": b""})  # the first copy was trusted, another one is seen
    with pytest.raises(UserError, match="has sha256"):
        data.load("synthetic-digits")


def test_archives_that_lack_pictures_are_refused(small: Path) -> None:
    syn(small / "synthetic-digits.zip", train=1)
    with pytest.raises(UserError, match=r"holds 10 \+ 10 images, expected 20 \+ 10"):
        data.load("synthetic-digits")
    assert not (small / "synthetic-digits.zip.sha256").exists()  # such a copy is not trusted
    zipped(small / "synthetic-digits.zip", {"README": b"nothing"})
    with pytest.raises(UserError, match="holds no pictures"):
        data.load("synthetic-digits")
    (small / "synthetic-digits.zip").write_bytes(b"no archive")
    with pytest.raises(UserError, match="cannot be read"):
        data.load("synthetic-digits")


def test_office_home_has_four_domains_and_no_test_rows(small: Path) -> None:
    domains = ("Art", "Clipart", "Product", "Real World")
    names = ("Alarm_Clock", "Bike", "TV")
    zipped(
        small / "OfficeHomeDataset_10072016.zip",
        {
            f"OfficeHomeDataset_10072016/{domain}/{name}/{n:05d}.jpg": drawn(60 * d + 20 * c)
            for d, domain in enumerate(domains)
            for c, name in enumerate(names)
            for n in (1, 2)
        },
    )
    made = data.load("office-home")
    assert made.groups == domains
    assert made.classes == names
    assert made.test is None
    assert made.group is not None
    assert np.abs(made.x.mean((1, 2, 3)) - 60 * made.group - 20 * made.y).max() < 4
    assert data.load("office-home", size=8).x.shape == (24, 3, 8, 8)


def test_tiny_imagenet_takes_its_test_classes_from_the_annotations(small: Path) -> None:
    root, kinds = "tiny-imagenet-200", ("n01443537", "n02123045")
    shown: dict[str, bytes | str] = {
        f"{root}/train/{kind}/images/{kind}_{n}.JPEG": drawn(100 * k, 64)
        for k, kind in enumerate(kinds)
        for n in range(2)
    }
    shown |= {f"{root}/val/images/val_{n}.JPEG": drawn(100 * (1 - n), 64) for n in range(2)}
    shown[f"{root}/test/images/test_0.JPEG"] = drawn(7, 64)  # without a class: left out
    notes = f"val_0.JPEG\t{kinds[1]}\t0\t0\t9\t9\nval_1.JPEG\t{kinds[0]}\t0\t0\t9\t9\n"
    path = zipped(
        small / "tiny-imagenet-200.zip", {**shown, f"{root}/val/val_annotations.txt": notes}
    )
    made = data.load("tiny-imagenet")
    assert made.x.shape == (6, 3, 32, 32)
    assert made.y.tolist() == [0, 0, 1, 1, 1, 0]
    assert made.test is not None
    assert made.test.tolist() == [False] * 4 + [True] * 2
    assert np.abs(made.x.mean((1, 2, 3)) - 100 * made.y).max() < 4
    zipped(path, {**shown, f"{root}/val/val_annotations.txt": notes[:20]})
    with pytest.raises(UserError, match=r"which of its classes val_1\.JPEG is of"):
        data.load("tiny-imagenet")


def test_what_is_not_here_is_told_with_where_to_get_it_and_where_to_put_it(folder: Path) -> None:
    for name, page, file in (
        ("synthetic-digits", "kaggle.com/datasets/prasunroy", "synthetic-digits.zip"),
        ("office-home", "hemanthdv.org", "OfficeHomeDataset_10072016.zip"),
    ):
        with pytest.raises(UserError) as caught:
            data.load(name)
        assert caught.value.exit_code == EXIT_DATA_MISSING
        assert page in caught.value.remedy
        assert f"images/{file}" in caught.value.remedy
        assert str(folder.parent) in caught.value.where
        assert data.about(name).presence == "not available"
    assert data.about("tiny-imagenet").presence == "to be downloaded"


def test_a_file_with_a_published_md5_is_held_to_it(folder: Path) -> None:
    (folder / "OfficeHomeDataset_10072016.zip").write_bytes(b"something else")
    with pytest.raises(UserError, match="expected b1c14819770c4448fd5b6d931031c91c"):
        data.load("office-home")


def test_the_fourth_domain_may_be_that_of_the_paper(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syn(small / "synthetic-digits.zip")
    x, y = np.zeros((4, 1, 16, 16), np.uint8), np.arange(4)
    other = Dataset("made", "image", x, y, (), images.TEN, "made", test=np.arange(4) > 1)
    for name in ("mnist", "usps", "svhn"):
        monkeypatch.setattr(images, name, lambda: other)
    made = data.load("digits-domains", fourth="synthetic-digits")
    assert made.groups == ("mnist", "usps", "svhn", "synthetic-digits")
    assert len(made) == 3 * 4 + 30  # nothing of MNIST is left out
    assert "stands in" not in made.source
    assert made.partial == ""

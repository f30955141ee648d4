"""The user's own images: folders, npz and Parquet become one data set, mistakes are told."""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from atoll import cli, data
from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.data.own.images import broken_images, some_images, unlabelled
from atoll.data.own.images import picture as picture_of
from atoll.data.public import PublicOptions, public
from atoll.engines.local import local_engine
from atoll.runs.config import resolve
from atoll.runs.execute import execute
from atoll.runs.parts import parts
from atoll.runs.result import Run

SHAPE = (3, 8, 8)


def picture(path: Path, colour: tuple[int, int, int] = (200, 100, 0), side: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), colour).save(path)


def encoded(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (value, value, value)).save(buffer, format="PNG")
    return buffer.getvalue()


def folder(path: Path, classes: dict[str, int]) -> str:
    for number, (name, count) in enumerate(sorted(classes.items())):
        (path / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture(path / name / f"{i:02}.png", (100 * number, 10 * i, 0))
    return str(path)


def npz(path: Path, rows: int = 6, **more: Any) -> str:
    x = np.arange(rows * 64, dtype=np.int64).reshape(rows, 8, 8).astype(np.uint8)
    np.savez(path, **{"x": x, "y": np.arange(rows) % 2, "classes": ["cat", "dog"], **more})
    return str(path)


def parquet(path: Path, images: list[Any] | None = None) -> str:
    images = images or [encoded(value) for value in (0, 50, 100, 150)]
    table = {"image": images, "label": ["dog", "cat"] * (len(images) // 2)}
    pq.write_table(pa.table(table), path)
    return str(path)


def test_a_folder_an_npz_and_a_parquet_file_become_one_set_of_domains(tmp_path: Path) -> None:
    paths = [
        folder(tmp_path / "scanner", {"cat": 3, "dog": 2}),
        npz(tmp_path / "camera.npz"),
        parquet(tmp_path / "plant.parquet"),
    ]
    found = data.load("", images=paths, size=8)
    assert found.x.shape == (15, *SHAPE)
    assert found.x.dtype == np.uint8
    assert found.classes == ("cat", "dog")
    assert found.groups == ("scanner", "camera", "plant")
    assert found.group is not None
    assert np.bincount(found.group).tolist() == [5, 6, 4]
    assert found.y.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 0]
    assert found.test is None
    assert found.x[4, :, 0, 0].tolist() == [100, 10, 0]  # the second dog of the folder
    assert found.x[6, :, 0, 1].tolist() == [65, 65, 65]  # grey is repeated
    assert found.x[11].min() == found.x[11].max() == 0
    assert data.load("", images=paths, size=8).fingerprint == found.fingerprint


def test_test_images_stay_test_images(tmp_path: Path) -> None:
    one = tmp_path / "a"
    folder(one / "train", {"0": 2, "1": 2})
    folder(one / "test", {"0": 1, "1": 1})
    parts = {k: np.zeros((3, 8, 8), np.uint8) for k in ("x_train", "x_test")}
    parts |= {k: np.array([1, 0, 1]) for k in ("y_train", "y_test")}
    np.savez(tmp_path / "b.npz", **parts)  # type: ignore[arg-type]
    found = data.load("", images=[str(one), str(tmp_path / "b.npz")], size=8)
    assert found.test is not None
    assert found.test.tolist() == [False] * 4 + [True] * 2 + [False] * 3 + [True] * 3
    whole = npz(tmp_path / "c.npz", classes=["0", "1"])
    with pytest.raises(UserError, match="some sites have test images"):
        data.load("", images=[str(one), whole], size=8)


@pytest.mark.parametrize("name", ["val", "valid", "Validation"])
def test_a_folder_of_validation_images_is_trained_on_and_is_no_class(
    name: str, tmp_path: Path
) -> None:
    for site in "ab":
        for part, count in (("train", 3), (name, 2), ("test", 1)):
            folder(tmp_path / site / part, {"cat": count, "dog": count})
    found = data.load("", images=[str(tmp_path / site) for site in "ab"], size=8)
    assert found.classes == ("cat", "dog")
    assert found.test is not None
    assert found.test.tolist() == ([False] * 10 + [True] * 2) * 2
    assert found.y.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1] * 2
    _, names, labels = some_images(tmp_path / "a", SHAPE, "image", "label")
    assert names[6] == f"{name}/cat/00.png"
    assert labels == [found.classes[label] for label in found.y[:12]]
    for site in "ab":
        shutil.rmtree(tmp_path / site / "test")
    found = data.load("", images=[str(tmp_path / site) for site in "ab"], size=8)
    assert (found.test, found.classes, len(found)) == (None, ("cat", "dog"), 20)
    sites = [folder(tmp_path / "d" / part, {"cat": 1, "dog": 1}) for part in ("train", "test")]
    assert data.load("", images=sites, size=8).test is None  # sites may be called so
    folder(tmp_path / "c" / "test", {"cat": 1})
    folder(tmp_path / "c" / name, {"cat": 1})
    with pytest.raises(UserError, match="without one called train"):
        data.load("", images=[str(tmp_path / site) for site in "ac"], size=8)


def test_sizes_channels_depth_and_orientation(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "a" / name).mkdir(parents=True)
    deep = np.full((4, 4), 257 * 99, dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "a" / "cat" / "deep.png")
    tall = np.zeros((8, 8), dtype=np.uint8)
    tall[0] = 255  # a bright first line, which a camera held sideways has as its last column
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(tall).save(tmp_path / "a" / "dog" / "turned.png", exif=exif)
    found = data.load("", images=[str(tmp_path / "a"), npz(tmp_path / "b.npz")], size=8, channels=1)
    assert found.x.shape[1:] == (1, 8, 8)
    assert found.x[0].min() == found.x[0].max() == 99
    assert found.x[1, 0, :, 7].min() == 255
    assert found.x[1, 0, :, 0].max() == 0


def test_deep_pixels_are_brought_to_bytes_or_refused_and_never_become_black(tmp_path: Path) -> None:
    path = tmp_path / "scan.tif"

    def brightest(values: Any) -> int:
        Image.fromarray(np.asarray(values)).save(path)
        return int(picture_of(path, lambda: path, (1, 2, 2)).max())

    assert brightest(np.full((2, 2), 200, dtype=np.int32)) == 200
    assert brightest(np.full((2, 2), 257 * 99, dtype=np.int32)) == 99
    assert brightest(np.full((2, 2), 200, dtype=np.uint16)) == 1  # dark, of 65,535
    refused: list[Any] = [
        np.full((2, 2), 0.5, dtype=np.float32),
        np.full((2, 2), 65_536, dtype=np.int32),
        np.full((2, 2), -1, dtype=np.int32),
    ]
    for values in refused:
        with pytest.raises(UserError, match="pixels of") as error:
            brightest(values)
        assert error.value.where == str(path)


def test_classes_may_be_listed_where_a_site_lacks_some(tmp_path: Path) -> None:
    paths = [folder(tmp_path / "a", {"cat": 2, "dog": 2}), folder(tmp_path / "b", {"cat": 2})]
    with pytest.raises(UserError, match=r"its classes are others than those of a: dog"):
        data.load("", images=paths, size=8)
    found = data.load("", images=paths, size=8, classes=["dog", "cat"])
    assert found.classes == ("dog", "cat")
    assert found.y.tolist() == [1, 1, 0, 0, 1, 1]
    with pytest.raises(UserError, match="class 'dog' is not among"):
        data.load("", images=paths, size=8, classes=["cat"])
    (tmp_path / "b" / "dog").mkdir()  # an empty folder names a class
    assert data.load("", images=paths, size=8).classes == ("cat", "dog")


def test_classes_that_differ_in_capitals_alone_are_said_to_look_like_one(tmp_path: Path) -> None:
    paths = [folder(tmp_path / "a", {"normal": 2, "x": 2}), folder(tmp_path / "b", {"Normal": 2})]
    with pytest.raises(
        UserError, match="the classes 'normal' and 'Normal' look like the same class"
    ):
        data.load("", images=paths, size=8)


def test_numbers_as_labels_are_ordered_as_numbers(tmp_path: Path) -> None:
    y = np.array([10, 9, 2, 10, 9, 2])
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((6, 8, 8), np.uint8), y=y)
    found = data.load("", images=[str(tmp_path / f"{n}.npz") for n in "ab"], size=8)
    assert found.classes == ("2", "9", "10")


def refusal(path: str, good: str) -> UserError:
    with pytest.raises(UserError) as error:
        data.load("", images=[good, path], size=8)
    assert error.value.where == path
    assert error.value.exit_code == EXIT_DATA_MISSING
    for word in ("delete", "remove", "pickle"):
        assert word not in str(error.value)
    return error.value


def test_ones_own_file_is_to_be_mended_and_never_deleted(tmp_path: Path) -> None:
    good, whole = npz(tmp_path / "a.npz"), (tmp_path / "a.npz").read_bytes()
    damaged = {"cut": whole[:300], "text": b"not an archive", "empty": b""}
    for name, content in damaged.items():
        (tmp_path / f"{name}.npz").write_bytes(content)
        found = refusal(str(tmp_path / f"{name}.npz"), good)
        assert found.what == "not an npz file of plain arrays that can be read"
        assert "export it again" in found.remedy
    np.savez(tmp_path / "objects.npz", x=np.array([{}] * 6), y=np.arange(6))
    refusal(str(tmp_path / "objects.npz"), good)
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, np.zeros((6, 8, 8)))
    refusal(str(tmp_path / "one.npz"), good)
    floats = refusal(npz(tmp_path / "floats.npz", x=np.zeros((6, 8, 8))), good)
    assert "multiplied by 255" in floats.remedy
    np.savez(tmp_path / "lacks.npz", y=np.arange(6))
    lacks = refusal(str(tmp_path / "lacks.npz"), good)
    assert lacks.what == "no array x, only y"
    assert "np.savez" in lacks.remedy
    refusal(npz(tmp_path / "number.npz", x=np.float64(3)), good)
    (tmp_path / "b.parquet").write_bytes(b"no")
    assert "Parquet" in refusal(str(tmp_path / "b.parquet"), good).what


BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": np.zeros((6, 8, 8), np.float32)}, "images of float32"),
    ({"x": np.zeros((6, 8, 8, 4), np.uint8)}, "shape \\(8, 8, 4\\)"),
    ({"y": np.arange(5)}, "6 images and labels of shape"),
    ({"y": np.arange(6)}, "no numbers of the 2 classes"),
]


@pytest.mark.parametrize(("arrays", "told"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_an_npz_file_that_is_not_one_is_refused(
    arrays: dict[str, Any], told: str, tmp_path: Path
) -> None:
    paths = [npz(tmp_path / "a.npz"), npz(tmp_path / "b.npz", **arrays)]
    with pytest.raises(UserError, match=told) as error:
        data.load("", images=paths, size=8)
    assert "b.npz" in error.value.where


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    good = folder(tmp_path / "a", {"cat": 1, "dog": 1})
    broken = Path(folder(tmp_path / "b", {"cat": 1, "dog": 1})) / "cat" / "x.png"
    broken.write_bytes(b"not a picture")
    with pytest.raises(UserError, match="not an image") as error:
        data.load("", images=[good, str(tmp_path / "b")], size=8)
    assert "x.png" in error.value.where
    noise = np.random.default_rng(0).integers(0, 255, (32, 32), dtype=np.uint8)
    Image.fromarray(noise).save(broken)
    broken.write_bytes(broken.read_bytes()[:500])  # cut off
    with pytest.raises(UserError, match="not an image"):
        data.load("", images=[good, str(tmp_path / "b")], size=8)
    bad = parquet(tmp_path / "c.parquet", [encoded(1), b"zzz"])
    with pytest.raises(UserError, match="not an image") as error:
        data.load("", images=[good, bad], size=8)
    assert "row 2" in error.value.where


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        (["a"], "fewer than two sites"),
        (["a", "none"], "no file or folder"),
        (["a", "a.txt"], "of no known kind"),
        (["a", "empty"], "no images in folders of classes"),
        (["a", "b/a"], "two sites are called 'a'"),
    ],
    ids=str,
)
def test_mistakes_in_paths(
    paths: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "a", {"cat": 1, "dog": 1})
    folder(tmp_path / "b" / "a", {"cat": 1, "dog": 1})
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match=told) as error:
        data.load("", images=paths, size=8)
    assert (error.value.exit_code == EXIT_DATA_MISSING) == ("none" in paths)


def test_a_parquet_column_that_is_not_there_is_told_with_the_nearest(tmp_path: Path) -> None:
    paths = [parquet(tmp_path / "a.parquet"), parquet(tmp_path / "b.parquet")]
    with pytest.raises(UserError, match="no column 'picture'"):
        data.load("", images=paths, size=8, image="picture")
    struct = [{"bytes": encoded(3), "path": "x"}, {"bytes": encoded(4), "path": "y"}]
    paths[1] = parquet(tmp_path / "b.parquet", struct)  # as many public sets have them
    assert data.load("", images=paths, size=8).x[-1].max() == 4


def test_public_images_of_ones_own_have_a_fixed_order_and_no_labels(tmp_path: Path) -> None:
    path = tmp_path / "public"
    for number in (2, 10, 1):
        picture(path / f"{number:02}.png", (number, 0, 0))
    picture(path / "deeper" / "5.JPG".lower(), (90, 0, 0))
    x = unlabelled(path, SHAPE)
    assert x[:3, 0, 0, 0].tolist() == [1, 2, 10]
    assert len(x) == 4
    like = data.load("", images=[folder(tmp_path / n, {"c": 1, "d": 1}) for n in "ab"], size=8)
    made, again = (
        public(PublicOptions(images=str(path), rows=4), like, "global", 0, data.load)
        for _ in range(2)
    )
    assert made.x.shape == (4, *SHAPE)
    assert made.fingerprint == again.fingerprint
    with pytest.raises(UserError, match="has 4 images to draw from, not 5000"):
        public(PublicOptions(images=str(path)), like, "global", 0, data.load)
    assert len(unlabelled(Path(npz(tmp_path / "p.npz")), SHAPE)) == 6
    assert len(unlabelled(Path(parquet(tmp_path / "p.parquet")), SHAPE)) == 4
    with pytest.raises(UserError, match="no images here"):
        unlabelled(Path(folder(tmp_path / "none", {"x": 0})), SHAPE)


def test_sites_with_folders_of_their_own_learn_from_each_other(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        draws = np.random.default_rng(number)
        x = draws.integers(0, 60, (60, 8, 8, 3), dtype=np.uint8)
        x[::2, :4] += 150 + 20 * number  # a bright upper half, or a bright lower one
        x[1::2, 4:] += 150 + 20 * number
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.arange(60) % 2)
    np.savez(tmp_path / "public.npz", x=x)
    paths = [str(tmp_path / f"{name}.npz") for name in "ab"]
    config = {
        "name": "own",
        "rounds": 1,
        "data": {"images": paths, "size": 8},
        "public": {"images": str(tmp_path / "public.npz"), "rows": 32},
        "models": ["cnn", "cnn-plain"],
        "method": {"name": "fccl", "pretrain_epochs": 8, "epochs": 4, "batch": 8, "rate": 0.01,
                   "public_batch": 32},
    }  # fmt: skip
    execute(resolve(config, "test"), tmp_path / "run", local_engine)
    run = Run(tmp_path / "run")
    assert run.facts["tasks"] == ["a", "b"]
    assert run.facts["public"]["name"] == "own images, public.npz"
    assert run.metrics["fccl"]["intra_accuracy"] > 0.8


@pytest.mark.parametrize("split", ["rows", "classes"])
def test_images_of_two_sites_are_never_dealt_to_one_client(split: str, tmp_path: Path) -> None:
    paths = [npz(tmp_path / f"{name}.npz", rows=40) for name in ("basel", "bern")]
    own = {"images": paths, "size": 8}
    config = resolve({"method": "fedavg", "data": own, "scenario": {"split": split}}, "test")
    with pytest.raises(UserError, match=f"with split = '{split}' client .* several sites") as error:
        parts(config)
    assert "'sites'" in str(error.value.remedy)


def test_fedavg_on_own_images_takes_their_folders_as_sites(tmp_path: Path) -> None:
    paths = [folder(tmp_path / name, {"cat": 8, "dog": 8}) for name in "abcd"]
    config = resolve({"method": "fedavg", "data": {"images": paths, "size": 8}}, "test")
    assert config.split == "domains"
    scenario = parts(config).scenario
    assert len(scenario.clients) == 4  # not rows that are dealt to three
    chosen = {"images": paths, "size": 8}
    rows = resolve({"method": "fedavg", "data": chosen, "scenario": {"split": "rows"}}, "test")
    assert rows.split == "rows"


def test_inspect_lists_every_image_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [folder(tmp_path / name, {"cat": 4, "dog": 4}) for name in "ab"]
    broken = [tmp_path / "a/cat/00.png", tmp_path / "a/dog/01.png", tmp_path / "b/cat/03.png"]
    for path in broken:
        path.write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('method = "fedavg"\ndata = { images = ["a", "b"], size = 8 }\n')
    monkeypatch.setattr(sys, "argv", ["atoll", "inspect", "run.toml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == EXIT_DATA_MISSING
    shown, error = capsys.readouterr()
    for path in broken:
        assert str(path.relative_to(tmp_path)) in shown
    assert "3 image files cannot be read" in error
    for path in broken:
        path.unlink()
    assert broken_images(paths) == []
    cli.main()
    assert "cat: 3, dog: 3" in capsys.readouterr().out


def test_inspect_shows_the_sizes_in_the_files_of_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for number in range(8):
        pixels = draw.integers(0, 256, (10 + number // 2, 12, 3), dtype=np.uint8)
        path = Path("a", "cat" if number % 2 else "dog", f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    grey = draw.integers(0, 256, (8, 20, 24), dtype=np.uint8)
    np.savez("b.npz", x=grey, y=np.array(["cat", "dog"] * 4))
    parquet(Path("c.parquet"), [encoded(value) for value in range(8)])
    images = '["a", "b.npz", "c.parquet"]'
    Path("run.toml").write_text(f'method = "fedavg"\ndata = {{ images = {images}, size = 8 }}\n')
    monkeypatch.setattr(sys, "argv", ["atoll", "inspect", "run.toml"])
    cli.main()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    sizes = "10 x 12 x 3: 2, 11 x 12 x 3: 2, 12 x 12 x 3: 2, and 1 more"
    assert f"a {sizes}" in lines
    assert "b 20 x 24 x 1: 8" in lines
    assert "c 8 x 8 x 3: 8" in lines

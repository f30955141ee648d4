"""The user's own images: a folder, an npz file or a Parquet file for each site.

A folder has one folder of PNG, JPEG, ... for each class, or `train` and `test` with these in them;
images in `val` beside them are also training images, as a run draws its own validation rows.
An npz file has `x` and `y`, or x_train, y_train, x_test, y_test: images uint8 as N x H x W or
N x H x W x 3, and, for classes that have names, `classes`. A Parquet file has a column of encoded
images and one of labels. All images are brought to one size and number of channels.
"""

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import AtLeastOne, nearest
from atoll.data.dataset import OWN_IMAGES, Dataset
from atoll.data.own.spellings import same_classes
from atoll.data.pictures import fitted
from atoll.data.sources.fetch import own

__all__ = [
    "ENDINGS",
    "Shape",
    "broken_images",
    "file_sizes",
    "image_files",
    "picture",
    "some_images",
    "unlabelled",
]

Array = np.ndarray[Any, Any]
Shape = tuple[int, int, int]
ENDINGS: Final = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
VALIDATION: Final = ("val", "valid", "validation")
KINDS: Final = "a folder of images, an .npz or a .parquet file"


@dataclass(frozen=True)
class _SiteImages:
    """The images of one site."""

    x: Array  # (rows, channels, height, width) uint8
    labels: list[str]
    test: Array | None  # (rows,) bool, if the site has its own train/test split
    classes: tuple[str, ...]  # all named classes, with or without rows
    names: tuple[str, ...] = ()  # file names, if each image is a file


def image_files(
    images: tuple[str, ...] = (),
    size: AtLeastOne = 32,
    channels: AtLeastOne = 3,
    image: str = "image",
    label: str = "label",
    classes: tuple[str, ...] = (),
) -> Dataset:
    """Load own images: a folder, npz or Parquet file for each site, all with the same classes."""
    if len(images) < 2:
        remedy = "write images = ['scanner-a', 'scanner-b.npz'], one for each site"
        raise UserError("fewer than two sites", "data.images", remedy)
    if channels not in (1, 3):
        raise UserError(f"images of {channels} channels", "data.channels", "use 1 or 3")
    paths, shape = [Path(path) for path in images], (channels, size, size)
    names = _names(paths)
    sites = [_site(path, shape, (image, label)) for path in paths]
    all_classes = classes or _agreed(paths, sites)
    parted = any(site.test is not None for site in sites)
    for path, site in zip(paths, sites, strict=True):
        _refuse_site(path, site, all_classes, parted)
    place = {name: number for number, name in enumerate(all_classes)}
    tests = [site.test for site in sites if site.test is not None]
    return Dataset(
        OWN_IMAGES,
        "image",
        np.concatenate([site.x for site in sites]),
        np.array([place[name] for site in sites for name in site.labels], dtype=np.int64),
        (),
        tuple(all_classes),
        "own files: " + ", ".join(path.name for path in paths),
        test=np.concatenate(tests) if tests else None,
        group=np.repeat(np.arange(len(sites)), [len(site.labels) for site in sites]),
        groups=tuple(names),
    )


def _refuse_site(path: Path, site: _SiteImages, classes: Sequence[str], parted: bool) -> None:
    """Refuse an unknown class, and test images at only some sites."""
    for name in site.labels:
        if name not in classes:
            what = f"class '{name[:80]}' is not among the {len(classes)} classes"
            raise UserError(what, str(path), nearest(name, classes))
    if parted and site.test is None:
        what = "some sites have test images and this one has none"
        raise UserError(what, str(path), "split the images of all sites or of none")


def broken_images(images: Sequence[str]) -> list[tuple[str, str]]:
    """The files in folders of images that cannot be read, each with the reason."""
    broken = []
    for folder in map(Path, images):
        for path in _below(folder) if folder.is_dir() else ():
            try:
                picture(path, lambda p=path: p, (1, 1, 1))  # type: ignore[misc]
            except UserError as error:
                broken.append((str(path), error.what))
    return broken


def file_sizes(path: Path, image: str = "image") -> Counter[str]:
    """The images of a site by height, width and channels, before resizing."""
    from PIL import Image  # noqa: PLC0415 (few runs need it)

    if path.suffix == ".npz":
        with _arrays(path) as archive:
            arrays = [archive[name] for name in ("x", "x_train", "x_test") if name in archive]
        return Counter(_size(*x.shape[1:]) for x in arrays for _ in range(len(x)))
    sources: list[Any] = _below(path) if path.is_dir() else []
    if not path.is_dir():
        cells = _column(path, image)
        sources = [io.BytesIO(c["bytes"] if isinstance(c, dict) else c) for c in cells]
    sizes = Counter[str]()
    for source in sources:
        with Image.open(source) as opened:  # reads only the header
            channels = 3 if opened.mode == "P" else len(opened.getbands())  # P: a palette
            sizes[_size(opened.height, opened.width, channels)] += 1
    return sizes


def _size(height: int, width: int, channels: int = 1) -> str:
    return f"{height} x {width} x {channels}"


def unlabelled(path: Path, shape: Shape, image: str = "image") -> Array:
    """All images of a folder (recursively), npz or Parquet file, in a fixed order."""
    _present(path)
    if path.is_dir():
        return _pictures(path, _below(path), shape)
    if path.suffix == ".npz":
        with _arrays(path) as arrays:
            key = next((k for k in ("x", "x_train") if k in arrays), "")
            if not key:
                raise _lacking(path, "x or x_train", arrays)
            return fitted(_channels_first(path, arrays[key]), shape)
    return _encoded(path, _column(path, image), shape)


def some_images(
    path: Path, shape: Shape, image: str, label: str
) -> tuple[Array, list[str], list[str] | None]:
    """Read images with or without labels: the images, their names, their labels.

    Images of a site's own file are in the order in which a run reads that file.
    """
    _present(path)
    if path.is_dir():
        loose = [p for p in path.iterdir() if p.suffix.lower() in ENDINGS and p.is_file()]
        if not loose and any(_shown(child) for child in path.iterdir()):
            site = _folder(path, shape)
            return site.x, list(site.names), site.labels
        paths = _below(path)
        return _pictures(path, paths, shape), [p.relative_to(path).as_posix() for p in paths], None
    labels: list[str] | None = None
    if path.suffix == ".npz":
        with _arrays(path) as arrays:
            columns = {*arrays}
        if {"x", "y"} <= columns or "y_train" in columns:
            site = _npz(path, shape)
            x, labels = site.x, site.labels
        else:
            x = unlabelled(path, shape)
    else:
        x, columns = unlabelled(path, shape, image), _columns(path)
        if label in columns:
            labels = [str(value) for value in _column(path, label)]
    return x, [str(number) for number in range(1, len(x) + 1)], labels


def _names(paths: Sequence[Path]) -> list[str]:
    """Unique names of sites, from the names of their files."""
    names = [path.stem if path.suffix in (".npz", ".parquet") else path.name for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two sites are called '{name}'", "data.images", "rename one of them")
    return names


def _agreed(paths: Sequence[Path], sites: Sequence[_SiteImages]) -> tuple[str, ...]:
    """The classes, which must be equal at all sites: they are the outputs of the networks."""
    first = sites[0].classes
    for path, site in zip(paths[1:], sites[1:], strict=True):
        other = sorted({*first} ^ {*site.classes})
        if other:
            _refuse_spellings(path, first, site.classes)
            what = f"its classes are others than those of {paths[0].name}: {', '.join(other[:10])}"
            remedy = "use the same names, make empty folders, or list all classes in data.classes"
            raise UserError(what, str(path), remedy)
    return tuple(first)


def _refuse_spellings(path: Path, classes: Sequence[str], others: Sequence[str]) -> None:
    """Refuse names of classes that differ only in case or punctuation."""
    counts = {"one": dict.fromkeys(classes, 1), "other": dict.fromkeys(others, 1)}
    for one, usual in same_classes(counts).items():
        what = f"the classes '{usual}' and '{one}' look like the same class"
        raise UserError(what, str(path), "give the class one name at all sites")


def _present(path: Path) -> None:
    if not path.exists():
        remedy = "fix the path; it is relative to the folder in which you start the command"
        raise UserError(f"no file or folder '{path}'", "images", remedy, EXIT_DATA_MISSING)
    if not path.is_dir() and path.suffix not in (".npz", ".parquet"):
        raise UserError(f"'{path}' is of no known kind", "images", f"give {KINDS}")


def _site(path: Path, shape: Shape, columns: tuple[str, str]) -> _SiteImages:
    _present(path)
    if path.is_dir():
        return _folder(path, shape)
    return _npz(path, shape) if path.suffix == ".npz" else _parquet(path, shape, columns)


def _folder(path: Path, shape: Shape) -> _SiteImages:
    """Read a folder per class; or train and test, each with these."""
    parts = _parts(path)
    parted = len(parts) > 1 and parts[-1].name.lower() == "test"
    labels, pictures, counts, classes = list[str](), list[Path](), list[int](), set[str]()
    for part in parts:
        before = len(pictures)
        for kind in sorted(child for child in part.iterdir() if _shown(child)):
            images = _below(kind)
            classes.add(kind.name)
            pictures += images
            labels += [kind.name] * len(images)
        counts.append(len(pictures) - before)
    if not pictures:
        remedy = "make a folder for each class and put its PNG or JPEG files there"
        raise UserError("no images in folders of classes", str(path), remedy)
    marks = [parted and part is parts[-1] for part in parts]
    test = np.repeat(marks, counts) if parted else None
    names = tuple(p.relative_to(path).as_posix() for p in pictures)
    return _SiteImages(
        _pictures(path, pictures, shape), labels, test, tuple(sorted(classes)), names
    )


def _parts(path: Path) -> list[Path]:
    """The folders that contain folders of classes: this one; or train, validation and last test."""
    inside = {child.name.lower(): child for child in sorted(path.iterdir()) if _shown(child)}
    if len(inside) < 2 or not {*inside} <= {"train", "test", *VALIDATION}:
        return [path]
    if "train" not in inside:
        what = f"folders {' and '.join(inside)} without one called train"
        raise UserError(what, str(path), "name it train, or give classes other names")
    return [inside[name] for name in ("train", *VALIDATION, "test") if name in inside]


def _shown(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _below(path: Path) -> list[Path]:
    """The images in a folder and below, sorted by name."""
    paths = [p for p in path.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file()]
    return sorted(paths, key=lambda p: p.relative_to(path).parts)


def _pictures(folder: Path, paths: Sequence[Path], shape: Shape) -> Array:
    if not paths:
        raise UserError("no images here", str(folder), f"give {KINDS}; known: {' '.join(ENDINGS)}")
    return np.concatenate([picture(path, lambda p=path: p, shape) for path in paths])  # type: ignore[misc]


def _encoded(path: Path, values: Sequence[Any], shape: Shape) -> Array:
    """Encoded images of a column: bytes, or a struct with them."""
    images = []
    for number, value in enumerate(values, 1):
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise UserError(
                f"row {number} has no encoded image", str(path), "name the right column"
            )
        where = path.with_name(f"{path.name}, row {number}")
        images.append(picture(where, lambda c=content: io.BytesIO(c), shape))  # type: ignore[misc]
    return np.concatenate(images)


def picture(where: Path, source: Callable[[], Any], shape: Shape) -> Array:
    """One image as (1, channels, height, width), rotated by its EXIF orientation."""
    from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415 (few runs need it)

    try:
        with Image.open(source()) as opened:
            upright = ImageOps.exif_transpose(opened)
            grey = upright.mode == "F" or upright.mode.startswith("I")
            pixels = np.asarray(upright if grey else upright.convert("RGB"))
            wide = upright.mode == "I"  # 32 bits a pixel; other modes with an I have 16
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        words = " ".join(str(error).split())[:120]
        remedy = "export it again from its source, or leave it out"
        raise UserError(f"not an image that can be read: {words}", str(where), remedy) from error
    bytes_ = (_to_bytes(where, pixels, wide)[:, :, None] if grey else pixels).transpose(2, 0, 1)
    return fitted(np.ascontiguousarray(bytes_[None]), shape)


def _to_bytes(where: Path, pixels: Array, wide: bool) -> Array:
    """Scale grey values of more than 8 bits to bytes: from 65,535 as in scanners, or from 255."""
    if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 65_535:
        what = f"pixels of {pixels.dtype} from {pixels.min():g} to {pixels.max():g}"
        remedy = "write the image with 8 or 16 bits a pixel, from 0 to 255 or from 0 to 65,535"
        raise UserError(what, str(where), remedy, EXIT_DATA_MISSING)
    if wide and pixels.max() < 256:
        return pixels.astype(np.uint8)
    return np.round(pixels / 257).astype(np.uint8)


@contextmanager
def _arrays(path: Path) -> Iterator[Any]:
    """The arrays of an npz file by name, without pickle."""
    with (
        own(path, "an npz file of plain arrays"),
        path.open("rb") as stream,
        np.load(stream, allow_pickle=False) as arrays,
    ):
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise TypeError  # a single array, under the name of several
        yield arrays


def _lacking(path: Path, name: str, arrays: Any) -> UserError:
    what = f"no array {name}, only {', '.join(sorted(arrays)) or 'nothing'}"
    remedy = "write it with np.savez(file, x=images, y=labels)"
    return UserError(what, str(path), remedy, EXIT_DATA_MISSING)


def _npz(path: Path, shape: Shape) -> _SiteImages:
    with _arrays(path) as content:
        parted = "x_train" in content
        keys = ("x_train", "y_train", "x_test", "y_test") if parted else ("x", "y")
        for key in keys:
            if key not in content:
                raise _lacking(path, key, content)
        arrays = [content[key] for key in keys]
        names = [str(name) for name in content["classes"].ravel()] if "classes" in content else []
    pictures, labels = [_channels_first(path, x) for x in arrays[::2]], list[str]()
    for x, y in zip(pictures, arrays[1::2], strict=True):
        if y.shape != x.shape[:1] or not len(y):
            what = f"{len(x)} images and labels of shape {y.shape}"
            raise UserError(what, str(path), "give each image one label", EXIT_DATA_MISSING)
        labels += _named(path, y, names)
    x = np.concatenate([fitted(x, shape) for x in pictures])
    test = np.repeat([False, True], [len(y) for y in arrays[1::2]]) if parted else None
    return _SiteImages(x, labels, test, tuple(names) or tuple(_sorted(labels)))


def _named(path: Path, y: Array, names: Sequence[str]) -> list[str]:
    if not names:
        return [str(value) for value in y.tolist()]
    if not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= len(names):
        what = f"labels that are no numbers of the {len(names)} classes of the file"
        remedy = f"write labels from 0 to {len(names) - 1}, or leave out classes"
        raise UserError(what, str(path), remedy, EXIT_DATA_MISSING)
    return [names[value] for value in y.tolist()]


def _channels_first(path: Path, x: Array) -> Array:
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3)):
        what = f"images of {x.dtype} and shape {x.shape[1:]}, not uint8 H x W or H x W x 3"
        remedy = "write them as uint8 from 0 to 255: those from 0 to 1 are multiplied by 255"
        raise UserError(what, str(path), remedy, EXIT_DATA_MISSING)
    return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def _parquet(path: Path, shape: Shape, columns: tuple[str, str]) -> _SiteImages:
    pictures, labels = (_column(path, name) for name in columns)
    if None in labels:
        row = labels.index(None) + 1
        raise UserError(f"row {row} has no label", str(path), "fill it or leave the row out")
    classes = [str(value) for value in labels]
    return _SiteImages(_encoded(path, pictures, shape), classes, None, tuple(_sorted(classes)))


def _columns(path: Path) -> set[str]:
    with own(path, "a Parquet file"):
        return {*pyarrow.parquet.ParquetFile(path).schema_arrow.names}


def _column(path: Path, name: str) -> list[Any]:
    columns = sorted(_columns(path))
    if name not in columns:
        raise UserError(f"no column '{name}'", str(path), nearest(name, columns))
    with own(path, "a Parquet file"):
        values: list[Any] = pyarrow.parquet.read_table(path, columns=[name]).column(0).to_pylist()
    if not values:
        raise UserError("a file without rows", str(path), "leave it out, or fill it")
    return values


def _sorted(labels: Sequence[str]) -> list[str]:
    """Sort class names, numbers numerically."""
    names = set(labels)
    whole = all(name.lstrip("-").isdigit() for name in names)
    return sorted(names, key=int if whole else None)

"""Tables: one function for each data set; registry.toml lists their files and sources."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from atoll.core.options import AtLeastOne, NotNegative
from atoll.core.rng import Stream
from atoll.data.dataset import Dataset
from atoll.data.sources.fetch import obtain, reading, refused, registry
from atoll.data.sources.made_up import made_up_numbers

__all__ = [
    "adult",
    "aloi",
    "breast_cancer",
    "covertype",
    "digits_table",
    "helena",
    "jannis",
    "sensorless",
    "synthetic_table",
    "wine",
]

Array = np.ndarray[Any, Any]

KIND = "table"
FILES = registry(KIND)
COVERTYPE_COLUMNS = (
    *("Elevation", "Aspect", "Slope"),
    *("Horizontal_Distance_To_Hydrology", "Vertical_Distance_To_Hydrology"),
    *("Horizontal_Distance_To_Roadways", "Hillshade_9am", "Hillshade_Noon", "Hillshade_3pm"),
    "Horizontal_Distance_To_Fire_Points",
    *(f"Wilderness_Area{number}" for number in range(1, 5)),
    *(f"Soil_Type{number}" for number in range(1, 41)),
)
COVERTYPE_CLASSES = (
    *("Spruce/Fir", "Lodgepole Pine", "Ponderosa Pine", "Cottonwood/Willow"),
    *("Aspen", "Douglas-fir", "Krummholz"),
)
COVERTYPE_ROWS = 11_340 + 3_780  # the two balanced parts that open the UCI file
ADULT_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status"),
    *("occupation", "relationship", "race", "sex", "capital-gain", "capital-loss"),
    *("hours-per-week", "native-country", "income"),
)
ADULT_TRAIN_ROWS = 32_561


def covertype() -> Dataset:
    """Seven forest cover types, 54 columns, 2,160 rows of each (UCI).

    `covertype.parquet` is the Kaggle training file; the UCI file gives its first 15,120 rows,
    which are balanced too but need not come in the same order.
    """
    (path,) = obtain("covertype", FILES["covertype"])
    with reading(path):
        table = _parquet(path) if path.suffix == ".parquet" else _covtype(path)
    with reading(path):
        x = _numbers(table.select(COVERTYPE_COLUMNS))
        y, _ = _labels(table["Cover_Type"])
    _expect(path, x, y, (15_120, 54, 7))
    if np.bincount(y).tolist() != [2_160] * 7:
        raise refused(path, "does not hold 2,160 rows of each class")
    source = "UCI Covertype (Blackard, Dean 1999), CC BY 4.0"
    return Dataset("covertype", "table", x, y, COVERTYPE_COLUMNS, COVERTYPE_CLASSES, source)


def adult() -> Dataset:
    """Income above 50K or not, 14 columns (108 after one-hot), official test rows (UCI)."""
    paths = obtain("adult", FILES["adult"])
    path = paths[0]
    with reading(path):
        table = _parquet(path) if path.suffix == ".parquet" else _adult(paths)
        x, columns = _one_hot(table.drop_columns(["income", "split"]))
        y, classes = _labels(table["income"])
        test = np.asarray(table["split"].to_pylist()) == "test"
    _expect(path, x, y, (48_842, 108, 2))
    if int(test.sum()) != 48_842 - ADULT_TRAIN_ROWS:
        raise refused(path, f"holds {int(test.sum()):,} test rows, expected 16,281")
    source = "UCI Adult (Becker, Kohavi 1996), CC BY 4.0"
    return Dataset("adult", "table", x, y, columns, classes, source, test=test)


def jannis() -> Dataset:
    """ChaLearn AutoML set 'jannis', 54 columns, 4 classes, 83,733 rows (OpenML 41168)."""
    (path,) = obtain("jannis", FILES["jannis"])
    rows = 30_145 if "subset" in path.name else 83_733
    source = "OpenML 41168, ChaLearn AutoML challenge, licence not stated"
    return _by_class("jannis", path, (rows, 54, 4), 83_733, source)


def helena() -> Dataset:
    """ChaLearn AutoML set 'helena', 27 columns, 100 classes, 65,196 rows (OpenML 41169)."""
    (path,) = obtain("helena", FILES["helena"])
    source = "OpenML 41169, ChaLearn AutoML challenge, licence not stated"
    return _by_class("helena", path, (65_196, 27, 100), 65_196, source)


def sensorless() -> Dataset:
    """Faults of an electric drive, 48 columns, 11 classes, 58,509 rows (UCI)."""
    (path,) = obtain("sensorless", FILES["sensorless"])
    rows = 2_200 if "subset" in path.name else 58_509
    source = "UCI Sensorless Drive Diagnosis (Bator 2013), CC BY 4.0"
    return _by_class("sensorless", path, (rows, 48, 11), 58_509, source)


def aloi() -> Dataset:
    """Colour histograms of 1,000 objects, 128 columns, 108,000 rows (LIBSVM)."""
    (path,) = obtain("aloi", FILES["aloi"])
    with reading(path):
        x, y, classes = _libsvm(path, 128)
    _expect(path, x, y, (108_000, 128, 1_000))
    columns = tuple(f"x{number}" for number in range(1, 129))
    source = "LIBSVM aloi (Geusebroek et al. 2005; Rocha, Goldenstein 2014), licence not stated"
    return Dataset("aloi", "table", x, y, columns, classes, source)


def breast_cancer() -> Dataset:
    """Wisconsin diagnostic breast cancer, 569 rows, 30 columns, 2 classes (in scikit-learn)."""
    return _embedded("breast-cancer", "load_breast_cancer", "UCI (Wolberg et al. 1995), CC BY 4.0")


def wine() -> Dataset:
    """Three wines by chemical analysis, 178 rows, 13 columns (in scikit-learn)."""
    return _embedded("wine", "load_wine", "UCI (Aeberhard, Forina 1991), CC BY 4.0")


def digits_table() -> Dataset:
    """Handwritten digits as 64 columns with values 0 to 16, 1,797 rows (in scikit-learn)."""
    return _embedded("digits-table", "load_digits", "UCI (Alpaydin, Kaynak 1998), CC BY 4.0")


def synthetic_table(  # noqa: PLR0913 - the options of a data set
    rows: AtLeastOne = 2_000,
    columns: AtLeastOne = 16,
    classes: AtLeastOne = 4,
    rule: Literal["mixed", "common", "unique", "interaction"] = "mixed",
    noise: NotNegative = 0.5,
    seed: int = 0,
    *,
    task: Literal["classification", "regression"] = "classification",
) -> Dataset:
    """Made up: each half of the columns hides a code, and a rule makes the label of the two codes.

    Every column of a half shows that half's code, so any part of it will do. `common` is the code
    of the first half, `unique` that of the second, `interaction` their sum modulo the classes (one
    half alone says nothing), `mixed` in turn one of the three, depending on both codes. For
    regression the label is a number around that class.
    """
    stream = Stream.of(seed, "synthetic-table", rows, columns, classes)
    codes = stream.child("codes").numpy().integers(classes, size=(2, rows))
    centres = stream.child("centres").numpy().normal(size=(classes, columns))
    half = (columns + 1) // 2
    x = np.hstack([centres[codes[0], :half], centres[codes[1], half:]])
    x += noise * stream.child("noise").numpy().normal(size=x.shape)
    names = tuple(f"common{number}" for number in range(half))
    names += tuple(f"unique{number}" for number in range(columns - half))
    y = _ruled(rule, codes[0], codes[1], classes)
    number = task == "regression"
    return Dataset(
        "synthetic-table",
        "table",
        x.astype(np.float32),
        made_up_numbers(y, stream) if number else y,
        names,
        ("number",) if number else tuple(f"class {number}" for number in range(classes)),
        f"made up, rule {rule}, seed {seed}",
    )


def _ruled(rule: str, common: Array, unique: Array, classes: int) -> Array:
    """The label of each row by its two codes."""
    both = (common + unique) % classes
    answers = {"common": common, "unique": unique, "interaction": both}
    if rule in answers:
        return answers[rule].astype(np.int64)
    turn = (common + 2 * unique) % 3
    chosen: Array = np.choose(turn, [common, unique, both])
    return chosen.astype(np.int64)


def _by_class(
    name: str, path: Path, shape: tuple[int, int, int], complete: int, source: str
) -> Dataset:
    """A table of numbers with the label in the column `class`."""
    with reading(path):
        table = _sensorless(path) if path.suffix == ".txt" else _parquet(path)
        y, classes = _labels(table["class"])
        others = [column for column in table.column_names if column not in ("class", "rtdl_split")]
        x = _numbers(table.select(others))
    _expect(path, x, y, shape)
    partial_words = "" if len(x) == complete else f"{len(x):,} of {complete:,} rows"
    return Dataset(name, "table", x, y, tuple(others), classes, source, partial_words)


def _embedded(name: str, loader: str, origin: str) -> Dataset:
    """A table that scikit-learn carries inside its wheel."""
    from sklearn import datasets  # noqa: PLC0415 (takes seconds, and few runs need it)

    bunch = getattr(datasets, loader)()
    return Dataset(
        name,
        "table",
        np.ascontiguousarray(bunch.data, dtype=np.float32),
        bunch.target.astype(np.int64),
        tuple(str(column) for column in bunch.feature_names),
        tuple(str(label) for label in bunch.target_names),
        f"in scikit-learn, from {origin}",
    )


def _expect(path: Path, x: Array, y: Array, shape: tuple[int, int, int]) -> None:
    """Refuse a table with another number of rows, columns or classes, or with NaN."""
    actual = (*x.shape, len(np.unique(y)))
    if actual != shape:
        words = "{:,} rows, {:,} columns, {:,} classes"
        raise refused(path, f"holds {words.format(*actual)}, expected {words.format(*shape)}")
    if not np.isfinite(x).all():
        raise refused(path, "holds numbers that are missing or not finite")


def _parquet(path: Path) -> pa.Table:
    return pyarrow.parquet.read_table(path)


def _covtype(path: Path) -> pa.Table:
    """The balanced rows that open UCI's covtype.data.gz."""
    names = pyarrow.csv.ReadOptions(column_names=[*COVERTYPE_COLUMNS, "Cover_Type"])
    return pyarrow.csv.read_csv(path, read_options=names).slice(0, COVERTYPE_ROWS)


def _adult(paths: Sequence[Path]) -> pa.Table:
    """UCI's adult.data and adult.test as one table with a column `split`."""
    return pa.concat_tables(
        _adult_part(path, split) for path, split in zip(paths, ("train", "test"), strict=True)
    )


def _adult_part(path: Path, split: str) -> pa.Table:
    with reading(path):
        # The test file opens with a remark, ends its labels with a full stop, and both files have
        # a blank after each comma.
        lines = path.read_bytes().replace(b", ", b",").splitlines()
        text = b"\n".join(line.strip().rstrip(b".") for line in lines if not line.startswith(b"|"))
        names = pyarrow.csv.ReadOptions(column_names=ADULT_COLUMNS)
        table = pyarrow.csv.read_csv(BytesIO(text), read_options=names)
    return table.append_column("split", pa.array([split] * len(table)))


def _sensorless(path: Path) -> pa.Table:
    """UCI's text: 48 numbers and the class, separated by blanks."""
    names = [*(f"x{number}" for number in range(1, 49)), "class"]
    return pyarrow.csv.read_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(column_names=names),
        parse_options=pyarrow.csv.ParseOptions(delimiter=" "),
    )


def _libsvm(path: Path, columns: int) -> tuple[Array, Array, tuple[str, ...]]:
    from sklearn.datasets import load_svmlight_file  # noqa: PLC0415 (takes seconds)

    x, labels = load_svmlight_file(str(path), n_features=columns, dtype=np.float32)
    y, classes = _labels(pa.chunked_array([pa.array(labels)]))
    return np.ascontiguousarray(x.toarray()), y, classes


def _numbers(table: pa.Table) -> Array:
    """All columns as (rows, columns) float32; a missing number becomes NaN."""
    columns = [column.cast(pa.float32()).to_numpy() for column in table.itercolumns()]
    return np.ascontiguousarray(np.stack(columns, axis=1))


def _labels(column: pa.ChunkedArray) -> tuple[Array, tuple[str, ...]]:
    """Each row's place among the sorted labels, and the labels: 9 comes before 10."""
    if pa.types.is_floating(column.type):
        column = column.cast(pa.int64())
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.null_count:
        raise ValueError("a label is missing")
    text = np.asarray(column.cast(pa.string()).to_pylist())
    classes = sorted(set(text.tolist()), key=_natural)
    places = {label: place for place, label in enumerate(classes)}
    return np.array([places[label] for label in text.tolist()], dtype=np.int64), tuple(classes)


def _natural(label: str) -> tuple[int, str]:
    return (int(label), "") if label.isdecimal() else (-1, label)


def _one_hot(table: pa.Table) -> tuple[Array, tuple[str, ...]]:
    """Numbers as they are, each other column as one column a level; '?' is a level of its own."""
    blocks: list[Array] = []
    names: list[str] = []
    for name in table.column_names:
        column = table[name]
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            blocks.append(_numbers(table.select([name])))
            names.append(name)
            continue
        text = np.asarray(pc.fill_null(column.cast(pa.string()), "?").to_pylist())
        levels = np.unique(text)
        blocks.append((text[:, None] == levels).astype(np.float32))
        names.extend(f"{name}={level}" for level in levels)
    return np.hstack(blocks), tuple(names)

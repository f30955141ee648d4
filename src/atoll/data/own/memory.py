"""Converts data in memory to tables or images: frames, arrays, torch and Hugging Face datasets."""

import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from atoll.core.errors import UserError

__all__ = [
    "Images",
    "as_table",
    "holds_images",
    "image_column",
    "is_data",
    "read",
    "separate_labels",
]

Array = np.ndarray[Any, Any]
COLOURS = (1, 3)  # supported numbers of channels


@dataclass(frozen=True)
class Images:
    """The images of one site."""

    x: Array  # (rows, height, width) or (rows, height, width, channels) uint8
    y: Array | None  # (rows,) labels

    @property
    def channels(self) -> int:
        """The number of channels of an image."""
        return int(self.x.shape[3]) if self.x.ndim == 4 else 1


def is_data(value: Any) -> bool:
    """Whether a value is data in memory: a frame, arrays (x, y), or a dataset."""
    if isinstance(value, tuple):
        return len(value) == 2 and all(hasattr(one, "__array__") for one in value)
    return _exports_arrow(value) or _of_hugging_face(value) or _of_torch(value)


def separate_labels(value: Any) -> bool:
    """Whether labels are separate from the inputs, so that their column has no name."""
    return isinstance(value, tuple) or _of_torch(value)


def read(value: Any, label: str = "") -> Any:
    """Convert a value to an Arrow table or Images; returns any other value unchanged.

    Of arrays the columns are x0, x1, ..., then `label`.

    >>> read((np.zeros((2, 1)), np.array([0, 1])), "sick").column_names
    ['x0', 'sick']
    >>> read((np.zeros((2, 8, 8), dtype=np.uint8), np.array([0, 1]))).channels
    1
    """
    if _of_hugging_face(value):
        return _named_classes(value)
    if _exports_arrow(value):
        return _plain_table(pa.table(value))
    if _of_torch(value):
        value = _items(value)
    x, y = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not hasattr(x, "__array__"):
        return value
    return _from_arrays(np.asarray(x), None if y is None else np.asarray(y), label)


def as_table(value: Any, label: str = "") -> Any:
    """Like `read`, but raises an error for images."""
    table = read(value, label)
    if isinstance(table, Images):
        what = f"an array of the shape {table.x.shape}"
        raise UserError(what, "data", "give rows and columns")
    return table


def holds_images(value: Any) -> bool:
    """Whether `read` returns images: arrays, or a column of encoded ones."""
    return isinstance(value, Images) or (isinstance(value, pa.Table) and bool(image_column(value)))


def image_column(table: pa.Table) -> str:
    """The first column of encoded images, in the Hugging Face format; empty if there is none."""
    for field in table.schema:
        if pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
            return str(field.name)
    return ""


def _exports_arrow(value: Any) -> bool:
    return hasattr(value, "__arrow_c_stream__")


def _of_hugging_face(value: Any) -> bool:
    """Whether this is a `datasets.Dataset`, by duck typing: the package is not required."""
    return all(hasattr(value, name) for name in ("with_format", "features", "column_names"))


def _of_torch(value: Any) -> bool:
    """Whether this is a `torch.utils.data.Dataset`; if it is, torch is already imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.utils.data.Dataset)


def _items(dataset: Any) -> tuple[Array, Array]:
    """The inputs and labels of a torch Dataset, whose items are pairs of a tensor and a class."""
    if not hasattr(dataset, "__len__"):
        remedy = "give one that has a length, whose items are (tensor, class)"
        raise UserError(f"a {type(dataset).__name__} has no length", "data", remedy)
    items = [dataset[number] for number in range(len(dataset))]
    if not items or any(not isinstance(item, tuple | list) or len(item) != 2 for item in items):
        remedy = "let each item be a pair: a tensor, and its class"
        raise UserError(f"items of a {type(dataset).__name__} are no pairs", "data", remedy)
    shapes = {tuple(np.shape(x)) for x, _ in items}
    if len(shapes) > 1:
        remedy = "bring all inputs to one shape"
        raise UserError(f"inputs of the shapes {sorted(shapes)[:3]}", "data", remedy)
    labels = [y.item() if hasattr(y, "item") else y for _, y in items]
    return np.stack([np.asarray(x) for x, _ in items]), np.array(labels)


def _from_arrays(x: Array, y: Array | None, label: str) -> Any:
    if x.ndim < 2 or x.ndim > 4 or (y is not None and y.shape != (len(x),)):
        what = f"arrays of the shapes {x.shape} and {None if y is None else y.shape}"
        remedy = "give x with rows and columns, or images, and y with a label a row"
        raise UserError(what, "data", remedy)
    if x.ndim > 2:
        return Images(_pixels(x), y)
    columns = {f"x{number}": x[:, number] for number in range(x.shape[1])}
    return pa.table(columns if y is None else {**columns, label: y})


def _pixels(x: Array) -> Array:
    """Images as bytes with channels last."""
    if x.ndim == 4 and x.shape[3] not in COLOURS and x.shape[1] in COLOURS:
        x = x.transpose(0, 2, 3, 1)
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    if not np.issubdtype(x.dtype, np.floating) or not (x.min() >= 0 and x.max() <= 1):
        what = f"images of {x.dtype} from {x.min()} to {x.max()}"
        raise UserError(what, "data", "give uint8 from 0 to 255, or floats from 0 to 1")
    return np.round(x * 255).astype(np.uint8)


def _named_classes(dataset: Any) -> pa.Table:
    """The table of a dataset of Hugging Face, classes by their names."""
    table = _plain_table(dataset.with_format("arrow")[:])
    for place, name in enumerate(table.column_names):
        classes = getattr(dataset.features[name], "names", None)
        if classes:
            values = [None if i is None else classes[i] for i in table.column(name).to_pylist()]
            table = table.set_column(place, name, pa.array(values, pa.string()))
    return table


def _plain_table(table: pa.Table) -> pa.Table:
    """The columns as in Parquet files, without the index of a pandas DataFrame."""
    about = json.loads((table.schema.metadata or {}).get(b"pandas", b"{}"))
    index = {name for name in about.get("index_columns", []) if isinstance(name, str)}
    fields = [field for field in table.schema if field.name not in index]
    # Parquet files do not support the strings of polars
    plain = pa.schema(
        [f.with_type(pa.string()) if pa.types.is_string_view(f.type) else f for f in fields]
    )
    return table.select(plain.names).cast(plain).replace_schema_metadata(None)

"""Converts data in memory to files of a run: tables to Parquet, images to npz."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from atoll.core.errors import UserError
from atoll.core.record import disk_errors, write_whole
from atoll.data.own.memory import Images, image_column
from atoll.data.own.profiles import site_name

__all__ = ["with_files", "with_images"]


def with_files(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options of `data` with a Parquet file for each table in memory, stored below `folder`.

    `files` may be a dictionary of tables by site: anything that exports Arrow streams, as
    DataFrames of pandas and polars do. Equal tables have equal files.
    """
    files = data.get("files")
    if not isinstance(files, Mapping) or all(isinstance(f, list | tuple) for f in files.values()):
        return dict(data)
    contents = {_file_name(site, ".parquet"): _parquet(site, files[site]) for site in files}
    return {**data, "files": _written(contents, len(files), folder)}


def with_images(
    sites: Mapping[str, Any], options: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """The options of `data` with a file for each site's images in memory, stored below `folder`."""
    contents = {}
    chosen = dict(options)
    for site, images in sites.items():
        if isinstance(images, Images):
            contents[_file_name(site, ".npz")] = _npz(site, images)
            chosen = {"size": max(images.x.shape[1:3]), "channels": images.channels, **chosen}
        elif isinstance(images, pa.Table) and image_column(images):
            contents[_file_name(site, ".parquet")] = _parquet(site, images)
            chosen = {"image": image_column(images), **chosen}
        else:
            what = f"the data of '{site}' are no images, those of other sites are"
            raise UserError(what, "data", "give images for all sites, or for none")
    return {**chosen, "images": _written(contents, len(sites), folder)}


def _file_name(site: Any, ending: str) -> str:
    return site_name(str(site)) + ending


def _written(contents: Mapping[str, bytes], count: int, folder: Path) -> list[str]:
    """Write files to a folder named by their content; returns their paths."""
    if len(contents) < count:
        what = "two sites have names that differ in blanks and signs alone"
        raise UserError(what, "data", "rename one of them")
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(name.encode() + b"\x1f" + contents[name])
    home = folder / digest.hexdigest()[:12]
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in contents.items():
        path = home / name
        if not path.exists():
            write_whole(path, content)
        paths.append(str(path))
    return paths


def _npz(site: Any, images: Images) -> bytes:
    """Images as the bytes of an npz file."""
    if images.y is None:
        raise UserError(f"the images of '{site}' have no labels", "data", "give (x, y)")
    buffer = io.BytesIO()
    np.savez(buffer, x=images.x, y=images.y)
    return buffer.getvalue()


def _parquet(site: Any, table: Any) -> bytes:
    """A table as the bytes of a Parquet file."""
    if not isinstance(table, pa.Table) and not hasattr(table, "__arrow_c_stream__"):
        what = f"the table of '{site}' has the type {type(table).__name__}"
        remedy = "give a DataFrame, an Arrow table, arrays (x, y), a dataset, or a list of files"
        raise UserError(what, "data.files", remedy)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(table), buffer)
    return buffer.getvalue()

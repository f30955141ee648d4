"""Tables in memory: DataFrames of pandas or polars, or Arrow tables, become files of a run."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from atoll.core.errors import UserError
from atoll.core.record import disk_errors, write_whole
from atoll.data.own.profiles import site_name

__all__ = ["with_files"]


def with_files(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options of `data` with a Parquet file for each table in memory, kept below `folder`.

    `files` may be a dictionary of tables by site: anything that exports Arrow streams, as
    DataFrames of pandas and polars do. Equal tables have equal files.
    """
    files = data.get("files")
    if not isinstance(files, Mapping) or all(isinstance(f, list | tuple) for f in files.values()):
        return dict(data)
    contents = {site_name(str(site)): _parquet(site, table) for site, table in files.items()}
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(name.encode() + b"\x1f" + contents[name])
    home = folder / digest.hexdigest()[:12]
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in contents.items():
        path = home / f"{name}.parquet"
        if not path.exists():
            write_whole(path, content)
        paths.append(str(path))
    return {**data, "files": paths}


def _parquet(site: Any, table: Any) -> bytes:
    """A table as the bytes of a Parquet file."""
    if not isinstance(table, pa.Table) and not hasattr(table, "__arrow_c_stream__"):
        what = f"the table of '{site}' is a {type(table).__name__}"
        remedy = "give a DataFrame of pandas 2.2 or polars, an Arrow table, or a list of files"
        raise UserError(what, "data.files", remedy)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(table), buffer)
    return buffer.getvalue()

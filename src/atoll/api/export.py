"""Rows of a result as a table for other libraries."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from atoll.core.errors import EXIT_DATA_MISSING, UserError

__all__ = ["arrow_table", "pandas_frame"]


def arrow_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows with equal keys as an Arrow table."""
    names = list(rows[0]) if rows else []
    return pa.table({name: [row[name] for row in rows] for name in names})


def pandas_frame(table: pa.Table) -> Any:
    """An Arrow table as a pandas DataFrame; an error where pandas is not installed."""
    try:
        import pandas  # type: ignore[import-untyped, import-not-found, unused-ignore] # noqa: F401, PLC0415
    except ImportError as error:
        remedy = "pip install 'atoll[pandas]', or use to_arrow()"
        what = "pandas is not installed"
        raise UserError(what, "to_pandas", remedy, EXIT_DATA_MISSING) from error
    return table.to_pandas()

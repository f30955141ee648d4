"""The first sheet of an Excel file as text, with the optional library python-calamine."""

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

__all__ = ["header", "rows"]


def _cells(path: Path) -> list[list[Any]]:
    """The cells of the first sheet, without empty rows; ImportError without the library."""
    from python_calamine import (  # noqa: PLC0415 - an optional library
        CalamineError,
        CalamineWorkbook,
    )

    try:
        sheet = CalamineWorkbook.from_path(str(path)).get_sheet_by_index(0)
        cells = sheet.to_python(skip_empty_area=True)
    except (CalamineError, OSError, IndexError) as error:
        raise ValueError("not an Excel file, or a damaged one") from error
    return [row for row in cells if any(cell not in ("", None) for cell in row)]


def header(path: Path) -> list[str]:
    """The names of the columns: the first row that is not empty; ValueError if there is none."""
    cells = _cells(path)
    if not cells:
        raise ValueError("the first sheet is empty")
    return [_written(cell) for cell in cells[0]]


def rows(path: Path) -> pa.RecordBatch:
    """All rows below the header, every cell as text."""
    first, *others = _cells(path)
    columns = []
    for place in range(len(first)):
        columns.append(pa.array([_written(row[place]) for row in others], pa.string()))
    return pa.RecordBatch.from_arrays(columns, names=[str(place) for place in range(len(first))])


def _written(cell: Any) -> str:
    """A cell as somebody would write it: 3 and not 3.0, dates as 2024-03-31."""
    if isinstance(cell, datetime.datetime) and cell.time() == datetime.time():
        return cell.date().isoformat()
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 1e15:
        return str(int(cell))
    if isinstance(cell, bool):
        return str(cell).lower()
    return "" if cell is None else str(cell)

"""Reads a CSV, Parquet, Feather or Excel file of the user as batches of text columns.

Reads files in chunks, never whole, except Excel sheets, which have few rows.
"""

import codecs
import csv
import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.data.own import excel

__all__ = [
    "BLOCK", "ENDINGS", "PARQUET", "Sheet", "as_written", "batches", "codec", "line_of", "opened",
    "uneven", "written",
]  # fmt: skip

DELIMITERS = (",", ";", "\t", "|")
TABS = {"tab": "\t", "\\t": "\t"}
OPEN = re.compile(r'(^|[,;\t|])"([^"]|"")*$')  # a header that continues: an unclosed quote
UNEVEN = re.compile(r"CSV parse error: Row #(\d+): Expected (\d+) columns, got (\d+)")
OTHER_KINDS = (  # first bytes of files that are not tables, their type, and the remedy
    (re.compile(rb"%PDF-"), "a PDF", "export it as CSV, Parquet or Excel"),
    (re.compile(rb"\{\\rtf"), "an RTF document", "export it as CSV, Parquet or Excel"),
    (re.compile(rb"(?i)<(html|!doctype html)"), "an HTML page", "save it as CSV or Excel (.xlsx)"),
    (re.compile(rb"<\?xml"), "an XML file", "save it as CSV or Excel (.xlsx)"),
)
ARCHIVES = (  # the same for files with the name of a text file
    (re.compile(rb"PK\x03\x04"), "a ZIP archive", "unpack it; if it is Excel, name it .xlsx"),
    (re.compile(rb"\x1f\x8b"), "a gzip file", "unpack it"),
)
FIRST = 100  # bytes of a file that identify its type; HTML may start with blanks
NAMES = 100  # maximum number of lines of a header
BLOCK = 1 << 23  # bytes of a CSV file per read; a row must fit
ROWS = 1 << 16  # rows of a Parquet file per read
PARQUET, JSON = (".parquet", ".pq"), (".jsonl", ".ndjson", ".json")
FEATHER, EXCEL = (".feather", ".arrow"), (".xlsx", ".xlsm", ".xls", ".xlsb", ".ods")
ENDINGS = (".csv", ".tsv", ".txt", *PARQUET, *FEATHER, *EXCEL)  # of tables
KINDS = "a CSV, TSV, Parquet, Feather or Excel file"


@dataclass(frozen=True)
class Sheet:
    """A file, its format, and its columns."""

    path: Path
    columns: tuple[str, ...]
    delimiter: str  # empty unless CSV
    encoding: str  # empty unless CSV
    stamp: tuple[int, int]  # size and modification time
    site: str = ""  # its site, if the options name it; else the site has the name of the file
    stage: str = ""  # stage of its rows, if each stage has a file
    written: tuple[str, ...] = ()  # names of columns in the file, if they were renamed
    text: tuple[bool, ...] = ()  # whether each column has type text; empty: untyped

    @property
    def text_columns(self) -> frozenset[str]:
        """The columns whose type in the file is text."""
        pairs = zip(self.columns, self.text, strict=True) if self.text else ()
        return frozenset(name for name, text in pairs if text)

    @property
    def comma(self) -> bool:
        """Whether 3,5 can be a number: only if commas do not separate columns."""
        return bool(self.delimiter) and self.delimiter != ","


def refused(what: str, path: Path, remedy: str) -> UserError:
    """The error for a file that cannot be used."""
    return UserError(what, str(path), remedy, EXIT_DATA_MISSING)


def opened(path: Path, delimiter: str = "", encoding: str = "") -> Sheet:
    """Open a file: detect its encoding, its delimiter and the names of its columns."""
    stamp = _stamp(path)
    if stamp[0] == 0:
        raise refused("the file is empty", path, "give a file with a header and rows")
    if path.suffix.lower() in JSON:  # its first line would become the names of columns
        remedy = "give a table; for texts, name their column: atoll init --text, or text = 'body'"
        raise refused("a JSON file is no table", path, remedy)
    _refuse_other_kinds(path)
    kind = path.suffix.lower()
    if kind in EXCEL:
        return Sheet(path, _checked(_excel_columns(path), path), "", "", stamp)
    if kind in (*PARQUET, *FEATHER):
        schema = _schema(path)
        typed = _checked([str(name) for name in schema.names], path)
        text = tuple(_is_text(field.type) for field in schema)
        return Sheet(path, typed, "", "", stamp, text=text)
    delimiter, encoding, header = written(path, delimiter, encoding)
    try:
        names = next(csv.reader(io.StringIO(header, newline=""), delimiter=delimiter), [])
    except csv.Error as error:  # a cell longer than the reader's limit
        remedy = "close the quotes that are open, or give a file with a header"
        raise refused(f"the header cannot be read: {error}", path, remedy) from error
    return Sheet(path, _checked(names, path), delimiter, encoding, stamp)


def _refuse_other_kinds(path: Path) -> None:
    """Refuse a file that is not a table, by its first bytes: some types are text."""
    with path.open("rb") as file:
        first = file.read(FIRST).removeprefix(codecs.BOM_UTF8).lstrip()
    typed = path.suffix.lower() in (*EXCEL, *PARQUET, *FEATHER)
    for signature, kind, remedy in OTHER_KINDS if typed else (*OTHER_KINDS, *ARCHIVES):
        if signature.match(first):
            raise refused(f"this is {kind}, not a table", path, remedy)


def written(path: Path, delimiter: str = "", encoding: str = "") -> tuple[str, str, str]:
    """The delimiter, encoding and header of a CSV file; detects those that are not given."""
    delimiter, encoding = _sign(delimiter), encoding or _encoding(path)
    header = _header(path, encoding)
    return delimiter or _delimiter(header), encoding, header


def _sign(delimiter: str) -> str:
    """The given delimiter; a tab may be written as a word."""
    sign = TABS.get(delimiter, delimiter)
    if len(sign) > 1 or not sign.isascii() or sign in ('"', "\n", "\r"):
        what = f"delimiter = '{delimiter}' cannot separate columns"
        raise UserError(
            what, "[data]", "give one character: ',', ';', '|' or 'tab'; or leave it out"
        )
    return sign


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
        if not path.is_file() or not os.access(path, os.R_OK):
            raise refused("not a file that can be read", path, f"give {KINDS}")
    except OSError as error:
        raise refused(
            "no such file", path, "paths are read from the folder where the command is started"
        ) from error
    return status.st_size, status.st_mtime_ns


def _checked(names: Sequence[str], path: Path) -> tuple[str, ...]:
    """The names of columns; refuses empty and duplicate names."""
    columns = tuple(re.sub(r"\s*[\r\n]\s*", " ", name.strip()) for name in names)
    for place, name in enumerate(columns, 1):
        if not name:
            remedy = "the first row has the names of columns: remove what stands above them"
            if place == 1:  # as pandas and R write row numbers
                remedy = "name it, or write the file without an index (pandas: index=False)"
            raise refused(f"column {place} has no name", path, remedy)
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise refused(f"the column '{twice[0]}' is there twice", path, "rename or remove one")
    return columns


def _encoding(path: Path) -> str:
    """UTF-16 by its mark, UTF-8 if all of the file is, else Windows' or ISO's Latin 1."""
    with path.open("rb") as file:
        first = file.read(4)
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for name in ("utf-8", "cp1252"):
        decoder = codecs.getincrementaldecoder(name)()
        try:
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    if b"\0" in block:
                        raise refused("not a text file", path, f"give {KINDS}")
                    decoder.decode(block)
                decoder.decode(b"", final=True)
            return name
        except UnicodeDecodeError:
            continue
    return "latin-1"


def _header(path: Path, encoding: str) -> str:
    try:
        with path.open(encoding=encoding, newline="") as file:
            lines = (line.lstrip("\ufeff") for line in file)
            header = next((line for line in lines if line.strip()), "")
            for line in islice(lines, NAMES):
                if not OPEN.search(header):
                    break
                header += line
            return header.rstrip("\r\n")
    except (UnicodeError, LookupError) as error:
        raise refused(
            f"the file is not {encoding}", path, "name its encoding, e.g. encoding = 'latin-1'"
        ) from error


def _delimiter(header: str) -> str:
    """The most frequent delimiter in the header outside quotes; a comma if there is none."""
    bare = re.sub(r'"[^"]*"', "", header)
    return max(DELIMITERS, key=lambda sign: (bare.count(sign), -DELIMITERS.index(sign)))


def _excel_columns(path: Path) -> list[str]:
    try:
        return excel.header(path)
    except ImportError as error:
        what = "this is an Excel file, and the library that reads it is not installed"
        remedy = "pip install 'atoll[excel]', or save the sheet as CSV"
        raise refused(what, path, remedy) from error
    except ValueError as error:
        raise refused(str(error), path, "save it again, or as CSV") from error


def _schema(path: Path) -> pa.Schema:
    """The columns of a Parquet or Feather file; refuses nested types."""
    feather = path.suffix.lower() in FEATHER
    try:
        if feather:
            with pa.memory_map(str(path)) as file:
                schema = pa.ipc.open_file(file).schema
        else:
            schema = pyarrow.parquet.ParquetFile(path).schema_arrow
    except (pa.ArrowException, OSError) as error:
        what = "not a Feather file" if feather else "not a Parquet file"
        raise refused(what, path, "write it again, or give a CSV file") from error
    for field in schema:
        if _strange(field.type):
            raise refused(
                f"the column '{field.name}' has the type {field.type}",
                path,
                "columns may be numbers, text, true or false, and dates; remove or flatten it",
            )
    return schema


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _strange(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _strange(kind.value_type)
    checks = (
        pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean,
        pa.types.is_string, pa.types.is_large_string, pa.types.is_date, pa.types.is_timestamp,
        pa.types.is_null,
    )  # fmt: skip
    return not any(check(kind) for check in checks)


def batches(sheet: Sheet, missing: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows in chunks: all values as stripped text, null if missing."""
    words = pa.array(["", *missing], pa.string())
    for batch in as_written(sheet):
        columns = []
        for column in batch.columns:
            text = pc.utf8_trim_whitespace(column)
            valid = pc.invert(pc.is_in(text, words))
            columns.append(pc.if_else(valid, text, pa.scalar(None, pa.string())))
        yield pa.RecordBatch.from_arrays(columns, names=list(sheet.columns))


def as_written(sheet: Sheet) -> Iterator[pa.RecordBatch]:
    """The rows in batches, every value as text, unchanged."""
    try:
        for batch in _csv(sheet) if sheet.delimiter else _typed(sheet):
            yield pa.RecordBatch.from_arrays(batch.columns, names=list(sheet.columns))
    except pa.ArrowException as error:
        row_error = uneven(sheet.path, error)
        reason = re.sub(r"^CSV parse error: ", "", str(error).splitlines()[0])[:200]
        raise row_error or refused(
            f"cannot read it: {reason}", sheet.path, "fix the file"
        ) from error
    except (UnicodeError, LookupError) as error:
        raise refused(
            f"the file is not {sheet.encoding}", sheet.path, "name its encoding"
        ) from error
    if _stamp(sheet.path) != sheet.stamp:
        raise refused("the file changed while it was read", sheet.path, "start again")


def _csv(sheet: Sheet) -> Iterator[pa.RecordBatch]:
    names = [f"{place}" for place in range(len(sheet.columns))]
    reader = pyarrow.csv.open_csv(
        sheet.path,
        read_options=pyarrow.csv.ReadOptions(
            use_threads=False, block_size=BLOCK, encoding=codec(sheet.encoding), column_names=names
        ),
        parse_options=pyarrow.csv.ParseOptions(delimiter=sheet.delimiter, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        ),
    )
    head = True
    for batch in reader:
        yield batch.slice(1) if head else batch  # the first row is the header
        head = False


def uneven(path: Path, error: Exception) -> UserError | None:
    """The row of a CSV file with too many or too few cells, without quoting it."""
    match = UNEVEN.match(str(error))
    if match is None:
        return None
    row, expected, cells = (int(number) for number in match.groups())
    counted = "1 cell" if cells == 1 else f"{cells} cells"
    what = f"row {row - 1} has {counted}, the header has {expected}"  # pyarrow counts the header
    remedy = "fix the row; a value that contains the delimiter needs quotes"
    return refused(what, path, remedy)


def codec(encoding: str) -> str:
    """The name of an encoding for pyarrow; with it, UTF-8 needs no conversion."""
    return "utf8" if encoding == "utf-8" else encoding


def _typed(sheet: Sheet) -> Iterator[pa.RecordBatch]:
    """The rows of a file with typed columns."""
    for batch in _typed_batches(sheet.path):
        columns = [_text(column) for column in batch.columns]
        yield pa.RecordBatch.from_arrays(columns, names=list(sheet.columns))


def _typed_batches(path: Path) -> Iterator[pa.RecordBatch]:
    kind = path.suffix.lower()
    if kind in EXCEL:
        yield excel.rows(path)
    elif kind in FEATHER:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
    else:
        yield from pyarrow.parquet.ParquetFile(path).iter_batches(ROWS)


def _text(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_timestamp(column.type) and column.type.tz:
        column = column.cast(pa.timestamp(column.type.unit, "UTC")).cast(
            pa.timestamp(column.type.unit)
        )
    if pa.types.is_floating(column.type):  # NaN is a missing value, not a word
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    return column.cast(pa.string())


def line_of(sheet: Sheet, row: int) -> str:
    """The line in the file of a data row, counted from 0."""
    if sheet.path.suffix.lower() in EXCEL:  # its first rows may be empty, and are not numbered here
        return f"{sheet.path}, row {row + 1} below the names of columns"
    if not sheet.delimiter:
        return f"{sheet.path}, row {row + 1}"
    with (
        suppress(csv.Error),  # a cell exceeds the reader's limit: give the row instead
        sheet.path.open(encoding=sheet.encoding, newline="") as file,
    ):
        reader = csv.reader(file, delimiter=sheet.delimiter)
        filled = (reader.line_num for cells in reader if cells)
        for place, line in enumerate(filled, -1):
            if place == row:
                return f"{sheet.path}, line {line}"
    return f"{sheet.path}, row {row + 1}"

"""Output files named by the user: never overwrites data, a record, or foreign files."""

from collections.abc import Callable, Iterable
from pathlib import Path

from atoll.core.errors import UserError
from atoll.core.record import NAMES
from atoll.core.storage import LOCK, disk_errors

__all__ = ["may_write"]

OWN = {*NAMES, LOCK, "traceback.txt"}
HEAD = 1 << 20  # bytes of a file that are inspected


def may_write(
    out: Path,
    inputs: Iterable[Path],
    runs: Iterable[Path],
    ours: Callable[[bytes], bool],
    option: str = "-o",
) -> None:
    """Refuse a file that is an input, one of a run's own, or not one of `ours` by its beginning."""
    with disk_errors(out):
        exists = out.exists()
        if exists and not out.is_file():
            what = "a folder, or no file that can be written"
            raise UserError(what, str(out), f"give {option} another name")
        for path in inputs:
            if exists and path.exists() and path.samefile(out):
                what = "the file to be written is one that is read"
                raise UserError(what, str(out), f"choose another with {option}")
        if out.name in OWN and out.parent.resolve() in [run.resolve() for run in runs]:
            what = "the file to be written is one of the run's own"
            raise UserError(what, str(out), f"choose another with {option}")
        if exists and out.stat().st_size:
            with out.open("rb") as file:
                old = file.read(HEAD)
            if not ours(old):
                remedy = f"choose another with {option}; only an earlier one of these is replaced"
                raise UserError("the file is there already", str(out), remedy)

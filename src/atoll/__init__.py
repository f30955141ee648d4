"""atoll: federated continual learning, one file a method, honest numbers."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core import VERSION

if TYPE_CHECKING:
    from atoll.runs.result import Run

__version__ = VERSION
__all__ = ["__version__", "answer", "run"]


def run(what: str, out: str | Path | None = None, **changes: Any) -> "Run":
    """Run a preset, a method or a TOML file with some options changed; what it found.

    A key is an option's name (`clients=5`, `rate=0.01`) or a name of the run (`data="wine"`);
    where two tables have it, pass a dictionary: `method={"name": "chfl", "rate": 0.01}`.
    Own tables may be DataFrames: `data={"files": {"basel": frame}, "label": "outcome"}`; they are
    kept as Parquet files in runs/tables.
    """
    from atoll import engines  # noqa: PLC0415
    from atoll.data.own.frames import with_files  # noqa: PLC0415
    from atoll.runs.config import change, read, resolve  # noqa: PLC0415
    from atoll.runs.execute import execute  # noqa: PLC0415
    from atoll.runs.folders import fresh_folder  # noqa: PLC0415
    from atoll.runs.result import Run  # noqa: PLC0415

    values, data = read(what), changes.get("data")
    if isinstance(data, dict):
        changes["data"] = with_files(data, Path("runs/tables"))
        if {"files", "parties", "images"} & data.keys() and "split" not in changes:
            values.pop("scenario", None)  # a preset's split is for its own data
    config = resolve(change(values, changes, "atoll.run"), what)
    place = nullcontext(Path(out)) if out is not None else fresh_folder(config.name)
    with place as folder:
        execute(config, folder, engines.load(config.engine_options().name))
    return Run(folder)


def answer(*folders: str | Path) -> dict[str, Any]:
    """Decide whether joining helps in finished runs that differ in their seed alone.

    It trains the same method at each site alone, and writes `answer.json`; see docs/answer.md.
    """
    from atoll import engines  # noqa: PLC0415
    from atoll.runs.answer import write_answer  # noqa: PLC0415

    return write_answer([Path(folder) for folder in folders], engines.load)

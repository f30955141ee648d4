"""Compares the events of two checkouts: every golden and demo config, in loop mode.

    python -m tests.events.compare BEFORE AFTER

Each checkout runs its own configs with its own source. `renamed.toml` holds the names that changed
between them; it is applied to the events of BEFORE. Numbers are compared as they are written, digit
by digit. The command prints the first difference of each run and exits with 1 if there is one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Number(str):
    """A number as it is written."""

    __slots__ = ()


def parsed(line: str) -> Any:
    """A line of events.jsonl; numbers keep their digits."""
    return json.loads(line, parse_int=Number, parse_float=Number)


def renamed(value: Any, keys: Mapping[str, str], names: Mapping[str, str]) -> Any:
    """The value with renamed keys of objects and renamed strings."""
    if isinstance(value, dict):
        return {keys.get(key, key): renamed(item, keys, names) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, keys, names) for item in value]
    if isinstance(value, str) and not isinstance(value, Number):
        return names.get(value, value)
    return value


def differences(before: Any, after: Any, place: str) -> Iterator[str]:
    """Where two values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            if key not in after:
                yield f"{place}: key '{key}' is gone"
            elif key not in before:
                yield f"{place}: key '{key}' is new"
            else:
                yield from differences(before[key], after[key], f"{place} {key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{place}[{number}]")
    elif type(before) is not type(after) or before != after:
        yield f"{place}: {before} is now {after}"


def first_difference(before: str, after: str, map_: Mapping[str, Any]) -> str | None:
    """The first difference between two events.jsonl, with its place."""
    old, new = before.splitlines(), after.splitlines()
    keys, names = map_.get("keys", {}), map_.get("names", {})
    for number, (one, other) in enumerate(zip(old, new, strict=False), 1):
        found = differences(renamed(parsed(one), keys, names), parsed(other), f"line {number}")
        difference = next(found, None)
        if difference is not None:
            return difference
    if len(old) != len(new):
        return f"{len(old)} lines are now {len(new)}"
    return None


def compare(before: Path, after: Path, map_: Mapping[str, Any]) -> dict[str, str | None]:
    """For each run of two folders of events, its first difference."""
    old = {path.stem: path for path in before.glob("*.jsonl")}
    new = {path.stem: path for path in after.glob("*.jsonl")}
    results: dict[str, str | None] = {}
    for name in sorted(old | new):
        if name not in old or name not in new:
            results[name] = f"runs only {'before' if name in old else 'after'}"
        else:
            results[name] = first_difference(old[name].read_text(), new[name].read_text(), map_)
    return results


def record(checkout: Path, folder: Path, cases: Mapping[str, Any]) -> None:
    """Run the configs of a checkout with its own source."""
    folder.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout / "src"),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    words = [sys.executable, str(HERE / "record.py"), str(checkout), str(folder), json.dumps(cases)]
    subprocess.run(words, check=True, env=environment, cwd=folder)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="the older checkout")
    parser.add_argument("after", type=Path, help="the newer checkout")
    given = parser.parse_args()
    map_ = tomllib.loads((HERE / "renamed.toml").read_text())
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        record(given.before.resolve(), before, map_.get("before", {}))
        record(given.after.resolve(), after, {})
        results = compare(before, after, map_)
    for name, difference in results.items():
        print(f"{name}: {difference or 'equal'}")  # noqa: T201
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())

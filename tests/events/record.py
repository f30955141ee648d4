"""Runs the golden and demo configs of a checkout in loop mode and keeps their events.

Started by compare.py with the source of the checkout: python record.py CHECKOUT FOLDER CASES
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import atoll
from atoll.runs.config import RunConfig, change, presets, read, resolve


def execute(config: RunConfig, folder: Path) -> None:
    """Run a config with the local engine; older checkouts keep `execute` in that module."""
    from atoll.engines import local  # noqa: PLC0415

    if hasattr(local, "execute"):
        local.execute(config, folder)
        return
    from atoll.runs.execute import execute as run  # noqa: PLC0415

    run(config, folder, local.local_engine)


def golden(checkout: Path) -> ModuleType:
    """The golden tests of the checkout, which know its configs."""
    path = checkout / "tests" / "golden" / "test_golden.py"
    spec = importlib.util.spec_from_file_location("golden_of_checkout", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configs(checkout: Path, more: dict[str, dict[str, Any]]) -> dict[str, RunConfig]:
    """Every golden config, every demo as it is shipped, and cases spelled out by the caller."""
    cases = golden(checkout)
    found = {f"golden {name}": cases.case(name) for name in cases.CASES}
    for name in presets():
        if name.startswith("demo"):
            values = {"engine.mode": "loop", "engine.device": "cpu", "engine.threads": 1}
            found[name] = resolve(change(read(name), values), name)
    for name, values in more.items():
        if name not in found:  # a checkout that lists it may refuse the older spelling
            found[name] = resolve(change({"name": "case"}, values), name)
    return found


def main(checkout: Path, folder: Path, more: dict[str, dict[str, Any]]) -> None:
    """Write FOLDER/CASE.jsonl for every config."""
    if not Path(atoll.__file__).is_relative_to(checkout):
        sys.exit(f"{atoll.__file__} is not the source of {checkout}")
    for name, config in configs(checkout, more).items():
        execute(config, folder / "runs" / name)
        (folder / f"{name}.jsonl").write_bytes(
            (folder / "runs" / name / "events.jsonl").read_bytes()
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))

"""The reference pages, which docs/generate.py writes from the code when the site is built."""

import dataclasses
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import atoll
from atoll import methods, testing
from atoll.core.federation import actions
from atoll.core.method import Method
from atoll.core.options import describe
from atoll.core.record import KINDS
from atoll.data import splits
from atoll.jobs.train import TrainJob
from atoll.runs.config import RunConfig

ROOT = Path(__file__).parents[2]
PUBLIC = [(m, n) for m in (atoll, testing) for n in m.__all__ if not n.startswith("_")]


def generator() -> ModuleType:
    """The script, as Sphinx imports it."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reference")
    generator().write(folder)
    return {path.stem: path.read_text() for path in folder.iterdir()}


def test_the_index_lists_the_pages(pages: dict[str, str]) -> None:
    lines = (ROOT / "docs" / "index.md").read_text().splitlines()
    assert {line for line in lines if line.startswith("reference/")} == {
        f"reference/{name}" for name in pages
    }


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=str)
def test_a_public_name_has_a_docstring_with_an_example(
    module: Any, name: str, pages: dict[str, str]
) -> None:
    text = inspect.getdoc(getattr(module, name)) or ""
    assert ">>>" in text
    assert f"\n### {name}\n" in pages["api"]
    assert text.partition("\n")[0] in pages["api"]


def test_signatures_fit_the_page_and_are_the_same_in_each_build(pages: dict[str, str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", pages["api"], re.DOTALL | re.M)
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 88
    assert "    rounds: int = 10,\n" in pages["api"]
    assert not re.search(r"<factory>|<function|at 0x|atoll\.\w+\.\w+\.", "".join(blocks))


def test_the_page_of_the_api_has_the_fields_of_a_method_and_of_a_job(pages: dict[str, str]) -> None:
    for kind in (Method, TrainJob):
        assert f"\n### {kind.__name__}\n" in pages["api"]
        for field in describe(kind):
            assert f"| `{field.name}` | " in pages["api"]
    assert all(field.remark for field in describe(Method)[3:])


def test_the_page_of_options_has_every_option(pages: dict[str, str]) -> None:
    kinds = [RunConfig, *(methods.load(name).options for name in methods.names())]
    kinds += [splits.load(name).options for name in splits.names()]
    for option in (option for kind in kinds for option in describe(kind)):
        remark = option.remark.replace("|", "\\|")
        assert f"| `{option.name}` |" in pages["options"]
        assert remark in pages["options"]


def test_the_page_of_events_has_every_field(pages: dict[str, str]) -> None:
    for name, kind in KINDS.items():
        section = pages["events"].split(f"## {name}\n")[1].split("\n## ")[0]
        for field in dataclasses.fields(kind):
            assert f"| `{field.name}` |" in section


@pytest.mark.parametrize("name", methods.names())
def test_the_page_of_messages_has_every_action(name: str, pages: dict[str, str]) -> None:
    for action in actions(methods.load(name).client):
        assert f"\n### {name}: {action}\n" in pages["messages"]


def test_a_page_that_is_the_same_is_not_written_again(tmp_path: Path) -> None:
    script = generator()
    script.write(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    script.write(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before

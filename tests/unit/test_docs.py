"""The documents: commands run as printed, links lead somewhere, tables are whole."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from atoll import cli, data, methods
from atoll.core import errors, record
from atoll.core.options import describe
from atoll.data import splits
from atoll.metrics import scores as metrics

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs" / "methods").glob("*.md"))
PAGES += sorted((ROOT / "docs" / "how-to").glob("*.md"))
LEDGERS = sorted((ROOT / "docs" / "reproduction").rglob("*.md"))  # no block of theirs is run
FENCE = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DECIMAL = re.compile(r"\d+\.\d+")
TOLERANCE = 0.03  # of decimal numbers: sums differ a little from machine to machine
POINTS = re.compile(r"[+-]?\d+\.\d points \(.*?\)")  # a gain and its interval: 3 points are 0.03
SIGNED = re.compile(r"[+-]?\d+\.\d")
ESTIMATE = re.compile(r"about [\d,]+ test rows")  # depends on how many predictions differ
RUNNABLE = ("python", "sh", "console")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the remark in the line above."""

    remark: str
    language: str
    text: str

    @property
    def reason(self) -> str:
        """Why it is not run; empty where it is."""
        return self.remark.removeprefix("not run:").strip() if "not run:" in self.remark else ""


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text())]


def not_run() -> list[Any]:
    """The blocks that say why they are not run."""
    return [
        pytest.param(block.reason, id=f"{page.relative_to(ROOT)}: {block.text.splitlines()[0]}")
        for page in PAGES
        for block in blocks(page)
        if block.reason
    ]


@dataclass
class Session:
    """A reader who types in what a page says, in one folder, from top to bottom."""

    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str = ""  # by the last Python block
    status: int = 0

    def do(self, block: Block) -> str:
        """Run a block; its text as it should stand on the page."""
        if block.reason:
            return block.text
        if block.remark.startswith("file:"):
            self._write(block.remark.removeprefix("file:").strip(), block.text)
        elif block.language == "python":
            self.printed = self._python(block.text)
        elif block.language == "text":
            return self.printed
        elif block.language == "console":
            lines = re.findall(r"^\$ (.+)$", block.text, re.MULTILINE)
            return "".join(f"$ {line}\n{self._typed(line)}" for line in lines)
        elif block.language == "sh":
            for line in commands(block.text):
                self._typed(line)
                assert self.status == 0, line
        return block.text

    def _write(self, name: str, text: str) -> None:
        """A config goes beside the runs, a method where methods are looked up."""
        home = self.folder / "methods" if name.endswith(".py") else self.folder
        home.mkdir(exist_ok=True)
        (home / name).write_text(text)
        importlib.invalidate_caches()

    def _python(self, text: str) -> str:
        with captured() as printed:
            exec(compile(text, "document", "exec"), self.names)  # noqa: S102 - our own pages
        return printed.getvalue()

    def _typed(self, line: str) -> str:
        words = shlex.split(line, comments=True)
        given = [word for word in words if re.match(r"[A-Z_]+=", word)]
        words = words[len(given) :]
        if words[0] == "make":
            return ""
        if words[0] != "atoll":
            return self._shell(line)
        with pytest.MonkeyPatch.context() as patch, captured() as printed:
            for assignment in given:
                patch.setenv(*assignment.split("=", 1))
            patch.setattr(sys, "argv", words)
            self.status = exit_code()
        return printed.getvalue()

    def _shell(self, line: str) -> str:
        done = subprocess.run(
            ["sh", "-c", line.replace("$?", str(self.status))],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        self.status = done.returncode
        return done.stdout + done.stderr


def exit_code() -> int:
    """Run the command in this process: it would take seconds to start a new one each time."""
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """All that is printed, on both ways."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield printed


def commands(text: str) -> list[str]:
    """The lines of a block of commands, without remarks and empty ones."""
    lines = text.replace("\\\n", "").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def same(printed: str, shown: str) -> None:
    """Words are equal, decimal numbers nearly."""
    assert worded(printed) == worded(shown)
    gains = zip(POINTS.findall(printed), POINTS.findall(shown), strict=True)
    for here, there in gains:
        numbers = zip(SIGNED.findall(here), SIGNED.findall(there), strict=True)
        assert all(abs(float(a) - float(b)) <= 100 * TOLERANCE for a, b in numbers)
    others = (DECIMAL.findall(POINTS.sub("", text)) for text in (printed, shown))
    for one, other in zip(*others, strict=True):
        assert float(one) == pytest.approx(float(other), abs=TOLERANCE)


def worded(text: str) -> list[str]:
    """The lines that are not empty, every decimal number, gain and estimate as one sign."""
    text = ESTIMATE.sub("about # test rows", POINTS.sub("#", text))
    return [DECIMAL.sub("#", line.strip()) for line in text.splitlines() if line.strip()]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path / "data"))  # nothing there, nothing fetched
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path / "methods")])
    before = set(sys.modules)
    yield Session(tmp_path)
    for name in set(sys.modules) - before:
        if name.startswith("atoll.methods."):
            del sys.modules[name]
            delattr(methods, name.rpartition(".")[2])


@pytest.mark.numerics
@every_page
def test_what_a_page_says_runs_as_printed(page: Path, session: Session) -> None:
    """With ATOLL_GOLDEN=renew the pages are made to show what is printed now."""
    text, pieces, end = page.read_text(), [], 0
    for found in FENCE.finditer(text):
        played = session.do(Block(*found.groups("")))
        if os.environ.get("ATOLL_GOLDEN") != "renew":
            same(played, found[3])
        lines = [f"{line.rstrip()}\n" for line in played.splitlines()]
        pieces += [text[end : found.start(3)], *lines]
        end = found.end(3)
    if os.environ.get("ATOLL_GOLDEN") == "renew":
        page.write_text("".join([*pieces, text[end:]]))


@pytest.mark.parametrize("reason", not_run())
def test_what_is_not_run_says_why(reason: str) -> None:
    assert reason
    pytest.skip(reason)


@every_page
def test_every_block_is_of_a_kind_that_the_tests_know(page: Path) -> None:
    known = {*RUNNABLE, "text", "toml", "yaml"}
    assert {block.language for block in blocks(page)} <= known
    for block in blocks(page):
        assert block.language != "toml" or block.remark.startswith("file:")
        assert block.language != "yaml" or block.reason


def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The places of a page that a link may name."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES + LEDGERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@every_page
def test_every_path_that_is_mentioned_exists(page: Path) -> None:
    for path in re.findall(r"`((?:src|docs|tests|bench|\.ci)/[^`\s]*)`", prose(page)):
        assert "NAME" in path or list(ROOT.glob(path.rstrip("/"))), path
    for target in re.findall(r"`make (\w+)`", prose(page)):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@every_page
def test_no_page_names_a_folder_of_the_machine_it_was_written_on(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(work|root|home|tmp)\b", page.read_text())


@pytest.mark.parametrize("name", methods.names())
def test_a_method_page_has_every_option_with_its_default(name: str) -> None:
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    for option in describe(methods.load(name).options):
        assert f"| `{option.name}` | `{json.dumps(option.default)}` |" in text


def test_the_page_of_methods_and_the_index_name_every_method() -> None:
    page = (ROOT / "docs" / "methods" / "README.md").read_text()
    index = (ROOT / "docs" / "README.md").read_text()
    for name in methods.names():
        assert f"| `{name}` |" in page
        assert f"methods/{name}.md" in index


def test_the_page_of_records_has_every_event_field_and_metric() -> None:
    text = (ROOT / "docs" / "record.md").read_text()
    for name, kind in record.KINDS.items():
        section = text.split(f"**{name}**")[1].split("\n**")[0]
        for item in dataclasses.fields(kind):
            assert f"`{item.name}`" in section, f"{name}.{item.name}"
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text.split("## Metrics")[1], re.MULTILINE))
    assert rows == dict(metrics.DEFINITIONS)


def test_the_first_page_has_every_exit_code() -> None:
    text = (ROOT / "docs" / "start.md").read_text()
    codes = {getattr(errors, name) for name in errors.__all__ if name.startswith("EXIT_")}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes


def test_the_page_of_data_has_every_set_and_split() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)) >= set(data.names())
    for name in splits.names():
        assert f"| `{name}` |" in text


def test_every_row_of_the_threat_model_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "network.md").read_text()
    table = text.partition("| attack | by |")[2].partition("\n\n")[0].splitlines()[2:]
    written = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    assert len(table) > 15
    for row in table:
        last = row.rstrip("| ").rpartition("|")[2]
        names = re.findall(r"`(\w+)`", last)
        files = re.findall(r"`(tests/[\w/]+\.py)`", last)
        assert names or files, row
        assert [name for name in names if f"def {name}(" not in written] == [], row
        assert [file for file in files if not (ROOT / file).exists()] == [], row
    about = text.partition("## Threat model")[2].partition("| attack | by |")[0]
    for name in re.findall(r"`(test_\w+)`", about):
        assert f"def {name}(" in written, name

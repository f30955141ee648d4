"""A call from Python shows a progress bar on a terminal and in a notebook, and nowhere else."""

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import atoll
from atoll.api import progress

TINY: dict[str, Any] = {"data": "wine", "clients": 2, "rounds": 2, "widths": [4], "epochs": 1}


@pytest.fixture(autouse=True)
def here(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 80 columns, and what is written to it."""
    written = io.StringIO()

    def console(**_: Any) -> Console:
        return Console(file=written, force_terminal=True, width=80, color_system=None)

    monkeypatch.setattr(progress, "Console", console)
    return written


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A cell of a notebook: each state of its display, as HTML."""
    states: list[str] = []

    def display(shown: str, display_id: bool) -> Any:
        assert display_id
        states.append(shown)
        return SimpleNamespace(update=states.append)

    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=True))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    monkeypatch.setattr(progress, "LEAST", 0.0)
    return states


def shares(states: list[str]) -> list[float]:
    """What each state of a display says is done."""
    return [float(share) for share in re.findall(r'<progress value="([\d.]+)">', "".join(states))]


def test_a_terminal_has_one_line_that_is_removed(terminal: io.StringIO) -> None:
    atoll.run("fedavg", seeds=range(2), answer=False, **TINY)
    text = terminal.getvalue()
    assert text.endswith("\x1b[2K")  # the line is erased
    assert "━" * 20 in text
    assert "left at most  run 2/2  round 2/2" in text


def test_a_notebook_has_a_display_that_is_emptied(cell: list[str]) -> None:
    atoll.run("fedavg", seeds=range(2), **TINY)
    assert cell[0] == cell[-1] == ""
    assert shares(cell)[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert "preparing" in cell[1]
    assert any("answer: training site-0 alone" in state for state in cell)


def test_a_display_is_emptied_where_a_run_fails(cell: list[str]) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        atoll.run("fedavg", watch=fail, **TINY)
    assert shares(cell) == [0.0, 0.5]
    assert cell[-1] == ""


def test_a_sweep_has_a_bar(cell: list[str]) -> None:
    atoll.sweep("fedavg", rate=[0.1, 0.2], **{**TINY, "widths": [[4]]})
    assert max(shares(cell)) == 1.0
    assert cell[-1] == ""


def test_nothing_is_shown_in_a_script_or_where_it_is_not_wanted(
    cell: list[str],
    terminal: io.StringIO,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    atoll.run("fedavg", progress=False, answer=False, **TINY)
    assert cell == []
    monkeypatch.delitem(sys.modules, "IPython")
    atoll.run("fedavg", progress=False, answer=False, **TINY)
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress, "Console", Console)
    atoll.run("fedavg", answer=False, **TINY)
    assert capfd.readouterr() == ("", "")

"""The live page in a real browser: it fills, grows and ends with the runs that it watches."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

ATOLL = [sys.executable, "-c", "from atoll.cli import main; main()"]
TINY = ["data=wine", "clients=3", "widths=[8]", "engine.mode=loop", "checkpoint_seconds=0"]
COUNT = "Number((document.querySelector('[data-rounds]') || document.body).dataset.rounds || 0)"
RUNS = "Array.from(document.querySelectorAll('[data-state]'))"
STATES = f"{RUNS}.map(function (r) {{ return r.dataset.state; }})"
BAR = "document.querySelector('#live').textContent"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Commands in processes of their own; what is still going in the end is ended."""
    made: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> "subprocess.Popen[str]":
        made.append(subprocess.Popen([*ATOLL, *words], stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield begin
    for process in made:
        process.kill()
        process.communicate()


def run(folder: Path, rounds: int, *more: str) -> list[str]:
    changes = [word for item in (*TINY, f"rounds={rounds}") for word in ("--set", item)]
    return ["run", "fedavg", *changes, "--quiet", "--out", str(folder), *more]


def watched(start: Start, *folders: Path) -> str:
    """The address of a watch over some folders."""
    process = start("watch", *map(str, folders), "--port", "0")
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
    assert found
    return found[0]


def done(tab: Any) -> int:
    """How many rounds the page says are done."""
    return int(tab.until(COUNT))


def test_the_page_fills_itself_and_grows_while_a_run_goes_on(
    tab: Any, start: Start, tmp_path: Path
) -> None:
    tab.open(watched(start, tmp_path / "run"))
    assert tab.says("document.querySelector('h1').textContent") == "No run yet"
    process = start(*run(tmp_path / "run", 4000))
    tab.until("document.querySelector('h1').textContent === 'fedavg on wine'")
    first = done(tab)
    tab.says("window.mark = 1")  # gone if the page were loaded anew
    tab.until(f"{COUNT} > {first + 1}")
    assert process.poll() is None  # the run goes on
    assert tab.says("document.querySelector('#curves svg') !== null")
    assert tab.says("document.querySelector('#live').dataset.on") == "yes"
    assert tab.says(f"{STATES}[0]") == "running"
    assert tab.says(BAR) == "1 running"
    assert tab.until("document.querySelector('progress').value") < 100
    assert tab.until("document.querySelectorAll('.sparks polyline').length") >= 1
    assert tab.says("window.mark") == 1
    assert tab.complaints == []


def test_stop_and_resume_and_a_second_run_are_seen(tab: Any, start: Start, tmp_path: Path) -> None:
    one, two = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    tab.open(watched(start, tmp_path / "runs"))
    first = start(*run(one, 400))
    tab.until("document.querySelector('#curves svg') !== null")
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130
    tab.until(f"{STATES}[0] === 'stopped'")
    assert tab.says(BAR) == "1 stopped"
    stopped = done(tab)
    start(*run(one, 400, "--resume"))
    tab.until(f"{COUNT} > {stopped + 1}")
    second = start(*run(two, 3))
    assert second.wait(120) == 0
    tab.until(f"{STATES}[1] === 'finished'")
    rows = "Array.from(document.querySelectorAll('#results tbody th')).length"
    assert tab.until(rows) >= 1
    assert tab.complaints == []


def test_what_the_reader_has_done_to_the_page_stays(tab: Any, start: Start, tmp_path: Path) -> None:
    assert start(*run(tmp_path / "runs" / "one", 3)).wait(120) == 0
    tab.open(watched(start, tmp_path / "runs"))
    button = "document.querySelector('#results thead button')"
    tab.says(f"{button}.click()")
    tab.says("document.querySelectorAll('details').forEach(function (d) { d.open = true; })")
    assert start(*run(tmp_path / "runs" / "two", 4)).wait(120) == 0
    tab.until(f"{STATES}[1] === 'finished'")
    tab.until("document.querySelectorAll('.gains').length === 2")  # a table of both comes before
    assert tab.says(f"{button}.parentNode.getAttribute('aria-sort')") == "ascending"
    assert tab.says("document.querySelector('details').open")


def test_a_watch_that_ends_harms_nothing_and_is_found_again(
    tab: Any, start: Start, tmp_path: Path
) -> None:
    running = start(*run(tmp_path / "run", 200))
    watch = start("watch", str(tmp_path / "run"), "--port", "0")
    assert watch.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", watch.stdout.readline())
    assert found
    tab.open(found[0])
    tab.until("document.querySelector('#live').dataset.on === 'yes'")
    watch.send_signal(signal.SIGINT)
    assert watch.wait(60) == 0
    tab.until("document.querySelector('#live').dataset.on === 'no'")
    assert running.wait(120) == 0  # the run never depended on it
    start("watch", str(tmp_path / "run"), "--port", found[1])
    tab.until(f"{STATES}[0] === 'finished'")
    assert tab.says(BAR) == "1 finished"


def test_the_live_page_is_narrow_and_dark_too(tab: Any, start: Start, tmp_path: Path) -> None:
    assert start(*run(tmp_path / "run", 3)).wait(120) == 0
    tab.resize(360)
    tab.scheme("dark")
    tab.open(watched(start, tmp_path / "run"))
    assert tab.says("document.documentElement.scrollWidth") <= 360
    assert tab.says("getComputedStyle(document.body).backgroundColor") == "rgb(17, 22, 28)"

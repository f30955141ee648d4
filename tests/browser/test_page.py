"""The report in a real browser: from disk, without network, by keyboard, dark and narrow."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.report import page

pytestmark = pytest.mark.browser

PROBE = """
<script>
window.addEventListener("load", function () {
  var found = %s;
  var mark = document.createElement("script");
  mark.type = "application/json"; mark.id = "found"; mark.textContent = JSON.stringify(found);
  document.body.appendChild(mark);
});
</script>
"""
OVERFLOW = """{
  wide: document.documentElement.scrollWidth, window: window.innerWidth,
  paper: getComputedStyle(document.body).backgroundColor,
  dark: matchMedia("(prefers-color-scheme: dark)").matches }"""
COLUMN = (
    "Array.from(t.tBodies[0].rows).map(function (r) { return Number(r.cells[1].dataset.key); })"
)
SORT = f"""(function () {{
  var t = document.querySelector("#results table"), b = t.querySelectorAll("thead button")[1];
  b.focus();
  var focused = document.activeElement === b, before = {COLUMN};
  b.click(); var up = {COLUMN}, said = b.parentNode.getAttribute("aria-sort");
  b.click(); var down = {COLUMN};
  var regions = Array.from(document.querySelectorAll(".scroll"));
  return {{ before: before, up: up, down: down, said: said, focused: focused,
    regions: regions.every(function (r) {{ return r.tabIndex === 0 && r.ariaLabel; }}) }};
}})()"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real run of CHFL and one with stages."""
    folder = tmp_path_factory.mktemp("report")
    tiny: dict[str, Any] = {"data": "wine", "clients": 3, "widths": [8], "engine.mode": "loop"}
    atoll.run("chfl", out=folder / "chfl", rounds=4, mu=[0.1], **tiny)
    staged: dict[str, Any] = {"split": "classes", "stages": 3, "attribution": True}
    atoll.run("fedavg", out=folder / "staged", rounds=2, **staged, **tiny)
    return page.write([folder / "chfl", folder / "staged"], folder / "report.html")


def opened(browser: str, path: Path, probe: str, *options: str) -> tuple[Any, str]:
    """What a probe finds in the page, and all that the browser logs."""
    copy = path.with_name("probed.html")
    copy.write_text(path.read_text().replace("</body>", PROBE % probe + "</body>"))
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--proxy-server=127.0.0.1:1", *options, "--dump-dom", copy.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r'id="found">(.*?)</script>', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(found[1]), done.stderr


def test_it_opens_from_disk_without_network_and_complains_of_nothing(
    browser: str, report: Path
) -> None:
    found, log = opened(browser, report, "document.querySelectorAll('svg').length")
    assert found == 7  # gain, curves, two for each run, and whose doing forgetting is
    assert "CONSOLE" not in log, log


def test_a_page_that_is_wrong_is_seen_to_be_wrong(browser: str, report: Path) -> None:
    _, log = opened(browser, report, "(console.error('broken'), 1)")
    assert "CONSOLE" in log


def test_tables_sort_both_ways_and_are_reached_by_keyboard(browser: str, report: Path) -> None:
    found, _ = opened(browser, report, SORT)
    assert found["focused"]
    assert found["regions"]
    assert found["said"] == "ascending"
    assert found["up"] == sorted(found["before"])
    assert found["down"] == sorted(found["before"], reverse=True)
    assert found["up"] != found["down"]


@pytest.mark.parametrize("width", [500, 800, 1600])
def test_no_width_makes_the_page_scroll_sideways(browser: str, report: Path, width: int) -> None:
    found, _ = opened(browser, report, OVERFLOW, f"--window-size={width},900")
    assert found["window"] <= width
    assert found["wide"] <= found["window"]


def test_dark_is_dark_and_light_is_light(browser: str, report: Path) -> None:
    light, _ = opened(browser, report, OVERFLOW, "--blink-settings=preferredColorScheme=1")
    dark, _ = opened(browser, report, OVERFLOW, "--blink-settings=preferredColorScheme=0")
    assert not light["dark"]
    assert dark["dark"]
    assert dark["paper"] != light["paper"]
    assert dark["wide"] <= dark["window"]


def test_the_keyboard_alone_sorts_a_table_and_opens_what_is_folded(tab: Any, report: Path) -> None:
    tab.offline()
    tab.open(report.as_uri())
    wanted = "document.activeElement.closest('#results') && document.activeElement.tagName"
    for _ in range(80):  # links and regions come first
        tab.press("Tab")
        if tab.says(wanted) == "BUTTON":
            break
    assert tab.says("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    sort = "document.activeElement.parentNode.getAttribute('aria-sort')"
    tab.press("Enter")
    assert tab.says(sort) == "ascending"
    tab.press(" ")
    assert tab.says(sort) == "descending"
    tab.says("document.querySelector('summary').focus()")
    tab.press("Enter")
    assert tab.says("document.querySelector('details').open")
    assert tab.complaints == []


@pytest.mark.parametrize("width", [320, 390, 768])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(
    tab: Any, report: Path, width: int, scheme: str
) -> None:
    tab.resize(width)
    tab.scheme(scheme)
    tab.open(report.as_uri())
    assert tab.says("document.documentElement.scrollWidth") <= width
    dark = tab.says("getComputedStyle(document.body).backgroundColor") == "rgb(17, 22, 28)"
    assert dark == (scheme == "dark")


def test_every_word_of_every_figure_can_be_read_aloud(tab: Any, report: Path) -> None:
    tab.open(report.as_uri())
    labels = tab.says("Array.from(document.querySelectorAll('figure [role=img]'))"
                      ".map(function (f) { return f.ariaLabel; })")  # fmt: skip
    assert len(labels) == 7
    assert all(len(label) > 20 for label in labels)


def test_it_prints(tab: Any, report: Path) -> None:
    tab.open(report.as_uri())
    assert tab.pdf().startswith(b"%PDF")

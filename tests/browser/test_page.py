"""The report in a real browser: from disk, without network, by keyboard, dark and narrow."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.report import page

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
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
def browser() -> str:
    for name in BROWSERS:
        path = shutil.which(name)
        if path:
            return path
    pytest.skip(f"needs a browser, and none of {', '.join(BROWSERS)} is installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real run of CHFL and one with stages."""
    folder = tmp_path_factory.mktemp("report")
    tiny: dict[str, Any] = {"data": "wine", "clients": 3, "widths": [8], "engine.mode": "loop"}
    atoll.run("chfl", out=folder / "chfl", rounds=4, mu=[0.1], **tiny)
    atoll.run("fedavg", out=folder / "staged", rounds=2, split="classes", stages=3, **tiny)
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
    assert found == 6  # gain, curves, and two for each run
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

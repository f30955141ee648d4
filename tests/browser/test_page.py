"""The report in a real browser: from disk, without network, by keyboard, dark and narrow."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.report import page
from tests.unit.report.records import answer, answered, many_sites

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
    """The page of a real run of CHFL with a verdict, and of one with stages."""
    folder = tmp_path_factory.mktemp("report")
    tiny: dict[str, Any] = {"data": "wine", "clients": 3, "widths": [8], "engine.mode": "loop"}
    run = atoll.run("chfl", out=folder / "chfl", rounds=4, mu=[0.1], answer=False, **tiny)
    staged: dict[str, Any] = {"split": "classes", "stages": 3, "attribution": True}
    atoll.run("fedavg", out=folder / "staged", rounds=2, answer=False, **staged, **tiny)
    kinds = [(0.08, 0.05, "helps"), (0.01, 0.06, "cannot tell"), (-0.05, 0.04, "hurts")]
    answered(folder / "chfl", answer(dict(zip(run.facts["clients"], kinds, strict=True))))
    return page.write([folder / "chfl", folder / "staged"], folder / "report.html")


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of 24 sites."""
    folder = tmp_path_factory.mktemp("crowd")
    return page.write([many_sites(folder / "run")], folder / "report.html")


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
    # for each run accuracy, flow, rows and two curves; what causes forgetting
    assert found == 2 * 5 + 1
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
    for _ in range(80):  # links, tabs and regions come first
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
    assert len(labels) == 11
    assert all(len(label) > 20 for label in labels)


ALL_OPEN = "document.querySelectorAll('details').forEach(function (d) { d.open = true; })"


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_shows_24_sites_and_what_is_folded(tab: Any, crowd: Path, width: int) -> None:
    tab.resize(width)
    tab.open(crowd.as_uri())
    tab.says(ALL_OPEN)
    assert tab.says("document.documentElement.scrollWidth") <= width
    assert tab.says("document.querySelectorAll('.gains li').length") == 24
    heights = tab.says("Array.from(document.querySelectorAll('.gains li'))"
                       ".map(function (r) { return r.offsetHeight; })")  # fmt: skip
    assert max(heights) < 120


def test_the_first_thing_on_the_page_is_the_verdict(tab: Any, report: Path) -> None:
    tab.resize(1280, 800)
    tab.open(report.as_uri())
    card = "document.querySelector('.card').getBoundingClientRect()"
    assert tab.says(f"{card}.bottom") < 800
    assert tab.says("document.querySelector('.card h3').innerText").startswith("▲▼")
    assert "helps at 1 of 3 sites, hurts at 1" in tab.says(
        "document.querySelector('.card').innerText"
    )


def test_tabs_show_one_task_each_and_links_open_the_right_one(tab: Any, report: Path) -> None:
    tab.open(report.as_uri())
    shown = (
        "Array.from(document.querySelectorAll('.story')).map(function (s) { return !s.hidden; })"
    )
    assert tab.says(shown) == [True, False]
    tab.says("document.getElementById('tab-1').focus()")
    tab.press("ArrowRight")
    assert tab.says(shown) == [False, True]
    assert tab.says("document.activeElement.id") == "tab-2"
    tab.press("ArrowLeft")
    assert tab.says(shown) == [True, False]
    tab.says("location.hash = '#curves-2'")
    tab.until("document.getElementById('story-2').hidden === false")
    assert tab.says("document.getElementById('curves-2').open")
    assert tab.complaints == []


def test_the_skip_link_comes_first_and_leads_to_the_verdict(tab: Any, report: Path) -> None:
    tab.open(report.as_uri())
    tab.press("Tab")
    assert tab.says("document.activeElement.className") == "skip"
    assert tab.says("document.activeElement.getBoundingClientRect().left") >= 0
    tab.press("Enter")
    tab.until("location.hash === '#main'")
    assert tab.says("document.activeElement.id") == "main"


def test_sites_are_filtered_by_name(tab: Any, crowd: Path) -> None:
    tab.open(crowd.as_uri())
    tab.says("var f = document.querySelector('[data-filter]'); f.value = 'TAL-2'; "
             "f.dispatchEvent(new Event('input'))")  # fmt: skip
    names = tab.says("Array.from(document.querySelectorAll('.gains li'))"
                     ".filter(function (r) { return r.offsetHeight; })"
                     ".map(function (r) { return r.dataset.site; })")  # fmt: skip
    assert sorted(names) == [f"hospital-2{n}" for n in range(4)]


def test_names_of_regions_and_ids_are_unique(tab: Any, report: Path) -> None:
    tab.open(report.as_uri())
    for what, key in (("[role=region]", "ariaLabel"), ("[id]", "id")):
        names = tab.says(f"Array.from(document.querySelectorAll('{what}'))"
                         f".map(function (r) {{ return r.{key}; }})")  # fmt: skip
        assert len(names) > 5
        assert len(names) == len(set(names))


VIOLATIONS = """axe.run(document).then(function (r) { return r.violations.map(function (v) {
  return v.id + ": " + v.nodes.slice(0, 3).map(function (n) { return n.html.slice(0, 160); });
}); })"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["report", "crowd"])
def test_axe_finds_nothing(
    tab: Any, axe: str, request: pytest.FixtureRequest, which: str, scheme: str
) -> None:
    tab.scheme(scheme)
    tab.resize(1280)
    tab.open(request.getfixturevalue(which).as_uri())
    tab.says(ALL_OPEN)
    tab.says(f"{axe}; 1")
    for story in range(tab.says("document.querySelectorAll('.story').length")):
        tab.says(f"window.report.start({story + 1})")
        assert tab.resolves(VIOLATIONS) == []


def test_axe_would_find_a_fault(tab: Any, axe: str, crowd: Path) -> None:
    tab.open(crowd.as_uri())
    tab.says("document.querySelector('.note').style.color = '#ccc'")
    tab.says(f"{axe}; 1")
    count = "axe.run(document).then(function (r) { return r.violations.length; })"
    assert tab.resolves(count) > 0


def test_print_unfolds_the_details_and_shows_every_task(tab: Any, report: Path) -> None:
    tab.open(report.as_uri())
    printed = tab.pdf()
    assert printed.startswith(b"%PDF")
    assert not tab.says("document.querySelector('details').open")  # afterwards as before
    tab.ask("Emulation.setEmulatedMedia", media="print")
    tab.says("window.dispatchEvent(new Event('beforeprint'))")
    folded = tab.says("Array.from(document.querySelectorAll('details'))"
                      ".filter(function (d) { return !d.open; }).length")  # fmt: skip
    assert folded == 0
    heights = tab.says("Array.from(document.querySelectorAll('.story'))"
                       ".map(function (s) { return s.offsetHeight; })")  # fmt: skip
    assert all(height > 500 for height in heights)
    heads = tab.says("getComputedStyle(document.querySelector('thead')).display")
    assert heads == "table-row-group"  # a head that is repeated on every page is blank

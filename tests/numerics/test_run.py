"""The runner of emulated CPUs: what it sets, what it counts, what it writes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import run
from .run import Outcome, counted, table
from .settings import QUICK, SETTINGS, Setting, environment, obstacle, vendor_library

PAGE = """<!-- marked: begin -->
| setting | passed |
|---|---|
| `one` | 1 | 0 | 0 | 9 | elsewhere |
| `two` | 2 | 0 | 0 | 9 | elsewhere |
<!-- marked: end -->
<!-- suite: begin -->
| `one` | 3 | 0 | 0 | 9 | elsewhere |
<!-- suite: end -->
"""


def test_rows_of_a_table_are_replaced_and_others_left() -> None:
    found = table(PAGE, "marked", {"one": Outcome(7, 1, 2, 3.6, "")}, "here")
    marked, suite = found.split("<!-- marked: end -->")
    assert marked.splitlines()[1:] == [
        "| setting | passed |",
        "|---|---|",
        "| `one` | 7 | 1 | 2 | 4 | here |",
        "| `two` | 2 | 0 | 0 | 9 | elsewhere |",
    ]
    assert "| `one` | 3 |" in suite


def test_failures_errors_and_skipped_tests_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "results.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure/></testcase>'
        '<testcase classname="a" name="broken"><error/></testcase>'
        '<testcase classname="a" name="left"><skipped/></testcase></testsuite></testsuites>'
    )
    found = counted(path, 1.0, "")
    assert (found.passed, found.failed, found.skipped) == (1, 2, 1)
    assert found.failures == ("a::bad", "a::broken")


def test_a_run_without_results_is_a_failure(tmp_path: Path) -> None:
    assert counted(tmp_path / "none.xml", 1.0, "").failed == 1


def test_a_setting_that_cannot_be_emulated_says_why() -> None:
    flags = frozenset({"sse4_1", "avx2"})
    assert obstacle(Setting("", "sse"), flags, None) == ""
    assert obstacle(Setting("intel", "avx2"), flags, None) == "there is no C compiler"
    assert obstacle(Setting("intel", "avx512"), flags, Path("x")) == "this CPU has no avx512f"


def test_a_setting_replaces_what_the_process_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    own = environment(SETTINGS["intel-avx2"], Path("vendor.so"))
    assert "MKL_CBWR" not in own
    assert own["MKL_ENABLE_INSTRUCTIONS"] == "AVX2"
    assert own["OMP_NUM_THREADS"] == own["ATOLL_TEST_THREADS"] == "1"
    assert own["LD_PRELOAD"] == "vendor.so"
    assert environment(SETTINGS["two-threads"], None)["OMP_NUM_THREADS"] == "2"


def test_every_setting_stands_on_the_page() -> None:
    assert set(QUICK) < set(SETTINGS)
    assert len(QUICK) == 3
    text = run.PAGE.read_text()
    for name in SETTINGS:
        assert f"| `{name}` |" in text
    assert table(text, "suite", {"x": Outcome(1, 0, 0, 1.0, "")}, "") != text


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_mkl_takes_other_kernels_when_it_is_told_another_maker(tmp_path: Path) -> None:
    """Else the settings of the two makers would test the same thing, and nobody would see it."""
    digests = []
    for name in ("amd-avx2", "intel-avx2"):
        library = vendor_library(SETTINGS[name].vendor, tmp_path)
        own = environment(SETTINGS[name], library)
        printed = subprocess.check_output([sys.executable, str(run.PROBE)], env=own, text=True)
        digests.append(json.loads(printed))
    one, other = digests
    assert one["mkl"] != other["mkl"]
    assert one["aten"] == other["aten"]

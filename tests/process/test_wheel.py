"""The wheel and the sdist in dist/, built and tested by `make wheel`."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.long]

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")


def only(pattern: str) -> Path:
    """The one file of dist/ with this pattern."""
    files = list((ROOT / "dist").glob(pattern))
    if not files:
        pytest.skip("needs make wheel: dist/ is empty")
    assert len(files) == 1, files
    return files[0]


def sources() -> set[str]:
    """Every file of the package that git does not ignore, by its path below src/."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {line.removeprefix("src/") for line in listing.stdout.splitlines()}


def interpreter(version: str) -> str:
    """The path of a Python that can start; a shim of a missing version cannot."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    path = shutil.which(f"python{version}")
    if path is None or subprocess.run([path, "-V"], check=False, capture_output=True).returncode:
        pytest.skip(f"needs Python {version}")
    return path


def call(folder: Path, *command: str) -> str:
    """Run a command in a folder, without the variables that lead Python to this checkout."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    result = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_has_the_files_of_the_source_and_no_others() -> None:
    with zipfile.ZipFile(only("*.whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == sources()


def test_the_sdist_has_the_files_of_the_source_and_no_others() -> None:
    path = only("*.tar.gz")
    head = path.name.removesuffix(".tar.gz") + "/src/"
    with tarfile.open(path) as sdist:
        members = [member.name for member in sdist.getmembers() if member.isfile()]
    package = {name.removeprefix(head) for name in members if name.startswith(f"{head}atoll/")}
    assert package == sources()


@pytest.mark.parametrize("version", PYTHONS)
def test_the_demo_runs_from_the_wheel_in_an_empty_environment(version: str, tmp_path: Path) -> None:
    wheel = only("*.whl")
    call(tmp_path, interpreter(version), "-m", "venv", "empty")
    pip = str(tmp_path / "empty" / "bin" / "pip")
    call(tmp_path, pip, "install", "--quiet", "torch==2.13.0")
    constraints = str(ROOT / "constraints.txt")
    call(tmp_path, pip, "install", "--quiet", "--constraint", constraints, str(wheel))
    atoll = str(tmp_path / "empty" / "bin" / "atoll")
    assert "Joining" in call(tmp_path, atoll, "run", "demo", "--quiet", "--out", "run")
    call(tmp_path, atoll, "report", "run", "--out", "report.html")
    assert "<svg" in (tmp_path / "report.html").read_text()
    python = atoll.replace("bin/atoll", "bin/python")
    call(tmp_path, atoll, "new", "method", "my-mean")
    suite = (
        "from atoll.testing import check_method\nprint(check_method('./my-mean/my_mean.py:METHOD'))"
    )
    assert "'learns': 'passed'" in call(tmp_path, python, "-c", suite)  # without pytest
    module = call(tmp_path, python, "-c", "import atoll; print(atoll.__file__)")
    assert Path(module.strip()).is_relative_to(tmp_path)

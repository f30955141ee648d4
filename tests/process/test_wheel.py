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

FRAMES = """
import numpy as np
import pandas as pd

rng = np.random.default_rng(0)


def patients(hospital, rows):
    age, pressure = rng.normal(60, 10, rows), rng.normal(130, 15, rows)
    risk = (age - 60) / 10 + (pressure - 130) / 15 + rng.normal(0, 0.5, rows)
    return pd.DataFrame({"hospital": hospital, "age": age, "pressure": pressure, "sick": risk > 0})


both = pd.concat([patients("basel", 200), patients("bern", 120)], ignore_index=True)
df, y = both.drop(columns="sick"), both["sick"]
df1 = both[both["hospital"] == "basel"].drop(columns="hospital")
df2 = both[both["hospital"] == "bern"].drop(columns="hospital")

import atoll

atoll.run("demo", out="runs/demo-1")
"""
# %% begins a cell; the lines are those that a user is promised
TOUR = """
# %%
import atoll
run = atoll.run("chfl", data={"basel": df1, "bern": df2}, label="sick", rounds=20, seeds=range(5))
run                      # in a notebook: verdict card and gain plot (_repr_html_)
# %%
run.to_pandas()          # scores, one row per seed, stage, site, task, variant
run.plot.gain(); run.report("report.html"); run.predict(df, site="basel"); run.export("model/")
old = atoll.load("runs/demo-1"); atoll.compare(run, old)
for event in atoll.stream("fedavg", data="digits"): ...     # rounds as they happen
sweep = atoll.sweep("chfl", data="digits-table", mu=[[0.01], [0.1]], seeds=range(5))
clf = atoll.FederatedClassifier(method="chfl", sites="hospital").fit(df, y)
"""
# What makes the tour take minutes in place of an hour; ATOLL_TOUR=printed leaves it out.
SMALLER = {
    "rounds=20, seeds=range(5)": "widths=[16], epochs=1, mu=[0.1]",
    'data="digits"': "rounds=2, widths=[16]",
    "seeds=range(5))\nclf": "rounds=2, epochs=1, widths=[[16]]",
    'sites="hospital"': "options={'widths': [16], 'rate': 0.01, 'mu': [0.1]}",
}
CHECKS = """
# %%
from pathlib import Path

keys = ["seed", "stage", "site", "task", "variant"]
assert not run.to_pandas().duplicated(keys).any()
assert run.seeds == (0, 1, 2, 3, 4)
assert Path("report.html").exists() and Path("model/bern/model.safetensors").exists()
assert len(sweep.settings) == 2
assert clf.score(df, y) > 0.6
print("the tour has ended")
"""
WITHOUT_PANDAS = """
import pyarrow as pa

import atoll

table = pa.table({"x": [0.1 * n for n in range(60)], "y": [n % 2 for n in range(60)]})
run = atoll.run("fedavg", data={"a": table, "b": table}, label="y", rounds=1, answer=False)
try:
    run.to_pandas()
except atoll.UserError as error:
    print(error)
"""
NOTEBOOK = """
from pathlib import Path

import nbclient
import nbformat

cells = [nbformat.v4.new_code_cell(text) for text in Path("tour.py").read_text().split("# %%\\n")]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=3600, kernel_name="python3").execute()
for cell in cells:
    for output in cell.outputs:
        print(output.get("text", ""), output.get("data", {}).get("text/html", ""))
"""


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
    """The path of a Python that can start; a shim of pyenv cannot where it is not chosen."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    paths = [shutil.which(f"python{version}")]
    paths += map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    for path in paths:
        if path and not subprocess.run([path, "-V"], check=False, capture_output=True).returncode:
            return path
    pytest.skip(f"needs Python {version}")


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


def environment(version: str, folder: Path) -> Path:
    """An empty environment with the wheel and what it requires; the folder of its commands."""
    wheel = only("*.whl")
    call(folder, interpreter(version), "-m", "venv", "empty")
    commands = folder / "empty" / "bin"
    call(folder, str(commands / "pip"), "install", "--quiet", "torch==2.13.0")
    install(folder, str(wheel))
    return commands


def install(folder: Path, requirement: str) -> None:
    """Install with the versions of the constraints."""
    pip = [str(folder / "empty" / "bin" / "pip"), "install", "--quiet"]
    call(folder, *pip, "--constraint", str(ROOT / "constraints.txt"), requirement)


@pytest.mark.parametrize("version", PYTHONS)
def test_the_demo_runs_from_the_wheel_in_an_empty_environment(version: str, tmp_path: Path) -> None:
    commands = environment(version, tmp_path)
    atoll, python = str(commands / "atoll"), str(commands / "python")
    assert "Joining" in call(tmp_path, atoll, "run", "demo", "--quiet", "--out", "run")
    call(tmp_path, atoll, "report", "run", "--out", "report.html")
    assert "<svg" in (tmp_path / "report.html").read_text()
    call(tmp_path, atoll, "new", "method", "my-mean")
    suite = (
        "from atoll.testing import check_method\nprint(check_method('./my-mean/my_mean.py:METHOD'))"
    )
    assert "'learns': 'passed'" in call(tmp_path, python, "-c", suite)  # without pytest
    module = call(tmp_path, python, "-c", "import atoll; print(atoll.__file__)")
    assert Path(module.strip()).is_relative_to(tmp_path)


def tour() -> str:
    """The lines of the tour, with options that make it short unless it is to run as printed."""
    text = TOUR
    for printed, options in SMALLER.items() if os.environ.get("ATOLL_TOUR") != "printed" else ():
        assert text.count(printed) == 1, printed
        head, end, rest = printed.partition(")\n")
        text = text.replace(printed, f"{head}, {options}{end}{rest}")
    compile(text, "tour", "exec")
    return text


def test_the_tour_runs_from_the_wheel_in_a_script_and_in_a_notebook(tmp_path: Path) -> None:
    """Without the extra for pandas, the call that needs it names it."""
    python = str(environment(PYTHONS[0], tmp_path) / "python")
    (tmp_path / "tour.py").write_text(f"{FRAMES}{tour()}{CHECKS}")
    assert "pip install 'atoll[pandas]'" in call(tmp_path, python, "-c", WITHOUT_PANDAS)
    install(tmp_path, f"{only('*.whl')}[pandas,notebook]")
    assert call(tmp_path, python, "tour.py").endswith("the tour has ended\n")
    notebook = tmp_path / "notebook"  # both begin with the same run in the same place
    notebook.mkdir()
    (tmp_path / "tour.py").rename(notebook / "tour.py")
    displayed = call(notebook, python, "-c", NOTEBOOK)
    assert displayed.count("<svg") == 2  # the gain plots beside the verdicts of both runs
    assert "the tour has ended" in displayed

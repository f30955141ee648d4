"""The recipes of CONTRIBUTING.md, each followed in a copy of the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import atoll

ROOT = Path(__file__).parents[2]
SOURCE = Path(atoll.__file__).parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.compile(
    r"<!-- not run: tests/unit/test_recipes.py (adds|changes) src/atoll/(\S+) -->\n"
    r"```python\n(.*?)```",
    re.DOTALL,
)
Copy = Callable[[str], Path]


def recipe(title: str) -> list[tuple[str, str, str]]:
    """What is done to each file: (adds or changes, its path, its text)."""
    section = PAGE.partition(f"### {title}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
    return BLOCK.findall(section)


@pytest.fixture
def followed(tmp_path: Path) -> Copy:
    """Copies the package and follows a recipe; the folder of the copy."""

    def follow(title: str) -> Path:
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SOURCE, tmp_path / "atoll", ignore=skipped)
        for verb, path, text in recipe(title):
            file = tmp_path / "atoll" / path
            if verb == "adds":
                assert not file.exists()
                file.write_text(text)
            else:  # the one line of the file that begins like the new one
                begin = text.partition(":")[0] + ":"
                old = file.read_text()
                assert old.count(f"\n{begin} Literal") == 1
                file.write_text(re.sub(rf"\n{begin} Literal.*\n", f"\n{text}", old))
        return tmp_path

    return follow


def python(folder: Path, text: str) -> str:
    """What a script prints that uses the copy."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    words = [sys.executable, "-W", "error", "-c", text]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("title", "files"),
    [("A data set", 1), ("A split", 1), ("An accelerated job", 2), ("An engine", 2)],
)
def test_a_recipe_touches_as_many_files_as_the_table_lists(title: str, files: int) -> None:
    words = {1: "one", 2: "two"}
    assert len(recipe(title)) == files
    assert f"| {title.lower()} | {words[files]} |" in PAGE


def test_a_data_set(followed: Copy) -> None:
    folder = followed("A data set")
    script = """
import atoll
from atoll import data
assert "moons" in data.names()
about = data.about("moons")
assert (about.kind, about.presence) == ("table", "embedded")
run = atoll.run("fedavg", out="run", data={"name": "moons", "rows": 200}, widths=[8], rounds=20,
                rate=0.05)
print(run.accuracy)
"""
    assert float(python(folder, script)) > 0.75


def test_a_split(followed: Copy) -> None:
    folder = followed("A split")
    script = """
import atoll
from atoll.data import splits
assert "turns" in splits.names()
run = atoll.run("fedavg", out="run", data="wine", split="turns", clients=4, held_out=20, widths=[8])
sites = run.facts["holdings"]["sites"].values()
print([site["test"] for site in sites], [site["train"] for site in sites])
"""
    tests, train = python(folder, script).strip().removeprefix("[").split("] [")
    assert tests == "[20], [20], [20], [20]"
    assert train == "[40], [40], [39], [39]]"


JOB = """
import torch, json
from pathlib import Path
from atoll.compute import autotune
from atoll.compute.executor import Executor
from atoll.core.federation import Moment
from atoll.core.rows import Rows
from atoll.jobs.gram import GramJob
draw = torch.Generator().manual_seed(0)
jobs = {}
for number in range(4):
    x = torch.randn(10 + number, 3, generator=draw)
    jobs[f"site-{number}"] = GramJob(Rows(x, x[:, :0], torch.zeros(len(x), dtype=torch.int64)))
results = Executor("stacked", Path("choices")).do(jobs, Moment(0, 0, 1))
for id, job in jobs.items():
    torch.testing.assert_close(results[id], job.run())
"""


def test_an_accelerated_job(followed: Copy) -> None:
    folder = followed("An accelerated job")
    (folder / "choices").mkdir()
    python(folder, JOB)
    choices = json.loads((folder / "choices" / "engine.json").read_text()).values()
    assert [choice["mode"] for choice in choices] == ["stacked"]


def test_a_job_without_the_second_file_runs_client_by_client(followed: Copy) -> None:
    folder = followed("An accelerated job")
    (folder / "atoll" / "compute" / "kinds" / "gram.py").unlink()
    (folder / "choices").mkdir()
    python(folder, JOB)
    choices = json.loads((folder / "choices" / "engine.json").read_text()).values()
    assert [choice["mode"] for choice in choices] == ["loop"]


def test_a_wrong_acceleration_is_not_used(followed: Copy) -> None:
    folder = followed("An accelerated job")
    path = folder / "atoll" / "compute" / "kinds" / "gram.py"
    text = path.read_text()
    assert text.count("return list(gram(x))") == 1
    path.write_text(text.replace("return list(gram(x))", "return list(gram(x) + 1e-4)"))
    (folder / "choices").mkdir()
    python(folder, JOB)
    choices = json.loads((folder / "choices" / "engine.json").read_text()).values()
    assert [choice["mode"] for choice in choices] == ["loop"]


def test_an_engine(followed: Copy) -> None:
    folder = followed("An engine")
    script = """
import atoll
for name in ("local", "threads"):
    atoll.run("fedavg", out=name, data="wine", widths=[8], rounds=3,
              engine={"name": name, "mode": "loop"})
"""
    python(folder, script)
    events = [(folder / name / "events.jsonl").read_bytes() for name in ("local", "threads")]
    assert events[0] == events[1]
    assert events[0]

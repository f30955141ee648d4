"""An exported model predicts without atoll and torch what `atoll predict` predicts."""

import csv
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll import data
from atoll.engines.local import local_engine
from atoll.learning.image_nets import NETWORKS
from atoll.runs.config import resolve
from atoll.runs.execute import execute
from atoll.runs.predict.model import Predictor

Call = Callable[..., int]
FOREIGN = ("torch", "atoll", "pyarrow", "scipy", "sklearn", "pydantic", "onnx", "onnxscript")
BLOCKED = f"""
import runpy, sys
for name in {FOREIGN!r}:
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="needs the extra onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def standalone(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs predict.py in a process that can import neither torch nor atoll."""
    command = [sys.executable, "-P", "-c", BLOCKED, str(script), *words]
    return subprocess.run(command, capture_output=True, text=True, env={}, check=False)


def agree(ours: str, theirs: str) -> list[dict[str, str]]:
    """Assert that two files have equal names and classes, and probabilities to 1e-5."""
    rows = []
    for name in (ours, theirs):
        with Path(name).open(newline="") as file:
            rows.append(list(csv.DictReader(file)))
    assert len(rows[0]) == len(rows[1]) > 0
    for one, other in zip(*rows, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            if key.startswith("p "):
                assert float(other[key]) == pytest.approx(float(one[key]), abs=1e-5)
            else:
                assert other[key] == one[key]
    return rows[0]


def exported(call: Call, run: str, site: str, *more: str) -> Path:
    assert call("export", run, "--site", site, "--onnx", "-o", f"out-{site}", *more) == 0
    return Path(f"out-{site}") / "predict.py"


def metadata(script: Path) -> dict[str, Any]:
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    session = runtime.InferenceSession(script.with_name("model.onnx"))
    return {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}


def run(values: dict[str, Any]) -> None:
    whole = {"rounds": 2, "engine": {"mode": "loop"}, **values}
    execute(resolve(whole, "test"), Path("run"), local_engine)


def messy_tables() -> dict[str, Any]:
    """Two sites; one in Latin 1 with semicolons, decimal commas, other names, units and codes."""
    draw = random.Random(3)
    for site in ("a", "b"):
        header = ["case", "age", "kön", "share", "seen", "born", "outcome"]
        lines = []
        for number in range(60):
            age, share = draw.randrange(30, 80), draw.random()
            label = "ja" if age / 50 + share + draw.gauss(0, 0.3) > 1.6 else "nej"
            seen = f"{draw.randrange(1, 29):02}.{draw.randrange(1, 13):02}.2023"
            born = f"19{draw.randrange(40, 90)}-03-{draw.randrange(1, 29):02}"
            cells = [f"{site}{number}", str(age), draw.choice(["man", "kvinna", ""])]
            lines.append([*cells, f"{share:.3f}", seen, born if number % 9 else "", label])
        if site == "b":
            header[1] = "Ålder"
            for number, line in enumerate(lines):
                line[2] = {"man": "1", "kvinna": "2.0", "": ""}[line[2]]
                line[1] = "999" if number % 10 == 0 else f"{line[1]},5"
                line[3] = f"{100 * float(line[3]):.1f} %".replace(".", ",")
        sign = ";" if site == "b" else ","
        text = "\n".join(sign.join(line) for line in [header, *lines]) + "\n"
        Path(f"{site}.csv").write_text(text, encoding="latin-1" if site == "b" else "utf-8")
    dates = {"seen": {"format": "day first", "since": "born"}}
    site_b = {
        "rename": {"Ålder": "age"}, "missing": {"age": ["999"]},
        "units": {"share": {"suffix": "%", "factor": 0.01}},
        "values": {"kön": {"1": "man"}},
    }  # fmt: skip
    files = {"files": ["a.csv", "b.csv"], "label": "outcome", "id": "case", "dates": dates}
    return {**files, "sites": {"b": site_b}}


def test_own_tables_with_harmonising(call: Call) -> None:
    options = {"name": "chfl", "epochs": 1, "batch": 16}
    run({"data": messy_tables(), "model": {"widths": [8]}, "method": options})
    assert call("predict", "run", "b.csv", "--site", "b", "-o", "ours.csv") == 0
    script = exported(call, "run", "b")
    ended = standalone(script, "b.csv", "-o", "theirs.csv")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "60 predictions in theirs.csv\n"
    rows = agree("ours.csv", "theirs.csv")
    assert rows[3]["case"] == "b3"
    assert len({row["p ja"] for row in rows}) > 50
    about = metadata(script)
    assert about["classes"] == ["ja", "nej"]
    assert {"age", "age missing", "kön=man", "kön=2", "share", "seen"} <= {*about["columns"]}
    assert about["preprocessing"]["rules"]["rename"] == {"Ålder": "age"}


def test_what_is_wrong_with_a_file_ends_the_script_with_a_reason(call: Call) -> None:
    options = {"name": "alone", "epochs": 1, "batch": 16}
    run({"data": messy_tables(), "model": {"widths": [8]}, "method": options})
    script = exported(call, "run", "a")
    for text, reason in (
        ("age,share\nold,0.5\n", "row 1: 'old' in 'age' is no number"),
        ("age,share\n1,2,3\n", "row 1 has 3 cells, the header has 2"),
        ("weight\n1\n", "none of the columns that the model reads"),
        ("age,share\n", "has no rows"),
    ):
        Path("new.csv").write_text(text)
        ended = standalone(script, "new.csv")
        assert ended.returncode == 1
        assert reason in ended.stderr
    assert not Path("predictions.csv").exists()


def test_texts(call: Call) -> None:
    draw = random.Random(1)
    words = {"sport": ["goal", "match", "team's"], "law": ["court", "judge", "Gericht"]}
    for site in ("a", "b"):
        rows = [["text" if site == "b" else "body", "label", "nr"]]
        for number in range(60):
            label = ("sport", "law")[number % 2]
            text = " ".join(draw.choice([*words[label], "the", "a", "of,"]) for _ in range(6))
            rows.append([text, label, f"n{number}"])
        with Path(f"{site}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    own = {"files": ["a.csv", "b.csv"], "text": "text", "label": "label", "length": 12}
    own |= {"id": "nr", "sites": {"a": {"rename": {"body": "text"}}}}
    model = {"vectors": "random-8", "widths": [8]}
    run({"data": own, "model": model, "method": {"name": "fedseit", "epochs": 2, "rate": 0.01}})
    site = next(iter(Predictor(Path("run"), "").recipe["sites"]))
    Path("new.jsonl").write_text('{"text": "the judge, unknown"}\n\n{"text": "goal!\u2028match"}\n')
    script = exported(call, "run", site)
    for name in ("a.csv", "new.jsonl"):
        assert call("predict", "run", name, "--site", site, "-o", f"ours-{name}.csv") == 0
        ended = standalone(script, name, "-o", "theirs.csv")
        assert (ended.returncode, ended.stderr) == (0, "")
        first = agree(f"ours-{name}.csv", "theirs.csv")[0]
        assert first.get("nr") == ("n0" if name == "a.csv" else None)
    about = metadata(script)
    assert about["classes"] == ["law", "sport"]
    assert "judge" in about["preprocessing"]["words"]


def test_image_networks(call: Call) -> None:
    """Three sites with networks of their own: plain, with batch norm, with narrow layers."""
    images = data.load("synthetic-images", rows=120)
    for number in range(3):
        part = slice(40 * number, 40 * number + 40)
        np.savez(f"{number}.npz", x=images.x[part, 0], y=images.y[part])
    values = {
        "data": {"images": [f"{n}.npz" for n in range(3)], "size": 8, "channels": 1},
        "public": {"name": "patterns", "rows": 32},
        "models": ["cnn", "small-resnet", "small-mobilenet"],
        "method": {"name": "fccl", "epochs": 1, "batch": 8, "pretrain_epochs": 1,
                   "public_batch": 32},
    }  # fmt: skip
    run(values)
    for number in range(3):
        file, site = f"{number}.npz", f"site-{number}"
        assert call("predict", "run", file, "--site", site, "-o", "ours.csv") == 0
        script = exported(call, "run", site)
        ended = standalone(script, file, "-o", "theirs.csv")
        assert (ended.returncode, ended.stderr) == (0, "")
        agree("ours.csv", "theirs.csv")
        Path("ours.csv").unlink()
    assert metadata(script)["preprocessing"]["shape"] == [1, 8, 8]


LARGE = ("resnet12", "resnet18", "resnet20", "resnet34", "efficientnet", "mobilenet", "googlenet")


@pytest.mark.parametrize(
    "network",
    [pytest.param(n, marks=pytest.mark.long if n in LARGE else ()) for n in NETWORKS],
)
def test_each_image_network(network: str, call: Call) -> None:
    """Colour images; a site that trains alone."""
    images = data.load("synthetic-images", rows=40)
    draw = np.random.default_rng(1)
    for number in range(2):
        part = slice(20 * number, 20 * number + 20)
        grey = np.repeat(np.repeat(images.x[part, 0], 2, axis=1), 2, axis=2)
        tint = draw.integers(0, 2, (20, 1, 1, 3), dtype=np.uint8)
        np.savez(f"{number}.npz", x=grey[..., None] * tint, y=images.y[part])
    values = {
        "data": {"images": ["0.npz", "1.npz"], "size": 16, "channels": 3},
        "model": {"name": network},
        "method": {"name": "fedavg", "epochs": 1, "batch": 8},
    }
    run(values | {"rounds": 1})
    assert call("predict", "run", "0.npz", "--site", "site-0", "-o", "ours.csv") == 0
    ended = standalone(exported(call, "run", "site-0"), "0.npz", "-o", "theirs.csv")
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = agree("ours.csv", "theirs.csv")
    assert len({row["p 0"] for row in rows}) > 1

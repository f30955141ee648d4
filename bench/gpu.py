"""What to measure on a lent GPU, in order of priority; one command after another in limited time.

    python3 bench/gpu.py --list
    python3 bench/gpu.py --to FOLDER --minutes 9 [--only NAME ...] [--before CHECKOUT]
                         [--wheels FOLDER] [--device cuda]

What has a result file in FOLDER is skipped, so the same command goes on. A measurement starts only
if its estimated minutes are left; those that continue where they were cut need two. NAME.txt has
all output, NAME.json command, seconds and state of what has ended well. What failed is tried again
after all others. Everything lies in FOLDER: keep it between calls, and pack it at the end of each:

    python3 bench/gpu.py --to "$HOME/gpu" --minutes 9; tar czf "$OUT/gpu.tgz" -C "$HOME/gpu" .

The data folder is that of ATOLL_DATA. `mnist.npz` and `fashion_mnist.npz` suffice for all but the
ledgers of CHFL (`tabular/covertype.parquet`) and FedSeIT (`text`).

Wheels. A machine with torch, numpy and scipy but without network needs the other packages. The
first line fetches what is known to be missing; --wheels unpacks the folder and needs no pip. Leave
torch and its CUDA packages out: those of the machine are used. Ray (the measurement `halves`) is
79 MB, 45 without its Java archive, which nothing here uses. Add packages that a first call of
`python3 bench/gpu.py --check --wheels wheels` lists as missing.

    pip download --python-version 3.12 --only-binary=:all: --no-deps -d wheels \\
        PACKAGES of `python3 bench/gpu.py --packages`
    zip -d wheels/ray-*.whl 'ray/jars/*' 'ray/dashboard/client/*'
    zip -d wheels/pyarrow-*.whl 'pyarrow/*flight*' 'pyarrow/*s3*' 'pyarrow/include/*'

The baseline of `pfl` and `steps` is the last version without checks during a run:

    mkdir before && git archive 1688333^ src bench | tar x -C before
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST = 2.0  # minutes in which a measurement that goes on can do something
SPARE = 0.2  # minutes to end in
AGAIN = "start the same command again"  # what atoll prints where its own time was over
PACKAGES = (  # to carry: module, distribution
    ("pydantic", "pydantic"), ("pydantic_core", "pydantic-core"), ("annotated_types", ""),
    ("typing_inspection", "typing-inspection"), ("typing_extensions", "typing-extensions"),
    ("typer", "typer"), ("click", "click"), ("shellingham", "shellingham"),
    ("annotated_doc", "annotated-doc"), ("rich", "rich"), ("markdown_it", "markdown-it-py"),
    ("mdurl", "mdurl"), ("pygments", "pygments"), ("safetensors", "safetensors"),
    ("scipy", "scipy"), ("sklearn", "scikit-learn"), ("joblib", "joblib"),
    ("cloudpickle", "cloudpickle"),
    ("threadpoolctl", "threadpoolctl"), ("narwhals", "narwhals"), ("pyarrow", "pyarrow"),
    ("matplotlib", "matplotlib"), ("contourpy", "contourpy"), ("cycler", "cycler"),
    ("fontTools", "fonttools"), ("kiwisolver", "kiwisolver"), ("packaging", "packaging"),
    ("PIL", "pillow"), ("pyparsing", "pyparsing"), ("dateutil", "python-dateutil"),
    ("jinja2", "jinja2"), ("markupsafe", "markupsafe"), ("pytest", "pytest"),
    ("pluggy", "pluggy"), ("iniconfig", "iniconfig"), ("hypothesis", "hypothesis"),
    ("sortedcontainers", "sortedcontainers"), ("ray", "ray"), ("jsonschema", "jsonschema"),
    ("jsonschema_specifications", "jsonschema-specifications"), ("referencing", "referencing"),
    ("rpds", "rpds-py"), ("attr", "attrs"), ("msgpack", "msgpack"), ("yaml", "pyyaml"),
    ("google.protobuf", "protobuf"), ("filelock", "filelock"), ("requests", "requests"),
    ("urllib3", "urllib3"), ("idna", "idna"), ("certifi", "certifi"),
    ("charset_normalizer", "charset-normalizer"),
)  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """A command; {to}, {before}, {device} and {minutes} are filled in."""

    name: str
    minutes: float  # estimated
    words: tuple[str, ...]  # after the Python interpreter
    goes_on: bool = False  # the same command continues what was cut
    what: str = ""

    def command(self, to: Path, before: Path, device: str, minutes: float) -> list[str]:
        """The words to start, with a limit of minutes."""
        values = {"to": to, "before": before, "device": device, "minutes": f"{minutes:.2f}"}
        return [sys.executable, *(word.format(**values) for word in self.words)]


def atoll(*words: str) -> tuple[str, ...]:
    """The words of a command of atoll."""
    return ("-m", "atoll", *words)


def cells(name: str, minutes: float, paper: str, only: str, *more: str) -> Measurement:
    """Cells of a ledger."""
    words = ("reproduce", paper, "--device", "{device}", "--tf32", "--only", only)
    out = ("--out", f"{{to}}/reproduction/{paper}")
    return Measurement(name, minutes, atoll(*words, *more, *out), True, f"{paper}: {only}")


def interleaved(name: str, minutes: float, what: str, *more: str) -> Measurement:
    """Two versions in turns, five repeats."""
    words = ("bench/interleaved.py", "{before}", ".", "--repeats", "5", "--device", "{device}")
    stored = ("--stored", f"{{to}}/{name}.jsonl")
    return Measurement(name, minutes, (*words, *more, *stored), True, what)


FIVE, TEN = "seeds=[0,1,2,3,4]", "seeds=[0,1,2,3,4,5,6,7,8,9]"
CONTROLS = "; ".join(
    f"{data} {name} 1.0" for data in ("R8", "TREC6", "SUBJ") for name in ("Local", "FedWeIT-Dense")
)
SPLITS = f"feature_seeds={json.dumps(list(range(20)))}"

MEASUREMENTS = (
    Measurement(
        "tests", 1.5, ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/unit"),
        what="all tests that need a GPU",
    ),
    Measurement(
        "fcl", 25,
        atoll("bench", "fcl", "--device", "{device}", "--out", "{to}/benchmark",
              "--minutes", "{minutes}"),
        True, "all methods against forgetting on MNIST, then on Fashion-MNIST",
    ),
    Measurement(
        "halves", 3, ("bench/halves.py", "--device", "{device}"),
        what="two workers with half a GPU each beside one stacked process; needs Ray",
    ),
    Measurement(
        "solo", 1.5, ("bench/deterministic.py", "--device", "{device}", "--repeats", "1"),
        what="equal bits before any exchange in four methods",
    ),
    cells("pass-0.001", 7, "vleto", "MNIST CIL Pass+VFL, rate 0.001", "--set", FIVE),
    cells("pass-ten", 12, "vleto", "FMNIST CIL Pass+VFL, rate 0.0003", "--set", TEN),
    cells("chfl-k5", 22, "chfl", "covertype K=5 30%", "--set", SPLITS),
    cells("controls", 18, "fedseit", CONTROLS, "--set", "seeds=[1,2,3,4,5]"),
    cells("chfl-k2", 20, "chfl", "covertype K=2 30%", "--set", SPLITS),
    cells("chfl-k10", 22, "chfl", "covertype K=10 30%", "--set", SPLITS),
    interleaved("pfl", 7, "the pfl task with checks and before them", "--clients", ""),
    interleaved(
        "steps", 6, "client-steps with checks and before them", "--rounds", "0", "--clients",
        "75,1125",
    ),
)  # fmt: skip


def pending(to: Path, only: list[str]) -> list[Measurement]:
    """What has no result yet, in order; what was tried and failed comes last."""
    chosen = [one for one in MEASUREMENTS if not only or one.name in only]
    left = [one for one in chosen if not (to / f"{one.name}.json").exists()]
    return sorted(left, key=lambda one: (to / f"{one.name}.failed").exists())


def is_installed(distribution: str) -> bool:
    """Whether the interpreter has a distribution of its own."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def unpacked(wheels: Path, site: Path) -> Path:
    """A folder with the packages that this machine lacks; programs keep their permission to run."""
    for wheel in sorted(wheels.glob("*.whl")):
        if is_installed(wheel.name.split("-")[0]):
            continue
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                target = site / entry.filename
                if target.exists() or entry.is_dir():
                    continue
                archive.extract(entry, site)
                target.chmod(0o644 | (entry.external_attr >> 16 & 0o111))
    return site


def ended(command: list[str], log: Path, minutes: float, path: list[Path]) -> int | None:
    """Run a command with its output in a log; its code, or None if the time was over."""
    inherited = os.environ.get("PYTHONPATH", "")
    places = os.pathsep.join([*(str(one) for one in path), *filter(None, [inherited])])
    environment = {**os.environ, "PYTHONPATH": places, "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # the group that this call started
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return None


def state(code: int | None, log: Path, before: int) -> str:
    """Whether a measurement has ended: its output since `before` bytes may say that it goes on."""
    if code is None:
        return "cut"
    text = log.read_bytes()[before:].decode(errors="replace")
    if code:
        return f"failed with code {code}"
    return "cut" if AGAIN in " ".join(text.split()) else "ended"


def measure(given: argparse.Namespace) -> Iterator[str]:
    """Run what is pending and fits; a line for each."""
    began = time.monotonic()
    given.to.mkdir(parents=True, exist_ok=True)
    path = [ROOT / "src"]
    if given.wheels:
        path.append(unpacked(given.wheels.resolve(), given.to.resolve() / "site"))
    for one in pending(given.to, given.only):
        left = given.minutes - SPARE - (time.monotonic() - began) / 60
        if left < (min(LEAST, one.minutes) if one.goes_on else one.minutes):
            yield f"{one.name}: not started, {left:.1f} minutes are left"
            continue
        command = one.command(given.to.resolve(), given.before.resolve(), given.device, left - 0.1)
        log = given.to / f"{one.name}.txt"
        size, start = log.stat().st_size if log.exists() else 0, time.monotonic()
        how = state(ended(command, log, left, path), log, size)
        seconds = round(time.monotonic() - start, 1)
        if how == "ended":
            body = {"name": one.name, "command": list(one.words), "seconds": seconds,
                    "device": given.device}  # fmt: skip
            (given.to / f"{one.name}.json").write_text(json.dumps(body, indent=1) + "\n")
        elif how != "cut":
            (given.to / f"{one.name}.failed").touch()
        yield f"{one.name}: {how} after {seconds} s"


def missing() -> list[str]:
    """Modules that cannot be found here."""
    modules = []
    for module, _ in PACKAGES:
        try:
            there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        modules += [] if there else [module]
    return modules


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--to", type=Path, default=Path("gpu"), help="folder of all results")
    asked.add_argument("--minutes", type=float, default=9.0, help="of the whole call")
    asked.add_argument("--only", nargs="*", default=[], choices=[m.name for m in MEASUREMENTS])
    asked.add_argument("--before", type=Path, default=ROOT / "before", help="baseline checkout")
    asked.add_argument("--wheels", type=Path, help="folder of wheels to unpack")
    asked.add_argument("--device", default="cuda")
    asked.add_argument("--list", action="store_true", help="print the measurements")
    asked.add_argument("--packages", action="store_true", help="print what to download")
    asked.add_argument("--check", action="store_true", help="print which modules are missing")
    return asked


def main() -> None:
    """Print the list, or measure."""
    given = parser().parse_args()
    if given.packages:
        print(*(name or module.replace("_", "-") for module, name in PACKAGES))
    elif given.check:
        if given.wheels:
            sys.path.append(str(unpacked(given.wheels, given.to / "site")))
        print("missing:", *missing())
    elif given.list:
        for one in MEASUREMENTS:
            kind = "goes on" if one.goes_on else ""
            print(f"{one.name:12s}{one.minutes:5.1f} min  {kind:8s}{one.what}")
        print(f"{'all':12s}{sum(one.minutes for one in MEASUREMENTS):5.1f} min")
    else:
        for line in measure(given):
            print(line, flush=True)


if __name__ == "__main__":
    main()

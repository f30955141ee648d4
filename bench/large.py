"""A large CSV file from `inspect` to `predict`: seconds and memory of each command.

    python bench/large.py GIGABYTES

The file is made in a temporary folder and deleted. A small file of the same columns is trained on,
so that a large one can be predicted.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ATOLL = [sys.executable, "-c", "from atoll.cli import main; main()"]
HEADER = "age,weight,height,pulse,glucose,sodium,iron,zinc,sex,smoker,city,outcome\n"


def lines(count: int) -> str:
    """Rows of a table, eight numbers and three words each."""
    draw, found = random.Random(1), []
    for _ in range(count):
        numbers = [draw.gauss(50, 10) for _ in range(8)]
        words = (draw.choice("fm"), draw.choice(("yes", "no", "")), draw.choice(("Bern", "Basel")))
        label = "ill" if numbers[0] + numbers[1] > 100 else "well"
        found.append(",".join([*(f"{n:.3f}" for n in numbers), *words, label]))
    return "\n".join(found) + "\n"


def write(path: Path, size: int, piece: str) -> None:
    """A file of at least this many bytes."""
    with path.open("w") as file:
        file.write(HEADER)
        for _ in range(size // len(piece) + 1):
            file.write(piece)


def timed(*words: str) -> None:
    """A command's seconds and the most memory that it held."""
    began = time.monotonic()
    child = subprocess.Popen([*ATOLL, *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    assert status == 0, words
    seconds, memory = time.monotonic() - began, used.ru_maxrss / 1024
    print(f"atoll {words[0]:8} {seconds:6.0f} s  {memory:6.0f} MB of memory", flush=True)


def main(gigabytes: float) -> None:
    """Make the files, time the commands, delete the files."""
    size = int(gigabytes * 1e9)
    home = Path(tempfile.mkdtemp(prefix="atoll-large-"))
    try:
        if shutil.disk_usage(home).free < 3 * size:
            raise SystemExit("not enough room on the disk")
        os.chdir(home)
        piece = lines(100_000)
        write(Path("small.csv"), 1_000_000, lines(10_000))
        write(Path("large.csv"), size, piece)
        print(f"large.csv: {Path('large.csv').stat().st_size / 1e9:.2f} GB")
        os.environ["OMP_NUM_THREADS"] = "1"
        data = '[data]\nfiles = ["FILE"]\nlabel = "outcome"\n[method]\nname = "alone"\nepochs = 1\n'
        for name in ("small", "large"):
            Path(f"{name}.toml").write_text("rounds = 1\n" + data.replace("FILE", f"{name}.csv"))
            timed("inspect", f"{name}.toml")
        timed("run", "small.toml", "--quiet", "--out", "run")
        for name in ("small", "large"):
            timed("predict", "run", f"{name}.csv", "--site", "small")
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main(float(sys.argv[1]))

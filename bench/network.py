"""What the network costs: exchanges over NVFlare with mutual TLS, beside the same on this engine.

Three tables. The time of an exchange of 10 KB, 1 MB and 20 MB each way with one and three sites;
V-LETO's mini-batches per second over the network and in one process; and a soak of many exchanges
with the threads and the memory of every process before and after. All sites are processes of this
machine on loopback, from real kits.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

SITES = ("basel", "bern", "geneva")
COMMAND = Path(sys.executable).with_name("atoll")
# The job of this benchmark is not one of ours: its classes come from this file, and the kits'
# policies and the sites' filters are told to let them in.
OTHER_JOB = """
from atoll.engines.network import job

own = job.site_config


def site_config():
    body = own()
    body["components"][0]["path"] = "parts.Echo"
    return body


job.site_config = site_config
"""
PARTS = """
import json, os, threading, time
from pathlib import Path
from nvflare.collab import collab


def vitals():
    text = Path("/proc/self/status").read_text()
    kilobytes = int(text.split("VmRSS:")[1].split()[0])
    running = threading.enumerate()
    timers = sum(isinstance(one, threading.Timer) for one in running)
    megabytes = round(kilobytes / 1000, 1)
    return {"threads": len(running), "timers": timers, "megabytes": megabytes}


class Echo:
    def __init__(self):
        pass

    @collab.publish
    def echo(self, block):
        return block

    @collab.publish
    def vitals(self):
        return vitals()


class Asker:
    def __init__(self, out, sizes, soak):
        self.out, self.sizes, self.soak = out, sizes, soak

    @collab.main
    def go(self):
        found = {"exchanges": [], "soak": {}}
        names = sorted(p.name for p in collab.clients)
        for count in (1, 3):
            chosen = collab.get_clients(names[:count])
            for size, times in self.sizes:
                block, seconds = os.urandom(size), []
                for _ in range(times):
                    began = time.perf_counter()
                    answers = dict(chosen(blocking=True, timeout=120).echo(block))
                    seconds.append(time.perf_counter() - began)
                    assert len(answers) == count and all(a == block for a in answers.values())
                found["exchanges"].append({"sites": count, "bytes": size, "seconds": seconds})
        block = os.urandom(10_000)
        marks = []
        began = time.perf_counter()
        for number in range(self.soak + 1):
            if number % max(1, self.soak // 10) == 0:
                sites = dict(collab.clients(blocking=True, timeout=60).vitals())
                marks.append({"done": number, "server": vitals(), **sites})
            if number < self.soak:
                assert len(list(collab.clients(blocking=True, timeout=60).echo(block))) == 3
        found["soak"] = {"marks": marks, "seconds": time.perf_counter() - began}
        Path(self.out).write_text(json.dumps(found))
"""


def call(folder: Path, *arguments: str) -> None:
    subprocess.run([str(COMMAND), *arguments], cwd=folder, check=True, capture_output=True)


def made_kits(folder: Path, port: int) -> None:
    """Kits of three sites that allow V-LETO."""
    lines = ['name = "bench"', f"port = {port}", f"sites = {json.dumps(SITES)}"]
    (folder / "project.toml").write_text("\n".join(lines))
    call(folder, "network", "init", "project.toml", "--run", "vleto")


def joined(folder: Path) -> list[subprocess.Popen[bytes]]:
    """Three sites, each a process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder / "parts")}
    return [
        subprocess.Popen(
            [str(COMMAND), "join", f"kits/{site}", f"kits/{site}/site.toml", "--quiet"],
            cwd=folder, env=environment,
        )
        for site in SITES
    ]  # fmt: skip


def vleto(folder: Path, rounds: int) -> dict[str, float]:
    """Mini-batches a second over the network and in one process: the median of the rounds."""
    (folder / "vleto.toml").write_text(
        f"rounds = {rounds}\n"
        'data = "digits-table"\nscenario = { split = "parties", clients = 3 }\n'
        'method = { name = "vleto", batch = 32 }\nengine = { threads = 1, mode = "loop" }\n'
    )
    call(folder, "serve", "kits/coordinator", "vleto.toml", "--out", "far", "--quiet")
    call(folder, "run", "vleto.toml", "--out", "near", "--quiet")
    found = {}
    for name in ("far", "near"):
        times = [json.loads(line) for line in (folder / name / "times.jsonl").open()]
        events = [json.loads(line) for line in (folder / name / "events.jsonl").open()]
        asked = [e for e in events if e["event"] == "message" and e["receiver"] == "site-0"]
        batches: Counter[int] = Counter()
        for e in asked:
            batches[e["round"]] += e["count"] if e["action"] == "learn" else 0
        found[name] = statistics.median(batches[line["round"]] / line["seconds"] for line in times)
    same = (folder / "far/events.jsonl").read_bytes() == (folder / "near/events.jsonl").read_bytes()
    return {**found, "same_record": float(same)}


def exchanges(folder: Path, soak: int, quick: bool) -> dict[str, Any]:
    """A job that only carries bytes, with NVFlare's processes started as ours are."""
    from atoll.engines.network import job as jobs  # noqa: PLC0415
    from atoll.engines.network import kits, process, session  # noqa: PLC0415

    kit = kits.Kit(folder / "kits" / "coordinator")
    out, times = folder / "found.json", (20, 5, 2) if quick else (200, 40, 10)
    sizes = [[10_000, times[0]], [1_000_000, times[1]], [20_000_000, times[2]]]
    job = folder / "job"
    jobs.write_job(job, folder, list(SITES))
    for name, path, arguments in (
        ("server/config/config_fed_server.json", "parts.Asker",
         {"out": str(out), "sizes": sizes, "soak": soak}),
        ("site/config/config_fed_client.json", "parts.Echo", {}),
    ):  # fmt: skip
        body = json.loads((job / name).read_text())
        body["components"][0].update(path=path, args=arguments)
        (job / name).write_text(json.dumps(body))
    host = process.Process(
        "server", kit, process.environment(PYTHONPATH=str(folder / "parts"), OMP_NUM_THREADS="1")
    )
    server = session.Session(kits.ADMIN, kit.folder.resolve() / "admin", kit.server)
    try:
        while len(server.sites() or {}) < len(SITES):
            host.ensure()
            time.sleep(0.5)
        number = ""
        while not number:  # a busy server may be late for the first try
            number = server.submit(job)
        while not out.exists():
            time.sleep(0.5)
            state = server.state(number) or ""
            if state.startswith("FINISHED") and not out.exists():
                raise RuntimeError(f"the job ended: {state}")
        return dict(json.loads(out.read_text()))
    finally:
        server.close()
        host.stop()


def let_in(folder: Path) -> None:
    """Allow this benchmark's own classes in the kits' policies."""
    (folder / "parts").mkdir()
    (folder / "parts" / "parts.py").write_text(PARTS)
    (folder / "parts" / "sitecustomize.py").write_text(OTHER_JOB)
    for name in ("coordinator", *SITES):
        path = folder / "kits" / name / "local" / "resources.json"
        body = json.loads(path.read_text())
        body["class_allow_list"] += ["parts.Asker", "parts.Echo"]
        path.write_text(json.dumps(body))


def printed(found: dict[str, Any]) -> None:
    """The three tables."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, loopback, mutual TLS; ", end="")
    print("load over 1, 5 and 15 minutes: {:.1f}, {:.1f}, {:.1f}\n".format(*os.getloadavg()))
    print("| sites | bytes each way | median ms | 90 % ms | exchanges |")
    print("|---|---|---|---|---|")
    for one in found["exchanges"]:
        seconds = sorted(one["seconds"])
        middle, most = statistics.median(seconds), seconds[int(0.9 * len(seconds))]
        cells = (one["sites"], f"{one['bytes']:,}", f"{1e3 * middle:.1f}", f"{1e3 * most:.1f}")
        print("|", " | ".join(map(str, (*cells, len(seconds)))), "|")
    speed = found["vleto"]
    same = "the same record" if speed["same_record"] else "ANOTHER RECORD"
    print("\nV-LETO, mini-batches a second, the median of the rounds: ", end="")
    print(f"{speed['far']:.1f} over the network, {speed['near']:.1f} in one process; {same}\n")
    print("| exchanges done | part | threads | of them timers | MB |")
    print("|---|---|---|---|---|")
    for mark in found["soak"]["marks"]:
        for part in ("server", *SITES):
            one = mark[part]
            cells = (one["threads"], one["timers"], one["megabytes"])
            print(f"| {mark['done']:,} | {part} |", " | ".join(map(str, cells)), "|")
    print(f"\nthe soak took {found['soak']['seconds']:.0f} s")


def main() -> None:
    """Measure, print, and write the raw numbers down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soak", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=20, help="of V-LETO")
    parser.add_argument("--port", type=int, default=8933)
    parser.add_argument("--quick", action="store_true", help="few exchanges")
    parser.add_argument("--json", type=Path, help="a file for the raw numbers")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
    sites: list[subprocess.Popen[bytes]] = []
    try:
        made_kits(folder, given.port)
        sites = joined(folder)
        speed = vleto(folder, given.rounds)
        let_in(folder)
        for process in sites:  # a policy is read when NVFlare's process starts
            process.terminate()
            process.wait()
        sites = joined(folder)
        found = {**exchanges(folder, given.soak, given.quick), "vleto": speed}
    finally:
        for process in sites:
            process.terminate()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    if given.json:
        given.json.write_text(json.dumps(found))
    printed(found)


if __name__ == "__main__":
    main()

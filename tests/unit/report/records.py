"""Small records and answers, written by hand, for the tests of the report."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.core.integrity import digest
from atoll.core.record import Message, Record, Round, Score, Stage
from atoll.runs.result import Run, event_digests, runs_in

__all__ = ["answer", "answered", "many_sites", "record"]

SHAPE = (("weights/w", "float32", (2, 3)),)


def record(
    folder: Path,
    method: str,
    seed: int,
    hits: dict[str, dict[str, int]],
    stages: int = 1,
    tensors: Any = SHAPE,
    *,
    device: str = "cpu",
    engine: str = "",
    ended: bool = True,
) -> Path:
    """A run of two sites with ten test rows each; `hits` by variant and site."""
    clients = list(next(iter(hits.values())))
    clients = clients if len(clients) > 2 else ["a", "b"]
    facts = {
        "atoll": "0", "python": "3", "packages": {"torch": "2"}, "threads": 1, "device": device,
        "data": {"name": "made", "title": "made", "rows": 20, "classes": 2, "source": "here",
                 "partial": "", "fingerprint": "f" * 64},
        "clients": clients, "tasks": [f"task-{n}" for n in range(stages)],
        "known_at": list(range(stages)), "stages": stages, "headline": next(reversed(hits)),
        "holdings": {"common": 3, "common_names": ["age", "sex", "<b>"], "sites": {
            id: {"train": [6], "valid": [2], "test": [10], "classes": [2], "own": 1,
                 "own_names": ["lab"]} for id in clients}},
    }  # fmt: skip
    config = f'name = "{method}"\nseed = {seed}\n[scenario]\n[method]\nname = "{method}"\n'
    config += f"[engine]\n{engine}\n" if engine else ""
    made = Record.create(folder, config, facts)
    for stage in range(stages):
        made.add([Round(stage, 0, {"loss": 1.0})])
        for id in clients:
            made.add([
                Message(stage, 0, "server", id, "fit", "Fit", SHAPE, 1, 24, 50),
                Message(stage, 0, id, "server", "fit", "Fitted", tensors, 2, 48, 1_000),
            ])  # fmt: skip
        for variant, sites in hits.items():
            for id, count in sites.items():
                for task in range(stage + 1):
                    correct = count - 3 * (stage - task)
                    made.add([Score(stage, 0, id, task, variant, "test", 10, correct, 0.5)])
        if ended:
            made.add([Stage(stage, 1)])
        made.time(stage=stage, round=0, seconds=1.5)
    made.close()
    return folder


def interval(gain: float, half: float, p: float = 0.02) -> dict[str, Any]:
    """A gain in the form of answer.json."""
    return {
        "gain": gain, "error": half / 2, "low": gain - half, "high": gain + half, "p": p,
        "units": 40,
    }  # fmt: skip


def answer(sites: Mapping[str, tuple[float, float, str]], **changes: Any) -> dict[str, Any]:
    """An answer; by site the gain, half of its interval and the kind of verdict."""
    kinds = [kind for _, _, kind in sites.values()]
    body: dict[str, Any] = {
        "format": 1, "metric": "accuracy", "margin": 0.02, "level": 0.95, "unit": "rows",
        "seeds": [0], "variant": "", "baseline": "fedavg at each site alone", "sites": {},
        "withheld": {}, "notes": [],
        "overall": {
            "gain": interval(0.032, 0.027), "unadjusted": None, "sites": len(sites),
            "verdict": {"kind": "helps", "text": "helps"},
            "helps": kinds.count("helps"), "hurts": kinds.count("hurts"),
        },
    }  # fmt: skip
    for place, (site, (gain, half, kind)) in enumerate(sites.items()):
        body["sites"][site] = {
            "test_rows": 40 + 10 * place, "smallest_class": 3 + place,
            "scores": {"joined": 0.7 + gain, "alone": 0.7, "majority": 0.6,
                       "logistic regression": 0.72, "gradient boosting": None},
            "gain": interval(gain, half),
            "unadjusted": {"low": gain - half / 2, "high": gain + half / 2},
            "joined_over_guessing": interval(0.1 + gain, half),
            "alone_over_guessing": interval(0.1, half),
            "joined_over_logistic": interval(gain - 0.02, half / 2),
            "verdict": {"kind": kind, "text": f"{kind} at {site}"}, "rows_needed": None,
        }  # fmt: skip
    return {**body, **changes}


def answered(folder: Path, body: Mapping[str, Any]) -> Path:
    """Write an answer for the runs of a folder, with their digests and its own."""
    whole = {"runs": event_digests([Run(path) for path in runs_in(folder)]), **body}
    own = whole.pop("digest", None) or digest(json.dumps(whole, sort_keys=True).encode())
    (folder / "answer.json").write_text(json.dumps({**whole, "digest": own}))
    return folder


def many_sites(folder: Path, count: int = 24) -> Path:
    """A run of many sites with an answer of every kind."""
    names = [f"hospital-{number:02}" for number in range(count)]
    record(folder, "fedavg", 0, {"": dict.fromkeys(names, 8)})
    kinds = ("helps", "cannot tell", "no difference", "hurts")
    gains = (0.08, 0.01, 0.0, -0.06)
    sites = {}
    for place, name in enumerate(names[1:]):
        half = (0.02, 0.05, 0.015, 0.02)[place % 4]
        sites[name] = (gains[place % 4] + place / 5000, half, kinds[place % 4])
    return answered(folder, answer(sites, withheld={names[0]: "too few test rows"}))

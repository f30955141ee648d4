"""What FCCL's server costs for 4, 16 and 64 participants: seconds and bytes of a round.

The participants are answers made beforehand, so that the server's own work alone is timed: packing
and unpacking, the mean of the logits, the notes. Sizes are those of the digits: 10 classes, nine
public batches of 512.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from atoll.core.federation import Clients, Moment
from atoll.core.messages import Packet, pack
from atoll.families.distillation import Aligned, Joined, Trained
from atoll.runs.config import resolve
from atoll.runs.parts import parts

CLASSES, BATCH, STEPS = 10, 512, 9


class Answers:
    """A transport without clients: it hands out answers that were made beforehand."""

    def __init__(self, ids: tuple[str, ...], joined: Joined) -> None:
        draws = torch.Generator().manual_seed(0)
        logits = [torch.randn(BATCH, CLASSES, generator=draws) for _ in ids]
        self.said = {id: pack(Aligned(z, 0.5)) for id, z in zip(ids, logits, strict=True)}
        self.last, self.trained = pack(Aligned(torch.zeros(0), 0.5)), pack(Trained(0.5))
        self.joined, self.steps = pack(joined), 0

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """The same answers for every question of a kind."""
        if action == "join":
            return dict.fromkeys(packets, self.joined)
        if action != "align":
            return dict.fromkeys(packets, self.trained)
        self.steps += 1
        done = self.steps % (STEPS + 1) == 0
        return dict.fromkeys(packets, self.last) if done else {id: self.said[id] for id in packets}


def measured(count: int, rounds: int) -> dict[str, Any]:
    """Seconds and bytes of a round with so many participants."""
    data = {"name": "synthetic-images", "rows": 60 * count, "classes": CLASSES, "domains": count}
    values = {
        "name": "cost",
        "rounds": rounds,
        "data": data,
        "public": {"name": "patterns", "rows": STEPS * BATCH + 100},
        "model": {"name": "cnn"},
        "method": {"name": "fccl", "public_batch": BATCH},
        "engine": {"threads": 1},
    }
    made = parts(resolve(values, "bench"))
    ids, public = made.scenario.clients, made.public
    joined = Joined(public.fingerprint, len(public), list(made.dataset.classes))
    transport, server = Answers(ids, joined), made.server()
    seconds, sent = [], 0
    for number in range(rounds + 1):  # the first one warms up
        moment = Moment(0, number, rounds + 1)
        clients = Clients(ids, transport, moment, (0,))
        began = time.perf_counter()
        server.round(clients, moment)
        seconds.append(time.perf_counter() - began)
        sent = sum(message.bytes for message in clients.traffic)
    best = min(seconds[1:])
    return {"participants": count, "seconds": round(best, 4), "bytes": sent}


def drawn(found: list[dict[str, Any]]) -> Figure:
    """Both over the number of participants, with the line through 0 and the last point."""
    figure, last = Figure(figsize=(7, 2.8)), found[-1]
    counts = [one["participants"] for one in found]
    for axes, key, scale, label in zip(
        figure.subplots(1, 2), ("seconds", "bytes"), (1e3, 1e-6), ("ms", "MB"), strict=True
    ):
        axes.plot(counts, [one[key] * scale for one in found], "o")
        axes.plot([0, counts[-1]], [0, last[key] * scale], "--", color="grey", linewidth=0.8)
        axes.set_xlabel("participants")
        axes.set_ylabel(f"{label} a round")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="4,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for count in map(int, asked.counts.split(",")):
        found.append(measured(count, asked.rounds))
        print(json.dumps(found[-1]), flush=True)
    if asked.figure:
        drawn(found).savefig(asked.figure, metadata={"Date": None})


if __name__ == "__main__":
    main()

"""A longer look for bytes that break a site's handler or the server's decoder, with atheris.

python tests/fuzz/fuzz_wire.py -max_total_time=60; without atheris it draws changes at random.
"""

import contextlib
import logging
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    import atheris

    watched: Any = atheris.instrument_imports(include=["atoll.core", "atoll.engines"])
except ImportError:
    atheris, watched = None, contextlib.nullcontext()

with watched:
    from atoll.core.errors import BadMessageError
    from atoll.core.messages import Check, Packet, Weights, opened, pack
    from atoll.engines.network.contract import SiteFile
    from atoll.engines.network.policy import Gate
    from atoll.engines.network.replies import handle_request
from atoll.families.averaging import Fitted
from atoll.runs.config import change, resolve, to_toml

logging.disable(logging.CRITICAL)  # a site writes down every refusal


def gate() -> Gate:
    """A site with a small run."""
    values = {"data": "wine", "rounds": 2, "clients": 3, "widths": [4], "epochs": 2, "threads": 1}
    contract = {"methods": ["fedavg"], "actions": ["fit", "check"]}
    made = Gate(SiteFile(store=tempfile.mkdtemp(prefix="atoll-fuzz-"), contract=contract))
    made.prepare("run", to_toml(resolve(change({"method": "fedavg"}, values), "fuzz")), "site-0")
    return made


SITE = gate()
WEIGHTS = dict(SITE._client.site.model().state_dict())
GOOD = [pack(Weights(WEIGHTS)), pack(Check(0, WEIGHTS)), pack(Fitted(WEIGHTS, 0.5, 7))]
SEEDS = [len(p.header).to_bytes(2, "little") + p.header + p.block for p in GOOD]


def one(content: bytes) -> None:
    """The same bytes at both ends; anything but an answer or the one error is a find."""
    cut = int.from_bytes(content[:2], "little")
    header, block = content[2 : 2 + cut], content[2 + cut :]
    for action in ("fit", "check"):
        SITE._last = None
        reply = handle_request(
            SITE, 1, action, [0, 0, 2], Packet(header, block, 0, len(content), ())
        )
        assert set(reply) in ({"ok", "header", "block"}, {"ok", "kind", "reason"})
    try:
        opened(header, block, Fitted, "site")
    except BadMessageError:
        pass


def changed(draw: random.Random) -> bytes:
    """A good message with some bytes changed, cut or repeated."""
    content = bytearray(draw.choice(SEEDS))
    for _ in range(draw.randint(1, 8)):
        place = draw.randrange(len(content))
        content[place : place + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 4))
        if not content:
            break
    return bytes(content)


def main() -> None:
    """Fuzz until the time is over."""
    if atheris is None:
        seconds = float(os.environ.get("FUZZ_SECONDS", "60"))
        draw, end, count = random.Random(time.time_ns()), time.monotonic() + seconds, 0
        while time.monotonic() < end:
            one(changed(draw))
            count += 1
        print(f"{count:,} messages, nothing found; install atheris to be led by coverage")
        return
    corpus = Path(tempfile.mkdtemp(prefix="atoll-corpus-"))
    for number, seed in enumerate(SEEDS):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([*sys.argv, str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

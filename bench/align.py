"""How long private set intersection takes: processor time, and time by the clock.

    python bench/align.py [IDS] [PARTIES]

Each party has so many ids, half of which the next one lacks; all is done in this process, message
by message, as `atoll align` does it. Needs the extra psi. The time by the clock says something only
where nobody else works: the load at the start is printed beside it.
"""

import os
import sys
import time

from atoll.data.own.alignment import align


def main(ids: int, parties: int) -> None:
    """Align and say what it took."""
    tables = {
        f"party-{number}": [
            f"customer-{place:07d}"
            for place in range(number * ids // 2 // (parties - 1),
                               number * ids // 2 // (parties - 1) + ids)
        ]
        for number in range(parties)
    }  # fmt: skip
    load = os.getloadavg()[0]
    clock, used = time.perf_counter(), time.process_time()
    made = align(tables, "party-0")
    clock, used = time.perf_counter() - clock, time.process_time() - used
    moved = sum(len(message.content) for message in made.sent)
    print(
        f"{parties} parties of {ids:,} ids, {len(made.rows['party-0']):,} in common: "
        f"{used:.1f} s of processor time, {clock:.1f} s by the clock "
        f"on {os.cpu_count()} cores (load {load:.1f}), {moved / 1e6:.1f} MB moved"
    )


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*(given + [100_000, 2][len(given) :]))

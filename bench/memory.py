"""The memory plan of 500 small clients against what the run then takes."""

import argparse
import json

import compare
import jobs

from atoll.compute.executor import Executor
from atoll.engines.local import LocalEngine
from atoll.runs.memory import Meter, Peak, plan
from atoll.runs.parts import device, parts


def main() -> None:
    """Plan, run, print both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=500)
    given = parser.parse_args()
    asked = {"tasks": 1, "rounds": 3, "way": "stacked", "unpacked": False, **vars(given)}
    job = compare.config(argparse.Namespace(**asked))
    dataset = compare.table(given.clients)
    data = {json.dumps(job.data, sort_keys=True): dataset}
    jobs.warm(given.device)
    planned = plan(
        parts(job, data),
        lambda: parts(job, data),
        lambda few: LocalEngine(few, Executor("stacked")),
        fewest=20,
    )
    assert planned is not None  # there are clients enough
    peak = Peak(device(given.device))
    jobs.run(job, dataset)
    whole = peak.bytes
    with Meter() as meter:
        jobs.run(job, dataset)
    mib = 1 / 2**20
    print(
        json.dumps(
            {
                **vars(given),
                "planned MiB": round(planned.peak * mib, 1),
                "tensors at the peak, MiB": round(meter.peak * mib, 1),
                "plan over tensors": round(planned.peak / meter.peak, 3),
                "tensors on the GPU, or growth of the process, MiB": round(whole * mib, 1),
            }
        )
    )


if __name__ == "__main__":
    main()

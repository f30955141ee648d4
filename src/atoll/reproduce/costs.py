"""What measuring takes, from the seconds of what was measured."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from atoll.reproduce.measured import Measurement

__all__ = ["estimate", "seconds_of"]


def seconds_of(measurement: Measurement) -> float:
    """The GPU seconds of a setting; its share, where several were one sweep."""
    if "seconds" not in measurement:  # each seed has its own file
        return float(sum(run["seconds"] for run in measurement["runs"]))
    together: Sequence[str] = measurement.get("together", ("",))
    return float(measurement["seconds"]) / len(together)


def estimate(
    settings: Iterable[Any], setting: Any, measured: Mapping[str, Measurement]
) -> float | None:
    """The seconds of a setting: the median of measured ones on the same data, else of all."""
    known = {one: measured[one.name] for one in settings if _timed(measured.get(one.name))}
    same = [seconds_of(one) for other, one in known.items() if _data(other) == _data(setting)]
    others = [seconds_of(one) for one in known.values()]
    return median(same or others) if others else None


def _timed(one: Measurement | None) -> bool:
    return one is not None and ("seconds" in one or all("seconds" in run for run in one["runs"]))


def _data(setting: Any) -> Any:
    return setting.values()["data"]["name"]

"""What measuring takes, from the seconds of what was measured."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from atoll.reproduce.measured import Measurement

__all__ = ["costs"]


def seconds_of(measurement: Measurement) -> float:
    """The GPU seconds of a setting; its share, where several were one sweep."""
    if "seconds" not in measurement:  # each seed has its own file
        return float(sum(run["seconds"] for run in measurement["runs"]))
    together: Sequence[str] = measurement.get("together", ("",))
    return float(measurement["seconds"]) / len(together)


def costs(
    settings: Sequence[Any], measured: Mapping[str, Measurement]
) -> dict[str, dict[str, Any]]:
    """Runs and GPU seconds of every setting: as measured, or estimated from others."""
    by_name = {one.name: one for one in settings if _timed(measured.get(one.name))}
    listed = {}
    for setting in settings:
        if setting.name in by_name:
            one = measured[setting.name]
            listed[setting.name] = {"measured": True, "runs": len(one["runs"]),
                                    "seconds": round(seconds_of(one), 1)}  # fmt: skip
        elif by_name:
            listed[setting.name] = {"measured": False, **_estimate(setting, by_name, measured)}
    return listed


def _estimate(
    setting: Any, by_name: Mapping[str, Any], measured: Mapping[str, Measurement]
) -> dict[str, Any]:
    """The medians of measured settings on the same data, else of all."""
    data = _data(setting)
    same = [name for name, other in by_name.items() if _data(other) == data]
    measurements = [measured[name] for name in same or by_name]
    seconds = round(median(seconds_of(measurement) for measurement in measurements), 1)
    return {"runs": int(median(len(one["runs"]) for one in measurements)), "seconds": seconds}


def _timed(one: Measurement | None) -> bool:
    return one is not None and ("seconds" in one or all("seconds" in run for run in one["runs"]))


def _data(setting: Any) -> Any:
    return setting.values()["data"]["name"]

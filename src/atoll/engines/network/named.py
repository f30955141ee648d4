"""Code outside atoll that a run's config names, found without importing it."""

from collections.abc import Mapping
from typing import Any

from atoll.core.plugins import Group, is_foreign

__all__ = ["foreign_names"]


def foreign_names(values: Mapping[str, Any]) -> list[tuple[Group, str]] | None:
    """Names of plug-ins in the values of a config, with their group; imports nothing.

    None if a table or a name does not have the format of a config.
    """
    scenario, models = values.get("scenario", {}), values.get("models", [])
    if not isinstance(scenario, Mapping) or not isinstance(models, list):
        return None
    names: list[tuple[Group, Any]] = [
        ("atoll.methods", _name(values.get("method", ""))),
        ("atoll.datasets", _name(values.get("data", {}))),
        ("atoll.datasets", _name(values.get("public", {}))),
        ("atoll.models", _name(values.get("model", {}))),
        ("atoll.splits", scenario.get("split", "")),
        *[("atoll.models", model) for model in models],
    ]
    if not all(isinstance(name, str) for _, name in names):
        return None
    return [(group, name) for group, name in names if name and is_foreign(name, group)]


def _name(table: Any) -> Any:
    """The name in a table, or the string given instead of a table."""
    return table.get("name", "") if isinstance(table, Mapping) else table

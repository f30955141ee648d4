"""Options and their values, read from the source of atoll without importing it. Needs no torch."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["configs", "option_values", "source_names"]

PACKAGE = Path(__file__).parent.parent
TABLES = {  # the class that has the options of a table of a config, by file
    "engine": ("runs/config.py", "EngineOptions"),
    "report": ("runs/config.py", "ReportOptions"),
    "model": ("learning/models.py", "ModelOptions"),
    "robust": ("core/influence.py", "RobustOptions"),
}
NESTED = ("data", "scenario", "model", "public", "method", "engine", "robust", "report")
Values = dict[str, tuple[str, ...]]  # the values that an option may have; empty: any


def configs() -> list[str]:
    """Presets, methods, and the TOML files of this folder."""
    presets = [path.stem for path in (PACKAGE / "presets").glob("*.toml")]
    files = [path.name for path in Path().glob("*.toml")]
    return sorted({*presets, *source_names("methods"), *files})


def source_names(package: str) -> list[str]:
    """The modules of a package of atoll: methods, or data/splits."""
    return sorted(p.stem for p in (PACKAGE / package).glob("*.py") if p.stem != "__init__")


def option_values(config: str) -> Values:
    """What --set may change in a run of a preset or method: keys, each with its values."""
    method, split = _chosen(config)
    options: Values = {}
    for name, values in _fields("runs/config.py", "RunConfig").items():
        if name not in NESTED:
            options[name] = values
    options |= {"data": tuple(_data_sets()), "method": tuple(source_names("methods"))}
    options["scenario.split"] = options["split"] = tuple(source_names("data/splits"))
    tables = {**TABLES, "method": (f"methods/{method}.py", "Options")}
    for table, (file, kind) in tables.items():
        options |= _both_names(table, _fields(file, kind), options)
    for name in [split] if split else source_names("data/splits"):
        options |= _both_names("scenario", _fields(f"data/splits/{name}.py", "Options"), options)
    return options


def _both_names(table: str, fields: Values, reserved: Values) -> Values:
    """Options by their full names, and by their short ones where these are free."""
    short = {name: values for name, values in fields.items() if name not in reserved}
    return {f"{table}.{name}": values for name, values in fields.items()} | short


def _chosen(config: str) -> tuple[str, str]:
    """The method and the split that a config names; fedavg and none where it cannot be read."""
    path = Path(config) if config.endswith(".toml") else PACKAGE / "presets" / f"{config}.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return config if config in source_names("methods") else "fedavg", ""
    method, scenario = values.get("method", "fedavg"), values.get("scenario", {})
    name = method.get("name", "fedavg") if isinstance(method, dict) else method
    split = scenario.get("split", "") if isinstance(scenario, dict) else ""
    return str(name), str(split)


def _data_sets() -> Iterator[str]:
    """The names of the data sets: what the modules of `data/sources` with a KIND make public."""
    for path in sorted((PACKAGE / "data" / "sources").glob("*.py")):
        assigned = dict(_assignments(path))
        if "KIND" in assigned:
            yield from (name.replace("_", "-") for name in ast.literal_eval(assigned["__all__"]))


def _assignments(path: Path) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def _fields(file: str, kind: str) -> Values:
    """The fields of a class, each with its values."""
    path = PACKAGE / file
    if not path.is_file():
        return {}
    body = ast.parse(path.read_text(encoding="utf-8")).body
    definition = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == kind), None)
    fields = (
        [node for node in definition.body if isinstance(node, ast.AnnAssign)] if definition else []
    )
    return {ast.unparse(field.target): _values(field.annotation) for field in fields}


def _values(annotation: ast.expr) -> tuple[str, ...]:
    """The values of a Literal or a bool."""
    if isinstance(annotation, ast.Name) and annotation.id == "bool":
        return ("false", "true")
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            values = [one.value for one in ast.walk(node.slice) if isinstance(one, ast.Constant)]
            return tuple(str(value) for value in values if value)
    return ()

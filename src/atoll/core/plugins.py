"""Plug-ins: objects outside atoll that a config names.

A name is `package.module:object`, `./file.py:object`, or that of an entry point of an installed
package. The name is part of the config, and so of the record, of a resumed run and of a sweep. At
a site of a network nothing is imported that the site's own file does not list.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

from atoll.core.errors import UserError
from atoll.core.options import nearest

__all__ = [
    "MEMORY", "Group", "entry_names", "import_named", "is_foreign", "load_foreign",
    "objects_in_memory",
]  # fmt: skip

T = TypeVar("T")

Group = Literal["atoll.methods", "atoll.models", "atoll.datasets", "atoll.splits"]
NOUNS = {
    "atoll.methods": "method",
    "atoll.models": "network",
    "atoll.datasets": "data set",
    "atoll.splits": "split",
}


MEMORY = "memory:"  # begins the names of objects of a Python session
_OBJECTS: ContextVar[Mapping[str, Any]] = ContextVar("objects")


@contextmanager
def objects_in_memory(objects: Mapping[str, Any]) -> Iterator[None]:
    """Let names that begin with `memory:` stand for these objects."""
    token = _OBJECTS.set({**_OBJECTS.get({}), **objects})
    try:
        yield
    finally:
        _OBJECTS.reset(token)


def entry_names(group: Group) -> list[str]:
    """The names of the installed entry points of a group; imports none of them."""
    return sorted({entry.name for entry in entry_points(group=group)})


def is_foreign(name: str, group: Group) -> bool:
    """Whether a name is that of a plug-in; imports nothing."""
    return ":" in name or name in entry_names(group)


def import_named(name: str, group: Group, where: str) -> Any:
    """The object that a name of a plug-in stands for."""
    path, _, attribute = name.rpartition(":")
    if name.startswith(MEMORY):
        objects = _OBJECTS.get({})
        if name not in objects:
            what = f"the {NOUNS[group]} of this run was an object of a Python session"
            raise UserError(what, where, "give it again: atoll.load(folder, model=...)")
        return objects[name]
    try:
        if not path:
            return _entry(name, group).load()
        module = _of_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
        return getattr(module, attribute)
    except (ImportError, AttributeError, ValueError, OSError, SyntaxError) as error:
        remedy = "name package.module:object, ./file.py:object or an entry point"
        what = f"no {NOUNS[group]} at '{name}', which cannot be imported: {error}"
        raise UserError(what, where, remedy) from error


def load_foreign(name: str, group: Group, kind: type[T], where: str, built_in: list[str]) -> T:
    """The plug-in of this name, an object of this class; `built_in` names what atoll has itself."""
    noun = NOUNS[group]
    if not is_foreign(name, group):
        names = [*built_in, *entry_names(group)]
        raise UserError(f"unknown {noun} '{name}'", where, nearest(name, names))
    loaded = import_named(name, group, where)
    if not isinstance(loaded, kind):
        remedy = f"name an object of the class {kind.__module__}.{kind.__qualname__}"
        raise UserError(f"'{name}' is no {noun}", where, remedy)
    return loaded


def _entry(name: str, group: Group) -> EntryPoint:
    """The entry point of this name; two packages that offer it are an error."""
    entries = list(entry_points(group=group, name=name))
    if len({entry.value for entry in entries}) != 1:
        raise ImportError(f"{len(entries)} entry points '{name}' in {group}")
    return entries[0]


def _of_file(path: Path) -> ModuleType:
    """The module in a file; one that was changed since it was imported is imported again."""
    content = path.read_bytes()
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\x1f" + content).hexdigest()[:16]
    name = f"atoll_file_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

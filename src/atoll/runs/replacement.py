"""Replacements: installed functions that a run may name to swap parts of its method.

`replace = "atoll.reproduce.faults.fedseit:released"` runs FedSeIT as the authors' code behaves;
`replace = "atoll.audits.leakage:snapshots"` measures what the messages of V-LETO reveal. The name
is part of the config, and so of the record, of a resumed run and of a sweep. atoll imports it only
from `atoll.reproduce.faults` and `atoll.audits`; a site runs it only if its contract lists it.
"""

import importlib
import importlib.util
import re

from atoll import methods
from atoll.core.errors import UserError
from atoll.core.method import Method
from atoll.core.options import nearest

__all__ = ["check_replacement", "replaced"]

# the only packages to import from
SPELLING = re.compile(r"atoll\.(reproduce\.faults|audits)\.[a-z_]+:[a-z_]+")
REMEDY = "name an installed one, as in atoll.reproduce.faults.fedseit:released"


def check_replacement(name: str, where: str = "replace") -> None:
    """Refuse a name that is not a valid name of an installed replacement, without importing it."""
    if not SPELLING.fullmatch(name):
        raise UserError(f"'{name}' is not a replacement", where, REMEDY)


def replaced(name: str, replacement: str) -> Method:
    """The method with this name, with parts swapped by the replacement if there is one."""
    method = methods.load(name)
    if not replacement:
        return method
    check_replacement(replacement)
    path, _, function = replacement.partition(":")
    if importlib.util.find_spec(path) is None:
        raise UserError(f"no module '{path}'", "replace", REMEDY)
    module = importlib.import_module(path)
    if function not in module.REPLACEMENTS:
        remedy = nearest(function, module.REPLACEMENTS)
        raise UserError(f"no replacement '{function}' in {path}", "replace", remedy)
    if name not in module.METHODS:
        allowed = "' or '".join(module.METHODS)
        what = f"'{replacement}' replaces parts of '{allowed}', not of '{name}'"
        raise UserError(what, "replace", f"set method.name = '{allowed}', or leave it out")
    changed = module.REPLACEMENTS[function](method)
    assert isinstance(changed, Method)
    return changed

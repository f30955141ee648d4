"""The digest of the package's own source, by which two installations are compared."""

import hashlib
from functools import cache
from pathlib import Path

__all__ = ["PACKAGE", "source"]

PACKAGE = Path(__file__).parents[1]


@cache
def source() -> str:
    """A hash of the package's Python files, for trees without a repository."""
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        total.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]

"""Plans for own tables: a site accepts a plan only if it matches what the site has disclosed.

The coordinator writes the plan. The site stores its agreement for a run, recomputes from its
table what it disclosed, and refuses every column, type and class beyond that.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from atoll.core.errors import UserError
from atoll.core.record import write_whole
from atoll.data.own.agreement import (
    LEFT_OUT,
    Agree,
    Agreed,
    Common,
    Offer,
    Offered,
    OwnTable,
    Plan,
)
from atoll.engines.network.contract import RefusedError

__all__ = ["Agreement", "agreement_size", "keep", "most_of_all", "read", "violation"]

MOST_PLAN = 1 << 23  # maximum bytes of a plan
MOST_NAMES = 1_000  # maximum number of classes, stages or clients of a run
FILE = "agreement.json"  # file in the run's folder of the store


@dataclass(frozen=True)
class Agreement:
    """What a site has agreed to; the rest follows from its table."""

    key: str  # key of the hashes
    asked: str  # a digest of the run's config and of the client's name
    data: str  # fingerprint of the table
    columns: tuple[str, ...] = ()  # hashes of the columns that 'agree' has described

    @classmethod
    def begun(cls, key: str, config: str, client: str, data: str) -> "Agreement":
        """The agreement that an offer starts."""
        return cls(key, _asked(config, client), data)

    def stale(self, config: str, client: str, data: str) -> str:
        """Why this agreement does not apply to a run; empty if it does."""
        if self.asked != _asked(config, client):
            return "the columns were agreed on for another config or client"
        return "" if self.data == data else "the table here has changed since columns were agreed"


def _asked(config: str, client: str) -> str:
    content = json.dumps([config, client]).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _written(agreement: Agreement) -> bytes:
    return json.dumps(asdict(agreement), indent=1).encode()


def agreement_size(agreement: Agreement) -> int:
    """The size of an agreement in the store, in bytes."""
    return len(_written(agreement))


def keep(home: Path, agreement: Agreement) -> None:
    """Write an agreement to the folder of its run, for later processes."""
    home.mkdir(parents=True, exist_ok=True)
    write_whole(home / FILE, _written(agreement))


def read(home: Path, text: str) -> tuple[Agreement, Plan]:
    """The agreement of this site for a run, and the plan that it received."""
    if len(text) > MOST_PLAN:
        raise RefusedError(f"a plan of {len(text):,} bytes; {MOST_PLAN:,} are allowed")
    try:
        plan = TypeAdapter(Plan).validate_json(text)
    except ValueError as error:
        raise RefusedError("a plan that is not of the agreed form") from error
    path = home / FILE
    if not path.exists():
        raise RefusedError("this site has agreed to no columns for this run")
    try:
        return TypeAdapter(Agreement).validate_json(path.read_bytes()), plan
    except ValueError as error:
        raise UserError("a file is damaged", str(path), "restore it from a copy") from error


def most_of_all(offers: Mapping[str, Offered]) -> tuple[str, str]:
    """Which site offers the most names where all offer too many, and why; else empty words."""
    for what in ("classes", "stages"):
        names = {id: {*getattr(offered, what)} for id, offered in offers.items()}
        reason = _names(what, sorted(set().union(*names.values())))
        if reason:
            id = max(names, key=lambda id: len(names[id]))
            return id, f"it offers {len(names[id]):,} {what}; all have {reason}"
    return "", ""


def violation(plan: Plan, agreement: Agreement, table: OwnTable, clients: Sequence[str]) -> str:
    """How a plan exceeds what this site discloses of its table; empty if it does not."""
    offered = table.offered(Offer(agreement.key))
    agreed = table.agreed(Agree([*agreement.columns]), agreement.key)
    if plan.key != agreement.key:
        return "a plan with another key than that of the offer"
    hashes = [column.hash for column in plan.columns]
    if len({*hashes}) < len(hashes):
        return "a plan that has a column twice"
    for number, column in enumerate(plan.columns, 1):
        reason = _beyond(column, offered, agreed, table.options.most_levels)
        if reason:
            return f"column {number} of the plan {reason}"
    left = {hashed for hashed, kind in offered.columns.items() if kind == LEFT_OUT}
    if not left <= {*plan.left_out}:
        return "the plan does not leave out a column that this site leaves out"
    labels = [table.options.label] if table.regression else offered.classes
    if table.regression and len(plan.classes) > 1:
        return "classes in the plan, and the label is a number at this site"
    return (
        _names("classes", plan.classes, labels)
        or _names("stages", plan.stages, offered.stages)
        or _names("clients", clients)
    )


def _beyond(column: Common, offered: Offered, agreed: Agreed, most_levels: int) -> str:
    """Why a column of a plan differs from this site's agreement; empty if it does not.

    Levels of other sites are allowed if this site has disclosed its own levels of the column: an
    update shows which of them this site has, and the coordinator knows them by then.
    """
    kind = offered.columns.get(column.hash)
    if kind is None or column.hash not in agreed.gaps:
        return "is none that this site has agreed to"
    if kind == LEFT_OUT:
        return "is left out at this site"
    if column.kind != kind:
        return f"has another type than at this site, where it is of type {kind}"
    if kind != "text":
        return "has levels, and is no text" if column.levels else ""
    if len(column.levels) > most_levels:
        count = f"{len(column.levels):,}"
        return f"has {count} levels; {most_levels:,} are allowed (most_levels of the site's [data])"
    return "has a level twice" if len({*column.levels}) < len(column.levels) else ""


def _names(what: str, names: Sequence[str], own: Sequence[str] | None = None) -> str:
    """Why names of classes, stages or clients do not fit a run with this site."""
    if len(names) > MOST_NAMES:
        return f"{len(names):,} {what}; {MOST_NAMES:,} are allowed"
    if len({*names}) < len(names):
        return f"the same name twice among the {what}"
    if own is None:
        return ""
    if names and not own:
        return f"{what} in the plan, and none at this site"
    return "" if {*own} <= {*names} else f"the plan lacks {what} that this site has"

"""A site's own file with its contract: the terms that its owner writes."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from atoll import methods
from atoll.core.errors import UserError
from atoll.core.federation import actions
from atoll.core.options import AtLeastOne, NotNegative, NotNegativeInt, build, nearest
from atoll.core.storage import read_toml
from atoll.engines.network import ranges
from atoll.runs.replacement import check_replacement

__all__ = ["TELLING", "Contract", "RefusedError", "SiteFile", "read_site"]

TELLING = ("offer", "agree")  # what sites with own tables tell before training


class RefusedError(Exception):
    """A request or answer that the site's contract does not allow."""


@dataclass(frozen=True)
class Contract:
    """What a site allows; everything else is refused."""

    methods: tuple[str, ...] = ()  # that a run may use
    actions: tuple[str, ...] = ()  # that a coordinator may request
    stages: NotNegativeInt = 0  # that take part, counted from the first; 0: all
    largest: AtLeastOne = 50_000_000  # bytes of one answer
    total: AtLeastOne = 5_000_000_000  # bytes of all answers of a run
    in_all: AtLeastOne = 50_000_000_000  # bytes of all answers of all runs, ever
    networks: tuple[str, ...] = ()  # installed code (package.module:function) that a run may name
    replacements: tuple[str, ...] = ()  # module:function that may replace parts of a method
    plugins: tuple[str, ...] = ()  # data sets and splits outside atoll that a run may name
    question: AtLeastOne = 200_000_000  # bytes of one request
    stored: AtLeastOne = 5_000_000_000  # bytes that one run may keep in the store
    stored_in_all: AtLeastOne = 50_000_000_000  # bytes that all runs may keep in the store
    parameters: AtLeastOne = 50_000_000  # of the largest network that a run may build here
    rows: AtLeastOne = 8  # fewest training rows behind an answer
    step_rows: AtLeastOne = 8  # fewest rows in a step; a last one may have fewer beside 16 others
    steps: AtLeastOne = 2  # fewest training steps behind an update
    columns: AtLeastOne = 5  # fewest common columns with many values, of own tables; 1: any
    unit_rows: AtLeastOne = 3  # fewest rows that activate a unit of the first layer; 1: any
    initial_weights: Literal["derived", "any"] = "derived"  # any: the coordinator chooses
    move: NotNegative = 0.5  # largest relative change of shared weights in a round; 0: any
    drift: NotNegative = 50.0  # largest relative distance from the first weights; 0: any
    gradient: NotNegative = 10.0  # largest norm of one row's gradient in a request; 0: any
    shown_rows: Literal["refuse", "allow"] = "refuse"  # updates that reveal a training row
    unchecked_networks: Literal["refuse", "allow"] = (
        "refuse"  # weights of networks that may give whole training rows away: no check covers them
    )
    sums: Literal["refuse", "allow"] = "refuse"  # sums of products of fewer rows than columns
    repeats: NotNegativeInt = 0  # answers of a run that may come again with other weights
    rounds_in_all: AtLeastOne = 1000  # rounds of all runs on the same data, ever
    epochs_in_all: AtLeastOne = 20_000  # epochs of all runs on the same data, ever
    answers_in_all: AtLeastOne = 200_000  # answers of all runs on the same data, ever
    answer: bool = False  # whether a run may have this site's comparison of joined and alone, once
    comparisons_in_all: AtLeastOne = 5  # such comparisons of all runs on the same data, ever
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # limits of options, by method


@dataclass(frozen=True)
class SiteFile:
    """A site's own file: its paths, its engine and its contract."""

    store: str = "store"  # a folder for this site's models, checkpoints and its egress log
    data: dict[str, Any] = field(default_factory=dict)  # for runs on own files: this site's file
    engine: dict[str, Any] = field(default_factory=dict)  # of this site: device, threads, mode
    contract: dict[str, Any] = field(default_factory=dict)  # terms; see Contract

    def terms(self) -> Contract:
        """The contract, checked."""
        terms = build(Contract, self.contract, "[contract]")
        for name in terms.methods:
            if not methods.exists(name):
                remedy = nearest(name, methods.names())
                raise UserError(f"unknown method '{name}'", "[contract] methods", remedy)
        known = {a for name in terms.methods for a in actions(methods.load(name).client)}
        known |= {*TELLING}
        for name in terms.actions:
            if name not in known:
                what = f"no method of the contract has an action '{name}'"
                raise UserError(what, "[contract] actions", nearest(name, known))
        for name in terms.replacements:
            check_replacement(name, "[contract] replacements")
        ranges.check_limits(terms.options, terms.methods, bool(terms.plugins))
        if not terms.methods or not terms.actions:
            raise UserError("the contract allows nothing", "[contract]", "name methods and actions")
        return terms


def read_site(path: Path) -> SiteFile:
    """Read a site's file; its paths are relative to the folder of the file."""
    values = read_toml(path)
    site_file = build(SiteFile, values, str(path))
    site_file.terms()
    home = path.resolve().parent
    data = dict(site_file.data)
    if "files" in data:
        data["files"] = [str(home / name) for name in data["files"]]
    return dataclasses.replace(site_file, store=str(home / site_file.store), data=data)

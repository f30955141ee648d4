"""Drafts a site's file, and a contract that allows exactly one run."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from atoll import methods
from atoll.core.federation import actions
from atoll.core.options import describe
from atoll.core.plugins import is_foreign
from atoll.engines.network import ranges
from atoll.engines.network.contract import TELLING, Contract
from atoll.engines.network.unchecked import kind_of, uncovered
from atoll.runs.config import RunConfig

__all__ = ["drafted_contract", "drafted_file", "epochs_of_round", "written"]

AGAIN = 5  # budget of rounds as a multiple of the run's rounds, because rounds may repeat
ANSWERS = 25  # answers per round: its update, and tests of all tasks so far
STAGES = 20  # assumed number of stages of own tables with a stage column, before reading them


def drafted_contract(run: RunConfig) -> Contract:
    """A contract for one run."""
    method = str(run.method["name"])
    every = [*sorted(actions(methods.load(method).client)), *(TELLING if _own(run) else ())]
    used = [str(run.model.get("name", "")), *run.models]
    epochs = epochs_of_round(run)
    rounds = AGAIN * run.rounds * _stages(run)
    return Contract(
        methods=(method,),
        actions=tuple(every),
        networks=tuple(sorted({one for one in used if is_foreign(one, "atoll.models")})),
        plugins=_plugins(run),
        replacements=(run.replace,) if run.replace else (),
        move=_move(run),
        unchecked_networks="allow" if uncovered(run, kind_of(run)) else "refuse",
        rounds_in_all=rounds,
        epochs_in_all=rounds * epochs + AGAIN * int(run.method.get("pretrain_epochs", 0)),
        answers_in_all=_answers(run, rounds),
        options={method: ranges.drafted(run)},
    )


def _plugins(run: RunConfig) -> tuple[str, ...]:
    """Plug-in data sets and splits of a run."""
    own = "" if _own(run) else str(run.data.get("name", ""))
    sets = {own, str(run.public.get("name", ""))}
    foreign = {one for one in sets if is_foreign(one, "atoll.datasets")}
    if is_foreign(run.split, "atoll.splits"):
        foreign.add(run.split)
    return tuple(sorted(foreign))


def _own(run: RunConfig) -> bool:
    return "files" in run.data


def _stages(run: RunConfig) -> int:
    """The number of stages of a run; own tables have one if the run names no stage column."""
    if _own(run):
        return STAGES if run.data.get("stage") else 1
    return int(run.scenario.get("stages", 1))


def epochs_of_round(run: RunConfig) -> int:
    """The maximum number of epochs that a client trains in a round."""
    return max(map(int, [run.method.get("epochs", 1), *run.method.get("epochs_each", ())]))


def _answers(run: RunConfig, rounds: int) -> int:
    """How many answers all runs may have; methods that exchange every step have the default."""
    if methods.load(str(run.method["name"])).split in ("parties", "domains"):
        return Contract.answers_in_all
    return min(Contract.answers_in_all, rounds * ANSWERS)


def _move(run: RunConfig) -> float:
    """The maximum move of weights in a round; larger only if a site may miss rounds."""
    missed = run.rounds if run.method.get("cohort") else 1
    return float(min(Contract.drift, Contract.move * missed))


def drafted_file(run: RunConfig | None, store: str = "../store") -> str:
    """Draft a site's file; for a known run, its contract is filled in."""
    contract = drafted_contract(run) if run else Contract()
    return f"{HEAD.replace('STORE', store)}\n{written(contract)}"


def written(terms: Contract) -> str:
    """A contract as a table for a site's file, with the remark of each term."""
    remarks = {option.name: option.remark for option in describe(Contract)}
    lines = list[str]()
    for field in dataclasses.fields(Contract):
        if field.name != "options":
            value = getattr(terms, field.name)
            lines += UNCHECKED if (field.name, value) == ("unchecked_networks", "allow") else ()
            lines.append(f"{field.name} = {_value(value)}  # {remarks[field.name]}")
    head = "[contract]  # what this site allows; everything else is refused"
    return "\n".join([head, *lines, *_options(terms.options)]) + "\n"


def _options(options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for method, limits in options.items():
        key = method if method.replace("-", "").isalnum() else json.dumps(method)
        lines += ["", f"[contract.options.{key}]  # others keep their default, or default range"]
        lines += [f"{json.dumps(name)} = {_value(limits[name])}" for name in sorted(limits)]
    return lines


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]+", name) else json.dumps(name)


UNCHECKED = (
    "# The run needs the next line. No check looks for single rows in its network, so a dishonest",
    '# coordinator can read whole training rows off updates. "refuse" does not take part.',
)
HEAD = """\
# This site's own file. Paths are meant from the folder that this file is in.
store = "STORE"  # models, checkpoints, the log of what left; never sent, never in the kit

# data = { files = ["my-table.csv"] }  # for runs on own tables: this site's one file
# engine = { device = "cpu", threads = 1 }  # of this site alone

# atoll contract explain FILE says in words what this contract allows
"""

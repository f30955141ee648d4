"""The rules that every method keeps; a rule is a function of a case and an empty folder.

A rule raises ConformanceError where a method breaks it and unittest.SkipTest where it does not
apply.
"""

import json
import math
import random
import unittest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from atoll import methods
from atoll.core.errors import ClientFailedError, InterruptedRunError
from atoll.core.federation import Moment, actions, kinds
from atoll.core.messages import Empty, contents, pack, unpack
from atoll.core.options import build, describe
from atoll.core.record import Message, Score, read_events
from atoll.engines.local import LocalEngine, local_engine
from atoll.metrics import scores as metrics
from atoll.runs.execute import execute
from atoll.runs.parts import parts
from atoll.testing.privacy import leaks
from atoll.testing.samples import Case, RecordingEngine, run, run_on

__all__ = [
    "ConformanceError",
    "answers_in_any_order",
    "balanced_classes_stack",
    "bytes_are_counted",
    "has_options_with_remarks",
    "learns",
    "leaves_global_randomness_alone",
    "messages_survive_packing",
    "needs_no_packing",
    "only_actions_can_be_called",
    "rebuilt_clients_give_the_same_record",
    "require",
    "resumed_equals_uninterrupted",
    "same_seed_same_record",
    "sends_no_private_data",
    "skip_without_predict",
    "stacked_equals_loop",
    "stacked_equals_loop_with_uneven_rows",
]


class ConformanceError(AssertionError):
    """A method breaks a rule of the contract.

    >>> raise ConformanceError("my-mean: runs with two seeds are equal")
    Traceback (most recent call last):
    atoll.testing.rules.ConformanceError: my-mean: runs with two seeds are equal
    """


def require(case: Case, holds: bool, words: str) -> None:
    """Raise an error with these words unless the rule holds."""
    if not holds:
        raise ConformanceError(f"{case}: {words}")


def messages_survive_packing(case: Case, folder: Path) -> None:
    """(a) Every message is the same after it became bytes and a message again."""
    run_parts = parts(case.config())
    engine = RecordingEngine(run_parts)
    run_on(run_parts, engine, folder)
    require(case, bool(engine.packets), "no message was sent: ask the clients in Server.round")
    client = next(iter(engine.clients.values()))
    for sender, action, packet in engine.packets:
        request, reply = kinds(actions(type(client))[action])
        message: Any = unpack(packet, request if sender == "server" else reply, sender)
        same = pack(message) == packet
        same &= {name for name, _, _ in packet.tensors} == set(contents(message))
        require(case, same, f"the message of '{action}' from {sender} changes when it is packed")


def same_seed_same_record(case: Case, folder: Path) -> None:
    """(b) The same seed gives the same record, another seed another."""
    first, second = (run(case.config(), folder / name) for name in ("first", "second"))
    other = run(case.config(seed=1), folder / "other")
    words = "two runs with one seed differ: draw random numbers from site.stream(...)"
    require(case, first == second, words)
    require(case, first != other, "runs with two seeds are equal: is site.stream(...) used?")


def rebuilt_clients_give_the_same_record(case: Case, folder: Path) -> None:
    """(c) Clients that are built anew from their state before every message change nothing."""
    run_parts = parts(case.config())
    rebuilt = run_on(run_parts, RecordingEngine(run_parts, rebuild=True), folder / "rebuilt")
    words = "a client that is built again differs: state() misses what a client remembers"
    require(case, rebuilt == run(case.config(), folder / "plain"), words)


def answers_in_any_order(case: Case, folder: Path) -> None:
    """(e) The order in which clients answer does not matter."""
    run_parts = parts(case.config())
    backwards = run_on(run_parts, RecordingEngine(run_parts, backwards=True), folder / "backwards")
    words = "the record depends on the order of the answers: go through them by sorted id"
    require(case, backwards == run(case.config(), folder / "plain"), words)


def needs_no_packing(case: Case, folder: Path) -> None:
    """(a) A run whose messages are copied, not packed, has the same record and bytes."""
    packed = run(case.config(), folder / "packed")
    copied = run(case.config(packing=False), folder / "copied")
    words = "a run without packing differs: does a client change a message that it received?"
    require(case, packed == copied, words)


def sends_no_private_data(case: Case, folder: Path) -> None:
    """(f) No packet holds a row, labels or the name of an own column."""
    run_parts = parts(case.config())
    engine = RecordingEngine(run_parts)
    run_on(run_parts, engine, folder)
    leaked = leaks(run_parts, engine.packets)
    require(case, not leaked, f"private data is sent: {'; '.join(leaked[:3])}")


def leaves_global_randomness_alone(case: Case, folder: Path) -> None:
    """(b) The random numbers of the process are neither seeded nor drawn from."""

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()  # noqa: NPY002

    before = states()
    run(case.config(), folder)
    words = "a global generator was seeded or drawn from: use site.stream(...)"
    require(case, states() == before, words)


def resumed_equals_uninterrupted(case: Case, folder: Path) -> None:
    """(g) A run that is interrupted and resumed has the files of one that is not."""
    config = case.config()
    execute(config, folder / "whole", local_engine)
    for after in (1, 2):
        cut = folder / f"cut-{after}"
        try:
            execute(config, cut, local_engine, stopping=_stop_after(after))
        except InterruptedRunError:
            execute(config, cut, local_engine, resume=True)
        else:
            require(case, False, f"the run did not stop after round {after}")
        words = f"interrupted after round {after} and resumed, the run differs: check state()"
        require(case, _lasting(cut) == _lasting(folder / "whole"), words)


def _stop_after(count: int) -> Callable[[], bool]:
    calls = []

    def stopping() -> bool:
        calls.append(1)
        return len(calls) == count

    return stopping


def _lasting(folder: Path) -> dict[str, bytes]:
    """The files that are equal in two equal runs: all but those of seconds."""
    names = ("config.toml", "events.jsonl", "looks.jsonl", "result.json", "checkpoint.safetensors")
    files = {name: (folder / name).read_bytes() for name in names}
    checkpoint = files["checkpoint.safetensors"]
    length = int.from_bytes(checkpoint[:8], "little")
    header = json.loads(checkpoint[8 : 8 + length])
    del header["__metadata__"]  # has the length of the file of seconds
    tensors = json.dumps(header, sort_keys=True).encode() + checkpoint[8 + length :]
    return {**files, "checkpoint.safetensors": tensors}


def learns(case: Case, folder: Path) -> None:
    """(h) Every model is better than the commonest class, or the mean, by the case's margin."""
    config = case.config(rounds=case.rounds)
    execute(config, folder, local_engine)
    events = read_events(folder)
    run_parts = parts(config)
    tests = run_parts.scenario.tests[run_parts.scenario.clients[0]]
    labels = np.concatenate([run_parts.dataset.y[rows] for rows in tests])
    commonest = 0.0 if run_parts.dataset.regression else np.bincount(labels).max() / len(labels)
    least = commonest + case.margin  # the mean has an R2 of 0
    for variant in metrics.variants(events):
        accuracy = metrics.summary(events, variant)["final_accuracy"]
        words = f"'{variant}' has accuracy {accuracy:.3f} after {case.rounds} rounds; {least:.3f}"
        require(case, accuracy > least, f"{words} is the least")


def has_options_with_remarks(case: Case, folder: Path) -> None:
    """(i) Defaults are valid, every option has a remark, and the class has a docstring."""
    kind = methods.load(case.name).options
    defaults = {option.name: option.default for option in describe(kind)}
    values = {name: value for name, value in defaults.items() if value is not None}
    require(case, build(kind, values, case.name) == kind(), "the defaults of its options change")
    bare = [option.name for option in describe(kind) if not option.remark]
    words = f"options without a remark at the end of their line: {', '.join(bare)}"
    require(case, not bare, words)
    require(case, bool(kind.__doc__), "its class of options has no docstring")


def bytes_are_counted(case: Case, folder: Path) -> None:
    """(a) The ledger has the bytes that travelled."""
    run_parts = parts(case.config())
    engine = RecordingEngine(run_parts)
    run_on(run_parts, engine, folder)
    ledger = [event for event in read_events(folder) if isinstance(event, Message)]
    travelled = sum(len(packet.header) + len(packet.block) for *_, packet in engine.packets)
    same = sum(event.bytes for event in ledger) == travelled
    same &= sum(event.count for event in ledger) == len(engine.packets)
    require(case, same, "the ledger does not have the bytes that travelled")


def only_actions_can_be_called(case: Case, folder: Path) -> None:
    """(d) A server can call the declared actions and nothing else."""
    run_parts = parts(case.config())
    engine = LocalEngine(run_parts)
    id = run_parts.scenario.clients[0]
    for action in ("state", "restore", "_keep", "__init__", "nothing"):
        try:
            engine.carry(action, Moment(0, 0, 1), {id: pack(Empty())})
        except ClientFailedError as error:
            require(case, "not an action" in str(error), f"'{action}' fails otherwise: {error}")
        else:
            require(case, False, f"a server can call '{action}', which is not an action")


def stacked_equals_loop(case: Case, folder: Path) -> None:
    """(j) Clients in one stack give what they give one by one, to 1e-10, and they do stack."""
    _compare_stack(case, folder, {"clients": 4})


def stacked_equals_loop_with_uneven_rows(case: Case, folder: Path) -> None:
    """(j) The same where clients have other numbers of rows, and batches that are not full."""
    _compare_stack(case, folder, {"clients": 4, "rows": "dirichlet", "alpha": 1.0})


def balanced_classes_stack(case: Case, folder: Path) -> None:
    """(j) With `class_weight = "balanced"` a stack gives what the loop gives, and not the same."""
    method = methods.load(case.name)
    if not (method.weighted or method.weighs_classes):
        raise unittest.SkipTest("the method does not weigh classes")
    if parts(case.config()).dataset.regression:
        raise unittest.SkipTest("the label is a number")
    dealt = {"clients": 3, "rows": "dirichlet", "alpha": 1.0}
    balanced = {"class_weight": "balanced", "rounds": 1}
    _compare_stack(case, folder, dealt, balanced)
    options = case.options_of_split()
    changes = {f"scenario.{key}": value for key, value in dealt.items() if key in options}
    plain = {"rounds": 1, "dtype": "float64", "engine.mode": "loop", **_batch(case)}
    execute(case.config(**changes, **plain), folder / "plain", local_engine)
    without, loop = (
        load((folder / part / "checkpoint.safetensors").read_bytes()) for part in ("plain", "loop")
    )
    moved = [
        key
        for key, tensor in loop.items()
        if tensor.shape != without[key].shape
        or not torch.allclose(tensor.double(), without[key].double(), 1e-6, 1e-6, equal_nan=True)
    ]
    require(case, bool(moved), "balanced classes do not change its training")


def _batch(case: Case) -> dict[str, Any]:
    """Small batches, where a method has an option for it."""
    options = {option.name for option in describe(methods.load(case.name).options)}
    return {"batch": 16} if "batch" in options else {}


def _compare_stack(
    case: Case, folder: Path, dealt: dict[str, Any], more: dict[str, Any] | None = None
) -> None:
    options = case.options_of_split()
    changes = {f"scenario.{key}": value for key, value in dealt.items() if key in options}
    changes |= {"dtype": "float64", **_batch(case), **(more or {})}
    for mode in ("loop", "stacked"):
        execute(case.config(**{**changes, "engine.mode": mode}), folder / mode, local_engine)
    loop, stack = (load((folder / m / "checkpoint.safetensors").read_bytes()) for m in MODES)
    require(case, loop.keys() == stack.keys(), "a stacked run saves other tensors than the loop")
    for key, tensor in loop.items():
        close = torch.allclose(stack[key].double(), tensor.double(), 1e-10, 1e-10, equal_nan=True)
        require(case, close, f"'{key}' differs by more than 1e-10 between stack and loop")
    scores = [[e for e in read_events(folder / m) if isinstance(e, Score)] for m in MODES]
    pairs = zip(*scores, strict=True)
    require(case, all(_same_score(*pair) for pair in pairs), "the scores of stack and loop differ")
    _require_stack(case, folder)


def _same_score(one: Score, other: Score) -> bool:
    """Whether scores are equal; errors of regression in all but the last of four digits."""
    pairs = [(value, other.errors.get(name, -1.0)) for name, value in one.errors.items()]
    close = all(math.isclose(value, again, rel_tol=1.1e-3) for value, again in pairs)
    return close and replace(one, errors={}) == replace(other, errors={})


MODES = ("loop", "stacked")


def _require_stack(case: Case, folder: Path) -> None:
    """Training that is handed over as jobs ran in stacks."""
    path = folder / "stacked" / "engine.json"
    choices = list(json.loads(path.read_text()).values()) if path.exists() else []
    refused = [choice["reason"] for choice in choices if choice["mode"] != "stacked"]
    require(case, not refused, f"a stack was refused: {'; '.join(refused)}")
    if not any(choice["work"] in ("work", "passes") for choice in choices):
        run_parts = parts(case.config())
        engine = RecordingEngine(run_parts)
        run_on(run_parts, engine, folder / "jobs")
        require(case, not engine.jobs, "its jobs did not run in a stack")


def skip_without_predict(case: Case) -> None:
    """Skip a rule for a method that does not predict: only those of atoll have to."""
    client = methods.load(case.name).client
    if not hasattr(client, "predict") and not client.__module__.startswith("atoll.methods."):
        raise unittest.SkipTest("the method has no predict: atoll predict and export need it")

"""Which round CHFL keeps, exactly: real servers and clients, made-up hits on validation rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from atoll.core.federation import Moment
from atoll.core.messages import Tensors
from atoll.core.rows import Rows
from atoll.jobs.train import EvalJob
from atoll.methods import chfl
from atoll.runs.config import change, resolve
from atoll.runs.parts import Parts, parts

SMALL: dict[str, Any] = {
    "name": "chfl",
    "data": {"name": "synthetic-table", "rows": 120},
    "scenario": {"split": "columns", "clients": 2, "ratio": 0.4},
    "model": {"widths": [4]},
    "method": {"name": "chfl", "epochs": 1, "batch": 64, "mu": [0.1, 1.0], "patience": 2,
               "rate_local": [0.01, 0.02]},
}  # fmt: skip
IDS = ("site-0", "site-1")
Hits = list[int]  # of column one, mu = 0, 0.1 and 1, concatenation, two networks trained alone


def hits(common: int = 0, bank: Sequence[int] = (0, 0, 0), concat: int = 0,
         alone: Sequence[int] = (0, 0)) -> Hits:  # fmt: skip
    return [common, *bank, concat, *alone]


def small(**changes: Any) -> Parts:
    return parts(resolve(change(SMALL, changes), "test"))


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def models(client: chfl.Client) -> dict[str, Tensors]:
    """The models that a client has just judged, by variant."""

    def named(part: str, new: str, member: int | None = None) -> Tensors:
        whole = {n: w for n, w in client.candidate.items() if n.startswith(f"{part}/")}
        chosen = {n: w if member is None else w[member] for n, w in whole.items()}
        return {n.replace(part, new, 1): w.clone() for n, w in chosen.items()}

    read = named("said", "common")
    found = {"common": named("common", "common"), "local": named("local", "local")}
    found["concat"] = read | named("concat", "concat")
    for variant, member in client.chosen.items():
        mu = {"mu": client.weights["mu"][member, 0, 0]}
        found[variant] = read | named("unique", "unique", member) | mu
    return found


def _same(rows: Rows, stage: int) -> Rows:
    return rows


@dataclass
class Clients:
    """Clients whose hits on validation rows come from a script, an entry for each judgement."""

    made: Parts
    script: Mapping[str, Sequence[Hits]]
    judged: int = 0
    seen: list[dict[str, dict[str, Tensors]]] = field(default_factory=list)  # by judgement, client
    moment: Moment = field(default_factory=lambda: Moment(0, 0, 1))

    def __post_init__(self) -> None:
        self.ids = IDS
        self.clients: dict[str, Any] = {id: self.made.client(id) for id in IDS}
        for client in self.clients.values():  # every stage has the same rows
            train, valid = client.site.train(0), client.site.valid(0)
            client.site.train, client.site.valid = partial(_same, train), partial(_same, valid)

    def ask_all(self, action: Any, request: Any, admit: Any = None) -> dict[str, Any]:
        replies = {id: self._perform(id, action, request) for id in IDS}
        judges = action is chfl.Client.settle or (
            action is chfl.Client.fit and not self.moment.first
        )
        if judges:
            self.seen.append({id: models(client) for id, client in self.clients.items()})
            self.judged += 1
        return replies

    def _perform(self, id: str, action: Any, request: Any) -> Any:
        steps = action(self.clients[id], request, self.moment)
        if not hasattr(steps, "send"):
            return steps
        try:
            job = next(steps)
            while True:
                told = isinstance(job, EvalJob)
                job = steps.send(torch.tensor(self.script[id][self.judged]) if told else job.run())
        except StopIteration as end:
            return end.value

    def kept(self, id: str, variant: str) -> int:
        """The judgement after which a client's model of a variant was kept."""
        best = self.clients[id].best[variant]
        (number,) = [n for n, seen in enumerate(self.seen) if equal(seen[id][variant], best)]
        return number


@pytest.fixture(autouse=True)
def no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test rows play no part here."""
    monkeypatch.setattr(chfl, "scores", lambda *_: [])


def trained(
    script: Mapping[str, Sequence[Hits]],
    *,
    stages: int = 1,
    often: bool = False,
    **changes: Any,
) -> tuple[Clients, list[Mapping[str, float]]]:
    """The clients and the notes of a run that is as long as the script.

    `often`: it is tested after every round, and every round but the last is judged twice.
    """
    made = small(**changes)
    clients, server, notes = Clients(made, script), made.server(), []
    judgements = len(script[IDS[0]]) // stages
    rounds = (judgements + 1) // 2 if often else judgements
    for stage in range(stages):
        for number in range(rounds):
            clients.moment = Moment(stage, number, rounds)
            notes.append(server.round(clients, clients.moment))
            if often or number == rounds - 1:
                server.evaluate(clients, clients.moment)
    return clients, notes


def both(*script: Hits) -> dict[str, list[Hits]]:
    """The same hits at both clients."""
    return {id: list(script) for id in IDS}


COMMON = {
    "rising": ([1, 2, 3, 4], 3),
    "falling": ([4, 3, 2, 1], 0),
    "best in the middle": ([1, 5, 2, 3], 1),
    "a tie: the first of equals": ([2, 5, 5, 1], 1),
    "a tie with the last": ([2, 5, 1, 5], 1),
    "the last beats a tie": ([5, 5, 5, 6], 3),
    "no hit at all": ([0, 0, 0, 0], 0),
}


@pytest.mark.parametrize(("counts", "best"), COMMON.values(), ids=list(COMMON))
def test_the_best_round_is_kept_and_of_equal_rounds_the_first(counts: list[int], best: int) -> None:
    clients, _ = trained(both(*(hits(common=count) for count in counts)), patience=9)
    assert [clients.kept(id, "common") for id in IDS] == [best, best]


@pytest.mark.parametrize("counts", [counts for counts, _ in COMMON.values()], ids=list(COMMON))
def test_with_select_last_the_last_round_is_kept_whatever_the_hits(counts: list[int]) -> None:
    script = [hits(count, [count] * 3, count, [count] * 2) for count in counts]
    clients, _ = trained(both(*script), select="last", patience=9)
    for variant in chfl.VARIANTS:
        assert [clients.kept(id, variant) for id in IDS] == [3, 3], variant


def test_every_variant_keeps_a_round_of_its_own() -> None:
    clients, _ = trained(
        both(
            hits(common=5, bank=(1, 2, 2), concat=1, alone=(1, 1)),
            hits(common=4, bank=(6, 1, 0), concat=2, alone=(7, 2)),
            hits(common=3, bank=(2, 3, 4), concat=9, alone=(3, 3)),
            hits(common=2, bank=(3, 0, 3), concat=4, alone=(6, 6)),
        ),
        patience=9,
    )
    wanted = {"common": 0, "mu=0": 1, "mu>0": 2, "concat": 2, "auto": 1, "local": 1}
    assert {v: clients.kept(IDS[0], v) for v in wanted} == wanted


def test_the_mean_over_clients_decides_and_not_any_one_of_them() -> None:
    script = {
        IDS[0]: [hits(common=9), hits(common=5), hits(common=1)],
        IDS[1]: [hits(common=0), hits(common=6), hits(common=9)],
    }  # sums of hits: 9, 11, 10
    clients, _ = trained(script, patience=9)
    assert [clients.kept(id, "common") for id in IDS] == [1, 1]


def test_the_network_trained_alone_is_kept_by_each_client_for_itself() -> None:
    script = {
        IDS[0]: [hits(alone=(3, 1)), hits(alone=(3, 2)), hits(alone=(1, 2))],
        IDS[1]: [hits(alone=(0, 0)), hits(alone=(2, 4)), hits(alone=(5, 1))],
    }
    clients, _ = trained(script, patience=9)
    assert [clients.kept(id, "local") for id in IDS] == [0, 2]


@pytest.mark.parametrize(("alone", "number"), [((3, 2), 0), ((2, 3), 1), ((3, 3), 0)])
def test_of_networks_trained_alone_the_one_with_most_hits_is_judged_and_of_equals_the_first(
    alone: tuple[int, int], number: int
) -> None:
    clients, _ = trained(both(hits(alone=alone)))
    client = clients.clients[IDS[0]]
    own = {n.removeprefix(f"local{number}/"): w for n, w in client.weights.items()}
    best = {n.removeprefix("local/"): w for n, w in client.best["local"].items()}
    assert equal(best, {n: own[n] for n in best})


@pytest.mark.parametrize(
    ("bank", "positive", "auto"),
    [
        ((0, 0, 0), 0.1, 0.0),
        ((1, 2, 3), 1.0, 1.0),
        ((3, 2, 2), 0.1, 0.0),
        ((2, 2, 1), 0.1, 0.0),
        ((1, 2, 2), 0.1, 0.1),
    ],
)
def test_the_strength_with_most_hits_is_taken_and_of_equals_the_smallest(
    bank: tuple[int, int, int], positive: float, auto: float
) -> None:
    clients, _ = trained(both(hits(bank=bank)))
    best = clients.clients[IDS[0]].best
    assert [round(float(best[v]["mu"]), 6) for v in ("mu=0", "mu>0", "auto")] == [0, positive, auto]


@pytest.mark.parametrize("select", ["best", "last"])
def test_without_any_validation_row_the_last_round_is_kept_and_patience_never_ends(
    select: str,
) -> None:
    script = both(*[hits()] * 4)
    clients, notes = trained(script, select=select, patience=1, valid=0.0)
    for variant in chfl.VARIANTS:
        assert [clients.kept(id, variant) for id in IDS] == [3, 3], variant
    assert not any(note["finished"] for note in notes)


def test_one_client_without_validation_rows_does_not_make_all_blind() -> None:
    """It has no hits, and keeps its last network alone; the others' hits choose the round."""
    clients = Clients(small(), both(hits(5, alone=(5, 0)), hits(3, alone=(3, 0)), hits(1)))
    lone = clients.clients[IDS[1]].site
    lone.valid = partial(_same, lone.valid(0).at(slice(0, 0)))
    server = clients.made.server()
    for number in range(3):
        clients.moment = Moment(0, number, 3)
        server.round(clients, clients.moment)
    server.evaluate(clients, clients.moment)
    assert [clients.kept(id, "common") for id in IDS] == [0, 0]
    assert [clients.kept(id, "local") for id in IDS] == [0, 2]


def test_a_stage_ends_after_as_many_rounds_without_gain_as_patience_says() -> None:
    counts = [3, 4, 4, 3, 5]  # the first two gain, the next two do not
    _, notes = trained(both(*(hits(common=count) for count in counts)), patience=2)
    # a round judges the models of the round before: 3, 4, 4, 3 are known after rounds 1 to 4
    assert [note["finished"] for note in notes] == [0, 0, 0, 0, 1]


def test_a_gain_of_any_counted_variant_resets_patience() -> None:
    script = both(hits(4), hits(4, concat=1), hits(4, concat=1), hits(4, bank=(1, 0, 0)), hits())
    _, notes = trained(script, patience=2)
    assert [note["finished"] for note in notes] == [0, 0, 0, 0, 0]


def test_a_single_strength_that_is_only_reported_does_not_reset_patience() -> None:
    script = both(*(hits(4, bank=(9, 9, n)) for n in range(5)))
    _, notes = trained(script, patience=2, each_mu=True)
    assert [note["finished"] for note in notes] == [0, 0, 0, 1, 1]


def test_a_new_stage_forgets_the_best_of_the_last() -> None:
    counts = [9, 8, 7, 1, 3, 2]
    script = both(*(hits(common=n, alone=(n, 0)) for n in counts))
    clients, _ = trained(script, stages=2, patience=9)
    assert [clients.kept(id, "common") for id in IDS] == [4, 4]
    assert [clients.kept(id, "local") for id in IDS] == [4, 4]


def test_a_new_stage_begins_with_all_its_patience() -> None:
    script = both(*(hits(common=n) for n in (3, 2, 1, 3, 2, 1)))
    _, notes = trained(script, stages=2, patience=1)
    assert [note["finished"] for note in notes] == [0, 0, 1, 0, 0, 1]


def test_a_test_between_rounds_judges_the_same_models_once() -> None:
    """Tested after every round, the same round is kept and patience ends no sooner."""
    counts = [3, 4, 4, 3, 5]
    plain, notes = trained(both(*map(hits, counts)))
    assert plain.kept(IDS[0], "common") == 4
    # `evaluate` judges the models of a round, `fit` of the next round judges them again
    script = [hits(n) for count in counts for n in (count, count)][:-1]
    often, often_notes = trained(both(*script), often=True)
    best = often.clients[IDS[0]].best["common"]
    assert equal(best, plain.clients[IDS[0]].best["common"])
    assert [n["finished"] for n in often_notes] == [n["finished"] for n in notes]

"""What a round on public images is made of, and the pictures of features beside it."""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.errors import BadMessageError, ClientFailedError, UserError
from atoll.core.federation import Clients, Moment
from atoll.core.messages import Empty, Packet, Weights, pack, unpack, wrap
from atoll.core.record import Snapshot
from atoll.core.rng import Stream
from atoll.core.rows import Public, Rows
from atoll.families.distillation import (
    Align,
    Aligned,
    Exchange,
    Joined,
    Learner,
    Plan,
    Trained,
    epochs_at,
    final_model,
    mean_logits,
)
from atoll.families.distillation_snapshots import features_snapshot, principal
from atoll.jobs.train import TrainResult
from atoll.learning.models import skeleton
from atoll.methods import fccl


def test_all_get_the_mean_of_all_logits_summed_in_double_precision() -> None:
    answers = {"b": torch.tensor([2.0**24, 1.0]), "a": torch.tensor([1.0, 3.0])}
    answers |= {"c": torch.tensor([-(2.0**24), 8.0])}
    found = mean_logits(answers)
    assert list(found) == ["b", "a", "c"]
    for target in found.values():
        assert target.dtype == torch.float32
        assert target.tolist() == pytest.approx([1 / 3, 4.0])


def test_epochs_are_the_usual_ones_or_each_clients_own_in_their_order() -> None:
    assert epochs_at((), 7, ["a", "b"], "b") == 7
    assert [epochs_at((3, 5), 7, ["a", "b"], id) for id in ("a", "b")] == [3, 5]
    with pytest.raises(UserError, match="3 numbers for 2 clients"):
        epochs_at((3, 5, 1), 7, ["a", "b"], "a")


class Scripted:
    """A transport at whose end clients answer as a function of id and request says."""

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Any]] = []

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        self.asked += [(id, packet.message) for id, packet in packets.items()]
        return {id: wrap(self.answer(id, packet.message)) for id, packet in packets.items()}


class Silent:
    """A transport at whose end client b does not answer."""

    def __init__(self, transport: Scripted) -> None:
        self.transport = transport

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        there = {id: wrap(unpack(p, Empty, id)) for id, p in packets.items() if id != "b"}
        return {
            id: pack(p.message) for id, p in self.transport.carry(action, moment, there).items()
        }


def exchange(
    answer: Callable[[str, Any], Any], ids: str = "ab", images: int = 2, **options: Any
) -> tuple[Exchange, Scripted]:
    """A round of clients that answer as they are told, with so many public images."""
    x, channel = torch.zeros(images, 1, 2, 2), torch.ones(1, 1, 1)
    public = Public(x, channel * 0, channel, "print")
    stream = lambda *names: Stream(7)  # noqa: E731
    site: Any = SimpleNamespace(public=lambda: public, classes=("x", "y"), stream=stream)
    transport = Scripted(answer)
    clients = Clients(list(ids), transport, Moment(0, 0, 1), packing=False)
    return Exchange(fccl.Options(**options), site, clients, fccl.Client), transport


def test_a_client_that_does_not_answer_is_not_asked_again_in_the_round() -> None:
    some, transport = exchange(lambda id, request: Trained(1.0), "abc")
    some.clients = Clients(["a", "b", "c"], Silent(transport), Moment(0, 0, 1), at_least=2)
    assert list(some.ask_all(fccl.Client.prepare, Empty())) == ["a", "c"]
    assert some.ids == ["a", "c"]


def test_shared_weights_are_the_mean_over_those_who_are_left() -> None:
    weights = {"a": 1.0, "b": 4.0}

    def answer(id: str, request: Any) -> Weights:
        return Weights({"w": torch.tensor([weights[id]])})

    both, _ = exchange(answer, average=True)
    assert both.mean_weights().weights["w"].tolist() == [2.5]
    both.ids.remove("b")
    assert both.mean_weights().weights["w"].tolist() == [1.0]
    none, transport = exchange(answer)
    assert none.mean_weights().weights == {}
    assert not transport.asked


LOGITS = {("a", 0): [1.0, 3.0], ("b", 0): [3.0, 5.0], ("a", 1): [0.0, 2.0], ("b", 1): [2.0, 6.0]}


def aligning(id: str, request: Align) -> Aligned:
    """Two steps; the loss of a step is told with the answer for the next one."""
    losses = {"a": [9.0, 1.0, 3.0], "b": [9.0, 2.0, 4.0]}
    known = (id, request.step) in LOGITS
    logits = torch.tensor([LOGITS[id, request.step]]) if known else torch.zeros(0)
    return Aligned(logits, losses[id][request.step])


def test_each_step_brings_the_target_of_the_one_before_and_the_last_asks_for_nothing() -> None:
    both, transport = exchange(aligning)
    loss = both.align(Plan(1, 1), mean_logits)
    assert loss == (1 + 2 + 3 + 4) / 4  # what the first exchange says of a loss counts for nothing
    asked = [(id, r.key, r.step, r.count, r.target.tolist()) for id, r in transport.asked]
    assert asked == [
        (id, 7, step, 2, target)
        for step, target in ((0, []), (1, [[2.0, 4.0]]), (2, [[1.0, 4.0]]))
        for id in "ab"
    ]


def test_the_mean_loss_of_one_step_of_one_client_and_of_no_step() -> None:
    once = {0: torch.zeros(1, 2), 1: torch.zeros(0)}
    one, _ = exchange(lambda id, request: Aligned(once[request.step], 5.0), "a", images=1)
    assert one.align(Plan(1, 1), mean_logits) == 5.0
    none, _ = exchange(lambda id, request: Aligned(torch.zeros(0), 5.0))
    assert none.align(Plan(1, 0), mean_logits) == 0.0


@pytest.mark.parametrize(("step", "logits"), [(0, torch.zeros(2, 2)), (2, torch.zeros(1, 2))])
def test_logits_of_another_shape_than_was_asked_for_are_refused(step: int, logits: Tensor) -> None:
    def wrong(id: str, request: Align) -> Aligned:
        lies = id == "b" and request.step == step
        return Aligned(logits, 0.0) if lies else aligning(id, request)

    with pytest.raises(BadMessageError, match="logits of shape") as caught:
        exchange(wrong)[0].align(Plan(1, 1), mean_logits)
    assert caught.value.sender == "b"


def failing(*who: str) -> Callable[[str, Any], Any]:
    def answer(id: str, request: Any) -> Trained:
        if id in who:
            raise ClientFailedError(id, "prepare", "its machine is gone")
        return Trained(1.0)

    return answer


def test_as_many_as_may_fail_are_left_out_and_named() -> None:
    some, transport = exchange(failing("a", "c"), "abcd", absent=2)
    replies = some.ask(fccl.Client.prepare, dict.fromkeys("abcd", Empty()))
    assert list(replies) == some.ids == ["b", "d"]
    assert some.notes == {"excluded a": 1.0, "excluded c": 1.0}
    transport.asked.clear()
    some.ask(fccl.Client.prepare, dict.fromkeys("abcd", Empty()))
    assert [id for id, _ in transport.asked] == ["b", "d"]


@pytest.mark.parametrize(
    ("ids", "absent", "who"), [("abcd", 0, "a"), ("abcd", 1, "ac"), ("ab", 2, "ab"), ("a", 1, "a")]
)
def test_one_more_than_may_fail_or_all_end_the_round(ids: str, absent: int, who: str) -> None:
    some, _ = exchange(failing(*who), ids, absent=absent)
    with pytest.raises(ClientFailedError, match=f"client {who[-1]} failed"):
        some.ask(fccl.Client.prepare, dict.fromkeys(ids, Empty()))


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (Joined("other", 5, ["x", "y"]), "its public data are other ones"),
        (Joined("print", 6, ["x", "y"]), "its public data are other ones"),
        (Joined("print", 5, ["y", "x"]), "its classes are others: y, x"),
    ],
)
def test_a_client_with_other_public_data_or_classes_cannot_join(lie: Joined, words: str) -> None:
    right = Joined("print", 5, ["x", "y"])
    exchange(lambda id, request: right, images=5)[0]._agree(Plan(1, 1))
    mixed, _ = exchange(lambda id, request: lie if id == "b" else right, images=5)
    with pytest.raises(ClientFailedError, match=words) as caught:
        mixed._agree(Plan(1, 1))
    assert caught.value.client == "b"


def test_the_first_twenty_of_other_classes_are_named() -> None:
    many = [f"c{number}" for number in range(25)]
    mixed, _ = exchange(lambda id, request: Joined("print", 5, many), images=5)
    with pytest.raises(ClientFailedError) as caught:
        mixed._agree(Plan(1, 1))
    assert str(caught.value).endswith("c18, c19")


def test_public_images_must_fill_one_batch() -> None:
    four, _ = exchange(lambda id, request: Joined("print", 4, ["x", "y"]), images=4)
    four._agree(Plan(4, 1))
    with pytest.raises(UserError, match="4 public images do not fill a batch of 5"):
        four._agree(Plan(5, 1))


def test_a_variant_that_begins_with_solo_is_the_model_before_any_exchange() -> None:
    learner = SimpleNamespace(weights={"w": torch.ones(1)}, solo={"w": torch.zeros(1)})
    client: Any = SimpleNamespace(learner=learner)
    variants = ("solo", "solo top-1", "fccl", "fccl x")
    models = {variant: final_model(client, {}, variant, 0) for variant in variants}
    assert [model is learner.solo for model in models.values()] == [True, True, False, False]
    assert models["fccl"] is learner.weights


def test_with_one_exchange_a_round_the_own_share_of_the_target_is_that_of_now() -> None:
    z, target = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])
    assert fccl.own_target(z, {"target": target}) is target
    earlier = {"earlier": torch.tensor([5.0, 10.0]), "count": torch.tensor(4.0)}
    assert fccl.own_target(z, {"target": target, **earlier}).tolist() == [6.0, 8.0]


@pytest.mark.parametrize(("decay", "rates"), [("linear", [0.1, 0.055]), ("none", [0.1, 0.1])])
def test_the_rate_falls_to_a_tenth_over_the_rounds_or_not_at_all(
    decay: str, rates: list[float]
) -> None:
    options = fccl.Options(rate=0.1, rate_decay=decay)  # type: ignore[arg-type]
    found = [fccl.rate(options, Moment(0, number, 10)) for number in (0, 5)]
    assert found == pytest.approx(rates)


@pytest.mark.numerics
def test_the_first_of_equally_large_values_is_the_positive_one() -> None:
    """The second row is longer by one rounding, which must not turn the picture."""
    rows = torch.tensor([[-3.0], [3.0 + 4.5e-16], [0.0]], dtype=torch.float64)
    assert torch.equal(principal(rows).sign()[:2], torch.tensor([[1.0], [-1.0]]).double())
    assert float(principal(torch.tensor([[1.0], [0.0], [-2.0]]))[2, 0]) > 0


def learner(**options: Any) -> Learner:
    """A learner of one input and two classes, without public images."""
    site: Any = SimpleNamespace(
        model=lambda: torch.nn.Linear(1, 2),
        regression=False,
        clients=["a"],
        id="a",
        device=torch.device("cpu"),
        stream=lambda *names: Stream(7),
        test=lambda task: Rows(
            torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, 0), torch.tensor([0, 1, 1])
        ),
    )
    return Learner("fml", fccl.Options(**options), site)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_round_that_ends_with_one_number_that_is_not_finite_changes_nothing(
    broken: float,
) -> None:
    own = learner()
    before = own.weights
    own.finish({"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0, broken])})
    assert own.weights is before
    assert own.last is before


def test_a_count_that_has_no_half_precision_does_not_spoil_a_round() -> None:
    """70000 batches are more than the largest number of 16 bits, 65504."""
    own = learner()
    ended = {"w": torch.ones(2, dtype=torch.float16), "batches": torch.tensor(70_000)}
    own.finish(ended)
    assert own.weights is ended
    assert own.last is ended


def test_a_learner_without_public_images_has_no_step_on_them() -> None:
    x = torch.zeros(5, 1, 2, 2)
    assert learner().plan.steps(Public(x, x[0], x[0], "print")) == 0


def test_the_solo_model_is_tested_again_once_it_was_trained() -> None:
    """Before, class 0 for all; after, class 1 for all: one hit, then two."""
    own = learner()
    first = {"weight": torch.zeros(2, 1), "bias": torch.tensor([1.0, 0.0])}
    own.weights = own.last = own.solo = first
    assert own.check(0).correct == {"fml": 1, "solo": 1}
    steps = own.prepare(own.site.test(0))
    next(steps)
    trained = {"weight": torch.zeros(2, 1), "bias": torch.tensor([0.0, 1.0])}
    with pytest.raises(StopIteration):
        steps.send(TrainResult(trained, {}, {"loss": 0.5}))
    assert own.check(0).correct == {"fml": 2, "solo": 2}
    assert own.weights is trained


def rows_of(count: int) -> Rows:
    x = torch.randn(count, 1, generator=torch.Generator().manual_seed(count))
    return Rows(x, x[:, :0], torch.arange(count) % 2)


def features_of(*counts: int) -> list[Snapshot]:
    """The snapshot for test rows of domains of these sizes; the last layer reads 30 features."""
    site: Any = SimpleNamespace(id="a", tasks=tuple("xyz"[: len(counts)]))
    weights = {"wide.weight": torch.arange(30.0)[:, None], "last.weight": torch.zeros(2, 30)}
    network = skeleton(Wide(), False)
    return features_snapshot(site, Moment(0, 0, 1), network, weights, [rows_of(n) for n in counts])


class Wide(torch.nn.Module):
    """One input, thirty features, two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(1, 30, bias=False)
        self.last = torch.nn.Linear(30, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.wide(x))
        return found


def test_features_are_shown_in_twenty_components_of_at_most_forty_rows_of_a_domain() -> None:
    (found,) = features_of(41, 3)
    assert len(found.columns) == 20
    assert found.columns[-1] == "component 20"
    assert [label.split("|")[0] for label in found.rows] == ["x"] * 40 + ["y"] * 3


@pytest.mark.parametrize(("counts", "shown"), [((1, 1), False), ((2, 1), True)])
def test_two_rows_have_no_components_worth_a_figure(counts: tuple[int, int], shown: bool) -> None:
    assert bool(features_of(*counts)) is shown

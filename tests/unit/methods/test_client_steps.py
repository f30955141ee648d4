"""What clients do before they answer, with the parts that a step reads and no more."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.core.federation import Moment
from atoll.core.messages import Weights
from atoll.families.distillation import Align
from atoll.jobs.train import TrainResult
from atoll.methods import alone, fccl, fedmd
from atoll.runs.config import change, resolve
from atoll.runs.parts import parts

NOW = Moment(0, 1, 4)
TARGET = torch.ones(2, 2)


def site() -> Any:
    cpu = torch.device("cpu")
    return SimpleNamespace(public=lambda: "public", device=cpu, train=lambda stage: [1, 2])


class Learner:
    """Remembers what it was asked for; what it says of images are the images."""

    def __init__(self) -> None:
        self.last, self.weights, self.training = "last", "now", None
        self.calls: list[Any] = []

    def logits(self, weights: Any, x: Any) -> torch.Tensor:
        return torch.full((2, 2), float(x))

    def rewind(self) -> None:
        self.calls.append("rewind")

    def receive(self, weights: Any) -> None:
        self.calls.append(weights)

    def probe(self, cause: str, moment: Moment) -> None:
        self.calls.append(cause)

    def step(self, request: Align, moment: Moment, loss: Any, given: Any, **how: Any) -> Any:
        yield given

    def fit(self, rows: Any, loss: Any, moment: Moment, *how: Any) -> Any:
        self.calls.append("fit")
        yield rows


@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_own_share_of_a_progressive_target_is_of_the_batch_that_the_target_is_of(
    step: int,
) -> None:
    client: Any = SimpleNamespace(
        options=fccl.Options(own_target="progressive"),
        learner=Learner(),
        site=site(),
        plan=SimpleNamespace(images=lambda public, key, step: 10 * key + step),
    )
    given: Any = next(fccl.Client._step(client, Align(7, step, 3, TARGET), NOW))
    if not step:
        assert list(given) == ["target"]
        return
    assert given["earlier"].tolist() == [[70.0 + step - 1] * 2] * 2
    assert float(given["count"]) == 3.0


@pytest.mark.parametrize(("step", "calls"), [(0, ["rewind"]), (1, [])])
def test_a_round_on_public_images_begins_where_the_last_one_ended(
    step: int, calls: list[str]
) -> None:
    for kind, options in ((fccl.Client, fccl.Options()), (fedmd.Client, fedmd.Options())):
        learner, request = Learner(), Align(7, step, 3, TARGET)
        client: Any = SimpleNamespace(options=options, learner=learner, site=site())
        client._step = lambda request, moment: iter([0])
        next(kind.align(client, request, NOW))
        assert learner.calls == calls


@pytest.mark.parametrize("kind", [fccl, fedmd])
def test_local_training_begins_with_the_mean_that_came(kind: Any) -> None:
    learner, common = Learner(), Weights({"w": torch.ones(1)})
    client: Any = SimpleNamespace(options=kind.Options(), learner=learner, site=site())
    client._taught = lambda rows: rows
    assert next(kind.Client.fit(client, common, NOW)) == [1, 2]
    assert learner.calls == [common.weights, "others", "fit"]


def test_a_client_alone_shows_what_it_says_after_its_own_training() -> None:
    small = {"data": "wine", "scenario": {"clients": 2}, "model": {"widths": [2]}}
    made = parts(resolve(change({"method": "alone", **small}, {}), "test"))
    client, shown = made.client(made.scenario.clients[0]), list[Any]()
    assert isinstance(client, alone.Client)
    record: Any = lambda doing, moment, check: shown.append((doing, check(0)))  # noqa: E731
    client.site.probe = record  # type: ignore[method-assign]
    steps = client.fit(None, Moment(0, 0, 1))  # type: ignore[arg-type]
    job: Any = next(steps)
    with pytest.raises(StopIteration):
        steps.send(TrainResult(job.weights, {}, {"loss": 1.0}))
    ((doing, checked),) = shown
    assert doing == "own"
    assert checked.rows == len(client.site.test(0))


def test_the_correlations_of_an_fccl_client_are_zero_before_its_first_step() -> None:
    public = SimpleNamespace()
    own: Any = SimpleNamespace(
        model=lambda: torch.nn.Linear(1, 3),
        public=lambda: public,
        classes=("x", "y", "z"),
        clients=["a"],
        id="a",
        device=torch.device("cpu"),
    )
    state = fccl.Client(fccl.Options(), own).state()
    assert state["seen/m"].tolist() == [[0.0] * 3] * 3

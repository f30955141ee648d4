"""The marks on message fields: what they say, and that the wire does not change."""

import pytest

from atoll import methods
from atoll.core.annotations import Outputs, RowGradient, SharedWeights, Update, marked
from atoll.core.federation import actions, kinds
from atoll.core.messages import Check, Empty, Tensors, Weights, _fields
from atoll.families.vertical import Learn
from atoll.methods import chfl, fedavg, fedseit, fml


def test_marks_are_found_by_their_kind() -> None:
    assert marked(Weights, SharedWeights) == {"weights": SharedWeights()}
    assert marked(Check, SharedWeights) == {"weights": SharedWeights()}
    assert marked(Learn, RowGradient) == {"gradient": RowGradient()}
    assert marked(fml.Fit, SharedWeights).keys() == {"weights", "own"}
    assert marked(Weights, Update) == {}
    assert marked(Empty, SharedWeights) == {}


def test_the_wire_does_not_see_a_mark() -> None:
    assert _fields(Weights) == {"weights": Tensors}


@pytest.mark.parametrize("method", [fedavg, chfl, fml, fedseit], ids=lambda m: m.__name__)
def test_methods_that_average_weights_mark_their_updates(method: object) -> None:
    fitted = method.Fitted  # type: ignore[attr-defined]
    assert marked(fitted, Update)


@pytest.mark.parametrize("name", methods.names())
def test_an_update_names_shared_weights_of_its_request(name: str) -> None:
    for action in actions(methods.load(name).client).values():
        request, reply = kinds(action)
        for mark in marked(reply, Update).values():
            assert mark.of in marked(request, SharedWeights)


def test_outputs_are_of_own_rows_without_tails_unless_their_mark_says_otherwise() -> None:
    mark = Outputs()
    assert (mark.tails, mark.common, mark.aligned) == (False, False, False)

"""Packing and unpacking, message by message."""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.core.errors import BadMessageError
from atoll.core.messages import (
    LARGEST_HEADER,
    LARGEST_NAME,
    MOST_TENSORS,
    Check,
    Checked,
    Empty,
    Packet,
    Tensors,
    Weights,
    contents,
    pack,
    same_shapes,
    unpack,
    wrap,
    wrap_all,
)


@dataclass(frozen=True)
class Embedded:
    part: Tensor
    loss: float


@dataclass(frozen=True)
class Listed:
    rows: list[int]
    nested: dict[str, list[float]]


def tampered(message: Any, change: Callable[[dict[str, Any]], object]) -> Packet:
    """The packet of a message after a change to its header."""
    packet = pack(message)
    body = json.loads(packet.header)
    change(body)
    return dataclasses.replace(packet, header=json.dumps(body).encode())


def reason(packet: Packet, kind: type) -> str:
    with pytest.raises(BadMessageError) as caught:
        unpack(packet, kind, "bank-7")
    assert caught.value.sender == "bank-7"
    assert "bank-7" in str(caught.value)
    return caught.value.reason


def test_shared_messages_survive_packing() -> None:
    for message in (Empty(), Checked(3, {"": 2, "own": 1}, {"": 0.5, "own": 0.25})):
        assert unpack(pack(message), type(message), "a") == message
    check = unpack(pack(Check(2, {"w": torch.ones(2)})), Check, "a")
    assert check.task == 2
    assert torch.equal(check.weights["w"], torch.ones(2))


def test_the_bytes_counted_are_the_bytes_that_travel() -> None:
    packet = pack(Weights({"w": torch.ones(3, 5), "b": torch.ones(5, dtype=torch.float64)}))
    assert packet.payload == 3 * 5 * 4 + 5 * 8
    assert packet.size == len(packet.header) + len(packet.block)
    assert packet.tensors == (
        ("weights/b", "float64", (5,)),
        ("weights/w", "float32", (3, 5)),
    )


def test_names_go_on_the_wire_with_their_field_and_in_order() -> None:
    assert list(contents(Weights({"b": torch.ones(1), "a": torch.ones(1)}))) == [
        "weights/a",
        "weights/b",
    ]


def test_tensors_that_share_memory_are_packed() -> None:
    base = torch.arange(6.0)
    tied = {"one": base, "same": base, "start": base[:2], "overlap": base[1:4], "apart": base[4:]}
    read = unpack(pack(Weights(tied)), Weights, "a").weights
    assert all(torch.equal(read[name], tied[name]) for name in tied)
    read["one"].zero_()
    assert torch.equal(read["same"], base)


def test_views_that_are_not_contiguous_are_packed() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    views = {"turned": base.T, "steps": base[:, ::2], "wide": torch.ones(1).expand(5)}
    read = unpack(pack(Weights(views)), Weights, "a").weights
    assert all(torch.equal(read[name], views[name]) for name in views)
    assert pack(Weights(views)).payload == (12 + 6 + 5) * 4


@pytest.mark.parametrize("carry", [pack, wrap])
def test_what_arrives_shares_nothing_with_what_was_sent(carry: Callable[[Any], Packet]) -> None:
    weight, rows = nn.Parameter(torch.ones(2)), [1, 2]
    packet, listed = carry(Weights({"w": weight})), carry(Listed(rows, {"a": [1.0]}))
    with torch.no_grad():
        weight.zero_()
    rows.append(3)
    read = unpack(packet, Weights, "a").weights["w"]
    assert torch.equal(read, torch.ones(2))
    assert not read.requires_grad
    assert unpack(listed, Listed, "a").rows == [1, 2]


def test_messages_wrapped_together_are_those_wrapped_one_by_one() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    messages: dict[str, Any] = {
        "b": Weights({"z": base.T, "a": base}),
        "a": Weights({"a": base + 1, "z": base.T + 1}),
        "d": Weights({"a": base.double(), "z": base.T}),
        "c": Embedded(base, 0.5),
        "e": Empty(),
        "f": Empty(),
    }
    together = wrap_all(messages)
    assert list(together) == list(messages)
    for id, message in messages.items():
        alone, found = wrap(message), together[id]
        assert (found.size, found.payload, found.tensors) == (
            alone.size,
            alone.payload,
            alone.tensors,
        )
        assert type(found.message) is type(message)
        for name, tensor in contents(found.message).items():
            assert torch.equal(tensor, contents(alone.message)[name])
            assert tensor.is_contiguous()
    base.zero_()
    assert together["a"].message.weights["a"].sum() == 21


@pytest.mark.parametrize("who", ["a", "b", "c"])
def test_of_messages_wrapped_together_the_poisoned_one_is_named(who: str) -> None:
    messages = {id: Weights({"w": torch.ones(2), "v": torch.ones(3)}) for id in "abc"}
    messages[who].weights["v"][1] = math.nan
    packets = wrap_all(messages)
    for id in {*"abc"} - {who}:
        unpack(packets[id], Weights, id)
    with pytest.raises(BadMessageError, match="'weights/v'") as caught:
        unpack(packets[who], Weights, who)
    assert caught.value.sender == who


def test_a_packet_that_somebody_else_checks_is_not_checked_again() -> None:
    poisoned = {"a": Weights({"w": torch.tensor([math.nan])})}
    assert unpack(wrap_all(poisoned, checked=True)["a"], Weights, "a").weights["w"].isnan()
    with pytest.raises(BadMessageError, match="a Weights, not a Empty"):
        unpack(wrap_all(poisoned, checked=True)["a"], Empty, "a")


class Number:
    """What float() reads, and nothing else."""

    def __init__(self) -> None:
        self.reads = 0

    def __float__(self) -> float:
        self.reads += 1
        return 0.25


def test_a_float_may_be_whatever_float_reads_and_is_read_when_its_bytes_are_counted() -> None:
    number: Any = Number()
    wrapped = wrap(Embedded(torch.ones(2), number))
    assert number.reads == 0
    assert wrapped.size == pack(Embedded(torch.ones(2), 0.25)).size
    assert unpack(pack(Embedded(torch.ones(2), number)), Embedded, "a").loss == 0.25
    nested = Listed([], {"a": [1.0, number]})
    assert pack(nested).header == pack(Listed([], {"a": [1.0, 0.25]})).header


def test_a_wrapped_message_arrives_as_a_packed_one_does() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    message = Weights({"z": base.T, "a": base, "m": base})
    packed, wrapped = unpack(pack(message), Weights, "a"), unpack(wrap(message), Weights, "a")
    assert list(packed.weights) == list(wrapped.weights) == ["a", "m", "z"]
    for name, tensor in packed.weights.items():
        assert torch.equal(tensor, wrapped.weights[name])
        assert tensor.stride() == wrapped.weights[name].stride()


@pytest.mark.parametrize("carry", [pack, wrap])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_with_a_number_that_is_not_finite_is_refused(
    carry: Callable[[Any], Packet], number: float, kind: torch.dtype
) -> None:
    poisoned = torch.zeros(2, 3, dtype=kind)
    poisoned[1, 2] = number
    assert "finite" in reason(carry(Weights({"w": poisoned})), Weights)


@pytest.mark.parametrize("carry", [pack, wrap])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_plain_value_that_is_not_finite_is_refused(
    carry: Callable[[Any], Packet], number: float
) -> None:
    assert "'loss' is not finite" in reason(carry(Embedded(torch.ones(1), number)), Embedded)
    assert "'nested' is not finite" in reason(carry(Listed([], {"a": [1.0, number]})), Listed)


@pytest.mark.parametrize("carry", [pack, wrap])
def test_a_tensor_of_another_type_is_refused(carry: Callable[[Any], Packet]) -> None:
    odd = Weights({"w": torch.zeros(2, dtype=torch.complex64)})
    assert "complex64" in reason(carry(odd), Weights)


@pytest.mark.parametrize("carry", [pack, wrap])
def test_a_message_of_another_kind_is_refused(carry: Callable[[Any], Packet]) -> None:
    assert "Empty" in reason(carry(Empty()), Weights)


@pytest.mark.parametrize("carry", [pack, wrap])
def test_a_name_that_is_too_long_is_refused(carry: Callable[[Any], Packet]) -> None:
    longest = "x" * (LARGEST_NAME - len("weights/"))
    assert unpack(carry(Weights({longest: torch.ones(1)})), Weights, "a")
    assert "name" in reason(carry(Weights({f"{longest}x": torch.ones(1)})), Weights)


@pytest.mark.parametrize("carry", [pack, wrap])
def test_a_tensor_with_too_many_axes_is_refused(carry: Callable[[Any], Packet]) -> None:
    assert unpack(carry(Weights({"w": torch.ones([1] * 16)})), Weights, "a")
    assert "axes" in reason(carry(Weights({"w": torch.ones([1] * 17)})), Weights)


def test_too_many_tensors_are_refused() -> None:
    one = torch.ones(1, dtype=torch.int8)
    many = Weights({str(i): one for i in range(MOST_TENSORS + 1)})
    assert "too many" in reason(pack(many), Weights)


def test_a_truth_value_that_is_neither_true_nor_false_is_refused() -> None:
    packet = pack(Weights({"w": torch.tensor([True, False])}))
    bent = dataclasses.replace(packet, block=packet.block[:-1] + b"\x02")
    assert "truth" in reason(bent, Weights)


def test_a_header_that_is_too_long_is_refused_before_it_is_read() -> None:
    long = dataclasses.replace(pack(Empty()), header=b" " * (LARGEST_HEADER + 1))
    assert "header" in reason(long, Empty)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"kind":"Empty","values":{}}',
        b'{"kind":"Empty","values":{},"named":{},"more":1}',
        b'{"kind":"Empty","values":[],"named":{}}',
        b'{"kind":"Empty","values":{},"named":[]}',
        b'{"kind":"Empty","values":{},"named":{"weights":0}}',
        b'{"kind":"Empty","values":{"x":1},"named":{}}',
        b'{"kind":null,"values":{},"named":{}}',
        b'{"kind":"\\ud800","values":{},"named":{}}',
        b"[" * 100_000,
        b'{"kind":' + b"[" * 900 + b"]" * 900 + b',"values":{},"named":{}}',
        b"1" * 10_000,
    ],
)
def test_a_header_of_another_form_is_refused(header: bytes) -> None:
    refusal = reason(dataclasses.replace(pack(Empty()), header=header), Empty)
    refusal.encode()  # can be printed: no half of a character in it


def test_a_value_that_is_nested_without_end_is_refused() -> None:
    for depth in range(850, 1000):  # about as deep as Python follows
        nested = b"[" * depth + b"]" * depth
        header = b'{"kind":"Listed","values":{"rows":[],"nested":' + nested + b'},"named":{}}'
        assert reason(dataclasses.replace(pack(Listed([], {})), header=header), Listed)


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (Checked(1, {}, {}), "rows", "1"),
        (Checked(1, {}, {}), "rows", 1.0),
        (Checked(1, {}, {}), "rows", True),
        (Checked(1, {}, {}), "correct", {"": 0.5}),
        (Checked(1, {}, {}), "correct", [1]),
        (Checked(1, {}, {}), "macro_f1", {"": 10**400}),
        (Listed([], {}), "rows", None),
        (Listed([], {}), "nested", {"a": ["1"]}),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(message: Any, field: str, value: Any) -> None:
    packet = tampered(message, lambda body: body["values"].update({field: value}))
    assert f"'{field}'" in reason(packet, type(message))


def test_a_missing_value_is_refused() -> None:
    assert "rows" in reason(
        tampered(Checked(1, {}, {}), lambda body: body["values"].pop("rows")), Checked
    )


def test_a_missing_tensor_is_refused() -> None:
    one, other = pack(Embedded(torch.ones(1), 0.0)), pack(Weights({"a": torch.ones(1)}))
    assert "'part' is missing" in reason(
        dataclasses.replace(one, block=pack(Empty()).block), Embedded
    )
    assert "'weights'" in reason(dataclasses.replace(other, block=pack(Empty()).block), Weights)


def test_a_tensor_too_many_is_refused() -> None:
    one, more = (
        pack(Weights({"a": torch.ones(1)})),
        Weights({"a": torch.ones(1), "b": torch.ones(1)}),
    )
    assert "'weights'" in reason(dataclasses.replace(one, block=pack(more).block), Weights)
    assert "unknown tensor 'weights/a'" in reason(
        dataclasses.replace(pack(Empty()), block=one.block), Empty
    )


def test_a_reply_may_have_the_requests_tensors() -> None:
    same_shapes(Weights({"a": torch.ones(2)}), Weights({"a": torch.zeros(2)}), "bank-7")
    same_shapes(Weights({"a": torch.ones(2)}), Empty(), "bank-7")


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"a": torch.ones(3)}, "(3,)"),
        ({"a": torch.ones(2, 1)}, "(2, 1)"),
        ({"a": torch.ones(2, dtype=torch.float64)}, "float64"),
        ({}, "missing"),
        ({"a": torch.ones(2), "b": torch.ones(1)}, "'b'"),
        ({"A": torch.ones(2)}, "'A'"),
    ],
)
def test_a_reply_with_other_tensors_than_its_request_is_refused(given: Tensors, part: str) -> None:
    with pytest.raises(BadMessageError) as caught:
        same_shapes(Weights({"a": torch.ones(2)}), Weights(given), "bank-7")
    assert caught.value.sender == "bank-7"
    assert part in caught.value.reason

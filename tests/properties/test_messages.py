"""What holds of packing for every message, and of unpacking for any bytes at all."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.core.errors import BadMessageError
from atoll.core.messages import ADMITTED, Packet, Tensors, contents, pack, unpack, wrap


@dataclass(frozen=True)
class Everything:
    one: Tensor
    many: Tensors
    other: Tensors
    number: int
    real: float
    truth: bool
    text: str
    maybe: str | None
    rows: tuple[int, ...]
    nested: dict[str, list[dict[str, float]]]
    by_task: dict[int, tuple[str, float]]


REAL = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
TYPES = st.sampled_from(sorted(ADMITTED, key=str))
SHAPES = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    kind, shape, seed = draw(TYPES), draw(SHAPES), draw(st.integers(0, 2**32))
    numbers = torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed))
    made = numbers.to(kind)
    if draw(st.booleans()):
        made = made.mT if made.dim() >= 2 else made
    return made / 3 if kind.is_floating_point else made


MESSAGES = st.builds(
    Everything,
    one=tensors(),
    many=st.dictionaries(NAMES, tensors(), max_size=4),
    other=st.dictionaries(NAMES, tensors(), max_size=2),
    number=st.integers(-(2**70), 2**70),
    real=REAL,
    truth=st.booleans(),
    text=NAMES,
    maybe=st.none() | NAMES,
    rows=st.lists(st.integers(-(2**63), 2**63)).map(tuple),
    nested=st.dictionaries(NAMES, st.lists(st.dictionaries(NAMES, REAL, max_size=2), max_size=2)),
    by_task=st.dictionaries(st.integers(-9, 99), st.tuples(NAMES, REAL), max_size=3),
)


def plain(message: Everything) -> dict[str, Any]:
    fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    return {name: fields[name] for name in fields.keys() - {"one", "many", "other"}}


def equal(one: Everything, other: Everything) -> bool:
    mine, theirs = contents(one), contents(other)
    return (
        plain(one) == plain(other)
        and mine.keys() == theirs.keys()
        and all(
            mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name])
            for name in mine
        )
    )


def refused_or_read(packet: Packet) -> None:
    """Whatever a packet holds, unpacking gives a message or the one error that names the sender."""
    refusal, read = None, None
    try:
        read = unpack(packet, Everything, "mallory")
    except BadMessageError as error:
        refusal = error
    if refusal is not None:
        assert refusal.sender == "mallory"
        assert str(refusal).encode()
    else:
        assert type(read) is Everything
        for tensor in contents(read).values():
            assert tensor.dtype in ADMITTED
            assert not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


@settings(deadline=None)
@given(MESSAGES)
def test_packing_and_unpacking_is_the_identity(message: Everything) -> None:
    read = unpack(pack(message), Everything, "a")
    assert equal(message, read)
    assert type(read.rows) is tuple
    assert pack(read).block == pack(message).block


@settings(deadline=None)
@given(MESSAGES)
def test_wrapping_counts_the_same_bytes_as_packing(message: Everything) -> None:
    packed, wrapped = pack(message), wrap(message)
    assert (wrapped.size, wrapped.payload) == (packed.size, packed.payload)
    assert packed.size == len(packed.header) + len(packed.block)
    assert wrapped.tensors == packed.tensors
    assert equal(message, unpack(wrapped, Everything, "a"))


@settings(deadline=None)
@given(MESSAGES)
def test_names_come_back_in_the_same_order_however_they_were_given(message: Everything) -> None:
    turned = dataclasses.replace(message, many=dict(reversed(message.many.items())))
    assert pack(turned) == pack(message)
    assert list(unpack(wrap(turned), Everything, "a").many) == sorted(message.many)


@settings(deadline=None)
@given(MESSAGES, st.integers(0), st.integers(0, 7), st.booleans())
def test_a_flipped_bit_gives_a_message_or_names_the_sender(
    message: Everything, place: int, bit: int, in_header: bool
) -> None:
    packet = pack(message)
    part = bytearray(packet.header if in_header else packet.block)
    part[place % len(part)] ^= 1 << bit
    changed: dict[str, Any] = {"header" if in_header else "block": bytes(part)}
    refused_or_read(dataclasses.replace(packet, **changed))


@settings(deadline=None)
@given(MESSAGES, st.integers(0), st.booleans())
def test_a_truncated_packet_is_refused(message: Everything, length: int, in_header: bool) -> None:
    packet = pack(message)
    part = packet.header if in_header else packet.block
    changed: dict[str, Any] = {"header" if in_header else "block": part[: length % len(part)]}
    with pytest.raises(BadMessageError) as caught:
        unpack(dataclasses.replace(packet, **changed), Everything, "mallory")
    assert caught.value.sender == "mallory"


@settings(deadline=None)
@given(MESSAGES, st.binary(min_size=1, max_size=9))
def test_a_packet_with_something_behind_it_is_refused(message: Everything, more: bytes) -> None:
    packet = pack(message)
    with pytest.raises(BadMessageError):
        unpack(dataclasses.replace(packet, block=packet.block + more), Everything, "mallory")


@settings(deadline=None)
@given(MESSAGES, st.binary(max_size=200), st.binary(max_size=200))
def test_random_bytes_are_refused(message: Everything, header: bytes, block: bytes) -> None:
    whole = pack(message)
    for packet in (
        dataclasses.replace(whole, header=header),
        dataclasses.replace(whole, block=block),
        dataclasses.replace(whole, header=header, block=block),
    ):
        with pytest.raises(BadMessageError, match="mallory"):
            unpack(packet, Everything, "mallory")


ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(
            ["F32", "BOOL", "I64", "BF16", "F8_E4M3", "F4", "C64", "U32", "?"]
        ),
        "shape": st.lists(st.integers(-1, 4) | st.integers(2**31, 2**64), max_size=20),
        "data_offsets": st.tuples(st.integers(-1, 20), st.integers(-1, 20)).map(list),
    }
)


@settings(deadline=None)
@given(
    MESSAGES, ENTRIES, st.binary(max_size=20), st.sampled_from(["one", "many/a", "__metadata__"])
)
def test_a_forged_block_gives_a_message_or_names_the_sender(
    message: Everything, entry: dict[str, Any], numbers: bytes, name: str
) -> None:
    head = json.dumps({name: entry}).encode()
    block = len(head).to_bytes(8, "little") + head + numbers
    refused_or_read(dataclasses.replace(pack(message), block=block))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(MESSAGES, JSON, st.sampled_from([f.name for f in dataclasses.fields(Everything)]))
def test_a_forged_value_gives_a_message_or_names_the_sender(
    message: Everything, value: Any, field: str
) -> None:
    packet = pack(message)
    for part in ("values", "named"):
        body = json.loads(packet.header)
        body[part][field] = value
        refused_or_read(dataclasses.replace(packet, header=json.dumps(body).encode()))
        body[part] = value
        refused_or_read(dataclasses.replace(packet, header=json.dumps(body).encode()))

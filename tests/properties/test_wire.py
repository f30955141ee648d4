"""Whatever bytes come: a site gives a reply of the agreed form, a server a message or one error."""

import json
import tempfile
from functools import cache
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import BadMessageError
from atoll.core.messages import Check, Checked, Packet, Weights, opened, pack
from atoll.engines.network.contract import SiteFile
from atoll.engines.network.policy import Gate
from atoll.engines.network.replies import handle_request
from atoll.families.averaging import Fitted
from atoll.runs.config import change, resolve, to_toml

MOMENT = [0, 0, 2]


@cache
def gate() -> Gate:
    values = {"data": "wine", "rounds": 2, "clients": 3, "widths": [4], "epochs": 2, "threads": 1}
    contract = {"methods": ["fedavg"], "actions": ["fit", "check"], "question": 100_000}
    made = Gate(SiteFile(store=tempfile.mkdtemp(prefix="atoll-fuzz-"), contract=contract))
    made.prepare("run", to_toml(resolve(change({"method": "fedavg"}, values), "test")), "site-0")
    return made


def weights() -> dict[str, torch.Tensor]:
    return dict(gate()._client.site.model().state_dict())


@cache
def good(action: str) -> Packet:
    return pack(Weights(weights()) if action == "fit" else Check(0, weights()))


def ask(
    number: int, action: str, header: Any, block: Any, moment: Any = None, site: Gate | None = None
) -> dict[str, Any]:
    size = len(header) + len(block)
    packet = Packet(header, block, 0, size, ())
    return handle_request(
        site or gate(), number, action, MOMENT if moment is None else moment, packet
    )


def agreed(reply: dict[str, Any]) -> None:
    """A reply of the agreed form, with nothing in it but what may leave."""
    if reply["ok"]:
        assert set(reply) == {"ok", "header", "block"}
        assert isinstance(reply["header"], bytes)
        assert isinstance(reply["block"], bytes)
    else:
        assert set(reply) == {"ok", "kind", "reason"}
        assert reply["kind"] in ("refused", "failed")
        assert len(reply["reason"]) < 400


numbers = st.integers(-(10**30), 10**30)
actions = st.sampled_from(["fit", "check", "state", "__init__", "", "fit\0", "keep"]) | st.text()


@given(numbers, actions, st.binary(max_size=400), st.binary(max_size=400))
@settings(max_examples=150)
def test_any_bytes_get_a_reply(number: int, action: str, header: bytes, block: bytes) -> None:
    gate()._last = None
    agreed(ask(number, action, header, block))


@given(st.sampled_from(["fit", "check"]), st.data())
@settings(max_examples=150)
def test_a_good_question_with_some_bytes_changed_gets_a_reply(action: str, data: Any) -> None:
    gate()._last = None
    packet = good(action)
    parts = {"header": bytearray(packet.header), "block": bytearray(packet.block)}
    part = parts[data.draw(st.sampled_from(sorted(parts)))]
    for _ in range(data.draw(st.integers(1, 4))):
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(part)) | st.just(len(part)))
    del part[cut:]
    agreed(ask(1, action, bytes(parts["header"]), bytes(parts["block"])))


@given(
    st.lists(numbers | st.none() | st.text(max_size=3) | st.floats() | st.booleans(), max_size=5)
)
@settings(max_examples=60)
def test_any_moment_gets_a_reply(moment: list[Any]) -> None:
    gate()._last = None
    packet = good("check")
    agreed(ask(1, "check", packet.header, packet.block, moment))


plain: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
names = st.sampled_from(["kind", "values", "named", "weights", "task", "loss", "rows"])


@given(st.dictionaries(names, plain | st.sampled_from(["Fitted", "Checked"])), st.binary())
@settings(max_examples=150)
def test_any_answer_is_a_message_or_one_typed_error(body: dict[str, Any], block: bytes) -> None:
    for kind in (Fitted, Checked):
        for bytes_ in (block, pack(Weights(weights())).block):
            try:
                found = opened(json.dumps(body).encode(), bytes_, kind, "basel")
            except BadMessageError as error:
                if error.sender != "basel":
                    raise
            else:
                assert isinstance(found.message, kind)


def test_a_site_that_was_asked_nonsense_still_answers_what_is_right() -> None:
    """Its answer is that of a site that was asked nothing else."""
    packet, asked_before, undisturbed = good("fit"), gate.__wrapped__(), gate.__wrapped__()
    for number, block in enumerate((b"", b"x" * 99_000, packet.block[:-1]), 1):
        assert not ask(number, "fit", packet.header, block, site=asked_before)["ok"]
    expected = ask(9, "fit", packet.header, packet.block, site=undisturbed)
    assert expected["ok"]
    assert ask(9, "fit", packet.header, packet.block, site=asked_before) == expected
    large = ask(10, "fit", packet.header, bytes(200_000), site=asked_before)
    assert large["kind"] == "refused"


def test_what_a_header_claims_is_not_believed() -> None:
    """Shapes far larger than the bytes that are there, and nesting without end: refused at once."""
    huge = {"weights/a": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4]}}
    text = json.dumps(huge).encode()
    block = len(text).to_bytes(8, "little") + text + bytes(4)
    lying = (2**63 - 1).to_bytes(8, "little") + b"{}"
    deep = b'{"kind":"Weights","values":{},"named":' + b"[" * 200_000
    gate()._last = None
    for header, tensors in (
        (good("fit").header, block),
        (good("fit").header, lying),
        (deep[:90_000], b""),
        (b'{"kind":"Weights","values":{},"named":{"weights":' + b"9" * 80_000 + b"}}", b""),
    ):
        reply = ask(1, "fit", header, tensors)
        assert not reply["ok"]

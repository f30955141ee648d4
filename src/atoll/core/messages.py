"""What parts say to each other: frozen dataclasses, as a JSON header and a safetensors block.

Nothing is pickled. A packet is admitted only if its header names the expected kind, its fields
are those of the message, and every number in it is finite; otherwise its sender is named.
"""

import dataclasses
import json
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.utils import get_total_norm

from atoll.core.annotations import SharedWeights, Update, marked
from atoll.core.errors import BadMessageError
from atoll.core.late import Arriving, Late, now

__all__ = [
    "Check",
    "Checked",
    "Doubt",
    "Empty",
    "Packet",
    "Part",
    "Tensors",
    "Weights",
    "Wholes",
    "admit_later",
    "contents",
    "opened",
    "pack",
    "same_shapes",
    "unpack",
    "unpack_all",
    "wrap",
    "wrap_all",
]

Tensors = dict[str, Tensor]
Form = tuple[tuple[str, str, tuple[int, ...]], ...]  # of each tensor its name, type, shape
M = TypeVar("M")


class Wholes:
    """Tensors of many members, those of one name one behind another; apart when one is wanted."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.apart: dict[str, tuple[Tensor, ...]] = {}

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values()), ()))

    def of(self, name: str) -> tuple[Tensor, ...]:
        """Each member's tensor of a name."""
        if name not in self.apart:
            self.apart[name] = self.tensors[name].unbind(0)
        return self.apart[name]

    def all(self) -> dict[str, tuple[Tensor, ...]]:
        """The same of every name."""
        if len(self.apart) < len(self.tensors):
            self.apart = {name: self.of(name) for name in self.tensors}
        return self.apart


class Part(Mapping[str, Tensor]):
    """One member's tensors among those of many.

    A round of 50 clients with 12 tensors each is 600 objects, and nobody may want a single one.
    """

    def __init__(self, wholes: Wholes, place: int, rest: Tensors | None = None) -> None:
        """`rest`: tensors that are not among the wholes."""
        self.wholes, self.place, self.rest = wholes, place, rest or {}

    def __getitem__(self, name: str) -> Tensor:
        return self.rest[name] if name in self.rest else self.wholes.of(name)[self.place]

    def __iter__(self) -> Iterator[str]:
        yield from self.wholes.tensors
        yield from self.rest

    def __len__(self) -> int:
        return len(self.wholes.tensors) + len(self.rest)

    def plain(self) -> Tensors:
        """The same as a dictionary."""
        place = self.place
        return {n: tensors[place] for n, tensors in self.wholes.all().items()} | self.rest


LARGEST_HEADER = 1 << 20  # bytes
LARGEST_NAME = 200  # characters of a tensor's name
MOST_TENSORS = 10_000
MOST_AXES = 16  # of a tensor's shape
ADMITTED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)
_ENCODER = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True)
class Empty:
    """A message without content."""


@dataclass(frozen=True)
class Weights:
    """Named weights of a model."""

    weights: Annotated[Tensors, SharedWeights()]


@dataclass(frozen=True)
class Check:
    """A request to test on a task; the weights to test with, where the server holds them."""

    task: int
    weights: Annotated[Tensors, SharedWeights()]


@dataclass(frozen=True)
class Checked:
    """How a client did on its test rows: for each variant the hits and the macro-F1."""

    rows: int
    correct: dict[str, int]
    macro_f1: dict[str, float]


@dataclass(frozen=True)
class Packet:
    """A packed message; `message` stands in for the bytes where an engine skips packing."""

    header: bytes
    block: bytes
    payload: int  # bytes of the tensors alone
    size: int  # bytes that travel; late where a number in the header is
    tensors: Form
    message: Any = None
    wholes: tuple[Tensor, ...] = ()  # without packing: what the message's tensors are parts of


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _fields(kind: type) -> dict[str, Any]:
    return _hints(cast(Hashable, kind))


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def contents(message: Any) -> Tensors:
    """All tensors of a message under the names they have on the wire."""
    layout = _laid_out(message)
    names = [n for name, keys in layout for n in ([name] if keys is None else [w for _, w in keys])]
    return dict(zip(names, _listed(message, layout), strict=True))


Layout = tuple[tuple[str, tuple[tuple[str, str], ...] | None], ...]


def _laid_out(message: Any) -> Layout:
    """The fields with tensors; of named ones, in order, their names there and on the wire."""
    kind = cast(Hashable, type(message))
    return _layout(kind, tuple(tuple(getattr(message, name)) for name in _named(kind)))


@cache
def _named(kind: Any) -> tuple[str, ...]:
    return tuple(name for name, hint in _fields(kind).items() if hint == Tensors)


@lru_cache(maxsize=1024)
def _layout(kind: Any, names: tuple[tuple[str, ...], ...]) -> Layout:
    keys = {
        field: tuple((key, f"{field}/{key}") for key in sorted(here))
        for field, here in zip(_named(kind), names, strict=True)
    }
    return tuple((n, keys.get(n)) for n, h in _fields(kind).items() if h is Tensor or n in keys)


def _header(message: Any) -> bytes:
    kind = type(message)
    values = [f"{_quoted(name)}:{_json(getattr(message, name))}" for name in _plain(kind)]
    named = [f"{_quoted(n)}:{len(getattr(message, n))}" for n in _named(cast(Hashable, kind))]
    return (
        f'{{"kind":{_quoted(kind.__name__)},"values":{{{",".join(values)}}}'
        f',"named":{{{",".join(named)}}}}}'
    ).encode()


@cache
def _quoted(name: str) -> str:
    return _ENCODER.encode(name)


def _json(value: Any) -> str:
    """A value as JSON; numbers, of which there are many, at once."""
    value = now(value)
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return repr(value)
    return _ENCODER.encode(value)  # NaN as it is: whoever reads it refuses it, names the sender


def _signature(tensors: Tensors) -> Form:
    return tuple([(n, _kind(t.dtype), tuple(t.shape)) for n, t in tensors.items()])


@cache
def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _overhead(signature: Form) -> int:
    """Bytes that a safetensors block spends on names and shapes."""
    empty = {
        name: torch.empty(shape, dtype=getattr(torch, kind)) for name, kind, shape in signature
    }
    return len(save(empty)) - sum(t.nbytes for t in empty.values())


def pack(message: Any) -> Packet:
    """A message as bytes."""
    tensors = {name: t.detach().to("cpu").contiguous() for name, t in contents(message).items()}
    header, block = _header(message), save(_apart(tensors))
    payload = sum(t.nbytes for t in tensors.values())
    return Packet(header, block, payload, len(header) + len(block), _signature(tensors))


def _apart(tensors: Tensors) -> Tensors:
    """The same tensors, none of which shares memory with another (safetensors refuses those)."""
    seen, apart = set[int](), Tensors()
    for name, tensor in tensors.items():
        home = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if home in seen else tensor
        seen.add(home)
    return apart


def wrap(message: Any) -> Packet:
    """A packet that carries a copy of the message itself and counts the bytes it would have."""
    return wrap_all({"": message})[""]


def wrap_all(messages: Mapping[str, Any]) -> dict[str, Packet]:
    """Each message as `wrap` wraps it; tensors of messages of one form are copied together."""
    packets = _wrapped_parts(messages)
    alike: dict[Any, dict[str, list[Tensor]]] = {}
    for id, message in messages.items():
        if id in packets:
            continue
        layout = _laid_out(message)
        tensors = _listed(message, layout)
        kinds = [(t.dtype, t.shape, t.get_device()) for t in tensors]
        alike.setdefault((layout, *kinds), {})[id] = tensors
    for (layout, *_), held in alike.items():
        form = _signature(contents(messages[next(iter(held))]))
        payload = sum(tensor.nbytes for tensor in next(iter(held.values())))
        wholes, copies = _copies(list(held.values()))
        for id, mine in zip(held, copies, strict=True):
            copy = _with(messages[id], layout, mine)
            packets[id] = _carrying(copy, form, payload, wholes)
    return {id: packets[id] for id in messages}


def _wrapped_parts(messages: Mapping[str, Any]) -> dict[str, Packet]:
    """The same for messages that hold nothing but parts of one whole: that is copied, not they."""
    whose: dict[tuple[int, type], list[str]] = {}
    for sender, message in messages.items():
        kind = type(message)
        named = _named(cast(Hashable, kind))
        if len(named) == 1 and len(_plain(kind)) + 1 == len(_fields(kind)):
            part = getattr(message, named[0])
            if isinstance(part, Part) and not part.rest:
                whose.setdefault((id(part.wholes), kind), []).append(sender)
    packets = {}
    for (_, kind), senders in whose.items():
        (name,) = _named(cast(Hashable, kind))
        wholes = _joined([getattr(messages[sender], name) for sender in senders])
        form = tuple(
            (f"{name}/{key}", _kind(t.dtype), tuple(t.shape[1:]))
            for key, t in wholes.tensors.items()
        )
        payload = sum(tensor.nbytes for tensor in wholes.tensors.values()) // len(senders)
        kept = tuple(wholes.tensors.values())
        for place, sender in enumerate(senders):
            copy = kind(**_values_of(messages[sender]), **{name: Part(wholes, place)})
            packets[sender] = _carrying(copy, form, payload, kept)
    return packets


def _carrying(message: Any, form: Form, payload: int, wholes: tuple[Tensor, ...]) -> Packet:
    """A packet with a message in it, and the size that it would have as bytes."""

    def size() -> int:
        return _overhead(form) + payload + len(_header(message))

    waits = any(isinstance(getattr(message, name), Late) for name in _plain(type(message)))
    told = cast(int, Late(size)) if waits else size()
    return Packet(b"", b"", payload, told, form, message, wholes)


@torch.no_grad()
def _joined(parts: Sequence[Part]) -> Wholes:
    """Copies of what these are parts of, in their order; names are sorted, as on the wire."""
    given, places = parts[0].wholes, [part.place for part in parts]
    every = places == list(range(len(given)))
    found = {n: t.detach() for n, t in sorted(given.tensors.items())}
    return Wholes({n: t.clone() if every else t[places] for n, t in found.items()})


def _listed(message: Any, layout: Layout) -> list[Tensor]:
    """The tensors of a message in the order of the wire."""
    found: list[Tensor] = []
    for name, keys in layout:
        value = getattr(message, name)
        found += [value] if keys is None else [value[key] for key, _ in keys]
    return found


@torch.no_grad()
def _copies(held: list[list[Tensor]]) -> tuple[tuple[Tensor, ...], Iterable[Sequence[Tensor]]]:
    """Contiguous copies of what messages of one form hold; those of several are parts of wholes."""
    if len(held) == 1:
        alone = [t.detach().clone(memory_format=torch.contiguous_format) for t in held[0]]
        return tuple(alone), [alone]
    wholes = tuple(torch.stack(same) for same in zip(*held, strict=True))
    parts = zip(*(whole.unbind(0) for whole in wholes), strict=True)
    return wholes, parts if wholes else [()] * len(held)


def _with(message: Any, layout: Layout, tensors: Iterable[Tensor]) -> Any:
    """The message as unpacking gives it, with these tensors; their names are sorted."""
    values, rest = _values_of(message), iter(tensors)
    for name, keys in layout:
        values[name] = next(rest) if keys is None else {key: next(rest) for key, _ in keys}
    return type(message)(**values)


def _values_of(message: Any) -> dict[str, Any]:
    return {name: _copy(getattr(message, name)) for name in _plain(type(message))}


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def unpack(packet: Packet, kind: type[M], sender: str) -> M:
    """The message in a packet, or an error that names the sender."""
    if packet.message is not None:
        if not _is_last(packet) or type(packet.message) is not kind:
            _of_kind(packet, kind, sender)
            tensors = contents(packet.message)
            _admit(tensors, packet.tensors, sender)
            _finite(_numbers(tensors), sender)
            _LAST[0] = weakref.ref(packet)
        return cast(M, _known(packet.message))
    body = _read_header(packet.header, kind, sender)
    tensors = _read_block(packet.block, sender)
    values = _values(body["values"], kind, sender)
    values.update(_tensor_fields(tensors, body["named"], kind, sender))
    return kind(**values)


Doubt = Callable[[], None]  # a look at numbers that is put off; refuses them as it would have then


def unpack_all(
    packets: Mapping[str, Packet], kind: type[M], doubts: list[Doubt] | None = None
) -> dict[str, M]:
    """The messages of several senders, all of one kind.

    Where an engine skips packing, the numbers of all of them are looked at together, and the form
    that many have is looked at once. Where there is a list of `doubts`, nobody waits for numbers
    here: whoever holds the list settles them before anything is kept.
    """
    if any(packet.message is None for packet in packets.values()):
        return {sender: unpack(packet, kind, sender) for sender, packet in packets.items()}
    wholes: dict[int, tuple[Tensor, ...]] = {}
    admitted = set[Form]()
    for sender, packet in packets.items():
        _of_kind(packet, kind, sender, doubts)
        if packet.tensors not in admitted:
            truths = bool(_truths(packet.tensors))  # the rest is told by the form
            _admit(contents(packet.message) if truths else {}, packet.tensors, sender)
            if not truths:
                admitted.add(packet.tensors)
        wholes[id(packet.wholes)] = packet.wholes

    def one_by_one() -> None:
        for sender, packet in packets.items():
            unpack(packet, kind, sender)

    _doubt([n for whole in wholes.values() for n in whole if _counts(n)], one_by_one, doubts)
    if doubts is not None:
        return {sender: packet.message for sender, packet in packets.items()}
    return {sender: _known(packet.message) for sender, packet in packets.items()}


def _known(message: Any) -> Any:
    """A message whose numbers are all there."""
    late = {name: getattr(message, name) for name in _plain(type(message))}
    late = {name: float(value) for name, value in late.items() if isinstance(value, Late)}
    return dataclasses.replace(message, **late) if late else message


def admit_later(packet: Packet, kind: type, sender: str, doubts: list[Doubt]) -> None:
    """Look at a message that goes to many clients before the first unpacks it, without waiting."""
    if packet.message is None or type(packet.message) is not kind or _truths(packet.tensors):
        return  # it is looked at where it is unpacked
    _of_kind(packet, kind, sender, doubts)
    _admit({}, packet.tensors, sender)
    numbers = _numbers(contents(packet.message))
    _doubt(list(numbers.values()), lambda: _finite(numbers, sender), doubts)
    _LAST[0] = weakref.ref(packet)


def _doubt(tensors: list[Tensor], look: Doubt, doubts: list[Doubt] | None) -> None:
    """If not all numbers are finite, look closer: now, or when doubts are settled."""
    if doubts is None:
        if not _all_finite(tensors):
            look()
    elif tensors:
        norm = Arriving(get_total_norm(tensors))
        doubts.append(lambda: None if math.isfinite(norm.numbers) else look())


# The packet that was admitted last: one that goes to many clients is looked at once.
_LAST: "list[weakref.ref[Packet] | None]" = [None]


def _is_last(packet: Packet) -> bool:
    return _LAST[0] is not None and _LAST[0]() is packet


def _of_kind(packet: Packet, kind: type, sender: str, doubts: list[Doubt] | None = None) -> None:
    """Refuse an unpacked message of another kind, or one with values that are not finite."""
    if type(packet.message) is not kind:
        raise BadMessageError(sender, f"a {type(packet.message).__name__}, not a {kind.__name__}")
    for name in _plain(kind):
        value = getattr(packet.message, name)
        if doubts is not None and isinstance(value, Late):
            doubts.append(partial(_finite_late, value, name, sender))
        else:
            _finite_value(now(value), name, sender)


def _finite_late(value: Late, name: str, sender: str) -> None:
    _finite_value(float(value), name, sender)


def opened(header: bytes, block: bytes, kind: type, sender: str) -> Packet:
    """Bytes that came from elsewhere as a packet, read once; or an error that names the sender."""
    size = len(header) + len(block)
    message: Any = unpack(Packet(header, block, 0, size, ()), kind, sender)
    tensors = contents(message)
    payload = sum(t.nbytes for t in tensors.values())
    wholes = tuple(tensors.values())
    return Packet(b"", b"", payload, size, _signature(tensors), message, wholes)


def _read_header(header: bytes, kind: type, sender: str) -> dict[str, Any]:
    if len(header) > LARGEST_HEADER:
        raise BadMessageError(sender, f"a header of {len(header)} bytes")
    try:
        body = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise BadMessageError(sender, "its header is not JSON") from error
    if not isinstance(body, dict) or set(body) != {"kind", "values", "named"}:
        raise BadMessageError(sender, "its header has other fields than kind, values, named")
    if not isinstance(body["values"], dict) or not isinstance(body["named"], dict):
        raise BadMessageError(sender, "its header is not of the agreed form")
    if body["kind"] != kind.__name__:
        shown = repr(body["kind"][:80]) if isinstance(body["kind"], str) else "nameless message"
        raise BadMessageError(sender, f"a {shown}, not a {kind.__name__}")
    return body


def _read_block(block: bytes, sender: str) -> Tensors:
    try:
        tensors: Tensors = load(block)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise BadMessageError(sender, "its tensors are not a whole safetensors block") from error
    _admit(tensors, _signature(tensors), sender)
    _finite(_numbers(tensors), sender)
    return tensors


def _admit(tensors: Tensors, form: Form, sender: str) -> None:
    """Refuse what no message may have; all but truth values is told by the form of the tensors."""
    if len(form) > MOST_TENSORS or any(len(name) > LARGEST_NAME for name, _, _ in form):
        raise BadMessageError(sender, "too many tensors or too long a name")
    for name, kind, shape in form:
        if getattr(torch, kind) not in ADMITTED:
            raise BadMessageError(sender, f"tensor {name!r} is of type torch.{kind}")
        if len(shape) > MOST_AXES:
            raise BadMessageError(sender, f"tensor {name!r} has {len(shape)} axes")
    for name in _truths(form):
        if bool((tensors[name].view(torch.uint8) > 1).any()):
            raise BadMessageError(sender, f"tensor {name!r} has truth values beyond 0 and 1")


def _truths(form: Form) -> list[str]:
    return [name for name, kind, _ in form if kind == "bool"]


def _numbers(tensors: Tensors) -> Tensors:
    return {n: t for n, t in tensors.items() if _counts(t)}


def _counts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _all_finite(tensors: list[Tensor]) -> bool:
    """Whether a norm of all numbers is finite; one that is not may have overflowed."""
    return not tensors or math.isfinite(float(get_total_norm(tensors)))


def _finite(tensors: Tensors, sender: str) -> None:
    """Refuse numbers that are not finite; their norm is looked at first, once for all tensors."""
    if _all_finite(list(tensors.values())):
        return
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadMessageError(sender, f"tensor {name!r} has numbers that are not finite")


def _plain(kind: type) -> dict[str, Any]:
    """The fields that travel in the header, with their types."""
    return _plain_hints(cast(Hashable, kind))


@cache
def _plain_hints(kind: Any) -> dict[str, Any]:
    return {n: h for n, h in _fields(kind).items() if h is not Tensor and h != Tensors}


def _values(given: dict[str, Any], kind: type, sender: str) -> dict[str, Any]:
    wanted = _plain(kind)
    if set(given) != set(wanted):
        raise BadMessageError(sender, f"values {str(sorted(given))[:200]}, not {sorted(wanted)}")
    read = {}
    for name, hint in wanted.items():
        try:
            read[name] = _adapter(hint).validate_json(json.dumps(given[name]), strict=True)
        except (ValueError, RecursionError) as error:
            raise BadMessageError(sender, f"value '{name}' is not of type {hint}") from error
        _finite_value(read[name], name, sender)
    return read


def _finite_value(value: Any, name: str, sender: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise BadMessageError(sender, f"value '{name}' is not finite")
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _finite_value(item, name, sender)


def _tensor_fields(
    tensors: Tensors, named: Mapping[str, Any], kind: type, sender: str
) -> dict[str, Any]:
    """The tensors dealt to the fields they belong to; none may be left over or missing."""
    left, read = dict(tensors), dict[str, Any]()
    if set(named) != {name for name, hint in _fields(kind).items() if hint == Tensors}:
        raise BadMessageError(sender, f"named tensors {str(sorted(named))[:200]}")
    for name, hint in _fields(kind).items():
        if hint is Tensor:
            if name not in left:
                raise BadMessageError(sender, f"tensor '{name}' is missing")
            read[name] = left.pop(name)
        elif hint == Tensors:
            keys = sorted(key for key in left if key.startswith(f"{name}/"))
            if len(keys) != named[name]:
                raise BadMessageError(
                    sender, f"{len(keys)} tensors in '{name}', not as many as said"
                )
            read[name] = {key.removeprefix(f"{name}/"): left.pop(key) for key in keys}
    if left:
        raise BadMessageError(sender, f"unknown tensor {min(left)!r}")
    return read


def same_shapes(request: Any, reply: Any, sender: str) -> None:
    """Tensors that a reply gives under a name of its request have the request's names and shapes,
    and so have updates of a field of the request.

    So weights that come back are the weights that went out, and a client cannot slip in others.
    """
    asked, given = _fields(type(request)), _fields(type(reply))
    bases = {name: name for name in asked.keys() & given.keys()}
    bases |= {name: mark.of for name, mark in marked(type(reply), Update).items()}
    for name, base in bases.items():
        if asked[base] == Tensors and given[name] == Tensors:
            _same(getattr(request, base), getattr(reply, name), name, sender)


def _same(asked: Tensors, given: Tensors, field: str, sender: str) -> None:
    for key in sorted(asked.keys() | given.keys()):
        if key not in asked or key not in given:
            raise BadMessageError(sender, f"tensor {key!r} is unknown or missing in '{field}'")
        wanted, found = asked[key], given[key]
        if wanted.shape != found.shape or wanted.dtype != found.dtype:
            raise BadMessageError(
                sender,
                f"tensor {key!r} is {found.dtype} {tuple(found.shape)}, "
                f"not {wanted.dtype} {tuple(wanted.shape)}",
            )

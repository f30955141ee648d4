"""Messages: frozen dataclasses, packed as a JSON header and a safetensors block.

Nothing is pickled. A packet is admitted only if its header names the expected kind, its fields
are those of the message, and every number in it is finite; otherwise its sender is named.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.utils import get_total_norm

from atoll.core.annotations import Optional, SharedWeights, Task, Update, marked
from atoll.core.errors import BadMessageError
from atoll.core.views import stacked_view

__all__ = [
    "Check",
    "Checked",
    "Empty",
    "Packet",
    "Tensors",
    "Weights",
    "admit",
    "check",
    "contents",
    "finite_values",
    "opened",
    "pack",
    "plain_values",
    "same_shapes",
    "unpack",
    "wrap",
    "wrap_all",
]

Tensors = dict[str, Tensor]
Form = tuple[tuple[str, str, tuple[int, ...]], ...]  # of each tensor its name, type, shape
M = TypeVar("M")


LARGEST_HEADER = 1 << 20  # bytes
LARGEST_NAME = 200  # characters of a tensor's name
MOST_TENSORS = 10_000
MOST_AXES = 16  # of a tensor's shape
ADMITTED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)
# a field of type float may hold whatever float() reads, such as a number of a tensor
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=float)


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

    task: Annotated[int, Task()]
    weights: Annotated[Tensors, SharedWeights()]


@dataclass(frozen=True)
class Checked:
    """A client's results on its test rows: for each variant the hits and the macro-F1.

    In regression both are empty, and each variant has `mse`, `mae` and the `variance` of the labels
    instead, in the unit of the label.
    """

    rows: int
    correct: dict[str, int]
    macro_f1: dict[str, float]
    errors: Annotated[dict[str, dict[str, float]], Optional()] = field(default_factory=dict)

    def accuracy(self, variant: str) -> float:
        """Hits per row; in regression R2. NaN where the rows do not define it."""
        if not self.errors:
            return self.correct[variant] / self.rows if self.rows else math.nan
        mse, variance = (self.errors[variant][name] for name in ("mse", "variance"))
        return 1 - mse / variance if variance > 0 else math.nan


@dataclass(frozen=True)
class Packet:
    """A packed message; `message` stands in for the bytes where an engine skips packing."""

    header: bytes
    block: bytes
    payload: int  # bytes of the tensors alone
    written: int  # bytes that travel, without a header that is not written
    tensors: Form
    message: Any = None
    wholes: tuple[Tensor, ...] = ()  # its tensors, each with those of like messages: (messages, …)
    header_size: Callable[[], int] = int  # counts the bytes of a header that is not written
    checked: bool = False  # whether the engine checks elsewhere that all numbers are finite

    @property
    def size(self) -> int:
        """Bytes that travel."""
        return self.written + self.header_size()


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
        field: tuple((key, f"{field}/{key}") for key in sorted(present))
        for field, present in zip(_named(kind), names, strict=True)
    }
    return tuple((n, keys.get(n)) for n, h in _fields(kind).items() if h is Tensor or n in keys)


def _header(kind: type, values: Mapping[str, Any], sizes: Mapping[str, int]) -> bytes:
    """The header of a message with these values and numbers of named tensors."""
    plain = [f"{_quoted(name)}:{_json(value)}" for name, value in values.items()]
    counts = [f"{_quoted(name)}:{count}" for name, count in sizes.items()]
    return (
        f'{{"kind":{_quoted(kind.__name__)},"values":{{{",".join(plain)}}}'
        f',"named":{{{",".join(counts)}}}}}'
    ).encode()


def _header_of(message: Any) -> Callable[[], bytes]:
    """Writes the header of a message later; holds none of its tensors until then."""
    kind = type(message)
    sizes = {name: len(getattr(message, name)) for name in _named(cast(Hashable, kind))}
    values = plain_values(message)
    absent = [name for name in _optional(kind) if not values[name]]
    written = {name: value for name, value in values.items() if name not in absent}
    return partial(_header, kind, written, sizes)


def _optional(kind: type) -> set[str]:
    """The fields that are not written where they are empty."""
    return set(marked(kind, Optional))


@cache
def _quoted(name: str) -> str:
    return _ENCODER.encode(name)


def _json(value: Any) -> str:
    """A value as JSON; numbers, of which there are many, at once."""
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return repr(value)
    return _ENCODER.encode(value)  # NaN stays NaN: the receiver refuses it and names the sender


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
    header, block = _header_of(message)(), save(_apart(tensors))
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


def wrap_all(messages: Mapping[str, Any], checked: bool = False) -> dict[str, Packet]:
    """Each message as `wrap` wraps it; tensors of messages of one form are copied together."""
    packets: dict[str, Packet] = {}
    alike: dict[Any, dict[str, list[Tensor]]] = {}
    for id, message in messages.items():
        layout = _laid_out(message)
        tensors = _listed(message, layout)
        kinds = [(t.dtype, t.shape, t.get_device()) for t in tensors]
        alike.setdefault((layout, *kinds), {})[id] = tensors
    for (layout, *_), group in alike.items():
        form = _signature(contents(messages[next(iter(group))]))
        payload = sum(tensor.nbytes for tensor in next(iter(group.values())))
        written = _overhead(form) + payload
        wholes, copies = _copies(list(group.values()))
        for id, copied in zip(group, copies, strict=True):
            copy = _with(messages[id], layout, copied)
            size = partial(_length, _header_of(copy))
            packets[id] = Packet(b"", b"", payload, written, form, copy, wholes, size, checked)
    return {id: packets[id] for id in messages}


def _length(header: Callable[[], bytes]) -> int:
    return len(header())


def _listed(message: Any, layout: Layout) -> list[Tensor]:
    """The tensors of a message in the order of the wire."""
    tensors: list[Tensor] = []
    for name, keys in layout:
        value = getattr(message, name)
        tensors += [value] if keys is None else [value[key] for key, _ in keys]
    return tensors


@torch.no_grad()
def _copies(tensors: list[list[Tensor]]) -> tuple[tuple[Tensor, ...], Iterable[Sequence[Tensor]]]:
    """Copies of what messages of one form hold: one tensor of all messages, and each one's part."""
    wholes = tuple(_stacked_copy(same) for same in zip(*tensors, strict=True))
    parts = zip(*(whole.unbind(0) for whole in wholes), strict=True)
    return wholes, parts if wholes else [()] * len(tensors)


def _stacked_copy(tensors: Sequence[Tensor]) -> Tensor:
    """The same as `torch.stack`, in one copy of memory where the tensors lie side by side."""
    whole = stacked_view(tensors)
    if whole is None:
        return torch.stack(list(tensors))
    return whole.detach().clone(memory_format=torch.contiguous_format)


def _with(message: Any, layout: Layout, tensors: Iterable[Tensor]) -> Any:
    """The message as `unpack` returns it, with these tensors; their names are sorted."""
    values = {name: _copy(getattr(message, name)) for name in _plain(type(message))}
    rest = iter(tensors)
    for name, keys in layout:
        values[name] = next(rest) if keys is None else {key: next(rest) for key, _ in keys}
    return type(message)(**values)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def unpack(packet: Packet, kind: type[M], sender: str) -> M:
    """The message in a packet, or an error that names the sender."""
    if packet.message is not None:
        if type(packet.message) is not kind:
            name = type(packet.message).__name__
            raise BadMessageError(sender, f"a {name}, not a {kind.__name__}")
        if not packet.checked:
            check(packet, sender)
        return packet.message
    body = _read_header(packet.header, kind, sender)
    tensors = _read_block(packet.block, sender)
    values = _values(body["values"], kind, sender)
    values.update(_tensor_fields(tensors, body["named"], kind, sender))
    return kind(**values)


def check(packet: Packet, sender: str) -> None:
    """Refuse a message that was not packed, as unpacking would refuse its bytes."""
    finite_values(plain_values(packet.message), sender)
    admit(packet, sender)
    _finite(_numbers(contents(packet.message)), sender)


def plain_values(message: Any) -> dict[str, Any]:
    """The fields of a message that hold no tensors."""
    return {name: getattr(message, name) for name in _plain(type(message))}


def finite_values(values: Mapping[str, Any], sender: str) -> None:
    """Refuse plain values of a message that are not finite."""
    for name, value in values.items():
        _finite_value(value, name, sender)


def admit(packet: Packet, sender: str) -> None:
    """Refuse a message that was not packed and holds tensors that no message may hold."""
    problem = _usual_problem(packet.tensors)
    if problem:
        raise BadMessageError(sender, problem)
    if _truths(packet.tensors):
        _admit_truths(contents(packet.message), packet.tensors, sender)


def opened(header: bytes, block: bytes, kind: type, sender: str) -> Packet:
    """Received bytes as a packet, read once; or an error that names the sender."""
    size = len(header) + len(block)
    message: Any = unpack(Packet(header, block, 0, size, ()), kind, sender)
    tensors = contents(message)
    payload = sum(t.nbytes for t in tensors.values())
    return Packet(b"", b"", payload, size, _signature(tensors), message, checked=True)


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
    """Refuse tensors that no message may hold; except for booleans, types and shapes decide."""
    problem = _problem(form)
    if problem:
        raise BadMessageError(sender, problem)
    _admit_truths(tensors, form, sender)


def _problem(form: Form) -> str:
    """Why no message may hold tensors of these names, types and shapes; empty if it may."""
    if len(form) > MOST_TENSORS or any(len(name) > LARGEST_NAME for name, _, _ in form):
        return "too many tensors or too long a name"
    for name, kind, shape in form:
        if getattr(torch, kind) not in ADMITTED:
            return f"tensor {name!r} is of type torch.{kind}"
        if len(shape) > MOST_AXES:
            return f"tensor {name!r} has {len(shape)} axes"
    return ""


# For messages that this process made: those of a run have few forms, and a sender chooses none.
_usual_problem = lru_cache(maxsize=256)(_problem)


def _admit_truths(tensors: Tensors, form: Form, sender: str) -> None:
    for name in _truths(form):
        if bool((tensors[name].view(torch.uint8) > 1).any()):
            raise BadMessageError(sender, f"tensor {name!r} has truth values beyond 0 and 1")


def _truths(form: Form) -> list[str]:
    return [name for name, kind, _ in form if kind == "bool"]


def _numbers(tensors: Tensors) -> Tensors:
    return {n: t for n, t in tensors.items() if t.is_floating_point() and t.numel()}


def _finite(tensors: Tensors, sender: str) -> None:
    """Refuse numbers that are not finite; checks the norm of all tensors first."""
    if not tensors or math.isfinite(float(get_total_norm(list(tensors.values())))):
        return  # else the norm may have overflowed
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadMessageError(sender, f"tensor {name!r} has numbers that are not finite")


def _plain(kind: type) -> dict[str, Any]:
    """The fields that travel in the header, with their types."""
    return _plain_hints(cast(Hashable, kind))


@cache
def _plain_hints(kind: Any) -> dict[str, Any]:
    return {n: h for n, h in _fields(kind).items() if h is not Tensor and h != Tensors}


def _values(values: dict[str, Any], kind: type, sender: str) -> dict[str, Any]:
    hints = _plain(kind)
    if not set(hints) - _optional(kind) <= set(values) <= set(hints):
        raise BadMessageError(sender, f"values {str(sorted(values))[:200]}, not {sorted(hints)}")
    read = {}
    for name, hint in hints.items():
        if name not in values:
            continue
        try:
            read[name] = _adapter(hint).validate_json(json.dumps(values[name]), strict=True)
        except (ValueError, RecursionError) as error:
            raise BadMessageError(sender, f"value '{name}' is not of type {hint}") from error
        _finite_value(read[name], name, sender)
    return read


def _finite_value(value: Any, name: str, sender: str) -> None:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _finite_value(item, name, sender)
    elif not isinstance(value, int | str) and value is not None and not math.isfinite(value):
        raise BadMessageError(sender, f"value '{name}' is not finite")


def _tensor_fields(
    tensors: Tensors, sizes: Mapping[str, Any], kind: type, sender: str
) -> dict[str, Any]:
    """The tensors dealt to the fields they belong to; none may be left over or missing."""
    left, read = dict(tensors), dict[str, Any]()
    if set(sizes) != {name for name, hint in _fields(kind).items() if hint == Tensors}:
        raise BadMessageError(sender, f"named tensors {str(sorted(sizes))[:200]}")
    for name, hint in _fields(kind).items():
        if hint is Tensor:
            if name not in left:
                raise BadMessageError(sender, f"tensor '{name}' is missing")
            read[name] = left.pop(name)
        elif hint == Tensors:
            keys = sorted(key for key in left if key.startswith(f"{name}/"))
            if len(keys) != sizes[name]:
                raise BadMessageError(
                    sender, f"{len(keys)} tensors in '{name}', not as many as announced"
                )
            read[name] = {key.removeprefix(f"{name}/"): left.pop(key) for key in keys}
    if left:
        raise BadMessageError(sender, f"unknown tensor {min(left)!r}")
    return read


def same_shapes(request: Any, reply: Any, sender: str) -> None:
    """Tensors that a reply gives under a name of its request have the request's names and shapes,
    and so have updates of a field of the request.

    So returned weights match the sent ones, and a client can neither add nor omit a tensor.
    """
    requested, replied = _fields(type(request)), _fields(type(reply))
    bases = {name: name for name in requested.keys() & replied.keys()}
    bases |= {name: mark.of for name, mark in marked(type(reply), Update).items()}
    for name, base in bases.items():
        if requested[base] == Tensors and replied[name] == Tensors:
            _same(getattr(request, base), getattr(reply, name), name, sender)


def _same(request: Tensors, reply: Tensors, field: str, sender: str) -> None:
    for key in sorted(request.keys() | reply.keys()):
        if key not in request or key not in reply:
            raise BadMessageError(sender, f"tensor {key!r} is unknown or missing in '{field}'")
        expected, actual = request[key], reply[key]
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            raise BadMessageError(
                sender,
                f"tensor {key!r} is {actual.dtype} {tuple(actual.shape)}, "
                f"not {expected.dtype} {tuple(expected.shape)}",
            )

"""Builds frozen options from plain mappings; an error suggests the correct spelling."""

import dataclasses
import difflib
import inspect
import io
import json
import tokenize
from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import Field, TypeAdapter, ValidationError

from atoll.core.errors import UserError

__all__ = [
    "SYNONYMS",
    "AtLeastOne",
    "Fraction",
    "NotNegative",
    "NotNegativeInt",
    "Option",
    "Positive",
    "build",
    "describe",
    "nearest",
]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
AtLeastOne = Annotated[int, Field(ge=1)]
NotNegativeInt = Annotated[int, Field(ge=0)]

T = TypeVar("T")
SYNONYMS = {  # names that other libraries have for an option
    "lr": "rate", "learning_rate": "rate", "batch_size": "batch", "optimizer": "optimiser",
    "hidden": "widths", "hidden_sizes": "widths", "layers": "widths", "n_clients": "clients",
    "num_clients": "clients", "n_rounds": "rounds", "num_rounds": "rounds",
    "local_epochs": "epochs", "weight_decay": "decay",
}  # fmt: skip
CLOSE = 0.7  # similarity of two names from which one may be a misspelling of the other


def nearest(name: str, names: Iterable[str]) -> str:
    """What to do about an unknown name: the nearest known one, else the first of them all."""
    names = sorted(set(names) - {""})
    lower = {candidate.lower(): candidate for candidate in names}
    synonym = SYNONYMS.get(name.lower().replace("-", "_"), "")
    matches = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=CLOSE)
    close = [synonym] if synonym in names else [lower[match] for match in matches]
    if close:
        return f"did you mean '{close[0]}'?"
    more = ", ..." if len(names) > 30 else ""
    return f"known: {', '.join(names[:30]) or 'none'}{more}"


def build(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """The options of this kind with these values; everything else has its default."""
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise UserError(f"unknown option '{name}'", where, nearest(name, fields))
    try:
        options: T = _adapter(cast(Hashable, kind)).validate_json(
            json.dumps(dict(values)), strict=True
        )
        return options
    except (TypeError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise UserError(
                "an option has a value of an unknown type", where, str(error)
            ) from error
        raise _explained(error, values, where) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _explained(error: ValidationError, values: Mapping[str, Any], where: str) -> UserError:
    """The first complaint of pydantic in the words of an option and its value."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "options"
    shown = json.dumps(values.get(name), default=str)
    remedy = str(first["msg"])  # its first letter alone: a choice may have capitals in it
    return UserError(f"option '{name}' cannot be {shown}", where, remedy[:1].lower() + remedy[1:])


@dataclasses.dataclass(frozen=True)
class Option:
    """One option as `atoll show` prints it."""

    name: str
    kind: str
    default: Any
    range: str
    remark: str


def describe(kind: type) -> list[Option]:
    """Every option of this kind with its type, default, range and the remark beside it."""
    hints = get_type_hints(kind, include_extras=True)
    remarks = _remarks(kind)
    return [
        Option(
            field.name,
            _kind(hints[field.name]),
            _default(field),
            _range(hints[field.name]),
            remarks.get(field.name, ""),
        )
        for field in dataclasses.fields(kind)
    ]


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _remarks(kind: type) -> dict[str, str]:
    """The comment that ends the line of each field, read from the source."""
    remarks, name = dict[str, str](), ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(kind)).readline):
        before = token.line[: token.start[1]].strip()
        if token.type == tokenize.NAME and not before:
            name = token.string
        if token.type == tokenize.COMMENT and before and name:
            remarks.setdefault(name, token.string.lstrip("# ").strip())
    return remarks


def _kind(hint: Any) -> str:
    """The type of an option in words."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _kind(choices[0])
    if origin is tuple:
        return f"list of {_kind(choices[0])}"
    if origin is dict:
        return "table"
    if origin in (Literal, Union, UnionType):
        return " | ".join(c if isinstance(c, str) else _kind(c) for c in choices)
    return hint.__name__ if isinstance(hint, type) else str(hint).removeprefix("typing.")


def _range(hint: Any) -> str:
    limits = []
    for extra in getattr(hint, "__metadata__", ()):
        for limit in getattr(extra, "metadata", ()):
            for sign, attribute in ((">", "gt"), (">=", "ge"), ("<", "lt"), ("<=", "le")):
                if hasattr(limit, attribute):
                    limits.append(f"{sign} {getattr(limit, attribute):g}")
    return ", ".join(limits)

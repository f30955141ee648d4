"""The name under which a choice is cached: the key of the job, and the source it depends on.

Source is all of this package, and every module that is not installed and that a loss reaches: by
its globals, closures, defaults, what is bound to it, and the modules these import. Values that are
plain count as well. What cannot be resolved has no name that outlives the process.
"""

import functools
import hashlib
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from atoll.learning.models import Architecture

__all__ = ["UNRESOLVED", "Key", "UnresolvedError", "cache_key", "fingerprint", "machine"]

UNRESOLVED = "unresolved-"  # begins a name that means nothing to another process
PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...), PurePath)
NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
INSTALLED = {"site-packages", "dist-packages"}  # folders of packages
IMPORTABLE = types.FunctionType | types.ModuleType | type  # what a module may have from elsewhere
# settings of libraries that change how products are summed
SETTINGS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


class UnresolvedError(Exception):
    """An object without a readable source or value, so nothing about it may be cached."""


@dataclass(frozen=True)
class Key:
    """A name for a choice, and whether it means the same in another process."""

    name: str
    lasting: bool


def cache_key(about: Hashable, device: torch.device) -> Key:
    """The key of a choice `about` a job's key, which holds the functions that it calls."""
    where = machine(device)
    try:
        return Key(_digest(f"{fingerprint(about)} on {where}"), True)
    except (UnresolvedError, RecursionError) as error:
        return Key(f"{UNRESOLVED}{_digest(f'{error} {about!r} on {where}')}", False)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def machine(device: torch.device) -> str:
    """What a choice depends on beside the work: hardware, torch, precision, and our own source."""
    cuda = device.type == "cuda"
    flags = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *(os.environ.get(name, "") for name in SETTINGS),
    )
    model = torch.cuda.get_device_name(device) if cuda else _processor()
    threads = torch.get_num_threads()
    return f"{model}, {threads} threads, torch {torch.__version__}, {flags}, {_package()}"


@functools.cache
def _processor() -> str:
    """The model of the CPU, and the instructions that torch uses of it."""
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'cpu'} ({capability})"


@functools.cache
def _package() -> str:
    """A hash of all source files of this package."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(_root().rglob("*.py")):
        digest.update(str(path.relative_to(_root())).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _root() -> Path:
    return Path(__file__).resolve().parent.parent


@functools.cache
def _library() -> tuple[Path, ...]:
    """The folders of Python's own modules."""
    return tuple(Path(sysconfig.get_paths()[n]).resolve() for n in ("stdlib", "platstdlib"))


def fingerprint(value: object) -> str:
    """A hash of a value with the source of all that it reaches; equal in every process."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _Walk().parts(value):
        digest.update(part.encode() + b"\x1f")
    return digest.hexdigest()


class _Walk:
    """Goes through what a value reaches, each object once."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, object]] = {}  # objects stay alive, so ids stay theirs

    def parts(self, value: Any) -> Iterator[str]:
        """A line for each thing that is reached, in a fixed order."""
        if isinstance(value, Enum) or type(value) in PLAIN or isinstance(value, (*NAMED, PurePath)):
            yield f"{type(value).__name__} {value!r}"
            return
        if id(value) in self.seen:
            yield f"again {self.seen[id(value)][0]}"
            return
        self.seen[id(value)] = len(self.seen), value
        yield from self._several(value)

    def _several(self, value: Any) -> Iterator[str]:
        if isinstance(value, tuple | list):
            yield f"{len(value)} items"
            if type(value) not in {tuple, list}:
                yield from self.parts(type(value))
            yield from self._all(value)
        elif isinstance(value, Mapping):
            yield f"mapping of {len(value)}"
            for key in sorted(value, key=repr):
                yield from self._all((key, value[key]))
        elif isinstance(value, set | frozenset):
            yield from sorted(fingerprint(item) for item in value)
        elif isinstance(value, torch.Tensor):
            yield _tensor(value)
        else:
            yield from self._callable(value)

    def _all(self, items: Iterable[Any]) -> Iterator[str]:
        for item in items:
            yield from self.parts(item)

    def _callable(self, value: Any) -> Iterator[str]:
        if isinstance(value, functools.partial):
            yield "partial"
            yield from self._all((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            yield "method"
            yield from self._all((value.__func__, value.__self__))
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, types.ModuleType):
            yield from self._module(value)
        elif isinstance(value, type):
            yield from self._class(value)
        else:
            yield from self._object(value)

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        """Its code, the values it closes over, and the globals it names."""
        yield f"function {function.__module__}.{function.__qualname__}"
        yield from self._all((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                yield from self.parts(cell.cell_contents)
            except ValueError as error:  # an empty cell
                raise UnresolvedError("a closure over nothing yet") from error
        yield from self.parts(getattr(function, "__wrapped__", None))
        if _is_known(function.__globals__.get("__name__", ""), function.__globals__):
            return
        yield from _code(function.__code__)
        yield from self._home(function.__module__)
        names = sorted(_names(function.__code__))
        for name in names:
            if name in function.__globals__:
                yield f"global {name}"
                yield from self._global(function.__globals__[name], names)
            for module in _imported(name, function.__globals__.get("__package__") or ""):
                yield from self._global(module, names)

    def _global(self, value: Any, names: Iterable[str]) -> Iterator[str]:
        """A global, and of a module that is not installed what code may read of it."""
        yield from self.parts(value)
        if isinstance(value, types.ModuleType) and not _is_known(value.__name__, vars(value)):
            for name in names:
                if name in vars(value):
                    yield f"attribute {name}"
                    yield from self.parts(vars(value)[name])

    def _class(self, kind: type) -> Iterator[str]:
        yield f"class {kind.__module__}.{kind.__qualname__}"
        yield from self._home(kind.__module__)
        module = sys.modules[kind.__module__]
        if not _is_known(kind.__module__, vars(module)):
            yield from self._all(kind.__bases__)
            own = [inspect.unwrap(getattr(v, "__func__", v)) for v in vars(kind).values()]
            yield from self._all(v for v in own if isinstance(v, types.FunctionType))

    def _home(self, name: str) -> Iterator[str]:
        """The module that something is defined in."""
        module = sys.modules.get(name)
        if module is None:
            raise UnresolvedError(f"module {name} is not there")
        yield from self.parts(module)

    def _module(self, module: types.ModuleType) -> Iterator[str]:
        """Its source, and that of all modules from which it has something."""
        yield f"module {module.__name__}"
        if _is_known(module.__name__, vars(module)):
            yield str(getattr(module, "__version__", ""))
            return
        yield hashlib.blake2b(_source(module), digest_size=16).hexdigest()
        for name in sorted(vars(module)):
            value = vars(module)[name]
            if isinstance(value, types.ModuleType):
                yield from self.parts(value)
            elif isinstance(value, IMPORTABLE):
                yield from self._home(value.__module__)

    def _object(self, value: Any) -> Iterator[str]:
        """An instance: its class and its attributes."""
        kind = type(value)
        yield f"object {kind.__module__}.{kind.__qualname__}"
        if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType):
            yield f"{getattr(value, '__module__', '')} {value.__qualname__}"
        elif isinstance(value, Architecture):
            yield repr(value)
            yield from self.parts(value.model)
        elif isinstance(value, nn.Module):
            yield from self._network(value)
        elif is_dataclass(value):
            yield from self._home(kind.__module__)
            yield from self._all(getattr(value, field.name) for field in fields(value))
        elif hasattr(value, "__dict__"):
            yield from self._home(kind.__module__)
            yield from self.parts(vars(value))
        else:
            raise UnresolvedError(f"a {kind.__qualname__} has no source and no value")

    def _network(self, model: nn.Module) -> Iterator[str]:
        """A network without its weights: how it prints, its classes and their own attributes."""
        yield repr(model)
        managed = vars(nn.Module())  # names of what every network has
        for name, part in model.named_modules():
            yield f"{name} {part.training}"
            yield from self._home(type(part).__module__)
            yield from self.parts({n: v for n, v in vars(part).items() if n not in managed})
            buffers = part.named_buffers(recurse=False)
            hidden = part._non_persistent_buffers_set
            yield from self.parts({n: b for n, b in buffers if n in hidden})


def _imported(name: str, package: str) -> list[types.ModuleType]:
    """Modules of this name that are loaded and not installed: a function may import them itself."""
    several = [sys.modules.get(full) for full in (name, f"{package}.{name}")]
    return [m for m in several if m and not _is_known(m.__name__, vars(m))]


def _tensor(value: torch.Tensor) -> str:
    if value.is_meta:
        return f"tensor {value.dtype} {tuple(value.shape)}"
    raw = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
    return f"tensor {value.dtype} {tuple(value.shape)} {digest}"


def _code(code: types.CodeType) -> Iterator[str]:
    """What compiled code does, without where it stands in a file."""
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        else:
            shown = sorted(constant, key=repr) if isinstance(constant, frozenset) else constant
            yield f"{type(constant).__name__} {shown!r}"


def _names(code: types.CodeType) -> set[str]:
    """The names that code looks up, its inner functions' too."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _is_known(name: str, namespace: Mapping[str, Any]) -> bool:
    """Whether a module is installed, built in, or part of atoll: its version identifies it."""
    file = namespace.get("__file__")
    if file is None:
        spec = namespace.get("__spec__")
        return name in sys.builtin_module_names or getattr(spec, "origin", "") == "frozen"
    path = Path(file).resolve()
    if INSTALLED & set(path.parts):
        return True
    return any(path.is_relative_to(root) for root in (_root(), *_library()))


def _source(module: types.ModuleType) -> bytes:
    file = getattr(module, "__file__", None)
    try:
        return Path(str(file)).read_bytes()
    except OSError as error:
        raise UnresolvedError(f"module {module.__name__} has no source") from error

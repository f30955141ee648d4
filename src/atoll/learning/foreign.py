"""Networks of the user: drawn like built-in ones, or with their own initial values.

A plug-in is a function of (shape, classes) that returns a module, or a module. A module has its own
values; those of a function are drawn with the run's seed unless `initial = "own"`. A frozen layer
is not part of the weights: it is not trained, sent or saved.
"""

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from atoll.core.errors import UserError
from atoll.core.options import nearest
from atoll.core.plugins import import_named
from atoll.core.rng import Stream
from atoll.learning.image_nets import StreamDropout, draw_weights

__all__ = ["Frozen", "build", "first_values", "frozen_layers", "frozen_values", "has_own_values"]

Shape = tuple[int, ...]


class Frozen(nn.Module):
    """A layer that is never trained, in evaluation mode; its values are not weights.

    They move between devices with the network, but not to the meta device.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # not a child: excluded from state_dict, parameters and train()
        self.__dict__["layer"] = layer.requires_grad_(False).eval()
        self.digest = digest(layer.state_dict().items())

    def forward(self, *inputs: Any) -> Any:
        """The outputs of the layer, computed in the precision of its inputs."""
        layer: nn.Module = self.__dict__["layer"]
        kinds = {x.dtype for x in inputs if isinstance(x, Tensor) and x.is_floating_point()}
        # not state_dict(), whose detached copies torch.export cannot trace
        tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        if not kinds or not any(
            tensor.is_floating_point() and tensor.dtype not in kinds for tensor in tensors.values()
        ):
            return layer(*inputs)
        kind = kinds.pop()
        cast = {n: t.to(kind) if t.is_floating_point() else t for n, t in tensors.items()}
        return functional_call(layer, cast, inputs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Frozen":
        """Move the values too, unless to "meta"."""
        if not fn(torch.empty(0)).is_meta:
            self.__dict__["layer"]._apply(fn)
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """A description that includes the layer and the hash of its values."""
        return f"{self.__dict__['layer']!r}, {self.digest}"


def digest(tensors: Any) -> str:
    """A hash of tensors and their names."""
    whole = hashlib.sha256()
    for name, tensor in tensors:
        values = tensor.detach().cpu().contiguous()
        whole.update(f"{name}{values.dtype}{tuple(values.shape)}".encode())
        whole.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def has_own_values(name: str, initial: str) -> bool:
    """Whether a plug-in starts with its own initial values; imports it."""
    return initial == "own" or isinstance(_load(name), nn.Module)


def build(
    name: str,
    shape: Shape,
    classes: int,
    stream: Stream,
    initial: str = "drawn",
    frozen: Sequence[str] = (),
) -> nn.Module:
    """Build a network of the user and evaluate it on two rows before the run."""
    loaded = _load(name)
    if isinstance(loaded, nn.Module):
        model = copy.deepcopy(loaded)
    elif initial == "own":
        model = _seeded(loaded, shape, classes, stream)
    else:
        model = _without_values(loaded, shape, classes, name)
    if not isinstance(model, nn.Module):
        raise UserError(f"'{name}' gives no torch.nn.Module", "model.name", "return a module")
    _stream_dropout(model, stream)
    if not has_own_values(name, initial):
        model = draw_weights(model, stream)
    _evaluate(model, name, shape, classes)
    _freeze_layers(model, frozen)
    return model.train()


def first_values(model: nn.Module) -> str:
    """A hash of the initial values of a network, including frozen ones."""
    return digest([*model.state_dict().items(), *frozen_values(model).items()])


def frozen_values(model: nn.Module) -> dict[str, Tensor]:
    """The values of frozen layers, by their names in the user's network."""
    values: dict[str, Tensor] = {}
    for name, layer in _all_frozen(model):
        own = layer.__dict__["layer"].state_dict()
        values |= {f"{name}.{key}": tensor for key, tensor in own.items()}
    return values


def frozen_layers(model: nn.Module) -> list[str]:
    """The names of the frozen layers."""
    return [name for name, _ in _all_frozen(model)]


def _all_frozen(model: nn.Module) -> Iterator[tuple[str, Frozen]]:
    return ((name, part) for name, part in model.named_modules() if isinstance(part, Frozen))


def _load(name: str) -> Any:
    loaded = import_named(name, "atoll.models", "model.name")
    if not callable(loaded):
        remedy = "name a torch.nn.Module, or a function of (shape, classes) that returns one"
        raise UserError(f"'{name}' is not a network", "model.name", remedy)
    return loaded


def _without_values(factory: Any, shape: Shape, classes: int, name: str) -> Any:
    """The result of a function on the meta device; loaded values would be lost."""
    with warnings.catch_warnings(record=True) as caught, torch.device("meta"):
        warnings.simplefilter("always")
        model = factory(shape, classes)
    if any("meta parameter" in str(one.message) for one in caught):
        what = f"'{name}' loads values, which the run would draw anew"
        raise UserError(what, "model.initial", "write model.initial = 'own'")
    return model


def _seeded(factory: Any, shape: Shape, classes: int, stream: Stream) -> Any:
    """The result of a function, with torch's global random state set from the stream."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream.key)
        return factory(shape, classes)


def _stream_dropout(model: nn.Module, stream: Stream) -> None:
    """Draw dropout masks from the stream, so that a resumed run continues with them."""
    for path, parent in list(model.named_modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Dropout and not layer.p:
                setattr(parent, name, nn.Identity())
            elif type(layer) is nn.Dropout:
                masks = StreamDropout(layer.p)
                masks.key = stream.child(path, name, "dropout").key
                setattr(parent, name, masks)
        inside = getattr(parent, "dropout", 0.0)
        hidden = isinstance(parent, nn.MultiheadAttention | nn.RNNBase)
        if hidden and isinstance(inside, float) and inside > 0:
            what = f"dropout inside '{path or type(parent).__name__}' is drawn from global state"
            raise UserError(
                what, "model.name", "use dropout=0 there, and nn.Dropout between layers"
            )


def _evaluate(model: nn.Module, name: str, shape: Shape, classes: int) -> None:
    """Evaluate the network on two rows."""
    kinds = [tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()]
    rows = torch.zeros((2, *shape), dtype=kinds[0] if kinds else torch.float32)
    try:
        with torch.no_grad():
            logits = model.eval()(rows)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        what = f"'{name}' cannot read rows of the shape {shape}: {str(error).splitlines()[0][:120]}"
        raise UserError(what, "model.name", "build it for that shape") from error
    if getattr(logits, "shape", None) != (2, classes):
        gives = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        what = f"'{name}' gives {gives} for 2 rows and {classes} classes"
        raise UserError(what, "model.name", f"let its last layer have {classes} outputs")


def _freeze_layers(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze the layers with these names, and those whose parameters need no gradient."""
    layers = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in layers:
            raise UserError(f"no layer '{name}' to freeze", "model.frozen", nearest(name, layers))
    _freeze_below(model, names, "")
    parts = [name for name, one in model.named_parameters() if not one.requires_grad]
    if parts:
        remedy = "freeze all parameters of a layer, or none"
        raise UserError(f"'{parts[0]}' is frozen and its layer is not", "model.name", remedy)
    if not any(True for _ in model.parameters()):
        raise UserError(
            "every layer of the network is frozen", "model.frozen", "leave one to train"
        )


def _freeze_below(parent: nn.Module, names: Sequence[str], path: str) -> None:
    for name, layer in list(parent.named_children()):
        needed = [one.requires_grad for one in layer.parameters()]
        if f"{path}{name}" in names or (needed and not any(needed)):
            setattr(parent, name, Frozen(layer))
        else:
            _freeze_below(layer, names, f"{path}{name}.")

"""Networks whose weights leave a site although the checks for single rows do not cover them.

The checks look at the matrices that read the inputs, in tables. Rows can be read off a unit of any
later layer, and nobody has looked for them in convolutions, texts and networks of plug-ins.
"""

from typing import Any, get_type_hints

from atoll import data, methods
from atoll.core.annotations import SharedWeights, Update, marked
from atoll.core.federation import actions, kinds
from atoll.core.messages import Tensors
from atoll.core.plugins import is_foreign
from atoll.runs.config import RunConfig

__all__ = ["is_built_in", "kind_of", "refused", "sent_networks", "uncovered"]


def refused(run: RunConfig, kind: str) -> str:
    """The refusal of a run whose weights no check covers; empty where checks cover them."""
    reason = uncovered(run, kind)
    allows = 'the contract allows it with unchecked_networks = "allow"'
    return f"no check looks for single rows in {reason}; {allows}" if reason else ""


def uncovered(run: RunConfig, kind: str) -> str:
    """What leaves a site in a run and is not covered by the checks for single rows; else empty.

    `kind` is that of the data set, empty where it is not known yet.
    """
    method = str(run.method["name"])
    if is_foreign(method, "atoll.methods") and _unmarked(method):
        return f"tensors without a mark, which sites of '{method}' send"
    own = run.models or (str(run.model["name"]),)
    names = {"own": own, "shared": (str(run.model["name"]),)}
    sent = [name for which in sent_networks(run) for name in names[which]]
    if sent and kind in ("text", "image"):
        return f"a network that reads {kind}s"
    other = next((name for name in sent if name != "mlp"), "")
    if other:
        return f"the network '{other}'"
    layers = len(run.model["widths"])
    return f"an mlp with {layers} hidden layers" if sent and layers > 1 else ""


def kind_of(run: RunConfig) -> str:
    """The kind of a run's data set as far as its config tells; empty for one outside atoll."""
    if "files" in run.data:
        return "text" if "text" in run.data else "table"
    return data.about(_name(run)).kind if is_built_in(run) else ""


def is_built_in(run: RunConfig) -> bool:
    """Whether a run is on a data set that atoll has itself, and so everybody."""
    return "files" not in run.data and _name(run) in data.names()


def _name(run: RunConfig) -> str:
    return str(run.data.get("name", "")).replace("_", "-")


def sent_networks(run: RunConfig) -> tuple[str, ...]:
    """The networks whose weights the clients of a run send."""
    method = methods.load(str(run.method["name"]))
    if method.sends is not None:
        return tuple(method.sends(run.options()))
    replies = [kinds(action)[1] for action in actions(method.client).values()]
    return ("own",) if any(marked(r, Update) or marked(r, SharedWeights) for r in replies) else ()


def _unmarked(method: str) -> bool:
    """Whether an answer has named tensors without a mark: nobody looks at these."""
    for action in actions(methods.load(method).client).values():
        reply = kinds(action)[1]
        hints: dict[str, Any] = get_type_hints(reply, include_extras=True)
        if any(hint == Tensors for hint in hints.values()):
            return True
    return False

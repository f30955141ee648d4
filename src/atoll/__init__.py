"""atoll: federated continual learning, one file a method, honest numbers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atoll.core import VERSION
from atoll.core.errors import UserError

if TYPE_CHECKING:
    from atoll.api.classifier import FederatedClassifier
    from atoll.api.comparison import Comparison, compare
    from atoll.api.result import Result, load
    from atoll.api.sweeps import Sweep
    from atoll.api.training import Stream, answer, run, stream, sweep

__version__ = VERSION
__all__ = [
    "Comparison",
    "FederatedClassifier",
    "Result",
    "Stream",
    "Sweep",
    "UserError",
    "__version__",
    "answer",
    "compare",
    "load",
    "run",
    "stream",
    "sweep",
]

_HOMES = {  # imported when they are used: torch takes seconds
    "Comparison": "comparison",
    "FederatedClassifier": "classifier",
    "Result": "result",
    "Stream": "training",
    "Sweep": "sweeps",
    "answer": "training",
    "compare": "comparison",
    "load": "result",
    "run": "training",
    "stream": "training",
    "sweep": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'atoll' has no attribute '{name}'")
    return getattr(import_module(f"atoll.api.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

"""What a method's module offers: its options, its two halves, and what engines ask of it.

A client may also have `final_model(shared, variant, task)`, the weights with which it predicts a
task after a run (`shared` is the state of the server), and `predict(model, rows)`, their logits.
Where the network is cut, `predict` of a client gives embeddings, and the server has both functions
too: its `predict(model, embeddings)` makes logits of the embeddings of all clients, by client.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Method"]


@dataclass(frozen=True)
class Method:
    """What a method's module offers; only the first three fields are needed."""

    options: type
    server: Callable[[Any, Any], Any]  # (options, site) -> Server
    client: Callable[[Any, Any], Any]  # (options, site) -> Client
    # the rest is for methods that can do more; docs/method.md has a table of it
    split: str = "rows"  # the kind of scenario it is made for
    headline: str = ""  # the variant that represents the method where one number is shown
    quorum: bool = False  # whether a round can do without some of the clients
    concurrency: Callable[[Any, int], int] | None = None  # (options, clients) -> most per round
    first: Callable[[Any], Any] | None = None  # server -> shared weights by mark; sites compare
    whole: Callable[[Any, Any], Any] | None = None  # (site, shared weights) -> all of the network
    sends: Callable[[Any], Any] | None = None  # options -> networks that clients send: own, shared
    own_share: Callable[[Any, int, int], float] | None = None  # (options, rows, earlier rows)
    summed: Callable[[Any, Any], Any] | None = None  # (options, site) -> sums sent by stage
    selects: bool = False  # whether clients select models by the run's metric, and send scores
    weighted: bool = False  # whether its losses count rows by their weights
    weighs_classes: bool = False  # whether they count rows by their class where rows have no weight
    regression: bool = False  # whether labels may be numbers

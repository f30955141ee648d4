"""Descriptions of the models of a run: names such as mu>0 need a sentence."""

from collections.abc import Mapping, Sequence

from atoll.report.tables import Group

__all__ = ["explanations"]

MODELS: Mapping[str, Mapping[str, str]] = {  # method -> model -> description, as on its page
    "chfl": {
        "common": "the network on the common columns alone, learned together (FedAvg)",
        "local": "one network on all columns of a site, trained at the site alone",
        "mu=0": "a network on the common columns and one on the own columns of a site; their "
        "outputs are added",
        "mu>0": "as mu=0, and the network on own columns also reads the layers of the other with "
        "the strength mu, which each site selects on its validation rows",
        "concat": "a network on the own columns and on the output of the network on common columns",
        "auto": "as mu>0, and mu may also be 0: the model that a site would use",
    },
}


def explanations(groups: Sequence[Group]) -> dict[str, str]:
    """The models of some runs by name, with descriptions; empty if the names are clear."""
    result: dict[str, str] = {}
    for group in groups:
        texts = MODELS.get(group.method, {})
        result |= {name: texts[name] for name in group.first.variants if name in texts}
    return result

"""FCCL's claims as comparisons of paired seeds.

All of them are measured on stand-ins. For the digits every comparison of Tables 1 and 2 has a
second row without MNIST-M, which stands in for SYN: it is left out as a client and as a test
domain, and took part in training.
"""

from collections.abc import Callable, Iterator

from atoll.reproduce.claims import Claim, Part, Series, above, near
from atoll.reproduce.fccl_scores import after, means, series
from atoll.reproduce.margins import SIZE
from atoll.reproduce.measured import Measurement

__all__ = ["OBSTACLES", "claims"]

OTHERS = ("FedMD", "FML", "RCFL", "FedDF", "FedMatch")
OBSTACLES = {
    "digits": "MNIST-M stands in for SYN; a part of SVHN",
    "office": "Office-Caltech-10 stands in for Office-Home",
}
WITHOUT = "a part of SVHN; MNIST-M took part in training"
LOSS = 0.01  # margin of a printed loss
Lookup = Callable[..., Measurement | None]  # (task, method, public="cifar100", homogeneous=False)
PUBLIC = {"cifar100": "CIFAR-100", "tiny-imagenet": "Tiny-ImageNet",
          "fashion-mnist": "Fashion-MNIST"}  # fmt: skip


def claims(find: Lookup) -> Iterator[Claim]:
    """All claims of the abstract, Section 4 and the conclusion."""
    for task, homogeneous in (("digits", False), ("office", False), ("office", True)):
        for kind in ("inter", "intra"):
            yield from _best(find, task, homogeneous, kind)
    yield from _sizes(find)
    yield from (_solo_is_worst(find, task) for task in ("digits", "office"))
    yield from _averaging(find)
    yield from _continual(find)
    yield from _public(find)
    yield from _correlation(find)
    yield from _rounds(find)
    for domains in (0, 3):
        yield from _pairs(find, domains)
    yield from _studies(find)


def _against(one: Measurement, other: Measurement, kind: str, name: str, domains: int = 0,
             place: int | None = None) -> Part:  # fmt: skip
    """One model above another, at the last round that both have."""
    at = after(one, other)
    return above(f"over {name}", series(one, kind, at, "", domains, place),
                 series(other, kind, at, "", domains, place))  # fmt: skip


def _pair(
    one: Measurement | None, other: Measurement | None
) -> tuple[Measurement, Measurement] | None:
    """Both, if they were measured and tested after a common round."""
    if one is None or other is None or after(one, other) == "0":
        return None
    return one, other


def _over_solo(one: Measurement, kind: str, domains: int = 0) -> Part:
    at = after(one)
    return above("over SOLO", series(one, kind, at, "", domains),
                 series(one, kind, at, "solo", domains))  # fmt: skip


def _parts(find: Lookup, task: str, homogeneous: bool, kind: str, domains: int = 0,
           place: int | None = None) -> tuple[tuple[Part, ...], str]:  # fmt: skip
    """FCCL over all others of its table, and what was not measured."""
    full = find(task, "FCCL", homogeneous=homogeneous)
    names = ("FedAvg", *OTHERS) if homogeneous else OTHERS
    if full is None:
        return (), "not measured: FCCL"
    others = {name: find(task, name, homogeneous=homogeneous) for name in names}
    lacking = [name for name, one in others.items() if one is None]
    parts = [_over_solo(full, kind, domains)] if place is None else []
    for name, one in others.items():
        if one is not None and after(full, one) != "0":
            parts.append(_against(full, one, kind, name, domains, place))
    return tuple(parts), f"not measured: {', '.join(lacking)}" if lacking else ""


def _best(find: Lookup, task: str, homogeneous: bool, kind: str) -> Iterator[Claim]:
    """FCCL above all others."""
    about = f"{task}{', all ResNet-18' * homogeneous}"
    number = 3 if homogeneous else {"inter": 1, "intra": 2}[kind]
    source = f"abstract, conclusion, Table {number}"
    text = f"{about}: FCCL above SOLO and all compared methods, {kind}-domain"
    parts, missing = _parts(find, task, homogeneous, kind)
    yield Claim(text, source, parts, OBSTACLES[task], missing)
    if task == "digits":
        parts, missing = _parts(find, task, homogeneous, kind, 3)
        yield Claim(f"{text}, without MNIST-M", source, parts, WITHOUT, missing)
    if homogeneous and kind == "inter":
        several = [_parts(find, task, True, kind, 0, place) for place in (0, 2, 3)]
        listed = tuple(part for one, _ in several for part in one)
        text = f"{about}: FCCL has the best inter-domain accuracy for A, P and R"
        yield Claim(text, "Table 3", listed, OBSTACLES[task], several[0][1])


def _sizes(find: Lookup) -> Iterator[Claim]:
    """The leads that the text states or the tables give."""
    leads = (
        ("inter", "SOLO", 0.0783, "Table 1"),
        ("inter", "FML", 0.0237, "Table 1"),
        ("intra", "RCFL", 0.0230, "Section 4.1"),
    )
    full = find("digits", "FCCL")
    for kind, name, size, source in leads:
        pair = _pair(full, full if name == "SOLO" else find("digits", name))
        for domains in (0, 3):
            end = ", without MNIST-M" if domains else ""
            text = f"digits: FCCL leads {name} by {100 * size:.1f} points, {kind}-domain{end}"
            obstacle = WITHOUT if domains else OBSTACLES["digits"]
            if pair is None:
                yield Claim(text, source, obstacle=obstacle, missing=f"not measured: {name}")
                continue
            part = (_over_solo(pair[0], kind, domains) if name == "SOLO"
                    else _against(*pair, kind, name, domains))  # fmt: skip
            sized = Part(part.text, part.gains, size, SIZE)
            yield Claim(text, source, (sized,), obstacle)


def _solo_is_worst(find: Lookup, task: str) -> Claim:
    text = f"{task}: SOLO has the lowest mean inter-domain accuracy"
    parts = []
    for name in ("FCCL", *OTHERS):
        one = find(task, name)
        if one is not None:
            part = _over_solo(one, "inter")
            parts.append(Part(f"{name} {part.text}", part.gains))
    return Claim(text, "Section 4.1", tuple(parts), OBSTACLES[task],
                 "" if parts else "not measured")  # fmt: skip


def _averaging(find: Lookup) -> Iterator[Claim]:
    """With weights averaged, accuracy on other domains rises by tens of points."""
    text = "office: averaging weights raises inter-domain accuracy by more than ten points"
    parts, lacking = [], []
    for name in ("FCCL", *OTHERS):
        pair = _pair(*(find("office", name, homogeneous=averaged) for averaged in (True, False)))
        if pair is None:
            lacking.append(name)
            continue
        part = _against(*pair, "inter", "")
        parts.append(Part(name, part.gains, 0.10))
    missing = f"not measured: {', '.join(lacking)}" if lacking else ""
    yield Claim(text, "Tables 1 and 3", tuple(parts), OBSTACLES["office"], missing)


def _continual(find: Lookup) -> Iterator[Claim]:
    """Figure 8: FCCL against FCCL without its continual part."""
    sizes = {("cifar100", "inter"): 0.0638, ("tiny-imagenet", "intra"): 0.0388}
    for public, name in PUBLIC.items():
        pair = _pair(*(find("digits", method, public) for method in ("FCCL", "FCCL w/o CON")))
        missing = "" if pair else f"not measured: {name}"
        for kind in ("inter", "intra"):
            text = f"digits, {name}: the continual part adds to {kind}-domain accuracy"
            size = sizes.get((public, kind))
            parts = (_against(*pair, kind, "w/o CON"),) if pair else ()
            yield Claim(text, "Section 4.2, Figure 8", parts, OBSTACLES["digits"], missing)
            if size:
                sized = tuple(Part(part.text, part.gains, size, SIZE) for part in parts)
                text = f"digits, {name}: it adds {100 * size:.1f} points, {kind}-domain"
                yield Claim(text, "Section 4.2", sized, OBSTACLES["digits"], missing)


def _public(find: Lookup) -> Iterator[Claim]:
    """Figure 7: richer or simpler public images are better."""
    base = find("digits", "FCCL")
    for public in ("tiny-imagenet", "fashion-mnist"):
        pair, name = _pair(find("digits", "FCCL", public), base), PUBLIC[public]
        text = f"digits: {name} as public images is above CIFAR-100, inter-domain"
        parts = (_against(*pair, "inter", "CIFAR-100"),) if pair else ()
        missing = "" if pair else f"not measured: {name}"
        yield Claim(text, "Section 4.2, Figure 7", parts, OBSTACLES["digits"], missing)


def _notes(one: Measurement, place: int, name: str) -> Series:
    return {run["seed"]: run["notes"][place][name] for run in one["runs"]}


def _correlation(find: Lookup) -> Iterator[Claim]:
    """On public images the diagonal of M grows and the rest falls below 0; the local loss."""
    one = find("digits", "FCCL")
    texts = {
        "digits: the diagonal of M on public images grows": "Section 4.1, Figure 5",
        "digits: off the diagonal M ends below 0": "Section 4.1, Figure 5",
        "digits: the loss of local updating ends at 0.0225": "Section 4.1, Figure 6b",
    }
    if one is None or "loss" not in one["runs"][0]["notes"][-1]:
        for text, source in texts.items():
            yield Claim(text, source, obstacle=OBSTACLES["digits"], missing="not measured")
        return
    parts = (
        above("last over first round", _notes(one, -1, "diagonal"), _notes(one, 0, "diagonal")),
        above("0 over it", {s: -v for s, v in _notes(one, -1, "off diagonal").items()}),
        near("loss", _notes(one, -1, "loss"), at=0.0225, margin=LOSS),
    )
    for (text, source), part in zip(texts.items(), parts, strict=True):
        yield Claim(text, source, (part,), OBSTACLES["digits"])


def _rounds(find: Lookup) -> Iterator[Claim]:
    """Figure 6a: how far the own-domain accuracy ends below its best tested round."""
    text = "digits: FCCL ends less below its best round than FedMD, RCFL and FedDF, intra"
    full = find("digits", "FCCL")
    parts, lacking = [], []
    for name in ("FedMD", "RCFL", "FedDF"):
        other = find("digits", name)
        if full is None or other is None:
            lacking.append(name)
            continue
        parts.append(above(f"{name} over FCCL", _fall(other), _fall(full)))
    missing = f"not measured: {', '.join(lacking)}" if lacking else ""
    yield Claim(text, "Section 4.1, Figure 6a", tuple(parts), OBSTACLES["digits"], missing)


def _fall(one: Measurement) -> Series:
    falls = {}
    for run in one["runs"]:
        rounds = sorted(run["matrix"], key=int)
        values = [means({"runs": [run]}, "intra", "", at)[0] for at in rounds]
        falls[run["seed"]] = max(values) - values[-1]
    return falls


def _studies(find: Lookup) -> Iterator[Claim]:
    """FCCL over FCCL with one part changed, where that was measured."""
    for name in ("FCCL w/o COL", "FCCL inter only", "FCCL intra only", "FCCL off-diagonal 0"):
        pair = _pair(find("digits", "FCCL"), find("digits", name))
        for kind in ("inter", "intra") if pair else ():
            parts = (_against(*pair, kind, name),) if pair else ()
            yield Claim(f"digits: FCCL above {name}, {kind}-domain", "study", parts,
                        OBSTACLES["digits"])  # fmt: skip


def _pairs(find: Lookup, domains: int) -> Iterator[Claim]:
    """FCCL over each method of Tables 1 and 2 on the digits, one by one."""
    full = find("digits", "FCCL")
    for kind in ("inter", "intra"):
        for name in OTHERS:
            pair = _pair(full, find("digits", name))
            if pair:
                end = ", without MNIST-M" if domains else ""
                text = f"digits: FCCL above {name}, {kind}-domain{end}"
                part = _against(*pair, kind, name, domains)
                obstacle = WITHOUT if domains else OBSTACLES["digits"]
                yield Claim(text, "order", (part,), obstacle)

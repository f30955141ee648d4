"""Detects spellings of one class: Yes and yes, or 0 and 1 versus no and yes."""

import re
from collections.abc import Mapping
from typing import Final

from atoll.core.errors import UserError

__all__ = ["folded", "refuse_spellings", "same_classes"]

TRUTH: Final = {  # words for yes and no; sites with different pairs mean the same
    "1": "yes", "yes": "yes", "y": "yes", "true": "yes", "t": "yes", "ja": "yes", "oui": "yes",
    "si": "yes", "positive": "yes", "pos": "yes", "present": "yes",
    "0": "no", "no": "no", "n": "no", "false": "no", "f": "no", "nein": "no", "non": "no",
    "negative": "no", "neg": "no", "absent": "no",
}  # fmt: skip
LETTER: Final = r"[^\W\d_]"
HYPHEN: Final = re.compile(rf"(?<={LETTER})[-/](?=\w)|(?<=\w)[-/](?={LETTER})")  # in a word
SIGNS: Final = "<>=~≤≥≠%#*!+-"  # signs that distinguish two classes
PUNCTUATION: Final = re.compile(rf"(?<!\d)[^\w{SIGNS}]|[^\w{SIGNS}](?!\d)|_")  # not in 1.1


def folded(name: str) -> str:
    """A name in lower case without blanks and punctuation; a name of signs only is unchanged."""
    return re.sub(r"[\W_]+", "", name.casefold()) or name


def same_classes(classes: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Classes that are probably equal: each spelling -> the reference name.

    `classes` are the rows of each class by site. Words for yes and no are compared between sites,
    and only if a site has no other classes: a class `n` beside `m` does not mean "no".
    """
    counts: dict[str, int] = {}
    truths = set[str]()
    for rows in classes.values():
        for name, count in rows.items():
            counts[name] = counts.get(name, 0) + count
        if {_meaning(name) for name in rows} <= TRUTH.keys() and len(rows) > 1:
            truths |= {*rows}
    meanings: dict[str, list[str]] = {}
    for name in counts:
        key = TRUTH[_meaning(name)] if name in truths else _meaning(name)
        meanings.setdefault(key, []).append(name)
    usual = _usual_names(classes)
    same: dict[str, str] = {}
    for names in meanings.values():
        listed = [name for name in names if name in usual]
        common = listed[0] if listed else max(names, key=lambda name: (counts[name], name))
        same |= {name: common for name in names if name != common}
    return same


def _meaning(name: str) -> str:
    """A key that is equal for spellings of one class: ignores case, blanks and punctuation.

    Signs with a meaning are kept: <=50 and >50, -1 and 1, A+ and A-, 1.1 and 11 differ.
    """
    text = re.sub(r"\s+", " ", name.casefold().strip())
    text = re.sub(r"(?<=\d),(?=\d+$)", ".", text)  # a decimal comma
    text = PUNCTUATION.sub("", HYPHEN.sub("", text))
    return text or name


def _usual_names(classes: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The reference names of classes: words before digits, then by row count."""
    rows: dict[tuple[str, ...], int] = {}
    for counts in classes.values():
        names = tuple(sorted(counts))
        rows[names] = rows.get(names, 0) + sum(counts.values())

    def rank(names: tuple[str, ...]) -> tuple[bool, int, bool, int, tuple[str, ...]]:
        text = "".join(names)
        signs = len(text) - len(folded(text))
        return (not text.isdigit(), rows[names], text == text.lower(), -signs, names)

    return [*max(rows, key=rank)] if rows else []


def refuse_spellings(classes: Mapping[str, Mapping[str, int]], label: str) -> None:
    """Refuse to train while classes look like spellings of each other."""
    same = same_classes(classes)
    if not same:
        return
    name, other = next(iter(same.items()))
    at, others = ([site for site, rows in classes.items() if one in rows] for one in (name, other))
    entries = ", ".join(f'"{old}" = "{new}"' for old, new in same.items())
    what = f"the classes '{name}' ({at[0]}) and '{other}' ({others[0]}) look like the same class"
    remedy = f'write labels = {{ {entries} }} in [data], or labels = "as-is" if they differ'
    raise UserError(what, f"column '{label}'", remedy)

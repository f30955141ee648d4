"""The user's own tables of parties that hold different columns of the same rows.

Each party has a file (or one for each stage) with a column of ids; one of them, the active party,
also has the label. `atoll align` has found the common rows; its index files list these rows
of each file, in one order. Each party encodes its own columns: no level
and no scale leaves it.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from atoll.core.errors import UserError
from atoll.core.options import AtLeastOne, build, nearest
from atoll.data.dataset import Dataset, Layout
from atoll.data.own.alignment import SHOWN, assume_aligned, normalised
from atoll.data.own.columns import (
    ENOUGH,
    Finding,
    identifies,
    leaks_of,
    make_block,
    refuse_mistakes,
)
from atoll.data.own.encoding import Block, encoded
from atoll.data.own.harmonise import DateRule, Rules, Unit, harmonise
from atoll.data.own.labels import MOST_CLASSES, Task, label_numbers, task_of, task_statement
from atoll.data.own.matching import match_rows
from atoll.data.own.profiles import (
    MISSING,
    Contents,
    Profile,
    TableOptions,
    in_order,
    known_columns,
    natural,
    refuse_unknown_columns,
    rename_columns,
    unusable,
)
from atoll.data.own.sheets import Sheet, batches, opened
from atoll.data.own.spellings import refuse_spellings

__all__ = ["PartyOptions", "examine", "leaks", "load", "read_contents"]

Array = np.ndarray[Any, Any]
NAMED = ("label", "id", "stage", "group")  # options that name one column


@dataclass(frozen=True)
class PartyOptions:
    """The options of `data` where parties hold different columns of the same rows."""

    parties: tuple[str | tuple[str, ...], ...] = ()  # a file for each, or files for each stage
    label: str = ""  # the column to be predicted; in the active party's files alone
    task: Task = ""  # empty: by the label; more than 20 distinct numbers are regression
    id: str = "id"  # the column of ids, in every file
    index: str = ""  # the folder with the index files of `atoll align`
    assume_aligned: bool = False  # rows already match: same ids in the same order in every file
    stage: str = ""  # a column of the active party that says at which stage a row comes
    lost: Literal["refuse", "drop"] = "refuse"  # what a class without a common row does
    ignore: tuple[str, ...] = ()  # columns to leave out
    keep: tuple[str, ...] = ()  # columns to keep though they look like identifiers
    categorical: tuple[str, ...] = ()  # columns to read as text, e.g. codes made of digits
    most_levels: AtLeastOne = 50  # of a text column; rarer ones count as unknown
    # words that mean that a value is missing ("" always does), or codes by column beside them
    missing: tuple[str, ...] | dict[str, tuple[str, ...]] = MISSING
    dates: dict[str, DateRule] = field(default_factory=dict)  # by column format and since
    group: str = ""  # a column of the active party: rows of one person are dealt together
    order: tuple[str, ...] = ()  # of the stages; empty: numbers by size, then words by letter
    rename: dict[str, str] = field(default_factory=dict)  # names of columns, old = new
    # classes by the way they are written; as-is: they may look like spellings of each other
    labels: Literal["", "as-is"] | dict[str, str] = ""
    # by column, values by the way they are written
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)  # by column factor, offset and suffix
    sites: dict[str, Rules] = field(default_factory=dict)  # by the name of a party's first file

    @property
    def as_of_a_table(self) -> TableOptions:
        """The options that define the role of a column, in the form of own tables."""
        names = {one.name for one in fields(TableOptions)} - {"id", "files", "stage"}
        return TableOptions(**{name: value for name, value in vars(self).items() if name in names})

    def renamed(self) -> "PartyOptions":
        """The same options with columns by their new names."""
        new = self.as_of_a_table.renamed()
        names = {one: self.rename.get(getattr(self, one), getattr(self, one)) for one in NAMED}
        return replace(self, ignore=new.ignore, keep=new.keep, categorical=new.categorical, **names)


@dataclass(frozen=True)
class _Party:
    """One party: its files in the order of stages, and the common rows of each file."""

    name: str
    sheets: tuple[Sheet, ...]
    texts: tuple[pa.Table, ...]  # all values as text, the common rows in their order
    rows: tuple[Array, ...]  # indices of these rows in each file
    counts: tuple[int, ...]  # number of rows of each file
    rules: Rules  # harmonisation rules of its files


_Stage = Sequence[tuple[Sheet, pa.Table]]  # the file of each party at one stage, and its values


def load(name: str = "", **values: Any) -> Dataset:
    """Load the common rows of all parties, joined by columns; equal files give equal data."""
    party_options = build(PartyOptions, values, "[data]")
    parties, active, options = _read(party_options)
    findings = [] if party_options.task else _task_findings(parties[active], options)
    if options.task == "regression":
        return _dataset(name, parties, active, (options.label,), options, findings)
    labels = [text.column(options.label).to_pylist() for text in parties[active].texts]
    if options.labels != "as-is":
        counts = Counter(label for part in labels for label in part)
        refuse_spellings({parties[active].name: counts}, options.label)
    classes = tuple(sorted({str(y) for part in labels for y in part}, key=natural))
    return _dataset(name, parties, active, classes, options, findings)


def _label_counts(
    options: PartyOptions, active: Sequence[Sheet], labels: Sequence[Sequence[str | None]]
) -> Contents:
    """Value counts of the active party's label, which determine the task."""
    contents = Contents(options.as_of_a_table, tuple(active))
    values = [value for part in labels for value in part if value is not None]
    contents.classes[active[0].path.stem] = Counter(values)
    return contents


def read_contents(**values: Any) -> Contents:
    """Read the contents of each party's columns in the common rows, for suggestions."""
    return _contents(*_read(build(PartyOptions, values, "[data]")))


def examine(**values: Any) -> Contents:
    """The same for files on one machine that are not aligned yet: compares ids in plain text."""
    return _contents(*_read(build(PartyOptions, values, "[data]"), _matched))


def _contents(parties: Sequence[_Party], active: int, options: PartyOptions) -> Contents:
    table = replace(options.as_of_a_table, stage=options.stage)
    contents = Contents(table, tuple(sheet for party in parties for sheet in party.sheets))
    special = {options.id, options.label, options.stage, options.group, *options.ignore}
    holder = parties[active]
    labels = [text.column(options.label).combine_chunks() for text in holder.texts]
    for party in parties:
        called = party.sheets[0].path.stem
        columns = [name for name in party.sheets[0].columns if name not in special]
        contents.profiles[called] = {name: _profile(party, name, labels) for name in columns}
        contents.files[called] = list(party.sheets)
    for option, counts in ((options.label, contents.classes), (options.stage, contents.stages)):
        if option:
            counts[holder.sheets[0].path.stem] = Counter(
                value for text in holder.texts for value in text.column(option).to_pylist()
            )
    return contents


def leaks(contents: Contents) -> list[Finding]:
    """Columns that predict the label almost alone, of any party."""
    findings = list[Finding]()
    for party, profiles in contents.profiles.items():
        for name, profile in profiles.items():
            kind = profile.kind(name in contents.options.categorical)
            findings += leaks_of(name, {party: profile}, {party: kind})
    return findings


def _read(
    options: PartyOptions, common_rows: Callable[[_Stage, PartyOptions], list[Array]] | None = None
) -> tuple[list[_Party], int, PartyOptions]:
    """The common rows of all parties, the party with the label, and the options."""
    files = [(one,) if isinstance(one, str) else tuple(one) for one in options.parties]
    _check_options(options, files)
    rules = [options.as_of_a_table.rules(Path(party[0]).stem) for party in files]
    sheets = [
        tuple(rename_columns(opened(Path(path)), own) for path in party)
        for party, own in zip(files, rules, strict=True)
    ]
    refuse_unknown_columns(
        known_columns([sheet for party in sheets for sheet in party]),
        options.as_of_a_table, "party",
    )  # fmt: skip
    options = options.renamed()
    for party in sheets:
        _lasting(party, options)
    active = _active(sheets, options)
    whole = [
        [_text(sheet, own, options) for sheet in party]
        for party, own in zip(sheets, rules, strict=True)
    ]
    find = common_rows or _common
    rows = [find(stage, options) for stage in zip(*_paired(sheets, whole), strict=True)]
    labels = [text.column(options.label).to_pylist() for text in whole[active]]
    labelled = [stage[active] for stage in rows]  # common rows of the active party, by stage
    for sheet, values, places in zip(sheets[active], labels, labelled, strict=True):
        _refuse_unlabelled(sheet, values, places)
    options = replace(options, task=task_of(_label_counts(options, sheets[active], labels)))
    if options.task == "classification":
        _refuse_lost(labels, labelled, sheets[active][0], options)
    parties = []
    for number, (party, texts) in enumerate(zip(sheets, whole, strict=True)):
        own_rows = tuple(stage[number] for stage in rows)
        common = tuple(t.take(pa.array(own)) for t, own in zip(texts, own_rows, strict=True))
        counts = tuple(len(text) for text in texts)
        name = f"{number}-{party[0].path.stem}"
        parties.append(_Party(name, party, common, own_rows, counts, rules[number]))
    return parties, active, options


def _check_options(options: PartyOptions, files: Sequence[tuple[str, ...]]) -> None:
    """Refuse incomplete options."""
    example = 'write for example data = { parties = ["bank.csv", "shop.csv"], label = "outcome" }'
    if len(files) < 2 or not options.label:
        raise UserError(
            "no label" if len(files) > 1 else "fewer than two parties", "[data]", example
        )
    if len({len(party) for party in files}) > 1:
        counts = ", ".join(str(len(party)) for party in files)
        raise UserError(f"parties have different numbers of files: {counts}", "[data]",
                        "give every party one file for each stage")  # fmt: skip
    if len(files[0]) > 1 and options.stage:
        raise UserError("a stage column and a file for each stage", "[data]", "give one of the two")
    stems = [Path(party[0]).stem for party in files]
    for name, rules in options.sites.items():
        if name not in stems:
            raise UserError(f"no party '{name}'", f"[data.sites.{name}]", nearest(name, stems))
        if rules.weights:
            what, remedy = "parties have no weights of rows", "leave weights out"
            raise UserError(what, f"[data.sites.{name}]", remedy)
    if not options.index and not options.assume_aligned:
        remedy = "run atoll align and write index = 'aligned', or assume_aligned = true"
        raise UserError("it is not known which rows belong together", "[data]", remedy)


def _lasting(party: Sequence[Sheet], options: PartyOptions) -> None:
    """Refuse a party whose columns differ between the files of its stages."""
    first = party[0]
    for sheet in party:
        if options.id not in sheet.columns:
            raise unusable(
                f"no column '{options.id}' for the ids",
                sheet.path,
                nearest(options.id, sheet.columns),
            )
    for sheet in party[1:]:
        dropped = [c for c in first.columns if c not in sheet.columns and c not in options.ignore]
        if dropped:
            what = f"the column '{dropped[0]}' of {first.path.name} is gone"
            raise unusable(what, sheet.path, f"bring it back, or write ignore = ['{dropped[0]}']")
        new = [c for c in sheet.columns if c not in first.columns and c not in options.ignore]
        if new:
            what = f"the column '{new[0]}' is not in {first.path.name}"
            remedy = (
                "give new columns as a party of their own with scenario.mode = 'columns', or ignore"
            )
            raise unusable(what, sheet.path, remedy)


def _active(sheets: Sequence[Sequence[Sheet]], options: PartyOptions) -> int:
    """The party with the label; raises an error unless exactly one has it."""
    having = [n for n, party in enumerate(sheets) if options.label in party[0].columns]
    if not having:
        columns = [c for party in sheets for c in party[0].columns]
        raise UserError(
            f"no party has a column '{options.label}'", "[data]", nearest(options.label, columns)
        )
    if len(having) > 1:
        both = " and ".join(sheets[n][0].path.name for n in having[:2])
        remedy = f"remove '{options.label}' from the parties that must not know it"
        raise UserError(f"the label is in {both}", "[data]", remedy)
    active = sheets[having[0]][0]
    if options.stage and options.stage not in active.columns:
        raise unusable(
            f"no column '{options.stage}' for the stage",
            active.path,
            nearest(options.stage, active.columns),
        )
    return having[0]


def _text(sheet: Sheet, rules: Rules, options: PartyOptions) -> pa.Table:
    """A file with all values as text, after applying the rules of its party."""
    pieces = batches(sheet, options.as_of_a_table.words)
    table = pa.Table.from_batches(
        harmonise(batch, rules, options.label, sheet.comma) for batch in pieces
    )
    if not len(table):
        raise unusable("a header and no rows", sheet.path, "give a file with rows")
    return table


def _paired(sheets: Any, texts: Any) -> list[list[tuple[Sheet, pa.Table]]]:
    return [
        list(zip(party, whole, strict=True)) for party, whole in zip(sheets, texts, strict=True)
    ]


def _ids(stage: _Stage, options: PartyOptions) -> dict[str, list[str]]:
    """The ids of each party's rows in one stage, by file."""
    return {
        str(sheet.path): [v or "" for v in text.column(options.id).to_pylist()]
        for sheet, text in stage
    }


def _matched(stage: _Stage, options: PartyOptions) -> list[Array]:
    """For each party the common rows of one stage; compares ids in plain text."""
    return match_rows([normalised(ids) for ids in _ids(stage, options).values()])


def _common(stage: _Stage, options: PartyOptions) -> list[Array]:
    """For each party the common rows of one stage in one order, verified by their ids."""
    ids = _ids(stage, options)
    command = _align_command([sheet for sheet, _ in stage], options)
    if options.assume_aligned:
        remedy = f"leave assume_aligned out, write index = 'aligned' and run {command}"
        aligned = assume_aligned(ids, remedy=remedy)
        return [aligned.rows[str(sheet.path)] for sheet, _ in stage]
    rows = [_index(sheet, len(text), options.index, command) for sheet, text in stage]
    first, first_ids = stage[0][0], normalised(ids[str(stage[0][0].path)])
    ids_of_first = [first_ids[row] for row in rows[0]]
    for (sheet, _), places in zip(stage[1:], rows[1:], strict=True):
        own_ids = normalised(ids[str(sheet.path)])
        if [own_ids[row] for row in places] != ids_of_first:
            what = f"its index file does not fit that of {first.path.name}: other rows or order"
            raise unusable(what, sheet.path, f"a table has changed since; run {command}")
    return rows


def _align_command(sheets: Sequence[Sheet], options: PartyOptions) -> str:
    """The command that writes the index files of one stage."""
    hub = [str(sheet.path) for sheet in sheets if options.label in sheet.columns]
    ids = [_written(sheet, options.id) for sheet in sheets]
    flags = ["--hub", *hub[:1]]
    for name in dict.fromkeys(ids) if len({*ids}) == 1 else ids:
        flags += ["--id", name]
    flags += ["--out", options.index or "aligned"]
    return shlex.join(["atoll", "align", *(str(sheet.path) for sheet in sheets), *flags])


def _written(sheet: Sheet, name: str) -> str:
    """The name of a column in the file itself."""
    return dict(zip(sheet.columns, sheet.written or sheet.columns, strict=True)).get(name, name)


def _index(sheet: Sheet, count: int, folder: str, command: str) -> Array:
    """The row indices in an index file."""
    path = Path(folder) / f"{sheet.path.stem}.index.csv"
    try:
        lines = path.read_text(encoding="utf-8").split()
        if lines[:1] != ["row"]:
            raise ValueError(lines[:1])
        rows = np.array([int(line) for line in lines[1:]], dtype=np.int64)
    except (OSError, ValueError, OverflowError) as error:
        what = "no index file, or not one of atoll align"
        raise unusable(what, path, f"run {command}") from error
    if not len(rows):
        raise unusable("an index file without rows", path, "align tables that share ids")
    if rows.min() < 0 or rows.max() >= count or len(np.unique(rows)) < len(rows):
        what = f"its rows do not fit {sheet.path.name}, which has {count}"
        raise unusable(what, path, f"the table has changed since; run {command}")
    return rows


def _refuse_unlabelled(sheet: Sheet, labels: Sequence[str | None], rows: Array) -> None:
    """Refuse common rows without a label."""
    empty = [int(row) for row in rows if labels[row] is None]
    if empty:
        listed = ", ".join(str(row + 1) for row in empty[:SHOWN])
        what = f"{len(empty)} common rows have no label, e.g. row {listed}"
        raise unusable(what, sheet.path, "give them one, or remove the rows and align again")


def _refuse_lost(
    labels: Sequence[Sequence[str | None]],
    active: Sequence[Array],
    sheet: Sheet,
    options: PartyOptions,
) -> None:
    """Refuse a class without aligned rows, a single class, and too many."""
    every = {y for part in labels for y in part if y is not None}
    common = {part[row] for part, rows in zip(labels, active, strict=True) for row in rows}
    lost = sorted(every - common)
    if lost and options.lost == "refuse":
        raise unusable(f"class '{lost[0]}' has no row that all parties have", sheet.path,
                     "bring its rows to the other parties, or write lost = 'drop'")  # fmt: skip
    if len(common) < 2:
        raise unusable(f"every common row has the label '{next(iter(common))}'", sheet.path,
                     "bring rows of other classes")  # fmt: skip
    total = sum(len(rows) for rows in active)
    if len(common) > min(MOST_CLASSES, max(ENOUGH, total // 2)):
        what = f"the label has {len(common):,} different values in {total:,} rows"
        remedy = 'choose a column with fewer, or set task = "regression" if it is a number'
        raise unusable(what, sheet.path, remedy)


def _dataset(
    name: str,
    parties: Sequence[_Party],
    active: int,
    classes: tuple[str, ...],
    options: PartyOptions,
    findings: list[Finding],
) -> Dataset:
    special = {options.id, options.label, options.stage, options.group, *options.ignore}
    pieces, names, owners, holders = [], [], list[int](), list[str]()
    blocks: dict[str, list[Block]] = {party.name: [] for party in parties}
    for party in parties:
        columns = [c for c in party.sheets[0].columns if c not in special]
        if not columns:
            continue  # an active party with only labels is not a client
        for block, values in _columns(party, columns, options, findings):
            blocks[party.name].append(replace(block, start=len(owners)))
            pieces.append(values)
            names += [f"{party.name}: {n}" for n in block.names]
            owners += [len(holders)] * block.width
        holders.append(party.name)
    if len(holders) < 1:
        raise UserError(
            "no party has columns to learn from", "[data]", "give columns beside the id"
        )
    y, stage, stages = _when(parties[active], classes, options)
    owner = np.array(owners)
    layout = Layout(
        np.stack([owner == number for number in range(len(holders))]),
        np.ones(len(owner), dtype=bool), stage, stages,
        _recipe(parties, active, blocks, classes, options), tuple(findings),
    )  # fmt: skip
    source = "own files: " + ", ".join(s.path.name for party in parties for s in party.sheets)
    x = np.concatenate(pieces, 1).astype(np.float32)
    return Dataset(
        name or "own tables", "table", x, y, tuple(names), classes, source,
        groups=tuple(holders), layout=layout,
        people=_people(parties[active], options.group) if options.group else None,
    )  # fmt: skip


def _task_findings(active: _Party, options: PartyOptions) -> list[Finding]:
    """Findings on how a numeric label is read."""
    labels = [text.column(options.label).to_pylist() for text in active.texts]
    contents = _label_counts(replace(options, task=""), active.sheets, labels)
    statement = task_statement(contents, options.task)
    return [Finding(*statement)] if statement else []


def _people(active: _Party, group: str) -> Array:
    """A number for each row, equal for rows of one person; a row without a name is unique."""
    if group not in active.sheets[0].columns:
        what = f"no column '{group}' for the group"
        remedy = nearest(group, active.sheets[0].columns)
        raise unusable(what, active.sheets[0].path, remedy)
    names = [name for text in active.texts for name in text.column(group).to_pylist()]
    keys = [f"={name}" if name is not None else f"row {row}" for row, name in enumerate(names)]
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)


def _recipe(
    parties: Sequence[_Party],
    place: int,
    blocks: dict[str, list[Block]],
    classes: tuple[str, ...],
    options: PartyOptions,
) -> dict[str, Any]:
    """The recipe that converts files of new rows to model inputs, and identifies the rows used."""
    active = parties[place]
    rules = {party.name: asdict(party.rules) for party in parties if party.rules != Rules()}
    rare = {party.name: _rare(party, blocks[party.name]) for party in parties}
    files = zip(active.sheets, active.counts, active.rows, strict=True)
    return {
        "id": options.id,
        "label": options.label,
        "classes": list(classes),
        "missing": list(options.as_of_a_table.words),
        **({"rules": rules} if rules else {}),
        **({"rare": rare} if any(rare.values()) else {}),
        "active": active.name,
        "files": [[sheet.path.name, count, rows.tolist()] for sheet, count, rows in files],
        "parties": {name: [asdict(block) for block in own] for name, own in blocks.items()},
    }


def _rare(party: _Party, blocks: Sequence[Block]) -> dict[str, list[str]]:
    """By column, the levels that were read and have no separate column."""
    rare = {}
    for block in blocks:
        if block.kind == "text":
            levels = {v for text in party.texts for v in text.column(block.column).to_pylist()}
            rare[block.column] = sorted(levels - {None, *block.levels})
    return {name: levels for name, levels in rare.items() if levels}


def _columns(
    party: _Party, names: Sequence[str], options: PartyOptions, findings: list[Finding]
) -> list[tuple[Block, Array]]:
    """A party's columns as numbers, read as own tables are; `findings` gets what is left out."""
    table, columns = options.as_of_a_table, []
    for name in names:
        profile = _profile(party, name)
        kind = profile.kind(name in options.categorical)
        if not kind:
            reason = f"'{name}' of {party.name} has no value in the common rows"
            findings.append(Finding(reason, "left out"))
            continue
        refuse_mistakes(name, profile, kind, table, str(party.sheets[0].path))
        if name not in options.keep and identifies(name, {"": profile}, {"": kind}):
            reason = f"'{name}' of {party.name} looks like an identifier or free text"
            findings.append(Finding(reason, f"left out; to use it, write keep = ['{name}']"))
            continue
        block = make_block(name, kind, [profile], options.most_levels)
        columns.append((block, _encoded(party, block)))
    if not columns:
        what = f"no column of {party.name} can be learned from: all are left out"
        remedy = f"write keep = ['{names[0]}'], or leave the party out"
        raise unusable(what, party.sheets[0].path, remedy)
    return columns


def _profile(party: _Party, column: str, labels: Sequence[pa.Array] = ()) -> Profile:
    """The profile of a column in the common rows, with the labels of each stage."""
    profile = Profile()
    for place, (sheet, rows) in enumerate(zip(party.sheets, party.rows, strict=True)):
        values = party.texts[place].column(column).combine_chunks()
        classes = labels[place] if labels else pa.nulls(len(values), pa.string())
        profile.add(values, classes, rows, sheet)
    return profile


def _encoded(party: _Party, block: Block) -> Array:
    """A party's column as numbers; missing values are NaN, and another column marks them."""
    return np.concatenate([
        encoded(block, text.column(block.column).combine_chunks(), sheet.comma)
        for sheet, text in zip(party.sheets, party.texts, strict=True)
    ])  # fmt: skip


def _labels(active: _Party, classes: tuple[str, ...], options: PartyOptions) -> Array:
    """The class of each row, or in regression its label."""
    if options.task == "regression":
        pairs = zip(active.texts, active.sheets, strict=True)
        return np.concatenate([
            label_numbers(text.column(options.label).combine_chunks(), sheet.comma)
            for text, sheet in pairs
        ])  # fmt: skip
    labels = [str(v) for text in active.texts for v in text.column(options.label).to_pylist()]
    return np.array([classes.index(label) for label in labels], dtype=np.int64)


def _when(
    active: _Party, classes: tuple[str, ...], options: PartyOptions
) -> tuple[Array, Array, tuple[str, ...]]:
    """The label and the stage of each row, and the names of the stages."""
    y = _labels(active, classes, options)
    if len(active.texts) > 1:
        stage = np.repeat(np.arange(len(active.texts)), [len(text) for text in active.texts])
        return y, stage, tuple(sheet.path.stem for sheet in active.sheets)
    if not options.stage:
        return y, np.zeros(len(y), dtype=np.int64), ()
    names = active.texts[0].column(options.stage).to_pylist()
    if None in names:
        what = f"no value in the column '{options.stage}'"
        raise unusable(what, active.sheets[0].path, "give every row a stage")
    stages = in_order({str(v) for v in names}, options.order)
    return y, np.array([stages.index(str(v)) for v in names], dtype=np.int64), stages

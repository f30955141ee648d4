"""Explains a contract in words: what it allows, the implied worst case, and loose terms."""

from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from torch import Tensor

from atoll import methods
from atoll.core.annotations import SharedWeights, Update, marked
from atoll.core.federation import actions, kinds
from atoll.core.messages import Tensors
from atoll.engines.network import ranges
from atoll.engines.network.contract import Contract
from atoll.engines.network.steps import PARTS
from atoll.engines.network.sums import sends_sums

__all__ = ["UNCHECKED", "explained", "loose_terms", "warnings"]

USUAL = Contract()
NO_EFFECT = (
    f"The contract does not limit {', '.join(ranges.COORDINATORS[:-2])} and the rest of engine,"
    " which have no effect here."
)
REMAINS = (
    "A patient coordinator can do the following within every contract without noise:",
    "- tell from updates and test counts whether a row that it knows is likely in the data"
    " (membership), and learn shares and averages of columns and labels;",
    "- send weights of its own making, in moves that the contract allows, over many rounds, and"
    " learn signs and values of single rows from them;",
    "- read the label of a test row whose columns it knows off the number of hits: each test of"
    " weights that it has steered there in small moves tells one label;",
    "- combine three or more units, or several rounds, to read off a row: the checks of weights"
    " and updates look at one and at two units of linear layers that read the inputs, in tables"
    " with five or more columns, and at nothing else (no images, no texts);",
    "- read whole rows off the head of a network with one hidden layer, by a class that this site"
    " does not have: 3 of 50 rows to 0.1 % in one run of 200 rounds, without a refusal"
    " (docs/network.md, Known gaps);",
    "- see from the update which levels of a common text column are in training rows, and from"
    " levels that move alike which rare ones belong to one row. It knows the levels: this site"
    " discloses them in 'agree', as far as its own file lets it;",
    "- send the same weights in many rounds. The order of the rows follows from the seed, so it is"
    " known which rows are in which step, and many updates together can give rows away;",
    "- collude with all sites but this one and so know this site's update exactly. In a run of two"
    " sites the other one knows it without the coordinator's help.",
    "Only noise on updates (differential privacy) bounds these, and atoll does not add any.",
)

UNCHECKED = (
    "Networks may leave that no check covers: with two or more hidden layers, of images, of texts,"
    " of plug-ins. The checks for single rows look at the first layer of tables alone, and a"
    " coordinator can read whole rows off units of the second one: 9 of 50 rows to 0.1 % in one run"
    " of 40 rounds, without a refusal (docs/network.md, Known gaps). Images and texts were not"
    " tried."
)
ANSWER = (
    "Once in a run the coordinator can ask how the joined model compares with this site alone."
    " What leaves: the scores of both models, of guessing and of simple classifiers on the test"
    " rows; gains with standard errors, p-values and intervals; row counts rounded down to tens;"
    " nothing of a site with fewer than 10 test rows. Accuracy times rows reveals a count: how many"
    " test rows a model gets right, and for guessing those of one class. Gain and standard error"
    " together reveal on how many rows one model alone is right. The joined weights have the bounds"
    " of a test in the last round, and this site must have trained in the run. Weights that are"
    " steered there over many rounds can tell the label of one test row that the coordinator"
    " knows; comparisons_in_all limits how many. Training alone counts in the budgets of rounds and"
    " epochs. Where sites hold columns of the same rows, the coordinator has the labels and"
    " compares: this site then trains its half of the network once more with the coordinator alone,"
    " and a second sequence of embeddings of the same rows leaves."
)

SUMS = (
    "An action answers with sums over its training rows of products of columns, or of features."
    ' They have more digits than an update, and no noise of training. Unless sums = "allow", a'
    " stage has at least as many rows as its sums have columns, so their span does not determine"
    " the rows. They tell means, variances and correlations of all columns, and a coordinator that"
    " knows all rows but one reads off that one."
)


def explained(terms: Contract) -> list[str]:
    """The contract in words, one or two sentences per line."""
    lines = [f"Methods: {', '.join(terms.methods)}. Actions: {', '.join(terms.actions)}."]
    for method in terms.methods:
        lines += _of_method(terms, method)
    lines += [
        f"All runs on the same data together: at most {terms.rounds_in_all:,} rounds,"
        f" {terms.epochs_in_all:,} epochs and {terms.answers_in_all:,} answers; of all runs at"
        f" all: {terms.in_all:,} bytes. The counts are in the chain of the egress log.",
        "Worst case:",
        *(f"- {line}" for line in _worst(terms)),
        *REMAINS,
    ]
    loose = warnings(terms)
    head = "This contract is looser than the default:" if loose else ""
    return lines + ([head, *(f"- {line}" for line in loose)] if loose else [])


def _of_method(terms: Contract, method: str) -> list[str]:
    limits = _limits(terms, method)
    shown = [f"{name} {ranges.words(limit)}" for name, limit in sorted(limits.items())]
    own = terms.options.get(method)
    lists = f"lists of at most {ranges.MOST_ITEMS} items"
    free = (
        f"other options are free, in {lists}; of data with own files a run may set"
        f" {', '.join(ranges.ANY_RUN[1:-1])} and {ranges.ANY_RUN[-1]} alone"
    )
    rest = "every other option has its default" if own else free
    return [f"{method}: {'; '.join(shown)}; {rest}. {NO_EFFECT}"]


def _limits(terms: Contract, method: str) -> dict[str, Any]:
    """The limits of a method: those of the contract, and defaults for its options."""
    own, known = terms.options.get(method, {}), ranges.known(method)
    limits = ranges.DEFAULTS if own else {**ranges.DEFAULTS, **ranges.SIZES}
    return {**{name: limit for name, limit in limits.items() if name in known}, **own}


def _marks(terms: Contract, mark: type) -> bool:
    """Whether an allowed action answers with a field with this mark."""
    replies = [
        kinds(action)[1]
        for method in terms.methods
        for name, action in actions(methods.load(method).client).items()
        if name in terms.actions
    ]
    return any(marked(reply, mark) for reply in replies)


def _updates(terms: Contract) -> Iterator[str]:
    """What updates of shared weights may reveal."""
    if _marks(terms, Update):
        rounds = int(min([terms.rounds_in_all, *_most(terms, "rounds")]))
        epochs = _words_of(_most(terms, "method.epochs"))
        yield (
            f"A coordinator can ask for {rounds:,} rounds in a stage of a run, each of {epochs}"
            " epochs at most, and see each update by itself. At least behind an update:"
            f" {terms.rows} training rows, {_count(terms.steps, 'step')} and"
            f" {_count(terms.step_rows, 'row')} in a step{_parts(terms)}."
        )
        yield _first(terms) + _later(terms)


def _worst(terms: Contract) -> Iterator[str]:
    yield from _updates(terms)
    if _marks(terms, SharedWeights):
        yield "An action answers with whole weights of this site's own network."
    if terms.unchecked_networks == "allow":
        yield UNCHECKED
    yield from _unbounded(terms)
    if any(sends_sums(method, terms.actions) for method in terms.methods):
        yield SUMS
    if any(methods.load(method).split == "parties" for method in terms.methods):
        yield (
            "A vertical method sends an embedding of every single row. The coordinator steers the"
            " network that makes it by gradients of a norm of at most"
            f" {terms.gradient:g} for a row (0: any); nothing here keeps an embedding from showing"
            " what is in a row."
        )
    if "check" in terms.actions:
        yield (
            "Each answer of 'check' tells how many test rows the weights get right: a few bits"
            f" each, {terms.answers_in_all:,} answers at most. Where the label is a number it tells"
            " the errors and the variance of the test labels with four digits each."
        )
    if terms.answer:
        yield f"{ANSWER} At most {_count(terms.comparisons_in_all, 'comparison')} on the same data."
    if "offer" in terms.actions:
        yield (
            "'offer' and 'agree' tell hashes of column names, their types, the names of classes and"
            " stages, and the levels of text columns. The plan that a coordinator makes of that may"
            " have no column, type or class beyond it: a column that is left out here is never"
            " disclosed, and no number becomes text. It may add levels of other sites to a text"
            " column whose levels this site has disclosed, up to most_levels of the site's data"
            " (50)."
        )


def _unbounded(terms: Contract) -> Iterator[str]:
    """Requests with tensors that no term bounds, because their fields have no mark."""
    for method in terms.methods:
        for name, action in actions(methods.load(method).client).items():
            hints = get_type_hints(kinds(action)[0], include_extras=True)
            fields = [field for field, hint in hints.items() if hint in (Tensor, Tensors)]
            if name in terms.actions and fields:
                yield (
                    f"Requests of '{name}' ({method}) have tensors that no term bounds:"
                    f" {', '.join(fields)}. A coordinator may choose them so that what is trained"
                    " with them gives rows away."
                )


def _parts(terms: Contract) -> str:
    return f"; {PARTS} steps, if a step has not all rows" if terms.steps > 1 else ""


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _first(terms: Contract) -> str:
    if terms.initial_weights == "any":
        return "The coordinator chooses the first weights as it likes. "
    return "The first weights are derived here from seed and architecture. "


def _later(terms: Contract) -> str:
    if not terms.move and not terms.drift:
        return "Later weights may be any."
    move = f"{terms.move:g} of their norm, or two own updates, in a round" if terms.move else "any"
    drift = f"{terms.drift:g} norms in all" if terms.drift else "any distance in all"
    return f"Later weights may move by {move} and by {drift}."


def _most(terms: Contract, name: str) -> list[float]:
    """The largest value of an option that each method may set."""
    bounds = []
    for method in terms.methods:
        limit = _limits(terms, method).get(name)
        values = _values(limit)
        bounds += [max(values)] if values else []
    return bounds


def _values(limit: Any) -> list[float]:
    """The numbers at the upper end of a limit."""
    if isinstance(limit, Mapping):
        limit = limit.get("one_of", limit.get("most", []))
    items = limit if isinstance(limit, list) else [limit]
    flat = [n for item in items for n in (item if isinstance(item, list) else [item])]
    return [float(n) for n in flat if type(n) in (int, float)]


def _words_of(values: list[float]) -> str:
    return f"{max(values):g}" if values else "any number of"


def warnings(terms: Contract) -> list[str]:
    """A warning for every term looser than its default, with the consequences."""
    return [*loose_terms(terms), *_loose_options(terms)]


def loose_terms(terms: Contract) -> Iterator[str]:
    """Every term looser than its default, without options of methods."""
    checks = (
        ("initial_weights", terms.initial_weights == "any"),
        ("move", not terms.move or terms.move > USUAL.move),
        ("drift", not terms.drift or terms.drift > USUAL.drift),
        ("shown_rows", terms.shown_rows == "allow"),
        ("steps", terms.steps < USUAL.steps),
        ("columns", terms.columns < USUAL.columns),
        ("unit_rows", terms.unit_rows < USUAL.unit_rows),
        ("rows", terms.rows < USUAL.rows),
        ("step_rows", terms.step_rows < USUAL.step_rows),
        ("gradient", not terms.gradient or terms.gradient > USUAL.gradient),
        ("unchecked_networks", terms.unchecked_networks == "allow"),
        ("sums", terms.sums == "allow"),
        ("repeats", terms.repeats > USUAL.repeats),
        ("networks", bool(terms.networks)),
        ("plugins", bool(terms.plugins)),
        ("replacements", bool(terms.replacements)),
        ("answer", terms.answer),
        ("comparisons_in_all", terms.comparisons_in_all > USUAL.comparisons_in_all),
    )
    for name, loose in checks:
        if loose:
            value = getattr(terms, name)
            shown = ", ".join(value) if isinstance(value, tuple) else str(value).lower()
            yield f"{name} = {shown}: {LOOSE_TERMS[name]}"


LOOSE_TERMS = {
    "initial_weights": "weights made for it let one update, or the counts of 'check', give single"
    " rows away.",
    "move": "weights that are made to give rows away are reached in fewer rounds; with 0 at once.",
    "drift": "weights may vanish or grow without limit, which helps to read rows.",
    "shown_rows": "updates leave even where a training row can be read off them.",
    "steps": "an update may be a single gradient, which gives rows away with weights made for it.",
    "columns": "a coordinator chooses which columns a network reads, and with fewer than five that"
    " have many values nothing looks for single rows: weights made for it give them away.",
    "unit_rows": "weights may come that let one row alone reach a unit, whose update is that row.",
    "rows": "fewer rows stand behind an answer.",
    "step_rows": "fewer rows stand behind a step: a coordinator that sends the same weights in many"
    " rounds, or the only other site, reads off the rows of a last step of few rows.",
    "gradient": "vertical networks can be steered faster towards showing rows.",
    "unchecked_networks": "updates leave of networks in which nothing looks for single rows: whole"
    " rows can be read off a second hidden layer, without a refusal.",
    "sums": "sums of products leave also where they have fewer rows than columns, and so determine"
    " every training row: 50 of 50 rows came out of one answer of 'analytic'.",
    "repeats": "after a restore a round may be answered for several weights.",
    "networks": "a run may use this code as its network, and no bound looks into it.",
    "plugins": "a run may use this code to load or deal out data; it runs with this site's rights.",
    "replacements": "a run may put these functions in the place of parts of a method.",
    "answer": "a run may have scores and gains on the test rows, with weights that it steers.",
    "comparisons_in_all": "more comparisons: each can tell the label of a test row, and many"
    " together the values of a row.",
}
LOOSE = {
    "method.optimiser": "an update is a plain sum of gradients: with low biases, which a"
    " coordinator can creep to, rows come out of it, and only shown_rows stands against that.",
    "scale": "rows come out in their own units, and one large column can single them out.",
    "dtype": "updates carry more digits, and so more rows.",
    "method.batch": "one step can hold all rows, so an update may be one gradient of them all.",
    "method.rate": "a step can be as large as it takes to read its digits.",
    "model.widths": "more units than rows: each row can have a unit of its own.",
    "seed": "more splits of the rows: the difference of two shows what is in one of them alone.",
    "scenario.train": "few rows can be chosen to train on.",
    ranges.METRIC: "a score that counts no rows has many digits: one comparison can tell the value"
    " of a column in a row.",
    "rounds": "more answers.",
    "method.width": "sums of more features, or wider embeddings, say more about a row.",
    "method.floor": "sums over fewer rows leave.",
    "method.least_cluster": "a centre that describes a task may be a single text.",
    "method.projection": "sums of other features of the same rows: together they say more.",
    "method.bits": "sums carry more digits.",
    "method.epochs": "more training on the same rows, which they show the more for.",
    "method.epochs_each": "more training on the same rows, which they show the more for.",
    "method.pretrain_epochs": "more training on the same rows, which they show the more for.",
}


def _loose_options(terms: Contract) -> Iterator[str]:
    for method, own in sorted(terms.options.items()):
        for name, limit in sorted(own.items()):
            usual = {**ranges.DEFAULTS, **ranges.SIZES}.get(name)
            if usual is not None and not ranges.inside(limit, usual):
                words = LOOSE.get(name, "more than by default.")
                yield f"{method} {name} {ranges.words(limit)}: {words}"

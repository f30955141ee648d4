"""Small faults put into a module's syntax tree, one at a time.

Annotations, docstrings, `__all__`, assertions, `strict=` and the texts of errors are left alone:
what is changed there is either no behaviour or behaviour that "cannot happen".
"""

import ast
import copy
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["Mutant", "mutants"]

Change = tuple[str, ast.AST]  # the operator's name, and what stands in the node's place
Operator = Callable[[ast.AST], Iterator[Change]]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
OPPOSITES = [("min", "max"), ("argmin", "argmax"), ("minimum", "maximum"), ("sum", "mean")]
OPPOSITES += [("any", "all"), ("floor", "ceil"), ("ones_like", "zeros_like")]
SWAPPED = {a: b for pair in OPPOSITES for a, b in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is, and what stands there instead."""

    file: str  # below src/atoll
    function: str  # qualified name; a class's own for its fields, "" for the module's constants
    operator: str
    number: int  # among those of this operator in this function
    lines: range  # of the statement that holds it
    inside: bool  # within a function, so that its lines tell which tests run it
    original: str  # the module's source
    tree: ast.Module
    statement: ast.stmt
    old: ast.AST
    new: ast.AST

    @property
    def key(self) -> str:
        """A name that an edit elsewhere in the file leaves as it is."""
        return f"{self.file}::{self.function}::{self.operator} {self.number}"

    @property
    def source(self) -> str:
        """The module with the fault."""
        return ast.unparse(self._with_fault(self.tree))

    @property
    def change(self) -> str:
        """The first lines of the statement before and after, for people."""
        before, after = ast.unparse(self.statement), ast.unparse(self._with_fault(self.statement))
        pairs = zip(before.splitlines(), after.splitlines(), strict=False)
        differ = [(one, other) for one, other in pairs if one != other]
        one, other = differ[0] if differ else (before.splitlines()[0], "")
        text = f"`{one.strip()}` becomes `{other.strip()}`"
        return text.replace("](", "] (")  # no link in Markdown

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the fault and of the function around it, or of the field or constant."""
        around: ast.stmt = next(n for n in self.tree.body if self._holds(n))
        if isinstance(around, ast.ClassDef):
            around = next((n for n in around.body if self._holds(n)), around)
        lines = self.original.splitlines()[around.lineno - 1 : around.end_lineno]
        text = "\n".join(lines)  # unlike a tree written out, the same in every version of Python
        return hashlib.sha256(f"{self.key}\n{text}".encode()).hexdigest()[:16]

    def _holds(self, node: ast.stmt) -> bool:
        return node.lineno <= self.statement.lineno <= (node.end_lineno or node.lineno)

    def _with_fault(self, node: ast.AST) -> ast.AST:
        new = ast.fix_missing_locations(ast.copy_location(copy.deepcopy(self.new), self.old))
        return copy.deepcopy(node, {id(self.old): new})


def comparison(node: ast.AST) -> Iterator[Change]:
    """`<` for `<=`, `==` for `!=`, `in` for `not in`, and back."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            new = copy.deepcopy(node)
            new.ops[place] = COMPARISONS[type(operator)]()
            yield "comparison", new


def arithmetic(node: ast.AST) -> Iterator[Change]:
    """`+` for `-`, `*` for `/`, and back."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        new = copy.deepcopy(node)
        new.op = ARITHMETIC[type(node.op)]()
        yield "arithmetic", new


def number(node: ast.AST) -> Iterator[Change]:
    """One more and one less than an integer; one more than a fraction; the other truth value."""
    if not isinstance(node, ast.Constant) or isinstance(node.value, str | bytes):
        return
    if isinstance(node.value, bool):
        yield "truth", ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield "one more", ast.Constant(node.value + 1)
        yield "one less", ast.Constant(node.value - 1)
    elif isinstance(node.value, float):
        yield "one more", ast.Constant(node.value + 1)


def logic(node: ast.AST) -> Iterator[Change]:
    """`and` for `or` and back; a `not` is dropped."""
    if isinstance(node, ast.BoolOp):
        new = copy.deepcopy(node)
        new.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield "logic", new
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not dropped", node.operand
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign dropped", node.operand


def condition(node: ast.AST) -> Iterator[Change]:
    """The opposite of a condition; one with a single comparison is `comparison`'s already."""
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not _simple(node.test):
        new = copy.deepcopy(node)
        new.test = ast.UnaryOp(ast.Not(), node.test)
        yield "condition", new
    if isinstance(node, ast.comprehension):
        for place in range(len(node.ifs)):
            other = copy.deepcopy(node)
            del other.ifs[place]
            yield "filter dropped", other


def _simple(test: ast.expr) -> bool:
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    if not isinstance(test, ast.Compare) or len(test.ops) > 1:
        return negated
    return type(test.ops[0]) in {ast.Eq, ast.NotEq, ast.Is, ast.IsNot}


def result(node: ast.AST) -> Iterator[Change]:
    """Nothing is returned."""
    constant = isinstance(node, ast.Return) and isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Return) and node.value is not None and not constant:
        yield "no result", ast.Return(ast.Constant(None))


def dropped(node: ast.AST) -> Iterator[Change]:
    """A call for its effect, a change of a value or of a part of something does not happen."""
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield)
    change = isinstance(node, ast.AugAssign)
    part = isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets
    )
    if call or change or part:
        yield "dropped", ast.Pass()


def opposite(node: ast.AST) -> Iterator[Change]:
    """`min` for `max`, `sum` for `mean`, `any` for `all`, and back."""
    if isinstance(node, ast.Call):
        called = node.func
        new = copy.deepcopy(node)
        if isinstance(called, ast.Name) and called.id in {"min", "max", "any", "all"}:
            new.func = ast.Name(SWAPPED[called.id], ast.Load())
            yield "opposite", new
        elif isinstance(called, ast.Attribute) and called.attr in SWAPPED:
            new.func = ast.Attribute(called.value, SWAPPED[called.attr], ast.Load())
            yield "opposite", new
    if isinstance(node, ast.keyword) and node.arg in {"min", "max"}:
        yield "opposite", ast.keyword(SWAPPED[node.arg], node.value)


OPERATORS: tuple[Operator, ...] = (
    comparison,
    arithmetic,
    number,
    logic,
    condition,
    result,
    dropped,
    opposite,
)


def mutants(file: str, source: str) -> list[Mutant]:
    """Every fault of every operator in a module."""
    tree = ast.parse(source)
    found: list[Mutant] = []
    seen: Counter[tuple[str, str]] = Counter()
    for node, place in _places(tree, Place("", False, None)):
        assert place.statement is not None
        for operator in OPERATORS:
            for name, new in operator(node):
                lines = _lines(node, place.statement)
                count = seen[place.function, name]
                seen[place.function, name] += 1
                where = (file, place.function, name, count, lines, place.inside)
                found.append(Mutant(*where, source, tree, place.statement, node, new))
    return found


def _lines(node: ast.AST, statement: ast.stmt) -> range:
    """The lines on which a statement runs: of a compound one its head, up to the changed node."""
    compound = isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.FunctionDef)
    last = getattr(node, "end_lineno", None) if compound else statement.end_lineno
    if compound and node is statement:
        last = statement.lineno
    return range(statement.lineno, (last or statement.lineno) + 1)


@dataclass(frozen=True)
class Place:
    """What holds a node."""

    function: str
    inside: bool
    statement: ast.stmt | None


def _places(node: ast.AST, place: Place) -> Iterator[tuple[ast.AST, Place]]:
    """All nodes that may be changed, with what holds them."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _exempt(child):
                continue
            inner = place
            if isinstance(child, ast.stmt):
                inner = replace(inner, statement=child)
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                qualified = f"{place.function}.{child.name}" if place.function else child.name
                inside = place.inside or isinstance(child, ast.FunctionDef)
                inner = Place(qualified, inside, child)
            if inner.statement is not None:
                yield child, inner
            yield from _places(child, inner)


def _exempt(node: ast.AST) -> bool:
    """Whether nothing below a node is changed."""
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    if isinstance(node, ast.FunctionDef) and any(map(_overload, node.decorator_list)):
        return True
    if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return True
    names: Sequence[ast.expr] = node.targets if isinstance(node, ast.Assign) else ()
    exported = any(isinstance(name, ast.Name) and name.id == "__all__" for name in names)
    held = node.value if isinstance(node, ast.Subscript) else None
    typed = isinstance(held, ast.Name) and held.id in {"Literal", "Annotated"}
    return exported or typed


def _overload(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "overload"

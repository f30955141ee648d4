"""The mutator itself: each operator on a small snippet, and a known fault that tests notice."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from .choice import MeasuredTest, chosen, sample
from .operators import Mutant, mutants
from .summary import Result, page, wilson

ROOT = Path(__file__).resolve().parents[2]


def changed(body: str) -> list[str]:
    """The bodies of a function with one statement, one for each mutant."""
    every = mutants("module.py", f"def f(a, b, c):\n    {body}\n")
    return [mutant.source.split("\n    ", 1)[1].strip() for mutant in every]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("c = a < b", ["c = a <= b"]),
        ("c = a >= b", ["c = a > b"]),
        ("c = a == b", ["c = a != b"]),
        ("c = a in b", ["c = a not in b"]),
        ("c = a is None", ["c = a is not None"]),
        ("c = a + b", ["c = a - b"]),
        ("c = a / b", ["c = a * b"]),
        ("c = a ** b", ["c = a * b"]),
        ("c = 3", ["c = 4", "c = 2"]),
        ("c = 0.5", ["c = 1.5"]),
        ("c = True", ["c = False"]),
        ("c = a and b", ["c = a or b"]),
        ("c = not a", ["c = a"]),
        ("c = -a", ["c = a"]),
        ("c = a if b else c", ["c = a if not b else c"]),
        ("c = [i for i in a if i]", ["c = [i for i in a]"]),
        ("return a", ["return None"]),
        ("a.append(b)", ["pass"]),
        ("a += b", ["a -= b", "pass"]),
        ("a[b] = c", ["pass"]),
        ("c = max(a, b)", ["c = min(a, b)"]),
        ("c = any(a)", ["c = all(a)"]),
        ("c = a.argmin()", ["c = a.argmax()"]),
        ("c = a.sum(b)", ["c = a.mean(b)"]),
        ("c = a.clamp(min=b)", ["c = a.clamp(max=b)"]),
    ],
)
def test_each_operator_changes_one_thing(body: str, expected: list[str]) -> None:
    assert changed(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        "assert a < b",
        "raise ValueError(1 + 2)",
        '"""1 < 2."""',
        "import torch",
        "c = zip(a, strict=True)",
    ],
)
def test_what_cannot_be_wrong_is_left_alone(body: str) -> None:
    assert changed(body) == []


def test_a_condition_is_negated_and_its_lines_are_those_of_its_head() -> None:
    source = "def f(a):\n    if a.any():\n        a.clear()\n    return 0\n"
    negated, opposite, dropped, *_ = mutants("m.py", source)
    assert "if not a.any()" in negated.source
    assert "if a.all()" in opposite.source
    assert (list(negated.lines), list(dropped.lines)) == ([2], [3])


def test_annotations_exports_and_literals_are_left_alone() -> None:
    source = "__all__ = [1]\nx: Annotated[int, 3] = y\ndef f(a: A[1 + 2]) -> B[3]:\n    pass\n"
    assert mutants("m.py", source) == []


def test_the_signatures_of_overloads_are_left_alone() -> None:
    source = "@overload\ndef f(a: int, b=True) -> int: ...\ndef f(a, b=True):\n    pass\n"
    assert [m.lines[0] for m in mutants("m.py", source)] == [3]


def test_a_key_names_the_function_and_outlives_an_edit_elsewhere() -> None:
    one = mutants("m.py", "class A:\n    def f(self):\n        return 1 < self\n")
    edited = "z = w\n\n\nclass A:\n    def f(self):\n        return 1 < self\n"
    other = mutants("m.py", edited)
    assert one[0].key == "m.py::A.f::no result 0"
    assert [(m.key, m.digest) for m in one] == [(m.key, m.digest) for m in other]
    assert len({m.key for m in one}) == len(one)


def test_every_function_and_test_that_is_named_exists() -> None:
    """A function that moves must not leave the list behind."""
    targets = tomllib.loads((ROOT / "tests/mutants/targets.toml").read_text())
    for file, names in targets["named"].items():
        every = mutants(file, (ROOT / "src/atoll" / file).read_text())
        assert set(names) <= {mutant.function for mutant in every}, file
    places = [place.partition("::")[0] for place in targets["tests"]]
    places += [f"src/atoll/{file}" for file in targets["modules"]]
    assert [place for place in places if not (ROOT / place).exists()] == []


def some(count: int, file: str) -> list[Mutant]:
    text = "".join(f"def f{n}(a):\n    return a\n" for n in range(count))
    return mutants(file, text)


def test_a_sample_has_some_of_each_module_and_is_the_same_again() -> None:
    population = {"big.py": some(2000, "big.py"), "small.py": some(5, "small.py")}
    one, other = sample(population), sample(population)
    assert [m.key for m in one] == [m.key for m in other]
    assert len({m.key for m in one}) == len(one) >= 600
    assert sum(m.file == "small.py" for m in one) == 4


def test_the_tests_that_are_most_likely_to_notice_come_first_within_the_limit() -> None:
    (mutant,) = mutants("a/thing.py", "def f(a):\n    return a\n")
    lines = {"a/thing.py": frozenset({2})}
    tests = [
        MeasuredTest("tests/golden/test_golden.py::run[thing]", 3.0, lines),
        MeasuredTest("tests/golden/test_golden.py::run[other]", 3.0, lines),
        MeasuredTest("tests/unit/b/test_other.py::cheap", 0.1, lines),
        MeasuredTest("tests/unit/a/test_thing.py::cheap", 0.15, lines),
        MeasuredTest("tests/unit/a/test_thing_more.py::dear", 2.0, lines),
        MeasuredTest("tests/unit/a/test_near.py::cheap", 0.1, lines),
        MeasuredTest("tests/unit/a/test_thing.py::away", 0.1, {"a/thing.py": frozenset({7})}),
    ]
    ids = [test.id.partition("test_")[2] for test in chosen(mutant, tests, 6.0)]
    likely = ["thing.py::cheap", "near.py::cheap", "golden.py::run[thing]", "thing_more.py::dear"]
    assert ids == [*likely, "other.py::cheap"]


def test_all_cheap_tests_of_a_module_are_run_and_constants_are_read_by_its_own_file() -> None:
    every = mutants("a/thing.py", "MOST = 7\n\n\ndef f(a):\n    return a\n")
    inside, constant = every[-1], every[0]
    lines = {"a/thing.py": frozenset({5})}
    own = [MeasuredTest(f"tests/test_thing.py::t{n:02}", 0.1, lines) for n in range(60)]
    others = [MeasuredTest(f"tests/test_other.py::t{n:02}", 0.1, lines) for n in range(60)]
    both = [test.id for test in chosen(inside, [*others, *own], 2.05)]
    assert both == [test.id for test in (*own, *others[:20])]
    reader = MeasuredTest("tests/test_thing.py::reads_a_constant", 0.1, {})
    assert [m.function for m in (inside, constant)] == ["f", ""]
    assert chosen(constant, [reader], 2.0) == [reader]
    assert chosen(inside, [reader], 2.0) == []


def test_wilsons_interval_worked_out_by_hand() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(90, 100)
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)


def test_the_page_counts_timeouts_as_killed_and_names_what_is_open() -> None:
    (mutant, other, third) = some(3, "m.py")
    results = [
        Result(mutant, {"status": "timeout", "killer": ""}, True, True),
        Result(other, {"status": "survived", "killer": ""}, True, True),
        Result(third, None, True, True),
    ]
    text = page(results, {"m.py": 3}, {}, {"abc": "a machine"})
    assert "Measured at commit abc on a machine." in text
    assert "| m.py | 3 | 2 | 0 | 1 | 1 | 50.0 % |" in text
    assert "Not tried: 1 of 3." in text
    assert (
        "2 tried, 50.0 % noticed (9.5 to 90.5). Of 1 survivors: 0 equivalent, 0 justified, 1 open."
        in text
    )
    assert f"{other.key}: `return a` becomes `return None`. **open**" in text
    assert "the same either way" in page(
        results, {"m.py": 3}, {other.key: "the same either way"}, {}
    )


CHECK = """
from tests.mutants.forks import run
source = open("src/atoll/learning/sparse.py").read()
test = ["tests/unit/learning/test_sparse.py::test_the_smaller_coding_is_taken"]
print(run("learning/sparse.py", source, test, 120).status)
print(run("learning/sparse.py", source.replace("<= len(flat) / 8", "< len(flat) / 8"), test, 120))
"""


def test_a_known_fault_is_killed_and_the_original_survives() -> None:
    command = [sys.executable, "-c", CHECK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    original, fault = done.stdout.splitlines()
    assert original == "survived"
    assert "status='killed'" in fault
    assert "test_the_smaller_coding_is_taken[25-places]" in fault

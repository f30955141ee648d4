"""How modules import each other, lazy imports inside functions included."""

import functools

import pytest

grimp = pytest.importorskip("grimp")  # comes with import-linter

LONGEST = 15  # modules in a chain of imports

Graph = dict[str, list[str]]


@pytest.fixture(scope="module")
def graph() -> Graph:
    """For each module of atoll those that it imports; imports for type checkers do not count."""
    built = grimp.build_graph("atoll", exclude_type_checking_imports=True, cache_dir=None)
    return {name: sorted(built.find_modules_directly_imported_by(name)) for name in built.modules}


def cycle(graph: Graph) -> list[str]:
    """Modules that import each other in a circle; empty if there are none."""
    left = {name: set(imported) for name, imported in graph.items()}
    while leaves := [name for name, imported in left.items() if not imported]:
        for name in leaves:
            del left[name]
        for imported in left.values():
            imported.difference_update(leaves)
    return sorted(left)


def longest_chain(graph: Graph) -> list[str]:
    """The longest chain of imports of a graph without cycles."""

    @functools.cache
    def below(name: str) -> tuple[str, ...]:
        return (name, *max((below(one) for one in graph[name]), key=len, default=()))

    chains = [below(name) for name in sorted(graph)]
    longest = max(chains, key=len)
    return list(longest)


def test_no_module_imports_itself_through_others(graph: Graph) -> None:
    assert cycle(graph) == []


def test_the_longest_chain_of_imports(graph: Graph) -> None:
    chain = longest_chain(graph)
    assert len(chain) <= LONGEST, " > ".join(chain)


def test_cycles_and_chains_of_a_graph_drawn_by_hand() -> None:
    graph = {"a": ["b", "c"], "b": ["c"], "c": ["d"], "d": []}
    assert cycle(graph) == []
    assert longest_chain(graph) == ["a", "b", "c", "d"]
    assert cycle({**graph, "d": ["b"]}) == ["a", "b", "c", "d"]
    assert cycle({**graph, "e": ["f"], "f": ["e"]}) == ["e", "f"]

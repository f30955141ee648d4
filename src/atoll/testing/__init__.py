"""The conformance suite: what every method must keep to, for tests of your own package.

    from atoll.testing import parametrize_with_checks

    @parametrize_with_checks(["my_method"])
    def test_conformance(case, check, tmp_path):
        check(case, tmp_path)

Needs pytest for the decorator alone; `check_method` runs all checks without it.
"""

import tempfile
import unittest
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.testing import models, network, rules
from atoll.testing.rules import ConformanceError
from atoll.testing.samples import Case

__all__ = ["Case", "Check", "ConformanceError", "check_method", "checks", "parametrize_with_checks"]

Rule = Callable[[Case, Path], None]

RULES: tuple[Rule, ...] = (
    rules.has_options_with_remarks,
    rules.messages_survive_packing,
    rules.needs_no_packing,
    rules.bytes_are_counted,
    rules.only_actions_can_be_called,
    rules.same_seed_same_record,
    rules.leaves_global_randomness_alone,
    rules.rebuilt_clients_give_the_same_record,
    rules.answers_in_any_order,
    rules.sends_no_private_data,
    rules.resumed_equals_uninterrupted,
    rules.learns,
    rules.stacked_equals_loop,
    rules.stacked_equals_loop_with_uneven_rows,
    rules.balanced_classes_stack,
    models.predicts_its_scores,
    models.exports_its_models,
    models.one_site_alone_gains_nothing,
    models.every_site_has_an_outcome,
    network.policies_let_it_pass,
)


@dataclass(frozen=True)
class Check:
    """One rule: call it with a case and an empty folder.

    >>> checks()[0].name
    'has_options_with_remarks'
    """

    rule: Rule

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.rule.__name__

    @property
    def words(self) -> str:
        """The rule in a sentence."""
        return str(self.rule.__doc__)

    def __call__(self, case: Case | str, folder: Path) -> None:
        """Raise ConformanceError where the method breaks the rule."""
        self.rule(Case(case) if isinstance(case, str) else case, folder)


def checks(network_engine: bool = False) -> list[Check]:
    """All checks; with `network_engine` also a run over NVFlare with real processes.

    >>> len(checks(network_engine=True)) - len(checks())
    1
    """
    further = [network.network_equals_local] if network_engine else []
    return [Check(rule) for rule in (*RULES, *further)]


def check_method(case: Case | str, network_engine: bool = False) -> dict[str, str]:
    """Run all checks: for each of them 'passed', or why it was skipped.

    Raises ConformanceError at the first rule that the method breaks.

    >>> check_method("alone")["has_options_with_remarks"]
    'passed'
    """
    results = {}
    for check in checks(network_engine):
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(case, Path(folder))
                results[check.name] = "passed"
            except unittest.SkipTest as reason:
                results[check.name] = f"skipped: {reason}"
    return results


def parametrize_with_checks(cases: Iterable[Case | str], network_engine: bool = False) -> Any:
    """A pytest decorator: the test is called with every `case` and `check`.

    >>> decorator = parametrize_with_checks(["fedavg", Case("chfl", {"clients": 2})])
    >>> len(decorator.args[1]) == 2 * len(checks())
    True
    """
    import pytest  # noqa: PLC0415 - only tests need it

    pairs = [
        pytest.param(case, check, id=f"{case}-{check.name}")
        for case in (Case(one) if isinstance(one, str) else one for one in cases)
        for check in checks(network_engine)
    ]
    return pytest.mark.parametrize(("case", "check"), pairs)

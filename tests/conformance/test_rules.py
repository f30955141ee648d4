"""The rules bite: methods with one fault each break the rule that is meant for it."""

import re
import sys
from pathlib import Path

import pytest

from atoll.core.errors import ClientFailedError, UserError
from atoll.engines.network.contract import RefusedError
from atoll.testing import Case, ConformanceError, models, network, rules

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "method.md").read_text()
GOOD = dict(re.findall(r"<!-- file: (\w+)\.py -->\n```python\n(.*?)```", PAGE, re.DOTALL))
FITTED = "return Fitted(result.weights, result.losses["
FAULTS = {  # the rule, a line of FedMedian, and what stands in its place
    "an option without a remark": (
        rules.has_options_with_remarks, "batch: AtLeastOne = 16  # rows in a local step",
        "batch: AtLeastOne = 16",
    ),
    "a default out of range": (rules.has_options_with_remarks, "Positive = 0.1", "Positive = -1.0"),
    "its own random numbers": (
        rules.same_seed_same_record, FITTED,
        "import secrets\n        result.weights['bias0'] += secrets.randbelow(9) / 100\n        "
        + FITTED,
    ),
    "a memory that is not in its state": (
        rules.rebuilt_clients_give_the_same_record, FITTED,
        "self.calls = getattr(self, 'calls', 0) + 1\n"
        "        result.weights['bias0'] += self.calls / 10\n        " + FITTED,
    ),
    "a count that clients share": (
        rules.answers_in_any_order, FITTED,
        "Client.calls = getattr(Client, 'calls', 0) + 1\n"
        "        result.weights['bias0'] += (Client.calls % 3) / 10\n        " + FITTED,
    ),
    "a request that is changed": (
        rules.needs_no_packing, "result = yield",
        "request.weights['bias0'] += 1\n        result = yield",
    ),
    "a row in place of a bias": (
        rules.sends_no_private_data, FITTED,
        "row = self.site.train(moment.stage).x[0]\n"
        "        result.weights['bias0'][: len(row)] = row[: len(result.weights['bias0'])]\n"
        "        " + FITTED,
    ),
    "a global generator": (
        rules.leaves_global_randomness_alone, FITTED, "torch.rand(1)\n        " + FITTED,
    ),
    "a server that forgets": (
        rules.resumed_equals_uninterrupted, "self.weights = copied(state)", "pass",
    ),
    "no learning": (
        rules.learns, "self.weights = {\n            name: torch", "_ = {\n            name: torch",
    ),
    "an action too many": (
        rules.only_actions_can_be_called, "    def state(self) -> Tensors:\n        return {}",
        "    def nothing(self, request: Check, moment: Moment) -> Checked:\n"
        "        return self.check(request, moment)\n\n"
        "    def state(self) -> Tensors:\n        return {}",
    ),
    "another network for predictions": (
        models.predicts_its_scores, "return shared\n",
        "return {n: -t for n, t in shared.items()}\n",
    ),
    "first weights that no site can check": (
        network.policies_let_it_pass, ', first=lambda server: {"shared": server.weights}', "",
    ),
}  # fmt: skip

BROKEN = (ConformanceError, UserError, ClientFailedError, RefusedError)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a method of a user; other tests do not see what it imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_a_refusal_by_a_policy_names_the_rule(folder: Path) -> None:
    text = GOOD["fedmedian"].replace(', first=lambda server: {"shared": server.weights}', "", 1)
    Path("faulty.py").write_text(text)
    with pytest.raises(ConformanceError, match="under a drafted contract a site refuses"):
        network.policies_let_it_pass(Case("./faulty.py:METHOD"), folder / "faulty")


def test_options_of_a_case_may_need_a_contract_of_their_own(folder: Path) -> None:
    case = Case("fedavg", {"cohort": 2, "optimiser": "sgd", "rate": 0.1, "batch": 16, "epochs": 2})
    network.policies_let_it_pass(case, folder / "run")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_method_breaks_its_rule(fault: str, folder: Path) -> None:
    rule, line, other = FAULTS[fault]
    text = GOOD["fedmedian"]
    assert line in text
    Path("faulty.py").write_text(text.replace(line, other, 1))
    Path("good.py").write_text(text)
    rule(Case("./good.py:METHOD"), folder / "good")
    with pytest.raises(BROKEN):
        rule(Case("./faulty.py:METHOD"), folder / "faulty")

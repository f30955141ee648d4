"""What the benchmark runs, and what equal cost means."""

import pytest

from atoll import data
from atoll.benchmark import protocol
from atoll.benchmark.protocol import CONTENDERS, QUICK, Plan, Sizes, settings
from atoll.data import splits
from atoll.runs.config import resolve

MNIST = Sizes(784, 10)
every_contender = pytest.mark.parametrize("name", CONTENDERS)


@every_contender
def test_every_contender_has_as_many_trials_within_its_ranges(name: str) -> None:
    trials = protocol.trial_options(name, Plan())
    assert len(trials) == len({str(trial) for trial in trials}) == Plan().trials
    for trial in trials:
        for option, (low, high) in CONTENDERS[name].ranges.items():
            assert low <= trial[option] <= high


def test_the_first_trial_is_the_middle_of_a_range_on_a_log_scale() -> None:
    assert protocol.trial_options("analytic", Plan())[0] == {"strength": 3.16}  # 0.01 to 1000


@every_contender
def test_every_config_is_one_of_a_run(name: str) -> None:
    for change in settings(name, QUICK, Sizes(64, 10)).values():
        config = protocol.values(name, "digits-table", QUICK, change, False, 0)
        assert resolve(config, "bench").options() is not None


def test_tuning_never_sees_the_test_rows() -> None:
    dataset = data.load("digits-table")
    tuning, measured = (
        protocol.values("fedavg", "digits-table", QUICK, {}, tuning, 0) for tuning in (True, False)
    )
    measured["seed"] = tuning["seed"]  # the same rows
    scenarios = []
    for config in (tuning, measured):
        options = splits.options_of(config["scenario"], "test")
        scenarios.append(splits.load("classes").deal(dataset, options, config["seed"]))
    tests = {row for rows in scenarios[1].tests["site-0"] for row in rows.tolist()}
    seen = {row for rows in scenarios[0].tests["site-0"] for row in rows.tolist()}
    trained = set()
    for holdings in scenarios[0].holdings.values():
        trained |= {row for holding in holdings for row in holding.train.tolist()}
    assert (len(tests), len(seen)) == (359, 360)  # of 1,797, a fifth each
    assert not tests & (seen | trained)
    assert not seen & trained


def test_analytic_has_as_many_features_as_fit_the_bytes_of_fedavg() -> None:
    """5 stages, 5 sites: 10 rounds of 203,530 weights there and back are 16.28 MB an exchange."""
    plan = Plan()
    weights = 4 * (785 * 256 + 257 * 10)
    assert MNIST.weights(plan) == weights
    width = settings("analytic", plan, MNIST)["bytes"]["width"]
    limit = 2 * weights * plan.rounds

    def cost(features: int) -> int:
        return 8 * ((features + 1) * (features + 2) // 2 + 2 * 10 * (features + 1))

    assert cost(width) <= limit < cost(width + 1)


def test_replay_has_fewer_rounds_at_equal_steps_and_exemplars_at_equal_memory() -> None:
    plan = Plan()
    equal = settings("replay", plan, MNIST)
    assert equal["steps"] == {"rounds": 5}  # 10 rounds of 5 stages, of which 4 have twice the rows
    rows = 2 * MNIST.weights(plan) // (4 * 785)
    assert equal["memory"] == {"memory": rows}
    assert protocol.stored_bytes("replay", plan, MNIST, equal["memory"]) == rows * 4 * 785


def test_fot_has_fewer_rounds_at_equal_bytes() -> None:
    """Gram matrices of 785 and 257 columns four times, against 50 exchanges of the network."""
    plan = Plan()
    weights = MNIST.weights(plan)
    extra = 4 * (weights + 4 * (785**2 + 257**2))
    rounds = settings("fot", plan, MNIST)["bytes"]["rounds"]
    assert 5 * rounds * 2 * weights + extra <= 50 * 2 * weights
    assert 5 * (rounds + 1) * 2 * weights + extra > 50 * 2 * weights


@pytest.mark.parametrize(("name", "squares"), [("lowrank", 0), ("lorm", 784 * 8)])
def test_adapters_have_the_largest_rank_that_fits_the_bytes_of_fedavg(
    name: str, squares: int
) -> None:
    """Two factors of the hidden layer, the output layer; mean squared inputs go up alone."""
    plan = Plan()
    rank = settings(name, plan, MNIST)["bytes"]["rank"]

    def cost(rank: int) -> int:
        return 2 * 4 * (rank * (784 + 256) + 257 * 10) + squares

    assert cost(rank) <= 2 * MNIST.weights(plan) < cost(rank + 1)

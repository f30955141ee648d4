"""Simple models of one site: class shares, two classifiers, and when one is skipped."""

import math

import numpy as np
import pytest
from scipy import sparse
from sklearn.dummy import DummyClassifier
from threadpoolctl import threadpool_info, threadpool_limits

from atoll.metrics.answer import BOOSTING, LOGISTIC
from atoll.runs import baselines
from atoll.runs.baselines import class_shares, classifiers


def test_class_shares_by_hand() -> None:
    shares = class_shares(np.array([0, 0, 2, 0]), classes=4, rows=2)
    assert shares.shape == (2, 4)
    assert np.exp(shares[1]) == pytest.approx([0.75, 0, 0.25, 0])


def test_classifiers_learn_and_know_all_classes() -> None:
    stream = np.random.default_rng(0)
    x = stream.normal(size=(200, 3))
    y = np.where(x[:, 0] > 0, 2, 0)  # nobody has class 1
    results = classifiers(x[:150], y[:150], x[150:], 3)
    assert list(results) == [LOGISTIC, BOOSTING]
    for outputs in results.values():
        assert isinstance(outputs, np.ndarray)
        assert (outputs.argmax(1) == y[150:]).mean() > 0.9
        assert (outputs[:, 1] == -math.inf).all()
        assert np.exp(outputs).sum(1) == pytest.approx(np.ones(50))


def test_one_class_is_always_predicted() -> None:
    x, y = np.zeros((5, 2)), np.ones(5, dtype=int)
    for outputs in classifiers(x, y, x[:2], 2).values():
        assert isinstance(outputs, np.ndarray)
        assert np.exp(outputs).tolist() == [[0, 1], [0, 1]]


def test_wide_and_sparse_rows_grow_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.eye(20, 400), np.arange(20) % 10
    wide = classifiers(x, y, x, 10)[BOOSTING]
    assert wide == "400 columns and 10 classes take too long"
    words = classifiers(sparse.csr_array(x), y, sparse.csr_array(x), 10)
    assert words[BOOSTING] == "texts have a column for each word"
    assert isinstance(words[LOGISTIC], np.ndarray)
    monkeypatch.setattr(baselines, "MOST", 100)
    assert classifiers(x, y, x, 10)[LOGISTIC] == "the training rows have more than 100 numbers"


def test_simple_models_train_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    class Watched(DummyClassifier):  # type: ignore[misc]
        def fit(self, x: np.ndarray, y: np.ndarray) -> "Watched":
            threads.append({pool["num_threads"] for pool in threadpool_info()})
            return super().fit(x, y)  # type: ignore[no-any-return]

    monkeypatch.setattr(baselines, "_boosting", lambda dense: Watched())
    x, y = np.eye(20), np.arange(20) % 2
    with threadpool_limits(2):
        classifiers(x, y, x, 2)
    assert threads == [{1}]

"""Simple models that a site can train alone: class shares and two classifiers.

Each predicts the log-probability of every class; minus infinity for classes without a training
row at the site. In regression: the mean of the labels and two regressors.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse
from threadpoolctl import threadpool_limits

from atoll.metrics.answer import BOOSTING, LOGISTIC, MEAN, RIDGE

__all__ = ["class_shares", "classifiers", "regressors"]

Array = np.ndarray[Any, Any]
Matrix = Any  # (rows, columns), dense or sparse
WIDEST = 3_000  # maximum of columns times trees per iteration for growing trees
MOST = 200_000_000  # maximum of numbers in the training rows for training a classifier
THREADS = 1  # for small trees, thread overhead exceeds the gain, above all on a busy machine


def class_shares(y: Array, classes: int, rows: int) -> Array:
    """The class shares of training labels as log-probabilities: (rows, classes)."""
    with np.errstate(divide="ignore"):
        shares = np.log(np.bincount(y, minlength=classes) / len(y))
    return np.tile(shares, (rows, 1))


def classifiers(x: Matrix, y: Array, test: Matrix, classes: int) -> dict[str, Array | str]:
    """For each classifier, the log-probabilities of test rows or the reason why it is skipped."""
    results: dict[str, Array | str] = {}
    for name, make in ((LOGISTIC, _logistic), (BOOSTING, _boosting)):
        reason = _obstacle(name, x, classes)
        results[name] = reason or _predicted(make, x, y, test, classes)
    return results


def _obstacle(name: str, x: Matrix, classes: int) -> str:
    """The reason why a classifier is not trained; empty if it is."""
    numbers = x.nnz if sparse.issparse(x) else x.size
    if numbers > MOST:
        return f"the training rows have more than {MOST:,} numbers"
    if name == BOOSTING and sparse.issparse(x):
        return "texts have a column for each word"
    trees = classes if classes > 2 else 1
    if name == BOOSTING and x.shape[1] * trees > WIDEST:
        return f"{x.shape[1]:,} columns and {classes} classes take too long"
    return ""


def _predicted(
    make: Callable[[bool], Any], x: Matrix, y: Array, test: Matrix, classes: int
) -> Array:
    """Train on some rows and predict others."""
    seen = np.unique(y)
    if len(seen) == 1:
        return class_shares(y, classes, test.shape[0])
    model = make(not sparse.issparse(x))
    limits = threadpool_limits(THREADS)
    with warnings.catch_warnings(), np.errstate(all="ignore"), limits:
        warnings.simplefilter("ignore")  # a solver that stops at its iteration limit is good enough
        model.fit(x, y)
        outputs = np.full((test.shape[0], classes), -np.inf)
        outputs[:, seen] = np.log(model.predict_proba(test))
    return outputs


def _logistic(dense: bool) -> Any:
    """Logistic regression with an L2 penalty on standardised columns."""
    # importing scikit-learn takes a second
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    return make_pipeline(StandardScaler(with_mean=dense), LogisticRegression(max_iter=1000))


def _boosting(dense: bool) -> Any:
    """Gradient boosting with the defaults of scikit-learn, all rows used for training."""
    from sklearn.ensemble import HistGradientBoostingClassifier  # noqa: PLC0415

    return HistGradientBoostingClassifier(early_stopping=False, random_state=0)


def regressors(x: Matrix, y: Array, test: Matrix) -> dict[str, Array | str]:
    """Predictions (rows, 1) of the label mean and each regressor, or why a regressor is skipped."""
    results: dict[str, Array | str] = {MEAN: np.full((test.shape[0], 1), y.mean())}
    for name, make in ((RIDGE, _ridge), (BOOSTING, _boosted_numbers)):
        reason = _obstacle(name, x, 1)
        if reason or len(y) < 2:
            results[name] = reason or "one training row"
            continue
        limits = threadpool_limits(THREADS)
        with warnings.catch_warnings(), np.errstate(all="ignore"), limits:
            warnings.simplefilter("ignore")
            results[name] = np.asarray(make().fit(x, y).predict(test), float)[:, None]
    return results


def _ridge() -> Any:
    """Ridge regression on standardised columns; leave-one-out selects the penalty."""
    from sklearn.linear_model import RidgeCV  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    return make_pipeline(StandardScaler(), RidgeCV(alphas=np.logspace(-2, 4, 13)))


def _boosted_numbers() -> Any:
    """Gradient boosting with the defaults of scikit-learn, all rows used for training."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415

    return HistGradientBoostingRegressor(early_stopping=False, random_state=0)

"""The classifier keeps the conventions of scikit-learn, and trains between sites."""

import pickle  # noqa: TID251 - users of scikit-learn pickle estimators; atoll reads none
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from atoll import FederatedClassifier

SMALL = {"widths": [8], "epochs": 5, "rate": 0.02}


@parametrize_with_checks([FederatedClassifier()])  # type: ignore[untyped-decorator]
def test_every_check_of_scikit_learn_without_exception(estimator: Any, check: Any) -> None:
    check(estimator)


def rows(count: int = 120) -> tuple[dict[str, list[Any]], list[str]]:
    """Columns with a text, a gap, a column of one site, and labels that depend on two of them."""
    draw = np.random.default_rng(3)
    age, where = draw.normal(60, 10, count), draw.integers(0, 2, count)
    sex = draw.integers(0, 2, count)
    columns: dict[str, list[Any]] = {
        "age": [None if i == 5 else float(value) for i, value in enumerate(age)],
        "sex": [["f", "m"][value] for value in sex],
        "crp": [None if at else 1.5 for at in where],
        "hospital": [["basel", "bern"][value] for value in where],
    }
    return columns, ["sick" if a + 8 * s > 64 else "well" for a, s in zip(age, sex, strict=True)]


@pytest.mark.parametrize("method", ["fedavg", "chfl"])
def test_a_frame_with_a_column_of_sites(method: str) -> None:
    columns, labels = rows()
    frame, y = pa.table(columns), np.array(labels)
    options = SMALL if method == "fedavg" else {**SMALL, "mu": [0.1]}
    classifier = FederatedClassifier(method, sites="hospital", rounds=8, options=options)
    assert classifier.fit(frame, y) is classifier
    assert classifier.sites_.tolist() == ["basel", "bern"]
    assert classifier.classes_.tolist() == ["sick", "well"]
    assert classifier.feature_names_in_.tolist() == list(columns)
    assert classifier.score(frame, y) > 0.85
    assert "FederatedClassifier" in classifier._repr_html_()
    again = pickle.loads(pickle.dumps(classifier))  # noqa: S301
    assert (again.predict_proba(frame) == classifier.predict_proba(frame)).all()


def test_pandas_and_polars_give_the_same_predictions() -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    columns, labels = rows()
    classifier = FederatedClassifier(sites="hospital", rounds=2, options=SMALL)
    frame = pandas.DataFrame(columns)
    frame["sex"] = frame["sex"].astype("category")
    frame.index = pandas.Index(range(500, 620), name="number")  # is no column
    expected = classifier.fit(frame, labels).predict_proba(frame)
    assert classifier.n_features_in_ == 4
    other = clone(classifier).fit(polars.DataFrame(columns), labels)
    assert (other.predict_proba(polars.DataFrame(columns)) == expected).all()


def test_sites_as_an_array_and_a_row_of_an_unknown_site() -> None:
    columns, labels = rows()
    x = np.array([columns["age"], [value == "m" for value in columns["sex"]]], dtype=float).T
    where = ["1.0" if site == "bern" else "0.0" for site in columns["hospital"]]
    classifier = FederatedClassifier("alone", rounds=5, options=SMALL).fit(x, labels, sites=where)
    here = [classifier.predict_proba(x, sites=[site] * len(x)) for site in ("0.0", "1.0")]
    assert not np.allclose(here[0], here[1])  # each site trains a model of its own
    assert classifier.predict_proba(x) == pytest.approx(np.mean(here, axis=0))
    assert (
        classifier.predict_proba(x, sites=["new"] * len(x)) == classifier.predict_proba(x)
    ).all()
    numbered = np.column_stack([x, [float(site) for site in where]])
    by_column = FederatedClassifier("alone", sites=2, rounds=5, options=SMALL)
    assert by_column.fit(numbered, labels).sites_.tolist() == ["0.0", "1.0"]
    own = classifier.predict_proba(x, sites=where)
    assert by_column.predict_proba(numbered) == pytest.approx(own)


def test_more_than_ten_classes_stay_in_order() -> None:
    y = np.repeat(np.arange(12), 10)
    x = np.eye(12)[y]
    classifier = FederatedClassifier(rounds=10, options=SMALL).fit(x, y)
    assert classifier.score(x, y) == 1


def test_model_selection_of_scikit_learn() -> None:
    columns, labels = rows()
    frame, y = pytest.importorskip("pandas").DataFrame(columns), np.array(labels)
    classifier = FederatedClassifier(sites="hospital", rounds=4, options=SMALL)
    assert cross_val_score(classifier, frame, y, cv=2).min() > 0.7
    search = GridSearchCV(classifier, {"rounds": [1, 4]}, cv=2).fit(frame, y)
    assert search.best_params_ == {"rounds": 4}


@pytest.mark.parametrize(
    ("arguments", "sites", "words"),
    [
        ({"sites": "hospitl"}, None, "no column 'hospitl'.*did you mean 'hospital'"),
        ({"sites": 9}, None, "no column 9"),
        ({"method": "fedavgg"}, None, "did you mean 'fedavg'"),
        ({"options": {"epoch": 2}}, None, "unknown option 'epoch'.*did you mean 'epochs'"),
        ({}, ["a"] * 3, "inconsistent numbers of samples"),
        ({}, ["a b", "a-b"] * 60, "two sites have names"),
        ({}, ["a"] * 117 + ["b"] * 3, "site 'b' has too few rows: 3"),
        ({"method": "splitnn"}, None, "cannot run where the split is 'files'"),
    ],
)
def test_what_cannot_be_trained_is_a_value_error(
    arguments: dict[str, Any], sites: Any, words: str
) -> None:
    columns, labels = rows()
    with pytest.raises(ValueError, match=words):
        FederatedClassifier(**arguments).fit(pa.table(columns), labels, sites=sites)

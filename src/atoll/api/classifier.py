"""A classifier with the conventions of scikit-learn that trains between sites."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import assert_all_finite, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from atoll import engines
from atoll.api.errors import keyword_errors
from atoll.api.inputs import named_objects, values_of
from atoll.core.errors import UserError
from atoll.core.options import nearest
from atoll.core.plugins import objects_in_memory
from atoll.data.own.memory import as_table
from atoll.data.own.profiles import site_name
from atoll.runs.config import resolve
from atoll.runs.execute import execute
from atoll.runs.predict import tables
from atoll.runs.predict.model import Predictor

__all__ = ["FederatedClassifier"]

Array = np.ndarray[Any, Any]
REQUIRED = "FederatedClassifier requires y to be passed"
ONE_SITE = "all"  # the site of all rows where none are named
FEWEST = 5  # rows of a site: to train, to validate and to test on
# Rows that are not for training choose the model, and test it; equal fits have equal bits.
DEFAULTS: dict[str, Any] = {
    "train": 0.8, "valid": 0.1, "dtype": "float64", "looks": False, "engine.mode": "loop",
}  # fmt: skip


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # untyped bases
    """A classifier that a method of atoll trains between the sites that hold the rows.

    `method` is a preset, a method, a TOML file or a plug-in, as for `atoll.run`. `sites` is the
    column of X that names the site of each row: its name, or its number where X is an array.
    Without it, give the sites to `fit`, or all rows are at one site. `options` are other options
    by their names: `{"rate": 0.01, "widths": [32]}`.

    X is a DataFrame (pandas, polars or Arrow), whose columns may be numbers, texts or dates and may
    have gaps, or an array of numbers. A column without a value at a site is not that site's. Of the
    rows of each site 80 % train, 10 % choose the best model, and 10 % test.

    A row is predicted by the model of its site; where its site is not known, by the mean of the
    probabilities of all sites.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> hospitals = ["basel", "bern"] * 75
    >>> classifier = FederatedClassifier("fedavg", rounds=10, options={"rate": 0.01})
    >>> classifier = classifier.fit(X, y, sites=hospitals)
    >>> classifier.sites_.tolist()
    ['basel', 'bern']
    >>> classifier.score(X, y) > 0.9
    True
    """

    def __init__(
        self,
        method: str = "fedavg",
        sites: str | int | None = None,
        *,
        rounds: int = 10,
        options: Mapping[str, Any] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.method = method
        self.sites = sites
        self.rounds = rounds
        self.options = options
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        """A missing value is filled in."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any, sites: Any = None) -> "FederatedClassifier":  # noqa: N803
        """Train; `sites` names the site of each row where no column of X does."""
        table, names = self._table(X, sites, y)
        labels = column_or_1d(y, warn=True)
        check_consistent_length(table, labels)
        assert_all_finite(labels, input_name="y")
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}: a classifier needs two")
        names = np.full(len(table), ONE_SITE) if names is None else names
        self.sites_ = np.unique(names)
        with _value_errors(), self._objects(), TemporaryDirectory() as home:
            changes, _ = named_objects(self._changes(_site_tables(table, names, codes)))
            config = resolve(values_of(self.method, changes, Path(home)), self.method)
            folder = Path(home) / "run"
            execute(config, folder, engines.load(config.engine_options().name))
            self._record = {
                path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()
            }
        return self

    def predict(self, X: Any, sites: Any = None) -> Array:  # noqa: N803
        """The class of each row."""
        probabilities = self.predict_proba(X, sites)
        return np.asarray(self.classes_[probabilities.argmax(1)])

    def predict_proba(self, X: Any, sites: Any = None) -> Array:  # noqa: N803
        """The probability of each class of each row, in the order of `classes_`."""
        check_is_fitted(self)
        table, names = self._table(X, sites)
        result = np.empty((len(table), len(self.classes_)))
        predicted = np.zeros(len(table), dtype=bool)
        with _value_errors(), self._objects(), TemporaryDirectory() as home:
            folder = self._unpacked(Path(home))
            for site in self.sites_ if names is not None else ():
                rows = np.flatnonzero(names == site)
                predicted[rows] = True
                if len(rows):
                    result[rows] = _probabilities(folder, site, table.take(pa.array(rows)))
            others = np.flatnonzero(~predicted)
            if len(others):
                part = table.take(pa.array(others))
                result[others] = np.mean([_probabilities(folder, s, part) for s in self.sites_], 0)
        return result

    def _changes(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a run."""
        seed = self.random_state
        if not isinstance(seed, int):
            seed = int(check_random_state(seed).randint(2**31))
        own = {"data": data, "rounds": self.rounds, "seed": seed}
        return {**DEFAULTS, **own, **(self.options or {})}

    def _objects(self) -> AbstractContextManager[None]:
        """The network where it is an object, by the name that the record has."""
        return objects_in_memory(named_objects(self.options or {})[1])

    def _unpacked(self, home: Path) -> Path:
        """The record of the training in a folder."""
        for name, content in self._record.items():
            (home / name).write_bytes(content)
        return home

    def _table(self, X: Any, sites: Any, y: Any = "no_validation") -> tuple[pa.Table, Array | None]:  # noqa: N803
        """The columns of X beside that of sites, and the site of each row; None: not given."""
        fitting = not isinstance(y, str)
        if hasattr(X, "__arrow_c_stream__"):
            validate_data(self, X, reset=fitting, skip_check_array=True)
            table = as_table(X)
        else:
            table = as_table(validate_data(self, X, reset=fitting, ensure_all_finite="allow-nan"))
        if y is None:
            raise ValueError(f"{REQUIRED}, but the target y is None")
        if fitting and len(table) < FEWEST:
            raise ValueError(f"n_samples={len(table)}: at least {FEWEST} rows are needed")
        if self.sites is None:
            return table, None if sites is None else _names(sites, table)
        column = _column(self.sites, table)
        return table.drop_columns([column]), _names(table.column(column).to_pylist(), table)


def _column(sites: str | int, table: pa.Table) -> str:
    """The name of the column that `sites` names or numbers."""
    if isinstance(sites, int) and 0 <= sites < table.num_columns:
        return str(table.column_names[sites])
    if sites not in table.column_names:
        remedy = nearest(str(sites), table.column_names)
        raise ValueError(f"no column {sites!r} in X (sites): {remedy}")
    return str(sites)


def _names(sites: Any, table: pa.Table) -> Array:
    """The site of each row, as a name that can stand in tables."""
    check_consistent_length(table, sites)
    every = [str(site) for site in sites]
    names = {site: site_name(site) for site in every}
    if len(set(names.values())) < len(names):
        raise ValueError("two sites have names that differ in blanks and signs alone (sites)")
    return np.array([names[site] for site in every])


def _site_tables(table: pa.Table, names: Array, codes: Array) -> dict[str, Any]:
    """The options of `data`: a table of each site, with its labels."""
    label = "label"
    while label in table.column_names:
        label += "_"
    digits = len(str(codes.max()))  # so that classes in the order of their names are as in y
    classes = [f"class {code:0{digits}d}" for code in codes]
    labeled = table.append_column(label, pa.array(classes))
    files = {}
    for site in np.unique(names):
        rows = np.flatnonzero(names == site)
        files[str(site)] = labeled.take(pa.array(rows))
    return {"files": files, "label": label, "keep": list(table.column_names)}


def _probabilities(folder: Path, site: str, table: pa.Table) -> Array:
    """The probabilities by the model of one site."""
    rows = folder / "rows.parquet"
    pyarrow.parquet.write_table(table, rows)
    return tables.probabilities(Predictor(folder, site), rows)


@contextmanager
def _value_errors() -> Iterator[None]:
    """Errors of scikit-learn's own kind where a user can mend something."""
    try:
        with keyword_errors():
            yield
    except UserError as error:
        raise ValueError(str(error)) from error

"""What `data` may be in memory: frames, arrays, datasets of torch and of Hugging Face."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import atoll
from atoll.core.errors import UserError
from atoll.data.own.memory import Images, is_data, read

TINY: dict[str, Any] = {
    "rounds": 2, "widths": [4], "epochs": 1, "engine": {"mode": "loop"}, "answer": False,
}  # fmt: skip
DRAW = np.random.default_rng(5)
X = {site: DRAW.normal(0, 1, (40, 2)) for site in ("basel", "bern")}
Y = {site: (x.sum(1) > 0).astype(np.int64) for site, x in X.items()}
PIXELS = {site: DRAW.integers(0, 256, (40, 8, 8), dtype=np.uint8) for site in X}


class Pairs(Dataset[Any]):
    """A dataset that computes its items."""

    def __init__(self, site: str) -> None:
        self.site = site

    def __len__(self) -> int:
        return len(X[self.site])

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(X[self.site][place]), int(Y[self.site][place])


class Label:
    names = ("no", "yes")


class Duck:
    """What a dataset of Hugging Face does; the package is not needed."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.column_names = table.column_names
        self.features = {name: object() for name in table.column_names} | {"sick": Label()}

    def with_format(self, name: str) -> "Duck":
        assert name == "arrow"
        return self

    def __getitem__(self, rows: slice) -> pa.Table:
        return self.table[rows.start or 0 :]


def frame(site: str) -> pa.Table:
    return pa.table({"x0": X[site][:, 0], "x1": X[site][:, 1], "sick": Y[site]})


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def expected(here: None) -> float:
    data = {site: (X[site], Y[site]) for site in X}
    return atoll.run("fedavg", out="arrays", data=data, **TINY).accuracy


def test_datasets_of_tensors_give_the_run_of_the_arrays(expected: float) -> None:
    tensors = {
        site: TensorDataset(torch.from_numpy(X[site]), torch.from_numpy(Y[site])) for site in X
    }
    run = atoll.run("fedavg", out="tensors", data=tensors, **TINY)
    assert run.accuracy == expected
    pairs: dict[str, Any] = {site: Pairs(site) for site in X}
    assert atoll.run("fedavg", out="pairs", data=pairs, **TINY).accuracy == expected
    by_tensor = {site: (torch.from_numpy(X[site]), torch.from_numpy(Y[site])) for site in X}
    assert atoll.run("fedavg", out="pair", data=by_tensor, **TINY).accuracy == expected
    assert run.predict(tensors["bern"], site="bern").shape == (40,)


def test_frames_and_datasets_of_hugging_face_with_names_of_classes(expected: float) -> None:
    data = {site: Duck(frame(site)) for site in X}
    run = atoll.run("fedavg", out="ducks", data=data, label="sick", **TINY)
    assert run.accuracy == expected
    assert run.runs[0].recipe["classes"] == ["no", "yes"]
    assert set(run.predict(data["bern"], site="bern")) <= {"no", "yes"}


def test_the_package_datasets(expected: float) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        x0=datasets.Value("float64"), x1=datasets.Value("float64"),
        sick=datasets.ClassLabel(names=["no", "yes"]),
    )  # fmt: skip
    data = {
        site: datasets.Dataset.from_dict(frame(site).to_pydict(), features=features).with_format(
            "torch"
        )
        for site in X
    }
    run = atoll.run("fedavg", out="hub", data=data, label="sick", **TINY)
    assert run.accuracy == expected


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_of_libraries(library: str, expected: float) -> None:
    module = pytest.importorskip(library)
    data = {site: module.DataFrame(frame(site).to_pydict()) for site in X}
    run = atoll.run("fedavg", out=library, data=data, label="sick", **TINY)
    assert run.accuracy == expected
    assert [block["column"] for block in run.runs[0].recipe["blocks"]] == ["x0", "x1"]


def test_a_shuffled_frame_of_pandas_has_no_column_of_row_numbers() -> None:
    pandas = pytest.importorskip("pandas")
    shuffled = pandas.DataFrame(frame("bern").to_pydict()).sample(frac=1, random_state=1)
    assert read(shuffled).column_names == ["x0", "x1", "sick"]


def test_images_as_arrays_and_tensors() -> None:
    options: dict[str, Any] = {**TINY, "model": {"name": "cnn"}}
    del options["widths"]
    arrays = {site: (PIXELS[site], Y[site]) for site in X}
    run = atoll.run("fedavg", out="arrays", data=arrays, **options)
    assert run.config["data"]["size"] == 8
    assert run.config["data"]["channels"] == 1
    tensors = {
        site: TensorDataset(
            torch.from_numpy(PIXELS[site])[:, None] / 255, torch.from_numpy(Y[site])
        )
        for site in X
    }
    other = atoll.run("fedavg", out="tensors", data=tensors, **options)
    assert other.accuracy == run.accuracy
    assert run.predict(PIXELS["bern"], site="bern").shape == (40,)
    assert (run.predict(PIXELS["bern"], "bern") == run.predict(tensors["bern"], "bern")).all()


def test_channels_come_last() -> None:
    colour = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    first = read((colour, np.array([0, 1])))
    last = read((colour.transpose(0, 2, 3, 1), np.array([0, 1])))
    assert isinstance(first, Images)
    assert first.x.shape == (2, 4, 4, 3)
    assert (first.x == last.x).all()
    assert first.channels == 3


def test_images_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        scan=datasets.Image(), label=datasets.ClassLabel(names=["no", "yes"])
    )
    data = {}
    for site in X:
        columns = {"scan": list(PIXELS[site]), "label": Y[site].tolist()}
        data[site] = datasets.Dataset.from_dict(columns, features=features)
    options = {key: value for key, value in TINY.items() if key != "widths"}
    run = atoll.run("fedavg", data=data, size=8, channels=1, model={"name": "cnn"}, **options)
    assert run.config["data"]["image"] == "scan"
    assert run.runs[0].recipe["classes"] == ["no", "yes"]


class Endless(IterableDataset[Any]):
    """A dataset without a length."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"a": Endless(), "b": Endless()}, "an? Endless has no length"),
        ({"a": TensorDataset(torch.zeros(3, 2))}, "are no pairs"),
        ({"a": (np.zeros((2, 4, 4)) + 7, np.zeros(2))}, "images of float64 from 7.0 to 7.0"),
        ({"a": (np.zeros(3), np.zeros(3))}, "arrays of the shapes"),
        ({"a": (PIXELS["bern"], Y["bern"]), "b": frame("bern")}, "the data of 'b' are no images"),
        ({"a": PIXELS["bern"], "b": PIXELS["bern"]}, "the images of 'a' have no labels"),
        ({"a b": frame("bern"), "a-b": frame("bern")}, "two sites have names"),
        ({"a": 3}, "the table of 'a' has the type int"),
    ],
)
def test_what_cannot_be_read(data: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        atoll.run("fedavg", data=data, **TINY)
    assert not Path("runs").exists()


def test_other_values_are_no_data() -> None:
    assert not is_data("wine")
    assert not is_data((1, 2))
    assert not is_data({"name": "wine"})

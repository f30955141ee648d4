"""Four made-up hospitals: sites of different size and case mix over two years.

A patient has a diagnosis, and a presentation of it: a mean for every measurement. Presentations
overlap, and one diagnosis has several of them, so that few patients do not suffice to learn it.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from atoll.core.options import AtLeastOne
from atoll.core.rng import Stream
from atoll.data.dataset import Dataset, Layout
from atoll.data.own.encoding import Block

__all__ = ["hospitals"]

Array = np.ndarray[Any, Any]

KIND: Final = "table"
LABEL: Final = "diagnosis"
YEARS: Final = ("year 1", "year 2")
DIAGNOSES: Final = ("reflux", "infarction", "myocarditis")
NEW: Final = "myocarditis"  # appears in year two


@dataclass(frozen=True)
class Measurement:
    """A column: how much patients of one presentation differ, and its last decimal."""

    name: str
    deviation: float
    decimals: int


@dataclass(frozen=True)
class Presentation:
    """How a diagnosis shows: the means of all measurements, in their order."""

    diagnosis: str
    share: float  # of the patients with this diagnosis
    means: tuple[float, ...]


@dataclass(frozen=True)
class Hospital:
    """A site: its size, its case mix, its own columns, and what shifts its measurements."""

    name: str
    size: float  # patients per year, as a share of the largest site's
    infarctions: float  # share of them among the patients of year one
    new: float  # share of the new diagnosis among the patients of year two
    own: tuple[str, ...]  # measurements beside those that every site has
    shifts: tuple[tuple[str, float], ...]  # what is added to a measurement


MEASUREMENTS: Final = (
    Measurement("age", 14, 0),  # years
    Measurement("systolic pressure", 20, 0),  # mmHg
    Measurement("heart rate", 15, 0),  # per minute
    Measurement("temperature", 0.5, 1),  # degrees Celsius
    Measurement("oxygen saturation", 2.2, 1),  # percent
    Measurement("log troponin", 0.5, 2),  # log10 of ng/l
    Measurement("log crp", 0.45, 2),  # log10 of mg/l
    Measurement("creatinine", 30, 0),  # micromol/l
    Measurement("haemoglobin", 1.5, 1),  # g/dl
    Measurement("glucose", 1.6, 1),  # mmol/l
    Measurement("st elevation", 0.8, 1),  # mm
    Measurement("ejection fraction", 8, 0),  # percent
)
PRESENTATIONS: Final = (
    # a healthy heart, and an old one with a chronic kidney disease, which raises troponin too
    Presentation("reflux", 0.6, (45, 128, 76, 36.7, 97.5, 0.6, 0.4, 80, 14.0, 5.4, 0.1, 62)),
    Presentation("reflux", 0.4, (74, 146, 78, 36.6, 95.5, 1.6, 0.8, 190, 11.0, 6.5, 0.2, 52)),
    # early, before troponin rises, and late
    Presentation("infarction", 0.45, (61, 142, 92, 36.7, 96.0, 1.2, 0.5, 88, 14.3, 7.5, 1.8, 55)),
    Presentation("infarction", 0.55, (71, 118, 98, 37.1, 93.5, 2.6, 1.2, 105, 13.3, 8.3, 1.4, 44)),
    # young with fever, and older with a weak heart
    Presentation("myocarditis", 0.7, (33, 120, 98, 37.9, 96.5, 2.4, 1.6, 82, 14.2, 5.5, 0.8, 50)),
    Presentation("myocarditis", 0.3, (62, 112, 102, 37.4, 92.5, 2.0, 1.5, 115, 12.8, 6.4, 0.4, 35)),
)
HOSPITALS: Final = (
    Hospital("basel", 1, 0.5, 0.25, ("st elevation", "ejection fraction"), ()),
    Hospital("bern", 2 / 3, 0.4, 0.25, ("st elevation",), (("log crp", -0.1),)),
    # older patients, and another assay of troponin
    Hospital("chur", 1 / 3, 0.4, 0.2, ("ejection fraction",), (("age", 6), ("log troponin", 0.3))),
    # young patients at 1,560 metres
    Hospital("davos", 1 / 8, 0.45, 0.25, (), (("age", -8), ("oxygen saturation", -3))),
)


def hospitals(patients: AtLeastOne = 3_200, seed: int = 0) -> Dataset:
    """Four made-up hospitals over two years; a third diagnosis appears in year two.

    `patients` is the number of patients of basel in a year; the other sites are smaller.
    """
    xs, ys, sites, years = [], [], [], []
    for number, site in enumerate(HOSPITALS):
        rows = max(1, round(patients * site.size))
        for year in range(len(YEARS)):
            stream = Stream.of(seed, "hospitals", site.name, year)
            x, y = _patients(site, year, rows, stream.numpy())
            xs.append(x)
            ys.append(y)
            sites.append(np.full(rows, number))
            years.append(np.full(rows, year))
    return Dataset(
        "hospitals",
        KIND,
        np.concatenate(xs).astype(np.float32),
        np.concatenate(ys),
        tuple(measurement.name for measurement in MEASUREMENTS),
        DIAGNOSES,
        f"made up by atoll, seed {seed}",
        group=np.concatenate(sites),
        groups=tuple(site.name for site in HOSPITALS),
        layout=_layout(np.concatenate(years)),
    )


def _patients(
    site: Hospital, year: int, rows: int, draws: np.random.Generator
) -> tuple[Array, Array]:
    """Measurements and diagnoses of the patients of one site in one year."""
    chances = [_case_mix(site, year)[one.diagnosis] * one.share for one in PRESENTATIONS]
    chosen = draws.choice(len(PRESENTATIONS), size=rows, p=chances)
    means = np.array([one.means for one in PRESENTATIONS])[chosen]
    shifts = dict(site.shifts)
    columns = []
    for place, measurement in enumerate(MEASUREMENTS):
        shifted = means[:, place] + shifts.get(measurement.name, 0.0)
        values = shifted + measurement.deviation * draws.normal(size=rows)
        columns.append(np.round(values, measurement.decimals))
    measured = _held(site)
    x = np.stack(columns, axis=1)
    x[:, ~measured] = 0  # not measured here; the layout says so
    diagnoses = [DIAGNOSES.index(presentation.diagnosis) for presentation in PRESENTATIONS]
    return x, np.array(diagnoses, dtype=np.int64)[chosen]


def _case_mix(site: Hospital, year: int) -> dict[str, float]:
    """The share of each diagnosis; the new one takes its share from both others."""
    new = site.new if year else 0.0
    shares = {"reflux": 1 - site.infarctions, "infarction": site.infarctions}
    return {name: share * (1 - new) for name, share in shares.items()} | {NEW: new}


def _held(site: Hospital) -> Array:
    """Which measurements a site has."""
    only_some = {name for other in HOSPITALS for name in other.own}
    measured = [one.name in site.own or one.name not in only_some for one in MEASUREMENTS]
    return np.array(measured)


def _layout(years: Array) -> Layout:
    """Who measures what, and when; a file of patients is read column by column."""
    measured = np.stack([_held(site) for site in HOSPITALS])
    numbers = np.ones(len(MEASUREMENTS), dtype=bool)
    blocks = [
        asdict(Block(measurement.name, "number", (), False, start))
        for start, measurement in enumerate(MEASUREMENTS)
    ]
    recipe = {
        "label": LABEL,
        "classes": list(DIAGNOSES),
        "missing": ["", "NA"],
        "delimiter": "",
        "encoding": "",
        "blocks": [{**block, "levels": list(block["levels"])} for block in blocks],
    }
    return Layout(measured, numbers, years, YEARS, recipe)

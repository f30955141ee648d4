"""A yardstick for FedSeIT's tables: word counts and logistic regression, every task by itself.

The same tasks, training, validation and test rows as `atoll reproduce fedseit`; nothing is shared
and nothing is forgotten. Counts are weighed by TF-IDF of the task's training rows, and the strength
of the penalty is chosen by validation rows. A seed there says who gets which task when, so here it
changes nothing.
"""

import argparse
from typing import Any

import numpy as np
from scipy.sparse import coo_matrix, csr_matrix
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression

from atoll.core.rows import Rows
from atoll.reproduce.fedseit import DATA, Setting
from atoll.runs.config import resolve
from atoll.runs.parts import parts

STRENGTHS = (1.0, 10.0, 100.0, 1000.0)


def counts(rows: Rows, words: int) -> csr_matrix:
    """How often each word occurs in each text; the first word is padding."""
    x = rows.x.cpu().numpy()
    row, place = np.nonzero(x)
    ones = np.ones(len(row))
    return coo_matrix((ones, (row, x[row, place])), shape=(len(x), words)).tocsr()


def accuracy(site: Any, task: int, words: int) -> float:
    """On the whole test set of a task, by the strength that does best on validation rows."""
    split = [site.train(task), site.valid(task), site.test(task)]
    weigh = TfidfTransformer(sublinear_tf=True).fit(counts(split[0], words))
    (x, y), (valid, seen), (test, true) = (
        (weigh.transform(counts(rows, words)), rows.y.cpu().numpy()) for rows in split
    )
    models = [LogisticRegression(C=c, max_iter=2000).fit(x, y) for c in STRENGTHS]
    best = max(models, key=lambda m: float((m.predict(valid) == seen).mean()))
    return float((best.predict(test) == true).mean())


def main() -> None:
    """Every task of every client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=",".join(DATA))
    asked = parser.parse_args()
    for row in asked.data.split(","):
        made = parts(resolve(Setting(row, "Local", "1.0").values(), row), {})
        words, stages = len(made.dataset.words), made.scenario.stages
        sites = [made.site(id) for id in made.scenario.clients]
        each = [accuracy(site, task, words) for site in sites for task in range(stages)]
        lowest, highest = min(each), max(each)
        print(f"{row}: {np.mean(each):.1%}, tasks from {lowest:.1%} to {highest:.1%}", flush=True)


if __name__ == "__main__":
    main()

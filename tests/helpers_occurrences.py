"""Token occurrences with a planted share of token identity: documents of unequal length with effects of their
own, neighbours that resemble each other, token frequencies like those of language, topics.

In: the share of variance that types carry. Out: values, types and groups of rows. Effects of types are fixed:
the vocabulary is no sample.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.signal import lfilter

TYPES = 300
REMEMBERED = 0.9  # correlation of neighbours in the context's part


@dataclass(frozen=True)
class Occurring:
    values: np.ndarray
    type: np.ndarray
    group: np.ndarray
    n_groups: int


@dataclass(frozen=True)
class Plan:
    """`document` and `neighbours`: shares of what types leave, carried by the document and by slowly drifting
    context; the rest is independent noise. `topics`: 0 for equal documents; at 20 most types stand in few.
    """

    share: float
    n_groups: int = 40
    length: float = 60.0
    spread: float = 0.8  # of log lengths
    document: float = 0.15
    neighbours: float = 0.15
    topics: float = 0.5
    skewed: bool = False


def occurring(plan: Plan, seed: int, *, realised: bool = False) -> Occurring:
    """One data set. The share is that of the population of documents, or with `realised` that of these very
    occurrences (of types in two documents or more).
    """
    rng = np.random.default_rng((seed, 7))
    lengths = np.maximum(8, rng.lognormal(0, plan.spread, plan.n_groups) * plan.length).astype(int)
    group = np.repeat(np.arange(plan.n_groups), lengths)
    type_of = np.concatenate([rng.choice(TYPES, n, p=_topic(rng, plan.topics)) for n in lengths])
    effect = effects(plan.topics, plan.skewed)
    if realised:
        effect = _standardised(effect, _covered_counts(type_of, group))
    documents = rng.standard_normal(plan.n_groups)[group]
    drift = np.concatenate([_drifting(rng, n) for n in lengths])
    noise = rng.gamma(1.0, 1.0, group.size) - 1.0 if plan.skewed else rng.standard_normal(group.size)
    parts = (plan.document, plan.neighbours, 1.0 - plan.document - plan.neighbours)
    rest = sum(np.sqrt(part) * one for part, one in zip(parts, (documents, drift, noise), strict=True))
    values = 2.0 + np.sqrt(plan.share) * effect[type_of] + np.sqrt(1 - plan.share) * rest
    return Occurring(values, type_of, group, plan.n_groups)


@cache
def effects(topics: float, skewed: bool) -> np.ndarray:
    """Effects of types, of mean 0 and variance 1 over the occurrences of a very long corpus."""
    rng = np.random.default_rng(5)
    frequency = np.mean([_topic(rng, topics) for _ in range(20_000)], axis=0)
    effect = rng.standard_normal(TYPES)
    return _standardised(np.exp(effect) if skewed else effect, frequency)


def _topic(rng: np.random.Generator, topics: float) -> np.ndarray:
    """Token frequencies of one document."""
    weight = 1.0 / np.arange(1, TYPES + 1)
    if topics:
        weight = weight * rng.gamma(1.0 / topics, topics, TYPES)
    return weight / weight.sum()


def _drifting(rng: np.random.Generator, n: int) -> np.ndarray:
    steps = rng.standard_normal(n) * np.sqrt(1 - REMEMBERED**2)
    steps[0] /= np.sqrt(1 - REMEMBERED**2)
    return np.asarray(lfilter([1.0], [1.0, -REMEMBERED], steps))


def _covered_counts(type_of: np.ndarray, group: np.ndarray) -> np.ndarray:
    pairs = np.unique(np.stack([type_of, group]), axis=1)
    covered = np.bincount(pairs[0], minlength=TYPES) >= 2
    return np.bincount(type_of, minlength=TYPES) * covered


def _standardised(effect: np.ndarray, weight: np.ndarray) -> np.ndarray:
    centred = effect - np.average(effect, weights=weight)
    return centred / np.sqrt(np.average(centred**2, weights=weight))

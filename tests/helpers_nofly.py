"""Two corpora with planted token needs, as sums per type and group, or row by row.

In: sizes, the correlation of the types' true needs, the reliability of their means. Out: data whose truth
over the types is exact (types are a fixed population): both true variances are 1, the true correlation is
`r`. Noise has three sources, as in text: a document's own level, a type's own level in a document, and the
occurrence. Documents are unequal (log-normal), types follow Zipf's law and clump in documents.
"""

from dataclasses import dataclass

import numpy as np
from nearline.analyze.token_means import TokenSums

DOCUMENT_LEVEL = 0.2  # of a document, in standard deviations of an occurrence
TYPE_IN_DOCUMENT = 0.3  # share of the noise of means that is a type's own level in a document


@dataclass(frozen=True)
class Design:
    n_types: int = 300
    n_groups: int = 40
    occurrences: float = 40.0  # of a type, on average
    spread: float = 0.6  # of the logarithm of a document's length
    clump: float = 0.5  # variance of a type's rate over documents


def planted(
    seed: int,
    r: float,
    reliability: tuple[float, float],
    design: Design | None = None,
    layers: int = 1,
) -> list[tuple[TokenSums, TokenSums]]:
    """Both corpora, for each of several layers: the same documents and occurrences, other needs. Reliability
    0 stands for noise alone.
    """
    design = design or Design()
    rng = np.random.default_rng(seed)
    counts = [occurrences(rng, design) for _ in reliability]
    found = []
    for _ in range(layers):
        truth = correlated(rng, design.n_types, r)
        a, b = (
            noisy(rng, count, values if share > 0 else 0 * values, share)
            for count, values, share in zip(counts, truth, reliability, strict=True)
        )
        found.append((a, b))
    return found


def correlated(rng: np.random.Generator, n_types: int, r: float) -> tuple[np.ndarray, np.ndarray]:
    """Two traits of the types with variance 1 and correlation r, exactly."""
    x, y = rng.standard_normal((2, n_types))
    x = standardised(x)
    y = standardised(y - y.mean() - x * (x @ (y - y.mean())) / (x @ x))
    return x, r * x + np.sqrt(1 - r * r) * y


def standardised(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / values.std(ddof=1)


def occurrences(rng: np.random.Generator, design: Design) -> np.ndarray:
    """(type, group) counts; every type has 10 occurrences or more, in two groups or more."""
    size = rng.lognormal(0.0, design.spread, design.n_groups)
    size /= size.sum()
    rate = 1.0 / np.arange(1, design.n_types + 1)
    rate *= design.occurrences / rate.mean()
    shape = (design.n_types, design.n_groups)
    expected = rate[:, None] * size * rng.gamma(1 / design.clump, design.clump, shape)
    count = rng.poisson(expected)
    while (few := ((count > 0).sum(axis=1) < 2) | (count.sum(axis=1) < 10)).any():
        count[few] += rng.poisson(expected[few] + 3 * size)
    return count


def noisy(rng: np.random.Generator, count: np.ndarray, truth: np.ndarray, reliability: float) -> TokenSums:
    """Sums of needs whose means over types have this reliability, given the counts."""
    n_types, n_groups = count.shape
    total = count.sum(axis=1)
    noise = (1 - reliability) / reliability if reliability > 0 else 1.0
    occurrence = np.sqrt(noise * (1 - TYPE_IN_DOCUMENT) / (1 / total).mean())
    own = np.sqrt(noise * TYPE_IN_DOCUMENT / ((count**2).sum(axis=1) / total**2).mean())
    kind, group = np.nonzero(count)
    n = count[kind, group].astype(np.float64)
    level = DOCUMENT_LEVEL * occurrence * rng.standard_normal(n_groups)
    mean = truth[kind] + level[group] + own * rng.standard_normal(kind.size)
    sums = n * mean + occurrence * np.sqrt(n) * rng.standard_normal(kind.size)
    return TokenSums(kind.astype(np.int32), group.astype(np.int32), n, sums, n_types, n_groups)


def without_group(sums: TokenSums, group: int) -> TokenSums:
    """The sums without one group; types keep their numbers, and may be left without an occurrence."""
    kept = sums.group != group
    renumbered = np.where(sums.group > group, sums.group - 1, sums.group)
    return TokenSums(
        sums.type[kept],
        renumbered[kept],
        sums.count[kept],
        sums.total[kept],
        sums.n_types,
        sums.n_groups - 1,
    )


def of_types(sums: TokenSums, types: np.ndarray) -> TokenSums:
    """The sums of some types, renumbered."""
    place = np.full(sums.n_types, -1)
    place[types] = np.arange(types.size)
    kept = place[sums.type] >= 0
    return TokenSums(
        place[sums.type[kept]].astype(np.int32),
        sums.group[kept],
        sums.count[kept],
        sums.total[kept],
        int(types.size),
        sums.n_groups,
    )


@dataclass(frozen=True)
class Rows:
    """A corpus row by row, documents one after the other."""

    token: np.ndarray
    group: np.ndarray
    need: np.ndarray


def rows(rng: np.random.Generator, count: np.ndarray, truth: np.ndarray, reliability: float) -> Rows:
    """One row for each occurrence; documents are groups. The noise is that of occurrences alone."""
    group = np.repeat(np.arange(count.shape[1]), count.sum(axis=0))
    token = np.concatenate([np.repeat(np.arange(count.shape[0]), column) for column in count.T])
    noise = np.sqrt((1 - reliability) / reliability / (1 / count.sum(axis=1)).mean())
    return Rows(token, group, truth[token] + noise * rng.standard_normal(token.size))

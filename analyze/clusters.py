"""Do clusters of MLP inputs tell who needs the nonlinearity? A fitted study in, table `clusters` out.

Per layer: principal components and k-means of x on the fit rows of `fit_on` (`partition`); the score of a
cluster is the mean need of its fit and gate rows there (needs of fit rows are out of fold, so both count).
Every store's held-out rows are scored by their cluster; the AUC of the score against "among the easier half
of the store" has intervals by group, simultaneous over layers. A cluster is clean where its share of easy
tokens lies above 0.9 or below 0.1 with its whole interval, which takes some forty documents. Workers find
clusters; needs are read here. Cost: see `partition`, and two bytes a row of each layer in flight.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float, Int, Int16, Int64

from .auc import auc
from .compute import Session
from .evidence import Evidence, StoreRows
from .influences import holm, intervals, p_values, verdict_above
from .intervals import Estimates, critical_value, ratios, share_bounds, stack
from .labels import easy_cut
from .noise_floor import above_noise
from .partition import assign, fit_partition, working_bytes
from .population import FIT, GATE
from .results import to_table

CHANCE: Final = 0.5
CLEAN: Final = 0.9


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What finding the clusters of any layer takes."""

    stores: Mapping[str, StoreRows]
    fit_on: str
    rows: Mapping[str, Int64[np.ndarray, "row"]]  # of each store: those whose cluster is wanted
    n_clusters: int
    n_components: int
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The clusters of one layer: of each store's wanted rows."""

    n_clusters: int
    n_components: int
    explained: float
    clusters: Mapping[str, Int16[np.ndarray, "row"]]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """One store and need at one layer."""

    facts: Mapping[str, Any]
    area: Estimates


def run(evidence: Evidence, session: Session) -> list[str]:
    """Write the table `clusters`; returns its path inside the study."""
    settings, fitted = evidence.settings, evidence.fitted
    body = np.flatnonzero(fitted.population.body)
    rows = {name: body if name == fitted.name else evidence.test_rows(name) for name in evidence.stores}
    work = Work(evidence.stores, fitted.name, rows, settings.clusters, settings.components, settings.seed)
    scored = session.map(
        find_clusters,
        work,
        list(evidence.layers),
        lambda layer, found: _score_layer(evidence, rows, layer, found),
        "clusters",
        workers=max(1, settings.memory_limit_bytes // working_bytes(fitted.reader, settings.components)),
    )
    table = to_table("clusters", _rows(evidence, dict(zip(evidence.layers, scored, strict=True))))
    return [evidence.study.write_table("clusters", above_noise(table, evidence.study, evidence.fit_on))]


def find_clusters(work: Work, layer: int) -> Found:
    """The clusters of a layer, learned on fit rows, and where every wanted row falls."""
    fitted = work.stores[work.fit_on]
    partition = fit_partition(
        fitted.source(layer), fitted.population.rows(FIT), work.n_clusters, work.n_components, work.seed
    )
    clusters = {
        name: assign(store.source(layer), work.rows[name], partition) for name, store in work.stores.items()
    }
    n_clusters, n_components = partition.centres.shape
    return Found(n_clusters, n_components, partition.components.explained, clusters)


def _score_layer(
    evidence: Evidence, rows: Mapping[str, np.ndarray], layer: int, found: Found
) -> dict[tuple[str, str], Scored]:
    """By store and need."""
    fitted, settings = evidence.fitted, evidence.settings
    needs = {name: evidence.need_columns(layer, name) for name in evidence.stores}
    learned = np.isin(fitted.population.split[rows[fitted.name]], (FIT, GATE))
    scored = {}
    for need in evidence.needs:
        means = cluster_means(
            needs[fitted.name][need][rows[fitted.name][learned]],
            found.clusters[fitted.name][learned],
            found.n_clusters,
        )
        for name, store in evidence.stores.items():
            values, tested = needs[name][need], evidence.test_rows(name)
            cluster = found.clusters[name][np.searchsorted(rows[name], tested)]
            known = np.isfinite(values[tested])
            tested, cluster = tested[known], cluster[known]
            easy = values[tested] <= easy_cut(values[store.population.rows(GATE)], settings.label)
            group = store.population.group[tested]
            area = auc(-means[cluster], easy, group)
            facts = {
                "n_clusters": found.n_clusters,
                "n_components": found.n_components,
                "n_tokens": int(tested.size),
                "n_groups": area.n_groups,
                "clean_clusters": clean_clusters(easy, cluster, group, found.n_clusters),
                "variance_explained": found.explained,
            }
            scored[name, need] = Scored(facts, area)
    return scored


def cluster_means(
    need: Float[np.ndarray, "token"], cluster: Int[np.ndarray, "token"], n_clusters: int
) -> Float[np.ndarray, "cluster"]:
    """Mean need of each cluster; the mean of all where a cluster has none."""
    known = np.isfinite(need)
    values, cluster = need[known].astype(np.float64), cluster[known]
    counts = np.bincount(cluster, minlength=n_clusters)
    sums = np.bincount(cluster, values, n_clusters)
    mean = values.mean() if values.size else float("nan")
    return np.where(counts > 0, sums / np.maximum(counts, 1), mean)


def clean_clusters(
    easy: Bool[np.ndarray, "token"],
    cluster: Int[np.ndarray, "token"],
    group: Int[np.ndarray, "token"],
    n_clusters: int,
) -> int:
    """How many clusters hold nearly only easy or nearly only hard tokens, each by its own interval: that of
    a family would find fewer, and "no cluster is clean" is the finding to be wary of.
    """
    groups, index = np.unique(group, return_inverse=True)
    cell, shape = index * n_clusters + cluster, (groups.size, n_clusters)
    counts = np.bincount(cell, minlength=groups.size * n_clusters).reshape(shape)
    found = ratios(np.bincount(cell, easy, groups.size * n_clusters).reshape(shape), counts)
    low, high = share_bounds(found, critical_value(found))
    return int(((low > CLEAN) | (high < 1.0 - CLEAN)).sum())


def _rows(
    evidence: Evidence, scored: Mapping[int, Mapping[tuple[str, str], Scored]]
) -> Iterator[dict[str, Any]]:
    for name in evidence.stores:
        bounds = {
            need: _family([scored[layer][name, need].area for layer in evidence.layers], evidence)
            for need in evidence.needs
        }
        for place, layer in enumerate(evidence.layers):
            for need in evidence.needs:
                one = scored[layer][name, need]
                yield {
                    "store": name,
                    "fit_on": evidence.fit_on,
                    "layer": layer,
                    "need": need,
                    **one.facts,
                    **{column: float(values[place]) for column, values in bounds[need].items()},
                    "verdict": verdict_above(
                        float(bounds[need]["auc_sim_lo"][place]),
                        float(bounds[need]["auc_sim_hi"][place]),
                        CHANCE,
                        one.area.n_groups,
                        margin=evidence.settings.margin,
                    ),
                }


def _family(areas: list[Estimates], evidence: Evidence) -> dict[str, np.ndarray]:
    """Columns of one store and need over layers."""
    family = stack(areas)
    found = intervals(family, evidence.settings.seed, "logit")
    return {
        "auc": family.estimate,
        **{f"auc_{name}": values for name, values in found.items()},
        "p_holm": holm(p_values(family, CHANCE, one_sided=True)),
    }

"""Clusters of MLP inputs are those of scikit-learn on the rows in memory; planted clusters are found with the
area that they have, and what is not there is not found.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers_store import make_store, normalise, synthetic, write_all
from nearline.analyze import partition as partition_module
from nearline.analyze.analyze_settings import AnalyzeSettings
from nearline.analyze.clusters import clean_clusters, cluster_means, run
from nearline.analyze.compute import session
from nearline.analyze.evidence import Evidence, StoreRows
from nearline.analyze.fit import fit
from nearline.analyze.gathering import gather
from nearline.analyze.labels import easy_cut
from nearline.analyze.partition import assign, fit_components, fit_partition, inputs
from nearline.analyze.population import FIT, GATE, fold_of_documents, load_population
from nearline.store import Reader, Study
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

D = 8
N_CLUSTERS = 5
# x is recomputed in float32 and its scatter summed from float32 products.
SAME_PCA = 2e-4


def rows_of(path: Path) -> StoreRows:
    reader = Reader.open(path)
    return StoreRows("a", reader, load_population(reader, fold_of_documents(reader, 5, 0), "a"))


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> StoreRows:
    return rows_of(make_store(tmp_path_factory.mktemp("noise") / "a", n_tokens=3000, d=D, seed=3))


def in_memory(store: StoreRows, layer: int, rows: np.ndarray) -> np.ndarray:
    source = store.source(layer)
    return np.concatenate([source.block(block)[1] for block in range(store.reader.n_blocks)])[rows]


def test_components_are_those_of_scikit_learn(noise: StoreRows) -> None:
    fitted = noise.population.rows(FIT)
    x = in_memory(noise, 1, fitted)
    found = fit_components(noise.source(1), fitted, 3)
    scaler = StandardScaler().fit(x)
    theirs = PCA(3, svd_solver="full").fit(scaler.transform(x))
    assert found.explained == pytest.approx(theirs.explained_variance_ratio_.sum(), rel=SAME_PCA)
    ours, wanted = found.of(x), theirs.transform(scaler.transform(x))
    signs = np.sign((ours * wanted).sum(axis=0))
    np.testing.assert_allclose(ours * signs, wanted, atol=SAME_PCA * np.abs(wanted).max())


def test_features_that_do_not_vary_are_no_component(tmp_path: Path) -> None:
    data = synthetic(n_tokens=2000, d=D, n_layers=1)
    data.affine["norm_weight"][:, 2] = 0.0
    write_all(tmp_path / "a", data)
    store = rows_of(tmp_path / "a")
    found = fit_components(store.source(0), store.population.rows(FIT), D)
    assert not found.projection[2].any()
    assert found.explained == pytest.approx(1.0)


def test_inputs_that_are_all_alike_are_one_cluster(tmp_path: Path) -> None:
    data = synthetic(n_tokens=2000, d=D, n_layers=1)
    data.affine["norm_weight"][:] = 0.0
    write_all(tmp_path / "a", data)
    store = rows_of(tmp_path / "a")
    found = fit_partition(store.source(0), store.population.rows(FIT), N_CLUSTERS, 3, seed=0)
    assert len(found.centres) == 1
    assert np.isnan(found.components.explained)


def test_clusters_are_those_of_scikit_learn(noise: StoreRows) -> None:
    fitted = noise.population.rows(FIT)
    found = fit_partition(noise.source(0), fitted, N_CLUSTERS, 3, seed=0)
    z = found.components.of(in_memory(noise, 0, fitted))
    state = int(np.random.default_rng((0, 0)).integers(2**31))
    theirs = KMeans(N_CLUSTERS, random_state=state).fit(z)
    np.testing.assert_allclose(found.centres, theirs.cluster_centers_, atol=1e-4)
    every = np.flatnonzero(noise.population.body)
    clusters = assign(noise.source(0), every, found)
    wanted = theirs.predict(found.components.of(in_memory(noise, 0, every)))
    # A row between two centres may fall to either.
    assert np.mean(clusters == wanted) > 0.998


def test_only_blocks_with_wanted_rows_are_read(noise: StoreRows) -> None:
    start, stop = noise.reader.block_range(3)
    wanted = np.array([start + 5, stop - 1])
    (found,) = inputs(noise.source(0), wanted)
    np.testing.assert_array_equal(found, in_memory(noise, 0, wanted))
    assert list(inputs(noise.source(0), wanted[:0])) == []
    assert assign(noise.source(0), wanted[:0], fit_partition(noise.source(0), wanted, 2, 2, 0)).size == 0


def test_a_large_store_is_clustered_on_a_sample(noise: StoreRows, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = noise.population.rows(FIT)
    monkeypatch.setattr(partition_module, "SAMPLE_ROWS", 300)
    one, same, other = (
        fit_partition(noise.source(0), fitted, N_CLUSTERS, 3, seed).centres for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    few = fit_partition(noise.source(0), fitted[:4], N_CLUSTERS, 3, seed=0)
    assert few.centres.shape == (4, 3)


def clustered(folder: Path, name: str, seed: int, n_tokens: int) -> tuple[Path, np.ndarray]:
    """A store of two layers whose inputs lie in five far clusters; the cluster of each row."""
    data = synthetic(n_tokens=n_tokens, d=D, seed=seed, bos=False, sequence_length=16)
    rng = np.random.default_rng(seed)
    cluster = rng.integers(0, N_CLUSTERS, n_tokens)
    centres = 6.0 * np.random.default_rng(9).standard_normal((N_CLUSTERS, D))
    residual = centres[cluster] + rng.standard_normal((2, n_tokens, D))
    output = np.stack([normalise(layer, "layernorm", data.affine, i) for i, layer in enumerate(residual)])
    sites = data.sites | {"residual": residual.astype(np.float32), "mlp_output": output.astype(np.float32)}
    write_all(folder / name, dataclasses.replace(data, sites=sites, stored=sites))
    return folder / name, cluster


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("clusters")
    made = {name: clustered(folder, name, seed, n) for name, seed, n in (("a", 1, 4000), ("b", 2, 4500))}
    path = fit(folder / "study", {name: store for name, (store, _) in made.items()}).path
    return path, {name: cluster for name, (_, cluster) in made.items()}


def planted(
    study: tuple[Path, dict[str, np.ndarray]],
    value: Callable[[np.ndarray, np.random.Generator], np.ndarray],
    **settings: object,
) -> Evidence:
    """A need `planted` in every store and layer, out of a row's cluster."""
    folder, clusters = study
    evidence = gather(
        Study.open(folder),
        AnalyzeSettings(**{"need": ("planted",), "clusters": N_CLUSTERS, "components": 3, **settings}),  # type: ignore[arg-type]
    )
    for store, cluster in clusters.items():
        for layer in evidence.layers:
            values = value(cluster, np.random.default_rng((layer, cluster.size))).astype(np.float32)
            evidence.study.write_need(layer, store, pa.table({"planted": values}), step="planted")
    return evidence


def analysed(evidence: Evidence) -> list[dict]:
    with session(evidence.settings) as workers:
        assert run(evidence, workers) == ["tables/clusters.parquet"]
    return evidence.study.table("clusters").to_pylist()


def test_planted_clusters_are_found(study: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Cluster 0 is always hard, cluster 1 always easy, the rest goes with noise; as a plain loop has it."""
    level = np.array([9.0, -9.0, 0.0, 0.4, 0.8])
    evidence = planted(study, lambda cluster, rng: level[cluster] + rng.standard_normal(cluster.size))
    rows = analysed(evidence)
    assert [(row["store"], row["layer"]) for row in rows] == list(itertools.product("ab", (0, 1)))
    for row in rows:
        population = evidence.stores[row["store"]].population
        need = evidence.need_columns(row["layer"], row["store"])["planted"]
        tested, cluster = evidence.test_rows(row["store"]), study[1][row["store"]]
        easy = need[tested] <= np.median(need[population.rows(GATE)])
        assert row["auc"] == pytest.approx(roc_auc_score(easy, -level[cluster[tested]]), abs=1e-9)
        assert (row["n_clusters"], row["n_components"]) == (N_CLUSTERS, 3)
        assert row["clean_clusters"] == 2
        assert row["n_tokens"] == tested.size
        assert row["auc_sim_lo"] < row["auc_lo"] < row["auc"] < row["auc_hi"] < row["auc_sim_hi"]
        assert row["verdict"] == "supported"
        assert row["p_holm"] < 1e-6


def test_needs_that_clusters_do_not_know_are_not_found(study: tuple[Path, dict[str, np.ndarray]]) -> None:
    rows = analysed(planted(study, lambda cluster, rng: rng.standard_normal(cluster.size)))
    assert not any(row["verdict"] == "supported" or row["clean_clusters"] for row in rows)
    assert all(abs(row["auc"] - 0.5) < 0.05 for row in rows)


def test_the_score_is_not_learned_where_it_is_tested(study: tuple[Path, dict[str, np.ndarray]]) -> None:
    """A need whose clusters are turned round in the test rows: a score that saw them would follow."""
    split = {
        name: store.population.split for name, store in planted(study, lambda c, _: c * 0.0).stores.items()
    }

    def turned(cluster: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        sign = np.where(np.isin(split["a" if cluster.size == 4000 else "b"], (FIT, GATE)), 1.0, -1.0)
        return sign * (cluster - 2.0) + 0.5 * rng.standard_normal(cluster.size)

    assert all(row["auc"] < 0.2 for row in analysed(planted(study, turned)))


def test_the_same_bytes_with_one_worker_and_with_two(study: tuple[Path, dict[str, np.ndarray]]) -> None:
    tables = []
    for workers in (1, 2):
        evidence = planted(
            study, lambda cluster, rng: cluster + rng.standard_normal(cluster.size), workers=workers
        )
        analysed(evidence)
        tables.append(evidence.study.table_path("clusters").read_bytes())
    assert tables[0] == tables[1]


def test_rows_without_a_need_do_not_count(study: tuple[Path, dict[str, np.ndarray]]) -> None:
    def gaps(cluster: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.where(rng.random(cluster.size) < 0.3, np.nan, cluster + rng.standard_normal(cluster.size))

    evidence = planted(study, gaps)
    for row in analysed(evidence):
        need = evidence.need_columns(row["layer"], row["store"])["planted"]
        assert row["n_tokens"] == np.isfinite(need[evidence.test_rows(row["store"])]).sum()
        assert row["auc"] > 0.8
    none = analysed(planted(study, lambda cluster, _: np.full(cluster.size, np.nan)))
    assert all(np.isnan(row["auc"]) and row["verdict"] == "too few documents" for row in none)


def test_documents_without_a_need_may_be_others_at_each_layer(
    study: tuple[Path, dict[str, np.ndarray]],
) -> None:
    evidence = planted(study, lambda cluster, rng: cluster + rng.standard_normal(cluster.size))
    missing = {
        (name, layer): np.isin(store.population.group % 7, (layer, layer + 1, 5 * layer))
        for name, store in evidence.stores.items()
        for layer in evidence.layers
    }
    for (name, layer), gone in missing.items():
        need = evidence.need_columns(layer, name)["planted"]
        table = pa.table({"planted": np.where(gone, np.float32("nan"), need)})
        evidence.study.write_need(layer, name, table, step="planted")
    for row in analysed(evidence):
        name, layer = row["store"], row["layer"]
        tested = evidence.test_rows(name)
        tested = tested[~missing[name, layer][tested]]
        assert row["n_tokens"] == tested.size
        assert row["n_groups"] == evidence.stores[name].population.n_groups(tested)
        assert 0.7 < row["auc_sim_lo"] < row["auc_lo"] < row["auc"] < row["auc_hi"] < row["auc_sim_hi"]
    assert len({row["n_groups"] for row in evidence.study.table("clusters").to_pylist()[:2]}) == 2


def test_a_cluster_without_needs_has_the_mean_of_all() -> None:
    need = np.array([1.0, 3.0, np.nan, 5.0])
    np.testing.assert_array_equal(cluster_means(need, np.array([0, 0, 1, 2]), 4), (2.0, 3.0, 5.0, 3.0))
    assert np.isnan(cluster_means(need[2:3], np.array([0]), 2)).all()


def test_a_cluster_in_few_documents_is_not_clean() -> None:
    """Cluster 0 is all easy in two documents, cluster 1 in forty, cluster 2 has no token."""
    group = np.repeat(np.arange(40), 20)
    cluster = np.where((group < 2) & (np.arange(800) % 2 == 0), 0, 1)
    assert clean_clusters(np.ones(800, bool), cluster, group, 3) == 1
    assert clean_clusters(np.zeros(800, bool), cluster, group, 3) == 1
    assert clean_clusters(np.arange(800) % 20 < 10, cluster, group, 3) == 0


def test_the_cut_is_a_quantile_or_the_papers() -> None:
    need = np.append(np.arange(1.0, 101.0, dtype=np.float32), np.float32("nan"))
    assert easy_cut(need, 0.5) == 50.5
    assert easy_cut(need, 0.1) == pytest.approx(10.9)
    assert easy_cut(need, "paper") == pytest.approx(25.75)  # fewer than 5 % are negative
    assert easy_cut(need - np.float32(6), "paper") == 44.5
    assert np.isnan(easy_cut(need[-1:], 0.5))

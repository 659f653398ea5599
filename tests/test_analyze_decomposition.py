"""x = β + t + p + k, the maps k̂ and the shares of ŷ: against their definitions, with planted truths, and with
what must not leak.
"""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_store import Synthetic, make_store, normalise, synthetic, write_all
from nearline.analyze import FitSettings, decomposition, fit, identity
from nearline.analyze.analyze_settings import AnalyzeSettings
from nearline.analyze.compute import session
from nearline.analyze.context_map import ALPHAS, ContextMap, fit_context_map, load_context_maps, token_basis
from nearline.analyze.evidence import Evidence
from nearline.analyze.gathering import gather
from nearline.analyze.moments import from_rows
from nearline.analyze.norms import apply_norm
from nearline.analyze.output_shares import share_rows
from nearline.analyze.parts import PartsSource, parts_source
from nearline.analyze.surrogates import LayerMoments, solve_layer
from nearline.store import Reader, Study, UsageError, encode
from sklearn.linear_model import Ridge

# Largest |x − (β + t + p + k)| of a row against the root mean square of x: a few roundings of float32 (6e-8),
# times how much larger parts are than their sum.
ROUNDING = 5e-6
# float32 products against float64 ones.
CLOSE = 2e-4
SMALL: dict[str, Any] = {"n_tokens": 1600, "d": 12, "n_layers": 2}
COPIED = 0.7  # of the token embedding, as a linear map writes it into the planted context


# The parts


def source_of(path: Path, layer: int = 1) -> PartsSource:
    return parts_source(Reader.open(path), layer)


@pytest.mark.parametrize("norm_kind", ["layernorm", "rmsnorm", "none"])
@pytest.mark.parametrize("with_positions", [True, False])
def test_the_parts_are_their_definition_and_add_up(
    norm_kind: str, with_positions: bool, tmp_path: Path
) -> None:
    data = synthetic(**SMALL, norm_kind=norm_kind, with_positions=with_positions)
    write_all(tmp_path / "s", data)
    source = pickle.loads(pickle.dumps(source_of(tmp_path / "s")))
    row0, row1 = data.plan.block_range(3)
    found = source.block(3)
    residual = data.sites["residual"][1, row0:row1].astype(np.float64)
    stored = data.sites["embedding"][row0:row1].astype(np.float64)
    table = data.position_embedding
    position = 0.0 if table is None else table[data.columns["position"][row0:row1]].astype(np.float64)
    weight, beta = (data.affine[name][1] if name in data.affine else neutral for name, neutral in
                    (("norm_weight", np.ones(data.d)), ("norm_bias", np.zeros(data.d))))  # fmt: skip
    centred = residual - residual.mean(axis=1, keepdims=True) if norm_kind == "layernorm" else residual
    scale = np.ones((len(residual), 1))
    if norm_kind != "none":
        scale = 1 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)

    def part(rows: np.ndarray) -> np.ndarray:
        shift = rows.mean(axis=1, keepdims=True) if norm_kind == "layernorm" else 0.0
        return weight * (rows - shift) * scale

    np.testing.assert_allclose(found.t, part(stored - position), atol=CLOSE)
    np.testing.assert_allclose(found.k, part(residual - stored), atol=CLOSE)
    np.testing.assert_allclose(found.embedding, stored - position, atol=1e-6)
    np.testing.assert_allclose(source.embedding(3), found.embedding)
    np.testing.assert_allclose(found.beta, beta)
    np.testing.assert_allclose(found.x, normalise(residual, norm_kind, data.affine, 1), atol=CLOSE)
    np.testing.assert_array_equal(found.token, apply_norm(found.embedding, source.norm))
    if found.p is None:
        assert not with_positions
    else:
        np.testing.assert_allclose(found.p, part(position + np.zeros_like(stored)), atol=CLOSE)
    assert found.deviation().max() < ROUNDING
    chosen = np.array([5, 2, 40])
    some = source.block(3, chosen)
    np.testing.assert_array_equal(some.k, found.k[chosen])
    np.testing.assert_array_equal(some.rows(1, 3).t, found.t[chosen[1:]])


def test_a_part_that_is_wrong_shows(tmp_path: Path) -> None:
    """The check can fail: a position forgotten, a scale or a bias off by a thousandth."""
    parts = source_of(make_store(tmp_path / "s", **SMALL)).block(2)
    assert parts.deviation().max() < ROUNDING
    for wrong in ({"p": None}, {"t": parts.t * np.float32(1.001)}, {"beta": parts.beta + np.float32(0.001)}):
        assert dataclasses.replace(parts, **wrong).deviation().max() > 100 * ROUNDING


def test_a_store_that_cannot_be_taken_apart_is_refused(tmp_path: Path) -> None:
    data = synthetic(**SMALL)
    sites = {name: values for name, values in data.sites.items() if name != "embedding"}
    storage = dataclasses.replace(data.attributes.storage, sites=tuple(sites))
    attributes = dataclasses.replace(data.attributes, storage=storage)
    stored = {name: data.stored[name] for name in sites}
    write_all(tmp_path / "bare", dataclasses.replace(data, sites=sites, stored=stored, attributes=attributes))
    with pytest.raises(
        UsageError, match=r"bare: the store has no `embedding`.*sites=embedding,residual,mlp_output"
    ):
        source_of(tmp_path / "bare")
    assert data.position_embedding is not None
    write_all(tmp_path / "far", dataclasses.replace(data, position_embedding=data.position_embedding[:20]))
    with pytest.raises(UsageError, match=r"far: position 31 lies beyond the 20 rows of `position_embedding`"):
        source_of(tmp_path / "far")


# The maps


def with_context(data: Synthetic, seed: int) -> Synthetic:
    """Residuals whose context is a linear image of the token embedding plus noise of variance 1; without a
    norm, k is that context.
    """
    assert data.position_embedding is not None
    stored = data.sites["embedding"].astype(np.float64)
    token = stored - data.position_embedding[data.columns["position"]]
    noise = np.random.default_rng(seed).standard_normal((len(data.layers), *token.shape))
    residual = (stored + COPIED * token @ image(data.d) + noise).astype(np.float32)
    return dataclasses.replace(
        data,
        sites=data.sites | {"residual": residual},
        stored=data.stored | {"residual": encode(residual, data.storage_dtype)},
    )


def image(d: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((d, d)) / np.sqrt(d)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Everything of a store's layer at once, in float64, for the slow twins."""

    t: np.ndarray
    p: np.ndarray
    k: np.ndarray
    embedding: np.ndarray


def all_rows(reader: Reader, layer: int) -> Rows:
    source = parts_source(reader, layer)
    blocks = [source.block(block) for block in range(reader.n_blocks)]

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(block, name) for block in blocks]).astype(np.float64)

    return Rows(*(joined(name) for name in ("t", "p", "k", "embedding")))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Two corpora of one model, whose context holds the token; decomposed."""
    folder = tmp_path_factory.mktemp("decomposed")
    for name, seed in (("a", 0), ("b", 1)):
        data = synthetic(**SMALL, seed=seed, vocab_size=200, norm_kind="none", model_name="one")
        write_all(folder / name, with_context(data, seed))
    fitted = fit(folder / "study", [folder / "a", folder / "b"], FitSettings(workers=2))
    decompose(fitted)
    return fitted


def decompose(study: Study, **settings: Any) -> list[str]:
    chosen = AnalyzeSettings(**settings)
    with session(chosen) as workers:
        return decomposition.run(gather(study, chosen), workers)


def evidence_of(study: Study) -> Evidence:
    return gather(study, AnalyzeSettings())


def test_the_map_is_the_ridge_that_rows_give(study: Study) -> None:
    """Against the same search by the fit's own moments and, at its alpha, scikit-learn on the rows."""
    evidence = evidence_of(study)
    population = evidence.fitted.population
    rows = population.rows(0)
    found, fold = all_rows(evidence.fitted.reader, 1), population.fold[rows]
    embedding, k = found.embedding[rows], found.k[rows]
    narrow = embedding.astype(np.float32), k.astype(np.float32)
    folds = tuple(from_rows(*(one[fold == index] for one in narrow)) for index in range(5))
    whole = solve_layer(LayerMoments(folds, from_rows(*narrow)), ALPHAS)
    context_map = load_context_maps(study)[1]
    assert context_map.alpha == pytest.approx(ALPHAS[whole.chosen], rel=1e-6)
    np.testing.assert_allclose(context_map.weight, whole.full.weight, atol=CLOSE)
    np.testing.assert_allclose(context_map.bias, whole.full.bias, atol=CLOSE)
    spread = float(((embedding - embedding.mean(axis=0)) ** 2).sum()) / embedding.shape[1]
    ridge = Ridge(alpha=context_map.alpha * spread, solver="cholesky").fit(embedding, k)
    np.testing.assert_allclose(context_map.weight, ridge.coef_, atol=CLOSE)
    np.testing.assert_allclose(context_map.predict(narrow[0]), ridge.predict(embedding), atol=CLOSE)
    assert list(load_context_maps(study)) == [0, 1]


def test_the_token_in_the_context_is_found_and_taken_out(study: Study) -> None:
    """Held-out R² is the planted one, and no linear map of the token is left in context_only."""
    evidence = evidence_of(study)
    for row in study.table("decomposition").to_pylist():
        rows = evidence.test_rows(row["store"])
        assert (row["n_tokens"], row["fit_on"]) == (rows.size, "a")
        found = all_rows(evidence.stores[row["store"]].reader, row["layer"])
        context_map = load_context_maps(study)[row["layer"]]
        embedding, k = found.embedding[rows], found.k[rows]
        left = k - context_map.predict(embedding.astype(np.float32))
        r2 = 1 - (left**2).sum() / ((k - context_map.mean) ** 2).sum()
        assert row["token_in_context"] == pytest.approx(r2, abs=CLOSE)
        signal = np.square(COPIED * embedding @ image(embedding.shape[1])).mean()
        assert row["token_in_context"] == pytest.approx(signal / (signal + 1.0), abs=0.05)
        assert row["token_in_context_lo"] < row["token_in_context"] < row["token_in_context_hi"]
        again = Ridge(alpha=1.0).fit(embedding, left).score(embedding, left)
        # By chance d / n from this fit and as much from that of the map; of k itself it is a third.
        assert again < 4 * embedding.shape[1] / rows.size
        assert row["identity_error"] < ROUNDING


@pytest.mark.parametrize("store", ["a", "b"])
@pytest.mark.parametrize("layer", [0, 1])
def test_shares_of_the_output_are_their_definition_and_sum_to_one(
    study: Study, store: str, layer: int
) -> None:
    evidence = evidence_of(study)
    rows, population = evidence.test_rows(store), evidence.stores[store].population
    weight = study.surrogates()["weight"].sel(layer=layer).to_numpy().astype(np.float64)
    found = all_rows(evidence.stores[store].reader, layer)
    k_hat = load_context_maps(study)[layer].predict(found.embedding.astype(np.float32)).astype(np.float64)
    splits = {
        "raw": {"token": found.t, "position": found.p, "context": found.k},
        "replaced": {"token_full": found.t + k_hat, "position": found.p, "context_only": found.k - k_hat},
    }
    table = study.table("output_shares").to_pylist()
    for split_by, parts in splits.items():
        key = {"store": store, "layer": layer, "split_by": split_by}
        mine = {row["part"]: row for row in table if key.items() <= row.items()}
        outputs = {name: part[rows] @ weight.T for name, part in parts.items()}
        centred = {name: output - output.mean(axis=0) for name, output in outputs.items()}
        whole = np.sum(list(centred.values()), axis=0)
        total = float((whole**2).sum())
        assert list(mine) == list(parts)
        for name, output in centred.items():
            variance, covariance = (float((output * one).sum()) / total for one in (output, whole - output))
            row = mine[name]
            assert row["variance"] == pytest.approx(variance, abs=CLOSE)
            assert row["covariance"] == pytest.approx(covariance, abs=CLOSE)
            assert row["share"] == pytest.approx(variance + covariance, abs=CLOSE)
            assert row["share_lo"] < row["share"] < row["share_hi"]
            assert row["n_groups"] == population.n_groups(rows)
        assert sum(row["share"] for row in mine.values()) == pytest.approx(1.0, abs=1e-12)


def test_replacing_moves_the_token_out_of_the_context(study: Study) -> None:
    rows = {
        (row["store"], row["layer"], row["part"]): row["share"]
        for row in study.table("output_shares").to_pylist()
    }
    for store in ("a", "b"):
        for layer in (0, 1):
            assert rows[store, layer, "token_full"] > rows[store, layer, "token"] + 0.02


def test_what_is_not_fitted_does_not_reach_the_maps(tmp_path: Path) -> None:
    """Other activations in gate and test rows, and in rows at position 0, leave every byte of a map as it is;
    others in fit rows do not.
    """
    data = synthetic(**SMALL)
    split, position = data.columns["split"], data.columns["position"]
    maps = []
    changes = {"whole": split > 3, "unseen": (split > 0) | (position == 0), "seen": split == 0}
    for name, changed in changes.items():
        residual = data.sites["residual"].copy()
        residual[:, changed] += 5.0 * np.random.default_rng(1).standard_normal(residual[:, changed].shape)
        stored = data.stored | {"residual": residual.astype(np.float32)}
        write_all(tmp_path / name, dataclasses.replace(data, sites=data.sites | stored, stored=stored))
        reader = Reader.open(tmp_path / name)
        folds = np.where((split == 0) & (position > 0), data.columns["document"] % 3, -1).astype(np.int32)
        source = parts_source(reader, 1)
        maps.append(fit_context_map(source, folds, token_basis(source, folds)))
    assert bytes_of(maps[0]) == bytes_of(maps[1])
    assert bytes_of(maps[0]) != bytes_of(maps[2])


def bytes_of(context_map: ContextMap) -> list[bytes]:
    return [one.tobytes() for one in (context_map.weight, context_map.bias, context_map.mean)]


def test_a_first_block_without_context_has_shares_and_no_r_squared(tmp_path: Path) -> None:
    """In a model of parallel blocks, the residual of layer 0 is the embedding itself."""
    plain: dict[str, Any] = {"with_positions": False, "bos": False, "sink_scale": 1.0}
    data = synthetic(n_tokens=1600, d=12, n_layers=1, **plain)
    residual = data.sites["embedding"][None].copy()
    stored = data.stored | {"residual": residual}
    write_all(tmp_path / "a", dataclasses.replace(data, sites=data.sites | stored, stored=stored))
    fitted = fit(tmp_path / "study", [tmp_path / "a"], FitSettings(workers=1))
    decompose(fitted)
    row = fitted.table("decomposition").to_pylist()[0]
    assert np.isnan(row["token_in_context"])
    shares = {row["part"]: row["share"] for row in fitted.table("output_shares").to_pylist()}
    assert shares == pytest.approx(
        {"token": 1.0, "context": 0.0, "token_full": 1.0, "context_only": 0.0}, abs=1e-6
    )


def test_the_same_bytes_whatever_the_workers(study: Study) -> None:
    def files(names: list[str]) -> list[bytes]:
        found = [path for name in names for path in (study.path / name, *(study.path / name).rglob("*"))]
        return [path.read_bytes() for path in sorted(found) if path.is_file()]

    before = files(decompose(study, workers=1))
    assert files(decompose(study, workers=2)) == before
    assert len(before) > 3


def test_output_that_does_not_vary_has_no_shares() -> None:
    rows = share_rows("raw", np.zeros((25, 3, 3)))
    assert all(np.isnan(row["share"]) and np.isnan(row["share_lo"]) for row in rows)


# Token identity, end to end


def test_the_table_of_token_identity_is_of_all_body_rows(study: Study) -> None:
    settings = AnalyzeSettings(need=("error", "error_stream"))
    evidence = gather(study, settings)
    with session(settings) as workers:
        assert identity.run(evidence, workers) == ["tables/variance.parquet"]
    rows = study.table("variance").to_pylist()
    assert len(rows) == 2 * 2 * 2 * 2
    for row in rows:
        population = evidence.stores[row["store"]].population
        ids = population.token_id if row["key"] == "input" else population.target_id
        kept = population.body & (ids >= 0)
        groups = [set(population.group[kept & (ids == one)].tolist()) for one in np.unique(ids[kept])]
        covered = np.isin(ids, np.unique(ids[kept])[[len(found) >= 2 for found in groups]]) & kept
        assert row["n_tokens"] == covered.sum()
        assert row["coverage"] == pytest.approx(covered.sum() / kept.sum())
        assert row["n_types"] == sum(len(found) >= 2 for found in groups)
        assert row["n_groups"] == population.n_groups(np.flatnonzero(covered))
        assert row["share_sim_lo"] <= row["share_lo"] < row["share"] < row["share_hi"] <= row["share_sim_hi"]
        assert row["verdict"] in ("supported", "not supported", "cannot tell")


def test_rows_without_a_need_are_left_out_of_its_share(tmp_path: Path) -> None:
    """A need that is not finite somewhere is described by the other rows, and the next one by all."""
    make_store(tmp_path / "a", **SMALL)
    fitted = fit(tmp_path / "study", [tmp_path / "a"], FitSettings(workers=1))
    evidence = evidence_of(fitted)
    column = identity.Column(evidence.fitted, "input")
    need = evidence.need_columns(0, "a")["error"]
    whole, _ = column.describe(need)
    holes = np.where(np.arange(need.size) % 3 == 0, np.nan, need).astype(np.float32)
    fewer, _ = column.describe(holes)
    assert fewer["n_tokens"] < 0.7 * whole["n_tokens"]
    assert np.isfinite(fewer["share"])
    assert column.describe(need)[0] == whole
    nothing, share = column.describe(np.full(need.size, np.nan, np.float32))
    assert nothing["n_tokens"] == 0
    assert np.isnan(share.estimate).all()

"""No-fly from rows to tables: shuffles keep documents whole, the paper's procedure shows its regression to
the mean, and a study of two stores gives what was planted in it.
"""

import itertools
import logging
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers_nofly import Design, Rows, correlated, occurrences, rows
from helpers_store import make_store
from nearline.analyze import FitSettings, fit
from nearline.analyze.analyze import analyze
from nearline.analyze.analyze_settings import AnalyzeSettings
from nearline.analyze.compute import session
from nearline.analyze.gathering import gather
from nearline.analyze.influences import holm
from nearline.analyze.intervals import MIN_GROUPS
from nearline.analyze.nofly import run
from nearline.analyze.nofly_null import (
    ShuffledMeans,
    Shuffles,
    correlations,
    enough_shuffles,
    null_correlations,
    permutation_p,
)
from nearline.analyze.nofly_paper import FOUND_FROM, LISTED_FROM, SHARE_ABOVE, THRESHOLD
from nearline.analyze.nofly_task import Column, Found, Item, Shared, Side, compare_needs
from nearline.analyze.population import fold_of_documents, load_population
from nearline.store import Reader, Study, UsageError
from scipy import stats

ROUNDING = 1e-9
# Needs are stored as float32.
STORED = 1e-6


def side(one: Rows, target: np.ndarray | None = None) -> Side:
    token = one.token.astype(np.int32)
    group = one.group.astype(np.int32)
    target = token if target is None else target
    return Side(token, target, group, group, int(group.max()) + 1)


def found_of(
    a: Rows, b: Rows, need: str = "error", n_shuffles: int = 99, seed: int = 0, occurrences: int = 10
) -> Found:
    """What the work item says of one need, keyed by input token."""
    shared = Shared(((side(a), side(b)),), occurrences, n_shuffles, seed, 5)
    column = Column(0, "pooled", need)
    item = Item(0, tuple({column: one.need.astype(np.float32)} for one in (a, b)))  # type: ignore[arg-type]
    return next(one for one in compare_needs(shared, item) if one.key == "input")


def test_a_shuffle_moves_needs_within_documents_and_nowhere_else() -> None:
    rng = np.random.default_rng(0)
    document = rng.integers(0, 6, 200)
    shuffles = Shuffles(document, (3, 0))
    by_document = shuffles.by_document
    first, again, second = (shuffles.permutation(n) for n in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != second).mean() > 0.5
    np.testing.assert_array_equal(np.sort(first), np.arange(200))
    np.testing.assert_array_equal(document[by_document][first], document[by_document])


def test_every_order_of_a_document_is_as_likely() -> None:
    shuffles = Shuffles(np.array([5, 5, 2, 5]), (0, 0))
    orders = [tuple(shuffles.permutation(n)[1:]) for n in range(1200)]
    counts = [orders.count(order) for order in itertools.permutations((1, 2, 3))]
    assert sum(counts) == 1200
    assert stats.chisquare(counts).pvalue > 0.001


def test_shuffled_means_are_those_of_a_loop() -> None:
    """Rows without a need, and types that are not compared, are passed over."""
    rng = np.random.default_rng(1)
    n = 300
    document, kind = rng.integers(0, 7, n), rng.integers(-1, 5, n)
    values, has_need = rng.standard_normal((n, 2)), rng.random(n) < 0.8
    shuffles = Shuffles(document, (1, 0))
    found = ShuffledMeans.of(shuffles, has_need, kind, 5, np.where(has_need[:, None], values, np.nan))
    permutation = shuffles.permutation(4)
    order = shuffles.by_document
    places = [row for row in order if has_need[row]]
    sources = [order[place] for place in permutation if has_need[order[place]]]
    shuffled = np.full(n, -1)
    for row, source in zip(places, sources, strict=True):
        assert document[row] == document[source]
        shuffled[row] = kind[source]
    for one in range(5):
        expected = values[shuffled == one].mean(axis=0)
        np.testing.assert_allclose(found.means(permutation)[one], expected, rtol=ROUNDING)


def test_p_is_level_under_the_null_and_small_where_needs_agree() -> None:
    """Forty columns of noise with documents of different level, and one that carries over."""
    rng = np.random.default_rng(2)
    design = Design(n_types=60, n_groups=25, occurrences=25.0)
    n_columns, sides, shuffles, means = 120, [], [], []
    truth = correlated(rng, design.n_types, 0.9)
    for number, trait in enumerate(truth):
        corpus = rows(rng, occurrences(rng, design), trait, 0.5)
        level = rng.standard_normal(design.n_groups)[corpus.group]
        noise = level[:, None] + rng.standard_normal((corpus.token.size, n_columns))
        values = np.column_stack([noise, corpus.need + level])
        one = Shuffles(corpus.group, (0, number))
        everything = np.ones(corpus.token.size, bool)
        shuffles.append(one)
        sides.append(ShuffledMeans.of(one, everything, corpus.token, design.n_types, values))
        total = np.stack([np.bincount(corpus.token, column) for column in values.T], axis=1)
        means.append(total / np.bincount(corpus.token)[:, None])
    (null,) = null_correlations([(sides[0], sides[1])], (shuffles[0], shuffles[1]), 99)
    r = correlations(means[0], means[1])
    p = np.array([permutation_p(float(one), null[:, place]) for place, one in enumerate(r)])
    # 120 independent columns at 5 % show more than 12 in 1 % of cases; these share their shuffles.
    assert (p[:-1] <= 0.05).mean() <= 14 / n_columns
    assert (p[:-1] <= 0.5).mean() == pytest.approx(0.5, abs=0.2)
    assert p[-1] == 0.01
    assert r[-1] == pytest.approx(stats.pearsonr(means[0][:, -1], means[1][:, -1])[0], rel=ROUNDING)


def test_agreement_that_comes_of_documents_is_no_agreement_about_tokens() -> None:
    """Hard documents have tokens of their own, in both corpora: r is high, and shuffles within documents have
    it too. A shuffle of everything would call it significant.
    """
    rng = np.random.default_rng(3)
    n_types, n_groups = 80, 30
    corpora = []
    for _ in range(2):
        hard = np.arange(n_groups) % 2
        rate = np.where((np.arange(n_types) % 2)[:, None] == hard, 3.0, 0.5)
        count = rng.poisson(rate) + 1
        one = rows(rng, count, np.zeros(n_types), 0.5)
        need = hard[one.group] + 0.5 * rng.standard_normal(one.token.size)
        corpora.append(Rows(one.token, one.group, need))
    found = found_of(*corpora)
    assert found.comparison.estimates.estimate[0] > 0.5
    assert found.p_permutation > 0.05
    everything = [Rows(one.token, 0 * one.group, one.need) for one in corpora]
    loose = [Shuffles(one.group, (0, number)) for number, one in enumerate(everything)]
    sides = [
        ShuffledMeans.of(one, np.ones(corpus.token.size, bool), corpus.token, n_types, corpus.need[:, None])
        for one, corpus in zip(loose, everything, strict=True)
    ]
    (null,) = null_correlations([(sides[0], sides[1])], (loose[0], loose[1]), 99)
    assert permutation_p(float(found.comparison.estimates.estimate[0]), null[:, 0]) == 0.01


def test_shuffles_are_enough_for_one_layer_to_be_significant() -> None:
    for n_layers in (1, 12, 36):
        n = enough_shuffles(199, n_layers, 0.05)
        assert holm(np.array([1 / (1 + n), *[1.0] * (n_layers - 1)]))[0] <= 0.05 + 1e-12
    assert enough_shuffles(199, 1, 0.05) == 199
    assert np.isnan(permutation_p(float("nan"), np.zeros(3)))
    assert permutation_p(0.0, np.array([-1.0, 0.0, 1.0])) == 3 / 4  # ties count against


def by_hand(a: Rows, b: Rows, threshold: float) -> dict[str, float]:
    """The paper's procedure, token by token; needs are less their lines already."""
    listed = [
        token
        for token in np.unique(a.token)
        for need in [a.need[a.token == token]]
        if need.size >= LISTED_FROM and need.mean() > threshold and (need > 0).mean() > SHARE_ABOVE
    ]
    met = {token: b.need[b.token == token] for token in listed}
    met = {token: need for token, need in met.items() if need.size >= FOUND_FROM}
    again = [need for need in met.values() if need.mean() > threshold and (need > 0).mean() > SHARE_ABOVE]
    pairs = np.array([(a.need[a.token == token].mean(), need.mean()) for token, need in met.items()])
    return {
        "list_size": len(listed),
        "found": len(met),
        "persisted": len(again),
        "flipped": float(sum(need.mean() < 0 for need in met.values())),
        "list_mean_a": float(pairs[:, 0].mean()),
        "list_mean_b": float(pairs[:, 1].mean()),
        "paper_r": float(np.corrcoef(pairs[:, 0], pairs[:, 1])[0, 1]),
    }


def corpora(seed: int, r: float, reliability: float, design: Design | None = None) -> tuple[Rows, Rows]:
    design = design or Design(n_types=300, n_groups=30, occurrences=20.0)
    rng = np.random.default_rng(seed)
    a, b = (
        rows(rng, occurrences(rng, design), truth, reliability)
        for truth in correlated(rng, design.n_types, r)
    )
    return a, b


def test_the_papers_procedure_is_done_as_the_paper_does_it() -> None:
    a, b = corpora(4, 0.5, 0.4, Design(n_types=80, n_groups=25, occurrences=15.0))
    a, b = (Rows(one.token, one.group, one.need.astype(np.float32).astype(np.float64)) for one in (a, b))
    b = Rows(*(values[b.token % 7 != 0] for values in (b.token, b.group, b.need)))  # some are not found
    found = found_of(a, b, "loss").paper
    slow = by_hand(a, b, THRESHOLD)
    assert found["threshold"] == THRESHOLD
    assert {name: found[name] for name in slow} == pytest.approx(slow, rel=ROUNDING)
    assert 0 < slow["persisted"] < slow["found"] < slow["list_size"]

    # A need that is never negative: less the median, over the 90th percentile of token means.
    a, b = (Rows(one.token, one.group, np.exp(one.need / 10).astype(np.float32)) for one in (a, b))
    found = found_of(a, b, "error").paper
    a, b = (Rows(one.token, one.group, one.need.astype(float) - np.median(one.need)) for one in (a, b))
    often = [token for token in np.unique(a.token) if (a.token == token).sum() >= LISTED_FROM]
    threshold = np.quantile([a.need[a.token == token].mean() for token in often], 0.9)
    assert found["threshold"] == pytest.approx(threshold, rel=STORED)
    slow = by_hand(a, b, found["threshold"])
    assert {name: found[name] for name in slow} == pytest.approx(slow, rel=1e-5)


def shares(r: float, reliability: float, n_sets: int = 8) -> dict[str, float]:
    """Of the paper's procedure over several corpora: shares of found tokens, and means of lists."""
    design = Design(n_types=800, n_groups=30, occurrences=15.0)
    paper = [
        found_of(*corpora(seed, r, reliability, design), need="loss", n_shuffles=1).paper
        for seed in range(n_sets)
    ]
    total = {name: float(np.sum([one[name] for one in paper])) for name in paper[0]}
    return {
        "persisted": total["persisted"] / total["found"],
        "flipped": total["flipped"] / total["found"],
        "persisted_heldout": total["persisted_heldout"] / total["found_heldout"],
        "flipped_heldout": total["flipped_heldout"] / total["found_heldout"],
        "half": total["half_list_mean"] / n_sets,
        "heldout": total["list_mean_a_heldout"] / n_sets,
        "elsewhere": total["half_list_mean_b"] / n_sets,
        "paper_r": total["paper_r"] / n_sets,
        "paper_r_heldout": total["paper_r_heldout"] / n_sets,
    }


def test_the_papers_findings_come_of_noise_alone() -> None:
    """No token has a need of its own, and still there is a list, of which some persist and some flip; the
    other half of the same corpus shows as much.
    """
    found = shares(0.0, 1e-6)
    print({name: round(value, 3) for name, value in found.items()})
    assert found["half"] > 0
    assert 0.3 < found["flipped"] < 0.7
    assert 0.3 < found["flipped_heldout"] < 0.7
    assert abs(found["paper_r"]) < 0.2
    assert abs(found["heldout"]) < 0.2 * found["half"]


def test_a_stable_trait_falls_within_one_corpus_as_far_as_in_another() -> None:
    """r = 1 through noise: the paper's r is near 0 and most of the list falls, and the other half of the same
    corpus shows the same fall. Where the trait is another one, the fall goes on.
    """
    stable, other = shares(1.0, 0.3), shares(0.0, 0.3)
    print({name: round(value, 3) for name, value in stable.items()})
    print({name: round(value, 3) for name, value in other.items()})
    assert stable["heldout"] < 0.5 * stable["half"]
    assert stable["elsewhere"] == pytest.approx(stable["heldout"], rel=0.2)
    assert stable["paper_r"] < 0.35
    assert stable["persisted_heldout"] == pytest.approx(stable["persisted"], abs=0.12)
    assert other["heldout"] == pytest.approx(stable["heldout"], rel=0.2)
    assert other["elsewhere"] < 0.5 * other["heldout"]


def test_rows_without_a_need_or_a_target_take_no_part() -> None:
    """Each column and key is what it is with those rows removed, whatever the other columns have."""
    a, b = corpora(5, 0.5, 0.5, Design(n_types=60, n_groups=25, occurrences=15.0))
    rng = np.random.default_rng(5)
    target = [
        np.where(rng.random(one.token.size) < 0.1, -1, one.token[::-1]).astype(np.int32) for one in (a, b)
    ]
    sides = (side(a, target[0]), side(b, target[1]))
    holed, whole = Column(3, "pooled", "error"), Column(3, "a", "error")
    values = []
    for one in (a, b):
        need = one.need.astype(np.float32)
        values.append({whole: need, holed: np.where(rng.random(need.size) < 0.2, np.nan, need)})
    found = compare_needs(Shared((sides,), 5, 19, 0, 3), Item(0, (values[0], values[1])))
    assert {(one.column, one.key) for one in found} == {
        (column, key) for column in (holed, whole) for key in ("input", "target")
    }
    for one in found:
        kept = []
        for place, corpus in enumerate((a, b)):
            need = values[place][one.column].astype(np.float64)
            key = sides[place].key(one.key)
            mask = np.isfinite(need) & (key >= 0)
            kept.append(Rows(key[mask], corpus.group[mask], need[mask]))
        alone = found_of(*kept, n_shuffles=19, occurrences=5)
        np.testing.assert_allclose(
            one.comparison.estimates.estimate, alone.comparison.estimates.estimate, rtol=ROUNDING
        )
        assert one.n_tokens == alone.n_tokens
        assert one.paper == pytest.approx(alone.paper, rel=ROUNDING, nan_ok=True)


def twice_sent(found: list[Found]) -> bytes:
    """The bytes, whatever objects were one and the same before."""
    return pickle.dumps(pickle.loads(pickle.dumps(found)))


def test_an_item_gives_the_same_bytes_with_others_beside_it_and_elsewhere() -> None:
    """Layers that share an item do not change one another; a process that gets it pickled finds the same."""
    a, b = corpora(8, 0.5, 0.5, Design(n_types=60, n_groups=25, occurrences=15.0))
    rng = np.random.default_rng(8)
    columns = [Column(layer, "pooled", "error") for layer in range(3)]
    values = tuple(
        {column: rng.standard_normal(one.token.size).astype(np.float32) for column in columns}
        for one in (a, b)
    )
    shared = Shared(((side(a), side(b)),), 5, 19, 0, 3)
    together = compare_needs(shared, Item(0, (values[0], values[1])))
    for column in columns:
        alone = Item(0, ({column: values[0][column]}, {column: values[1][column]}))
        sent_shared, sent = pickle.loads(pickle.dumps((shared, alone)))
        same = [one for one in together if one.column == column]
        assert twice_sent(compare_needs(sent_shared, sent)) == twice_sent(same)


def test_the_top_tokens_are_those_of_highest_mean() -> None:
    a, b = corpora(6, 0.5, 0.5, Design(n_types=60, n_groups=25, occurrences=15.0))
    found = found_of(a, b)
    mean = np.array([a.need[a.token == token].mean() for token in range(60)])
    eligible = [
        token
        for token in range(60)
        if all(
            (one.token == token).sum() >= 10 and np.unique(one.group[one.token == token]).size >= 2
            for one in (a, b)
        )
    ]
    assert found.comparison.n_types == len(eligible)
    expected = sorted(eligible, key=lambda token: -mean[token])[:5]
    assert [one["token_id"] for one in found.top] == expected
    first = found.top[0]
    assert first["mean_a"] == pytest.approx(mean[expected[0]], rel=STORED)
    assert first["n_b"] == (b.token == expected[0]).sum()


# A study


N_TYPES = 60
PLANTED = FitSettings(folds=2, examples=0, histogram_bins=4, alpha=0.1)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Two stores with a planted `loss`, which no fit brings: r = .8 at layer 0, noise at layer 1."""
    folder = tmp_path_factory.mktemp("nofly")
    stores = {
        name: make_store(folder / name, seed=seed, n_tokens=4000, d=4, vocab_size=N_TYPES, sequence_length=48)
        for name, seed in (("first", 1), ("second", 2))
    }
    fitted = fit(folder / "study", stores, PLANTED)
    rng = np.random.default_rng(7)
    traits = dict(zip(stores, correlated(rng, N_TYPES, 0.8), strict=True))
    for name in stores:
        token = fitted.rows(name)["token_id"].to_numpy()
        for layer, size in ((0, 1.0), (1, 0.0)):
            need = size * traits[name][token] + rng.standard_normal(token.size)
            table = pa.table({"loss": need.astype(np.float32)})
            fitted.write_need(layer, name, table, step="measure")
    return analyze(fitted.path, AnalyzeSettings(only=("nofly",), need=("loss",)))  # type: ignore[arg-type]


def test_a_planted_need_is_found_in_the_tables(study: Study) -> None:
    found = study.table("nofly").to_pylist()
    assert [(row["layer"], row["key"]) for row in found] == [
        (0, "input"),
        (1, "input"),
        (0, "target"),
        (1, "target"),
    ]
    assert {(row["store_a"], row["store_b"], row["surrogate"]) for row in found} == {
        ("first", "second", "first")
    }
    planted, noise, target, _ = found
    assert planted["verdict"] == "supported"
    assert planted["r_disattenuated_sim_lo"] < 0.8 < planted["r_disattenuated_sim_hi"]
    assert planted["p_permutation"] == 1 / 200
    assert planted["p_holm"] == 2 / 200
    assert planted["threshold"] == THRESHOLD
    for row in (noise, target):
        assert row["verdict"] == "cannot tell"
    assert min(row["n_groups_a"] for row in found) >= MIN_GROUPS
    assert planted["reliability_a"] > 0.5 > noise["reliability_a"]


def test_tables_are_of_the_body_rows_of_the_stores(study: Study) -> None:
    """Counts and the top tokens, from the stores' own columns."""
    (row, *_) = study.table("nofly").to_pylist()
    sides = {}
    for name, path in study.stores().items():
        reader = Reader.open(path)
        population = load_population(reader, fold_of_documents(reader, 2, 0), name)
        loss = study.need(0, name, step="measure")["loss"].to_numpy().astype(np.float64)
        body = population.body
        sides[name] = Rows(population.token_id[body], population.group[body], loss[body])
    found = found_of(sides["first"], sides["second"], "loss", n_shuffles=199)
    assert row["n_types"] == found.comparison.n_types > 20
    assert (row["n_tokens_a"], row["n_tokens_b"]) == found.n_tokens
    assert row["r"] == pytest.approx(float(found.comparison.estimates.estimate[0]), rel=ROUNDING)
    assert row["p_permutation"] == found.p_permutation
    tokens = [
        one for one in study.table("nofly_tokens").to_pylist() if (one["layer"], one["key"]) == (0, "input")
    ]
    assert [one["rank"] for one in tokens] == list(range(1, 11))
    assert [one["token_id"] for one in tokens[:5]] == [one["token_id"] for one in found.top]
    assert all(one["text"] == f" w{one['token_id']}" for one in tokens)


def test_every_surrogate_need_and_pair_has_its_rows(tmp_path: Path) -> None:
    stores = {
        name: make_store(tmp_path / name, seed=seed, n_tokens=800, d=4, n_layers=2, vocab_size=40)
        for name, seed in (("a", 1), ("b", 2), ("c", 3))
    }
    study = fit(tmp_path / "study", stores, PLANTED)
    settings = AnalyzeSettings(only=("nofly",), need=("error", "error_norm"), permutations=19)  # type: ignore[arg-type]
    analyze(study.path, settings)
    found = study.table("nofly").to_pylist()
    keys = [
        (*pair, surrogate, need, key, layer)
        for pair in itertools.combinations("abc", 2)
        for surrogate in (*pair, "pooled")
        for need in ("error", "error_norm")
        for key in ("input", "target")
        for layer in (0, 1)
    ]
    columns = ("store_a", "store_b", "surrogate", "need", "key", "layer")
    assert sorted(tuple(row[name] for name in columns) for row in found) == sorted(keys)
    by_surrogate = {
        row["surrogate"]: row["r"] for row in found if row["layer"] == 0 and row["key"] == "input"
    }
    assert len(set(by_surrogate.values())) == 4  # each surrogate has needs of its own
    tokens = study.table("nofly_tokens").to_pylist()
    assert {row["surrogate"] for row in tokens} == {"pooled"}
    assert {row["need"] for row in tokens} == {"error"}


def test_a_text_of_both_stores_is_left_out_of_the_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two stores of the same corpus have nothing to compare: its noise would agree with itself."""
    sizes = {"one": 960, "shorter": 800}
    stores = {
        name: make_store(tmp_path / name, seed=1, d=4, vocab_size=30, n_layers=1, n_tokens=size)
        for name, size in sizes.items()
    }
    study = fit(tmp_path / "study", stores, PLANTED)
    rng = np.random.default_rng(0)
    for name, size in sizes.items():
        table = pa.table({"loss": rng.standard_normal(size).astype(np.float32)})
        study.write_need(0, name, table, step="measure")
    with caplog.at_level(logging.INFO, "nearline"):
        analyze(study.path, AnalyzeSettings(only=("nofly",), need=("loss",), permutations=19))  # type: ignore[arg-type]
    assert "documents stand in one and in shorter" in caplog.text
    assert "share 0 input tokens" in caplog.text
    assert "harvest more `tokens`, or set `occurrences` lower" in caplog.text
    rows_of = study.table("nofly").to_pylist()
    assert {row["verdict"] for row in rows_of} == {"too few documents"}
    assert all(row["n_tokens_b"] == 0 and np.isnan(row["r"]) for row in rows_of)


def test_one_store_is_no_comparison(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused where it is asked for by name; among all analyses it leaves empty tables."""
    store = make_store(tmp_path / "store", n_tokens=800, d=4, n_layers=1)
    study = fit(tmp_path / "study", [store], PLANTED)
    with pytest.raises(UsageError, match="two"):
        analyze(study.path, AnalyzeSettings(only=("nofly",)))
    assert not study.has_table("nofly")
    settings = AnalyzeSettings()
    with caplog.at_level(logging.INFO, "nearline"), session(settings) as workers:
        written = run(gather(study, settings), workers)
    assert written == ["tables/nofly.parquet", "tables/nofly_tokens.parquet"]
    assert study.table("nofly").num_rows == study.table("nofly_tokens").num_rows == 0
    assert "not applicable to one store" in caplog.text

"""Folds over several stores, and planted leaks: a group or a text in two splits."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers_store import Synthetic, synthetic, write_all
from nearline.analyze.population import (
    LEFT_OUT,
    UNSEEN,
    Population,
    fold_of_documents,
    joint_folds,
    load_population,
)
from nearline.store import SPLITS, Reader, UsageError

FOLDS = 3


def corpus(seed: int) -> Synthetic:
    return synthetic(n_layers=1, d=4, n_tokens=2000, seed=seed, with_positions=False)


def with_documents(data: Synthetic, **columns: list) -> Synthetic:
    table = data.documents
    for name, values in columns.items():
        field = table.schema.field(name)
        table = table.set_column(table.column_names.index(name), field, pa.array(values, field.type))
    return dataclasses.replace(data, documents=table)


def written(path: Path, data: Synthetic) -> Reader:
    write_all(path, data)
    return Reader.open(path)


def documents_of(data: Synthetic, split: str) -> list[int]:
    """Documents of a split that share their group with no other."""
    groups, splits = (data.documents[name].to_pylist() for name in ("group", "split"))
    return [i for i, s in enumerate(splits) if s == split and groups.count(groups[i]) == 1]


def hashes_of(data: Synthetic) -> list[str]:
    return data.documents["content_hash"].to_pylist()


def test_the_folds_of_the_first_store_are_its_own(tmp_path: Path) -> None:
    readers = {f"store{seed}": written(tmp_path / str(seed), corpus(seed)) for seed in (0, 1, 2)}
    joint = joint_folds(readers, FOLDS, 0)
    alone = fold_of_documents(readers["store0"], FOLDS, 0)
    assert {h: joint["store0"][h] for h in alone} == alone
    for name, reader in readers.items():
        population = load_population(reader, joint[name], name)
        fitted = population.body & (population.split == SPLITS.index("fit"))
        assert (population.fold[fitted] >= 0).all()
        assert (population.fold[population.split != SPLITS.index("fit")] == UNSEEN).all()
        rows = np.bincount(population.fold[fitted], minlength=FOLDS)
        assert rows.max() - rows.min() <= 64, "a group has no more rows: folds are in balance in each store"


def test_a_document_of_two_stores_has_one_fold(tmp_path: Path) -> None:
    """Copies, and what their own store counts as near-duplicates of them: one fold, also where they are not
    fitted; a group that ties two folds together is left out, and enters no row."""
    first, second = corpus(0), corpus(1)
    one = written(tmp_path / "one", first)
    alone = fold_of_documents(one, FOLDS, 0)
    ours, theirs, tested = (
        documents_of(first, "fit"),
        documents_of(second, "fit"),
        documents_of(second, "test"),
    )
    known = {fold: [d for d in ours if alone[hashes_of(first)[d]] == fold] for fold in range(FOLDS)}
    hashes, groups = hashes_of(second), second.documents["group"].to_pylist()
    copied, near, torn, bridge, test_copy, test_near = *theirs[:4], *tested[:2]
    hashes[copied] = hashes_of(first)[known[2][0]]
    groups[near] = groups[copied]
    hashes[torn], hashes[bridge] = hashes_of(first)[known[0][1]], hashes_of(first)[known[1][1]]
    groups[bridge] = groups[torn]
    hashes[test_copy], groups[test_near] = hashes_of(first)[known[1][0]], groups[test_copy]
    two = written(tmp_path / "two", with_documents(second, content_hash=hashes, group=groups))
    joint = joint_folds({"one": one, "two": two}, FOLDS, 0)
    population = load_population(two, joint["two"], "two")
    fold = {d: set(population.fold[population.document == d].tolist()) for d in range(len(hashes))}
    assert fold[copied] == fold[near] == {2}
    assert fold[torn] == fold[bridge] == {LEFT_OUT}
    assert fold[test_copy] == fold[test_near] == {1}
    left_out = np.isin(population.document, [torn, bridge])
    assert left_out.any()
    assert not (population.body | population.sink)[left_out].any()
    theirs_alone = load_population(one, joint["one"], "one")
    np.testing.assert_array_equal(theirs_alone.fold, load_population(one, alone, "one").fold)
    assert theirs_alone.body.sum() == load_population(one, alone, "one").body.sum()


def test_a_fit_of_one_store_scores_near_duplicates_elsewhere_out_of_fold(tmp_path: Path) -> None:
    """The other store has a text of a fitted document under its test rows, and a near-duplicate of it."""
    first, second = corpus(0), corpus(1)
    folds = fold_of_documents(written(tmp_path / "one", first), FOLDS, 0)
    copy, near = documents_of(second, "test")[:2]
    hashes, groups = hashes_of(second), second.documents["group"].to_pylist()
    hashes[copy], groups[near] = next(iter(folds)), groups[copy]
    two = written(tmp_path / "two", with_documents(second, content_hash=hashes, group=groups))
    population = load_population(two, folds, "two")
    rows = np.isin(population.document, [copy, near])
    assert set(population.fold[rows].tolist()) == {folds[hashes[copy]]}
    assert set(population.fold[~rows].tolist()) == {UNSEEN}


@pytest.mark.parametrize("pair", [("fit", "gate"), ("fit", "test"), ("gate", "test")])
@pytest.mark.parametrize("what", ["group", "content_hash"])
def test_a_planted_leak_is_refused(pair: tuple[str, str], what: str, tmp_path: Path) -> None:
    data = corpus(0)
    one, other = (documents_of(data, split)[0] for split in pair)
    values = data.documents[what].to_pylist()
    values[other] = values[one]
    reader = written(tmp_path / "store", with_documents(data, **{what: values}))
    words = "group .* of near-duplicate documents" if what == "group" else f"content hash {values[one][:16]}"
    with pytest.raises(UsageError, match=f"store leaky: .*{words} is both in {pair[0]} and in {pair[1]}"):
        load_population(reader, fold_of_documents(reader, FOLDS, 0), "leaky")


def test_a_clean_store_is_not_refused(tmp_path: Path) -> None:
    reader = written(tmp_path / "store", corpus(0))
    population = load_population(reader, fold_of_documents(reader, FOLDS, 0), "clean")
    assert isinstance(population, Population)
    assert population.body.sum() > 1000

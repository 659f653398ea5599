"""Stores that are opened together belong together, or the difference is named and can be accepted by name."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers_store import Synthetic, begin, commit, synthetic
from nearline.analyze.fit import fit
from nearline.analyze.settings import parse
from nearline.store import Attributes, Reader, Study, UsageError
from nearline.store.comparable import DIFFERENCES, check_comparable, name_stores, open_together

SETTINGS: dict[str, Any] = {"n_layers": 2, "d": 8, "n_tokens": 1600, "block": 160}


def written(path: Path, data: Synthetic) -> Reader:
    writer = begin(path, data)
    for block in range(data.plan.n_blocks):
        commit(writer, data, block)
    writer.seal()
    return Reader.open(path)


def edited(path: Path, **sections: dict[str, Any]) -> Reader:
    """A store of another corpus of the same model, with some attributes changed."""
    data = synthetic(**SETTINGS, seed=1)
    changed: dict[str, Any] = {
        section: {**getattr(data.attributes, section), **values}
        if section == "policies"
        else dataclasses.replace(getattr(data.attributes, section), **values)
        for section, values in sections.items()
    }
    attributes: Attributes = dataclasses.replace(data.attributes, **changed)
    return written(path, dataclasses.replace(data, attributes=attributes))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return written(tmp_path_factory.mktemp("first") / "a", synthetic(**SETTINGS))


HASH = "ab" * 32
CHANGED: list[tuple[str, dict[str, Any], str]] = [
    (
        "weights",
        {"model": {"weights_hash": HASH}},
        r"a and b differ in weights \(digest: \w{12} and abababab",
    ),
    (
        "tokenizer",
        {"tokenizer": {"fingerprint": HASH}},
        r"differ in tokenizer \(fingerprint: \w{12} and abab",
    ),
    ("norms", {"norm": {"epsilons": (1e-5, 1e-6)}}, r"differ in norms \(layer 1: .*1e-05.* and .*1e-06"),
    ("policies", {"policies": {"nonfinite": "mask"}}, r"differ in policies \(nonfinite: stop and mask\)"),
    ("policies", {"plan": {"bos": "never"}}, r"differ in policies \(bos: always and never\)"),
    ("policies", {"policies": {"padding": "left"}}, r"differ in policies \(padding: none and left\)"),
    ("numerics", {"compute": {"dtype": "bfloat16"}}, r"numerics \(compute dtype: float32 and bfloat16\)"),
    ("numerics", {"compute": {"attention": "sdpa"}}, r"numerics \(attention: eager and sdpa\)"),
]


@pytest.mark.parametrize(
    ("kind", "sections", "words"), CHANGED, ids=[f"{c[0]}-{i}" for i, c in enumerate(CHANGED)]
)
def test_a_difference_is_refused_by_name_and_accepted_by_name(
    first: Reader,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    sections: dict[str, Any],
    words: str,
) -> None:
    readers = {"a": first, "b": edited(tmp_path / "b", **sections)}
    with pytest.raises(UsageError, match=words) as caught:
        check_comparable(readers)
    assert str(caught.value).endswith(f"allow=('{kind}',), or --allow {kind}")
    with pytest.raises(UsageError, match=words):
        check_comparable(readers, allow=set(DIFFERENCES) - {kind})
    with caplog.at_level(logging.WARNING, "nearline"):
        check_comparable(readers, allow=[kind])
    assert [record.message.endswith(f"(accepted by name: {kind})") for record in caplog.records] == [True]


def test_two_corpora_of_one_model_may_be_compared(
    first: Reader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = written(tmp_path / "b", synthetic(**SETTINGS, seed=1))
    third = written(tmp_path / "c", synthetic(**{**SETTINGS, "n_layers": 2, "layers": [1]}, seed=2))
    check_comparable({"a": first, "b": second, "c": third})
    check_comparable({"a": first})
    opened = open_together({"a": first, "b": tmp_path / "b"})
    assert list(opened) == ["a", "b"]
    assert opened["b"]["residual"].sizes["token"] == 1600
    assert not caplog.records


def test_a_list_of_stores_is_named_by_their_last_parts(
    first: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "b", synthetic(**SETTINGS, seed=1))
    monkeypatch.chdir(tmp_path)
    assert list(open_together([first.path, "b"])) == ["a", "b"]
    assert list(open_together([first, Path("b")])) == ["a", "b"]
    assert list(name_stores([first.place, ".", "file:b", "s3://bucket/c/", "hf://datasets/o/d"])) == [
        "a",
        tmp_path.name,
        "b",
        "c",
        "d",
    ]
    with pytest.raises(UsageError, match=r"two stores are called b \(b and x/b\): give them names"):
        open_together(["b", "x/b"])
    with pytest.raises(UsageError, match="'b' is one store: give a list"):
        open_together("b")


def test_sites_that_are_needed(first: Reader, tmp_path: Path) -> None:
    data = synthetic(**SETTINGS, seed=1)
    storage = dataclasses.replace(data.attributes.storage, sites=("residual", "mlp_output"))
    attributes = dataclasses.replace(data.attributes, storage=storage)
    sites = {name: data.sites[name] for name in storage.sites}
    stored = {name: data.stored[name] for name in storage.sites}
    second = written(
        tmp_path / "b", dataclasses.replace(data, attributes=attributes, sites=sites, stored=stored)
    )
    with pytest.raises(
        UsageError, match=r"b has no `embedding`, its sites are residual, mlp_output\..*sites"
    ):
        check_comparable({"a": first, "b": second})
    check_comparable({"a": first, "b": second}, sites=["residual", "mlp_output"])
    check_comparable({"a": first, "b": second}, allow=["sites"])


def with_documents(path: Path, documents: pa.Table) -> Reader:
    return written(path, dataclasses.replace(synthetic(**SETTINGS, seed=1), documents=documents))


def changed_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    index = table.column_names.index(name)
    return table.set_column(index, table.schema.field(name), pa.array(values, table.schema.field(name).type))


def sharing(first: Reader, n_shared: int) -> tuple[pa.Table, list[str]]:
    """Documents of another corpus of which `n_shared` are the first store's, each in another split than
    there; and their keys in the first store."""
    ours, theirs = first.documents.to_pylist(), synthetic(**SETTINGS, seed=1).documents
    hashes, splits, keys = theirs["content_hash"].to_pylist(), theirs["split"].to_pylist(), []
    for index in range(n_shared):
        twin = next(row for row in ours if row["split"] != splits[index] and row["key"] not in keys)
        keys.append(twin["key"])
        hashes[index] = twin["content_hash"]
    return changed_column(theirs, "content_hash", hashes), keys


def test_a_document_in_two_splits_is_refused(first: Reader, tmp_path: Path) -> None:
    documents, keys = sharing(first, 5)
    readers = {"wiki": first, "books": with_documents(tmp_path / "b", documents)}
    with pytest.raises(UsageError, match="5 documents stand in different splits") as caught:
        check_comparable(readers)
    message = str(caught.value)
    assert sum(f"'{key}'," in message for key in keys) == 3, "three are named"
    assert " in wiki and " in message
    assert " in books" in message
    assert message.endswith("allow=('documents',), or --allow documents")
    check_comparable(readers, allow=["documents"])


def test_a_shared_document_in_the_same_split_is_fine(first: Reader, tmp_path: Path) -> None:
    ours, theirs = first.documents, synthetic(**SETTINGS, seed=1).documents
    index = next(i for i, (a, b) in enumerate(zip(ours["split"], theirs["split"], strict=False)) if a == b)
    hashes = theirs["content_hash"].to_pylist()
    hashes[index] = ours["content_hash"][index].as_py()
    check_comparable(
        {"a": first, "b": with_documents(tmp_path / "b", changed_column(theirs, "content_hash", hashes))}
    )


def test_a_document_without_rows_counts_where_its_group_has_some(first: Reader, tmp_path: Path) -> None:
    """The shared text itself was not stored in b: alone in its group it leaks nothing, beside a stored twin
    it does."""
    documents, _ = sharing(first, 1)
    rows = documents["n_tokens"].to_pylist()
    rows[0] = 0
    empty = changed_column(documents, "n_tokens", rows)
    alone = changed_column(empty, "group", np.arange(documents.num_rows))
    check_comparable({"a": first, "b": with_documents(tmp_path / "alone", alone)})
    split = documents["split"].to_pylist()
    twin = next(i for i in range(1, documents.num_rows) if split[i] == split[0] and rows[i])
    groups = [number if number != twin else 0 for number in range(documents.num_rows)]
    beside = with_documents(tmp_path / "beside", changed_column(empty, "group", groups))
    with pytest.raises(UsageError, match="1 document stands in different splits"):
        check_comparable({"a": first, "b": beside})


def test_an_unknown_name_names_the_nearest(first: Reader) -> None:
    with pytest.raises(
        UsageError, match="allow='document' is no difference of stores: did you mean 'documents'"
    ):
        check_comparable({"a": first}, allow=["document"])


def test_what_was_chosen_of_a_corpus_is_no_difference_of_stores(first: Reader, tmp_path: Path) -> None:
    chosen = {
        "join": "wikitext",
        "documents": "first 1000",
        "include": HASH,
        "keep": "1/8",
        "pieces": "2048 tokens",
    }
    check_comparable({"a": first, "b": edited(tmp_path / "b", policies=chosen)})
    with pytest.raises(UsageError, match=r"policies \(exclude_tokens: none and 11\)"):
        check_comparable({"a": first, "c": edited(tmp_path / "c", policies={"exclude_tokens": "11"})})


def test_several_differences_come_in_one_refusal(first: Reader, tmp_path: Path) -> None:
    second = edited(tmp_path / "b", compute={"dtype": "bfloat16"}, policies={"nonfinite": "mask"})
    with pytest.raises(UsageError, match=r"policies.*; .*numerics.*--allow policies,numerics"):
        check_comparable({"a": first, "b": second})


def test_a_fit_refuses_and_keeps_what_was_allowed(first: Reader, tmp_path: Path) -> None:
    documents, _ = sharing(first, 2)
    stores = {"a": first.path, "b": with_documents(tmp_path / "b", documents).path}
    quick = {"folds": 2, "alphas": [0.1], "examples": 0}
    with pytest.raises(UsageError, match=r"2 documents stand in different splits.*--allow documents"):
        fit(tmp_path / "study", stores, parse(quick))
    assert not (tmp_path / "study").exists()
    study = fit(tmp_path / "study", stores, parse({**quick, "allow": "documents"}))
    assert study.provenance()["fit"]["settings"]["allow"] == ["documents"]
    assert Study.open(tmp_path / "study").settings()["allow"] == ["documents"]
    plain = fit(tmp_path / "plain", {"a": stores["a"]}, parse(quick))
    assert "allow" not in plain.provenance()["fit"]["settings"]


@pytest.mark.parametrize(
    ("section", "name", "kind"),
    [("model", "weights_hash", "weights"), ("tokenizer", "fingerprint", "tokenizer")],
)
def test_a_study_holds_one_model_whatever_is_allowed(
    first: Reader, tmp_path: Path, section: str, name: str, kind: str
) -> None:
    stores = {"a": first.path, "b": edited(tmp_path / "b", **{section: {name: HASH}}).path}
    with pytest.raises(UsageError, match=f"differ in {kind}.*make one for each model"):
        fit(tmp_path / "study", stores, parse({"allow": ["documents", "policies", "numerics", "norms"]}))
    with pytest.raises(UsageError, match=f"allow='{kind}': input should be 'norms', 'policies'"):
        parse({"allow": kind})

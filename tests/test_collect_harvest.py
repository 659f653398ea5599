"""A harvest stores what the model did: the numbers of one plain forward pass per sequence."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_harvest import files_of, harvested, plain_forward, texts
from helpers_models import FAMILIES, tiny_model, tiny_tokenizer
from nearline.collect import Document, harvest
from nearline.store import Reader
from nearline.store.errors import UsageError

# Other batch shapes sum the same float32 products in another order: some 1e-7 of the largest value per layer.
TOLERANCE = 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_values_equal_plain_forward_passes(family: str, tmp_path: Path) -> None:
    model, _ = tiny_model(family)
    reader = Reader.open(harvested(tmp_path / "store", model=model, storage_dtype="float32", bos="always"))
    token, target, nll = (reader.column(name) for name in ("token_id", "target_id", "nll"))
    stored = {site: values_of(reader, site) for site in ("residual", "mlp_output", "embedding")}
    for row0, row1 in zip(reader.plan.row_offsets[:-1], reader.plan.row_offsets[1:], strict=True):
        rows = slice(int(row0), int(row1))
        wanted = plain_forward(family, model, token[rows])
        for site, values in stored.items():
            scale = np.abs(wanted[site]).max()
            np.testing.assert_allclose(
                values[:, rows], wanted[site], rtol=0, atol=TOLERANCE * scale, err_msg=site
            )
        has_target = target[rows] >= 0
        losses = -wanted["log_p"][np.flatnonzero(has_target), target[rows][has_target]]
        np.testing.assert_allclose(nll[rows][has_target], losses, rtol=TOLERANCE, atol=TOLERANCE)
    assert (np.isnan(nll) == (target < 0)).all()
    assert reader.column("valid").all()


def values_of(reader: Reader, site: str) -> np.ndarray:
    """A whole site as (layer, token, feature); the embedding counts as one layer."""
    if site == "embedding":
        return reader.rows(site, None, 0, reader.n_blocks)[None]
    return np.stack([reader.rows(site, layer, 0, reader.n_blocks) for layer in reader.layers])


def test_batching_changes_nothing_but_rounding(tmp_path: Path) -> None:
    wide = Reader.open(harvested(tmp_path / "wide", storage_dtype="float32", batch_tokens=400))
    narrow = Reader.open(harvested(tmp_path / "narrow", storage_dtype="float32", batch_tokens=24))
    assert wide.plan.sequence_batch.max() < narrow.plan.sequence_batch.max()
    assert (wide.column("token_id") == narrow.column("token_id")).all()
    for site in ("residual", "mlp_output", "embedding"):
        np.testing.assert_allclose(values_of(wide, site), values_of(narrow, site), rtol=0, atol=1e-4)


@pytest.mark.parametrize("storage_dtype", ["float16", "bfloat16"])
def test_narrow_storage_is_the_cast_of_the_wide_one_to_the_bit(storage_dtype: str, tmp_path: Path) -> None:
    wide = Reader.open(harvested(tmp_path / "wide", storage_dtype="float32"))
    narrow = Reader.open(harvested(tmp_path / "narrow", storage_dtype=storage_dtype))
    for site in ("residual", "mlp_output", "embedding"):
        cast = torch.from_numpy(values_of(wide, site)).to(getattr(torch, storage_dtype)).float().numpy()
        np.testing.assert_array_equal(values_of(narrow, site), cast)


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", "float16"), ("bfloat16", "bfloat16"), ("float16", "float16")]
)
def test_the_storage_dtype_follows_the_compute_dtype(dtype: str, stored: str, tmp_path: Path) -> None:
    model, _ = tiny_model("gpt2", dtype=getattr(torch, dtype))
    reader = Reader.open(harvested(tmp_path / "store", model=model))
    assert reader.storage_dtype == stored
    assert reader.attributes.compute.dtype == dtype


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (files_of(harvested(tmp_path / name), without=("runs",)) for name in ("one", "two"))
    assert first.pop("README.md") != second.pop("README.md"), "the card names its folder"
    assert first == second
    assert {"SEALED", "manifest.json", "plan.json", "documents.parquet", "vocabulary.parquet"} < set(first)


def test_a_subset_of_layers_keeps_its_numbers(tmp_path: Path) -> None:
    every = Reader.open(harvested(tmp_path / "all"))
    some = Reader.open(harvested(tmp_path / "some", layers=[0, 2]))
    assert list(some.layers) == [0, 2]
    for layer in (0, 2):
        found, wanted = (reader.rows("mlp_output", layer, 0, 3) for reader in (some, every))
        np.testing.assert_array_equal(found, wanted)
    weights = every.affine("norm_weight")
    assert weights is not None
    np.testing.assert_array_equal(some.affine("norm_weight"), weights[[0, 2]])


def test_tables_and_counts_agree_with_the_rows(tmp_path: Path) -> None:
    reader = Reader.open(harvested(tmp_path / "store"))
    documents, vocabulary = reader.documents, reader.vocabulary
    stored = np.bincount(reader.column("document"), minlength=documents.num_rows)
    assert (documents["n_tokens"].to_numpy() == stored).all()
    counts = dict(zip(*np.unique(reader.column("token_id"), return_counts=True), strict=True))
    listed = dict(zip(vocabulary["token_id"].to_pylist(), vocabulary["count"].to_pylist(), strict=True))
    assert {token: count for token, count in listed.items() if count} == counts
    assert set(reader.column("target_id").tolist()) - {-1} <= set(listed)
    assert (
        reader.column("special") == np.isin(reader.column("token_id"), tiny_tokenizer().all_special_ids)
    ).all()


def test_block_records_hold_the_size_of_what_was_stored(tmp_path: Path) -> None:
    reader = Reader.open(harvested(tmp_path / "store", storage_dtype="float32"))
    record = reader.record(1).statistics
    for site in ("residual", "mlp_output", "embedding"):
        values = values_of(reader, site)[:, slice(*reader.block_range(1))]
        np.testing.assert_array_equal(record[site]["max_abs"], np.abs(values).max(axis=(1, 2)))
        mean_square = np.square(values.astype(np.float64)).mean(axis=(1, 2))
        np.testing.assert_allclose(
            np.array(record[site]["mean_square"]), mean_square, rtol=1e-5
        )  # float32 sums
        assert record[site]["n_nonfinite"] == record[site]["n_out_of_range"] == [0] * len(values)


def test_the_live_model_comes_back_as_it_was(tmp_path: Path) -> None:
    model, _ = tiny_model("gpt_neox")
    model.train()
    model.gpt_neox.layers[1].eval()
    before = [module.training for module in model.modules()]
    threads = torch.get_num_threads()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    reader = Reader.open(harvested(tmp_path / "store", model=model, threads=1))
    assert reader.attributes.compute.torch_threads == 1
    assert [module.training for module in model.modules()] == before
    assert torch.get_num_threads() == threads
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_documents_may_be_texts_pairs_or_documents(tmp_path: Path) -> None:
    words = texts()
    mixed = [*words[:20], *[(f"pair {n}", text) for n, text in enumerate(words[20:40])]]
    mixed += [Document(f"whole {n}", text) for n, text in enumerate(words[40:])]
    model, tokenizer = tiny_model("llama")[0], tiny_tokenizer()
    path = harvest(model, tokenizer, mixed, tmp_path / "store", tokens=300, name="mine", corpus="talk")
    reader = Reader.open(path)
    assert {"pair 0", "whole 19", "000003"} < set(reader.documents["key"].to_pylist())
    assert (reader.attributes.model.name, reader.attributes.corpus.spec) == ("mine", "talk")


def test_unknown_overrides_name_the_nearest_setting(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown setting 'token': did you mean 'tokens'"):
        harvest(tiny_model("llama")[0], tiny_tokenizer(), texts(), tmp_path / "store", token=5)
    assert not (tmp_path / "store").exists()


def test_progress_counts_every_token_once(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int, str]] = []
    harvested(tmp_path / "store", progress=lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    assert done == sorted(set(done))
    assert calls[-1] == ("collect", 900, 900, "tokens")

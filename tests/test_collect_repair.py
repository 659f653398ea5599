"""A damaged store is made whole again: to the same bytes where this machine gives them, else to the same
values, said so in its lineage; where it is another model, corpus or machine, it is left as it is."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_disk import open_temporaries
from helpers_harvest import files_of, texts
from helpers_models import tiny_model, tiny_tokenizer
from helpers_store import begin, commit, make_store, synthetic
from nearline.collect import collect, corpora, damage, harvest, models, parse_settings
from nearline.collect.likeness import _statistics_errors, require_alike
from nearline.collect.repairing import Repaired, repair
from nearline.collect.resealing import record_of
from nearline.store import Reader, durable, points, seal, silent
from nearline.store.errors import DamageError, EnvironmentFault, FormatError, IncompleteError, UsageError
from nearline.store.manifest import MANIFEST, parse_manifest
from nearline.store.places import _LocalFile
from nearline.store.verify import verify

SETTINGS: dict[str, Any] = {
    "tokens": 300,
    "sequence_length": 24,
    "min_length": 4,
    "batch_tokens": 48,
    "block": 50,
    "threads": 1,
    "storage_dtype": "float32",
}
ZARR = "activations.zarr"
SITES = ("residual", "mlp_output")


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("sealed") / "store")


def made(path: Path, **changes: Any) -> Path:
    return harvest(tiny_model("llama")[0], tiny_tokenizer(), texts(), path, **{**SETTINGS, **changes})


@pytest.fixture
def store(sealed: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return shutil.copytree(sealed, tmp_path / "store")


def repaired(store: Path, model: Any = None, documents: list[str] | None = None) -> Repaired:
    loaded = models.describe(model or tiny_model("llama")[0], tiny_tokenizer())
    return repair(store, model=loaded, corpus=corpora.from_documents(documents or texts()))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def whole(path: Path) -> dict[str, bytes]:
    return files_of(path, without=("runs", "README.md"))


def elsewhere(relative: float) -> Any:
    """The same model on a machine that computes a little differently: each MLP's output is off by so much."""
    model, _ = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: output * (1 + relative))
    return model


def site_chunks(store: Path, block: int) -> list[Path]:
    found = [path for site in SITES for path in (store / ZARR / site / "c").glob(f"*/{block}/0")]
    return [*found, store / ZARR / f"embedding/c/{block}/0"]


# ---- the same bytes

DAMAGE: dict[str, list[str]] = {
    "a site": [f"{ZARR}/residual/c/1/2/0"],
    "two blocks": [f"{ZARR}/mlp_output/c/0/0/0", f"{ZARR}/embedding/c/5/0"],
    "a measured column": [f"{ZARR}/nll/c/1"],
    "a column of the plan": [f"{ZARR}/token_id/c/4"],
    "a record": ["blocks/000003.json"],
    "a record and a chunk of its block": ["blocks/000003.json", f"{ZARR}/residual/c/0/3/0"],
    "the plan": ["plan.json"],
    "tables": ["documents.parquet", "vocabulary.parquet"],
    "metadata of arrays": [f"{ZARR}/residual/zarr.json", f"{ZARR}/norm_weight/zarr.json"],
    "a small array": [f"{ZARR}/norm_weight/c/0/0", f"{ZARR}/layer/c/0"],
    "the attributes": [f"{ZARR}/zarr.json"],
    "the manifest": ["manifest.json"],
    "the seal": ["SEALED"],
    "the seal and a chunk": ["SEALED", f"{ZARR}/residual/c/1/2/0"],
    "nearly everything": [
        f"{ZARR}/zarr.json",
        "plan.json",
        "documents.parquet",
        f"{ZARR}/residual/zarr.json",
        "blocks/000000.json",
        f"{ZARR}/embedding/c/0/0",
        f"{ZARR}/valid/c/5",
    ],
}


@pytest.mark.parametrize("names", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_undone_to_the_byte(names: list[str], sealed: Path, store: Path) -> None:
    # Every other case loses its files instead (but for SEALED: a store without it was never finished).
    lose = list(DAMAGE.values()).index(names) % 2 == 1 and "SEALED" not in names
    for name in names:
        (store / name).unlink() if lose else flip(store / name)
    assert not verify(store, level="full").whole
    done = repaired(store)
    assert whole(store) == whole(sealed)
    assert verify(store, level="full").whole
    assert (done.digest, done.parent) == (Reader.open(sealed).digest, None)
    assert (done.changed, done.largest_error) == ((), None)
    assert set(done.files) == set(names)
    assert not (store / "runs/repairing").exists()


def test_a_whole_store_needs_no_model(sealed: Path, store: Path) -> None:
    done = repair(store, model="no/such-model", corpus="no:corpus")
    assert done.note == "nothing to do: every file is what was sealed"
    assert (done.files, done.blocks, done.parent) == ((), (), None)
    assert files_of(store) == files_of(sealed)


def test_metadata_of_arrays_needs_no_model(sealed: Path, store: Path) -> None:
    flip(store / ZARR / "residual/zarr.json")
    done = repair(store, model="no/such-model", corpus="no:corpus")
    assert whole(store) == whole(sealed)
    assert done.note == "1 file put back: the store is as it was sealed"


def test_a_block_that_is_gone_comes_back(sealed: Path, store: Path) -> None:
    for key in Reader.open(store).record(2).chunks:
        (store / ZARR / key).unlink()
    (store / "blocks/000002.json").unlink()
    done = repaired(store)
    assert whole(store) == whole(sealed)
    assert done.blocks == (2,)
    assert done.note.endswith("block 2 collected again: the store is as it was sealed")


# ---- other bytes, the same values


def lineage(store: Path) -> list[dict[str, Any]]:
    return list(Reader.open(store).attributes.lineage)


@pytest.mark.parametrize("compressor", [None, "zstd"])
def test_a_block_of_another_machine_is_recorded(compressor: str | None, tmp_path: Path) -> None:
    store = made(tmp_path / "store", compressor=compressor)
    before, sealed = whole(store), Reader.open(store)
    parent, values = sealed.digest, sealed.rows("mlp_output", 1, 0, sealed.n_blocks)
    flip(store / f"{ZARR}/mlp_output/c/1/2/0")
    flip(store / f"{ZARR}/embedding/c/4/0")
    done = repaired(store, elsewhere(1e-5))
    assert (done.blocks, done.changed, done.parent) == ((2, 4), (2,), parent), "block 4 came out the same"
    assert done.digest == Reader.open(store).digest != parent
    assert done.largest_error is not None
    assert 0 < done.largest_error < 1e-3
    assert "block 2 has other bytes now" in done.note
    assert lineage(store) == [{"kind": "repaired", "blocks": [2], "parent": parent}]
    assert verify(store, level="full").whole
    now = whole(store)
    changed = {name for name in before if now[name] != before[name]}
    others = {"SEALED", "manifest.json", f"{ZARR}/zarr.json", "blocks/000002.json"}
    assert {name for name in changed - others if "/2/0" not in name and not name.endswith("/c/2")} == set()
    again = Reader.open(store)
    np.testing.assert_allclose(again.rows("mlp_output", 1, 0, again.n_blocks), values, rtol=1e-3, atol=1e-5)


def test_two_repairs_are_two_entries_and_collect_is_content(store: Path) -> None:
    first = Reader.open(store).digest
    flip(store / f"{ZARR}/mlp_output/c/1/2/0")
    flip(store / f"{ZARR}/residual/c/2/3/0")
    second = repaired(store, elsewhere(1e-5)).digest
    flip(store / f"{ZARR}/mlp_output/c/1/0/0")
    repaired(store, elsewhere(-1e-5))
    assert lineage(store) == [
        {"kind": "repaired", "blocks": [2, 3], "parent": first},
        {"kind": "repaired", "blocks": [0], "parent": second},
    ]
    before = whole(store)
    made(store)
    assert whole(store) == before


@pytest.mark.parametrize("relative", [0.01, float("nan")])
def test_other_values_are_refused(relative: float, sealed: Path, store: Path) -> None:
    """Beyond the tolerance; and a plausible block, but of other rows."""
    if relative == relative:
        model = elsewhere(relative)
    else:
        model, _ = tiny_model("llama")
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output.roll(1, dims=-1))
    flip(store / f"{ZARR}/mlp_output/c/1/2/0")
    before = whole(store)
    with pytest.raises(DamageError, match="block 2 collected again is not the block that was lost") as caught:
        repaired(store, model)
    assert caught.value.exit_code == 1
    assert "allowed 0.001; nothing was changed" in str(caught.value)
    assert whole(store) == before
    assert not (store / "runs/repairing").exists()


def test_without_any_value_left_the_statistics_decide(store: Path, sealed: Path) -> None:
    for path in site_chunks(store, 2):
        flip(path)
    before = whole(store)
    with pytest.raises(DamageError, match=r"`mlp_output` differs by 0\.0"):
        repaired(store, elsewhere(0.02))
    assert whole(store) == before
    assert repaired(store, elsewhere(1e-5)).changed == (2,)
    assert verify(store, level="full").whole
    (store / "blocks/000003.json").unlink()
    for path in site_chunks(store, 3):
        flip(path)
    with pytest.raises(DamageError, match="block 3 has lost its record and all its values"):
        repaired(store, elsewhere(1e-5))


def test_without_the_record_the_values_decide(store: Path) -> None:
    (store / "blocks/000002.json").unlink()
    flip(store / f"{ZARR}/mlp_output/c/1/2/0")
    with pytest.raises(DamageError, match="is not the block that was lost"):
        repaired(store, elsewhere(0.02))
    assert repaired(store, elsewhere(1e-5)).changed == (2,)
    assert verify(store, level="full").whole


class Crash(Exception):
    """A process that ends here."""


@pytest.mark.parametrize("point", ["staged", "ready", "half_moved", "moved"])
def test_a_repair_that_dies_is_finished_by_the_next(
    point: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(store / f"{ZARR}/mlp_output/c/1/2/0")
    parent = Reader.open(store).digest

    def crash(name: str) -> None:
        if name == f"replacing.{point}":
            raise Crash

    monkeypatch.setattr(points, "hook", crash)
    with pytest.raises(Crash):
        repaired(store, elsewhere(1e-5))
    monkeypatch.undo()
    repaired(store, elsewhere(1e-5))
    assert verify(store, level="full").whole
    assert lineage(store) == [{"kind": "repaired", "blocks": [2], "parent": parent}]


# ---- what is refused


def another_model() -> Any:
    model, _ = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    return model


def test_another_model_or_corpus_is_refused(sealed: Path, store: Path) -> None:
    flip(store / f"{ZARR}/residual/c/1/2/0")
    before = whole(store)
    with pytest.raises(UsageError, match="the weights of the model are not those that the store"):
        repaired(store, another_model())
    with pytest.raises(UsageError, match="the texts of the corpus are not those"):
        repaired(store, documents=texts()[:-1])
    with pytest.raises(UsageError, match="the tokenizer are not those"):
        repair(
            store,
            model=models.describe(tiny_model("llama")[0], tiny_tokenizer(150)),
            corpus=corpora.from_documents(texts()),
        )
    assert whole(store) == before


def test_an_unsealed_store_is_collects_business(store: Path) -> None:
    (store / "SEALED").unlink()
    with pytest.raises(IncompleteError, match="is not sealed; the same `nearline collect` command"):
        repaired(store)


def test_damage_that_nothing_vouches_for_is_refused(store: Path) -> None:
    (store / "manifest.json").unlink()
    flip(store / "plan.json")
    before = whole(store)
    with pytest.raises(DamageError, match="nothing says any more what was sealed; restore the store"):
        repaired(store)
    assert whole(store) == before


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_only_an_error_of_the_file_itself_is_damage(
    number: int, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, file_digest = damage.anchor_of(store).manifest, damage.file_digest
    chunk = f"{ZARR}/residual/c/1/2/0"

    def failing(path: Path) -> str:
        if path == store / chunk:
            raise OSError(number, "injected")
        return file_digest(path)

    monkeypatch.setattr(damage, "file_digest", failing)
    if number == errno.EIO:
        found = damage.find_damage(store, manifest, silent)
        assert found.chunks == {2: {"residual/c/1/2/0"}}
        return
    before = whole(store)
    with pytest.raises(EnvironmentFault, match=f"{chunk}: cannot be read"):
        repaired(store)
    assert whole(store) == before


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_so_it_is_with_small_files(number: int, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = damage.anchor_of(store).manifest

    def failing(self: _LocalFile, view: memoryview) -> int:
        raise OSError(number, "injected")

    monkeypatch.setattr(_LocalFile, "readinto", failing)
    if number == errno.EIO:
        assert damage.find_damage(store, manifest, silent).blocks == list(range(manifest.n_blocks))
        return
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        damage.find_damage(store, manifest, silent)


def test_a_manifest_with_absurdly_many_blocks_is_refused(sealed: Path) -> None:
    """Whoever reads it may make a list of them."""
    found = json.loads((sealed / MANIFEST).read_bytes())
    parse_manifest(found, "here")
    with pytest.raises(FormatError, match="n_blocks"):
        parse_manifest(found | {"n_blocks": 10**12}, "here")


@pytest.mark.parametrize("link", ["runs", "runs/repairing"])
def test_a_scratch_folder_that_is_a_link_is_not_emptied(link: str, store: Path, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "mine").mkdir()
    (elsewhere / "repairing").mkdir()
    (elsewhere / "repairing" / "precious").write_text("mine")
    if link == "runs":
        shutil.rmtree(store / "runs", ignore_errors=True)
    else:
        (store / "runs").mkdir(exist_ok=True)
    (store / link).symlink_to(elsewhere, target_is_directory=True)
    flip(store / f"{ZARR}/residual/c/1/2/0")
    with pytest.raises(UsageError, match=f"{link} is a link"):
        repaired(store)
    assert [path.name for path in elsewhere.rglob("*")] == ["repairing", "precious"]


def test_a_repair_needs_few_open_files(sealed: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in Reader.open(store).record(2).chunks:
        (store / ZARR / key).unlink()
    temporary, numbers = durable._temporary, list[int]()

    def counted(path: Path) -> Any:
        pending = temporary(path)
        if "repairing" not in path.parts:
            numbers.append(open_temporaries())
        return pending

    monkeypatch.setattr(durable, "_temporary", counted)
    monkeypatch.setattr(durable, "OPEN_FILES", 3)
    repaired(store)
    assert whole(store) == whole(sealed)
    assert len(numbers) > 12
    assert max(numbers) == 3


@pytest.mark.parametrize("kept", ["values", "statistics"])
def test_a_block_that_comes_out_not_finite_is_another_block(kept: str, tmp_path: Path) -> None:
    """Rows that are not finite have no error to measure: that they were finite before has to count."""
    settings: dict[str, Any] = {"n_layers": 1, "d": 4, "n_tokens": 60, "block": 20, "sequence_length": 10}
    store, data = make_store(tmp_path / "store", **settings), synthetic(**settings)
    for values in data.stored.values():  # and of `sites`, in this dtype
        values[..., 20:40, :] = np.nan
    if kept == "values":  # the statistics say nothing about it
        data.sites.update(synthetic(**settings).sites)
    else:
        data.sites.update({name: values.copy() for name, values in data.stored.items()})
    writer = begin(tmp_path / "new", data)
    commit(writer, data, 1)
    new = Reader.open(tmp_path / "new", require_seal=False)
    record = record_of(store, 1, new)
    sites = {key for key in record.chunks if key.startswith((*SITES, "embedding"))}
    bad = {"residual/c/0/1/0"} if kept == "values" else sites
    with pytest.raises(DamageError, match=r"differs by inf \(relative\)"):
        require_alike(store, 1, record, bad, new)


def test_another_number_of_values_that_are_not_finite_is_another_block(store: Path) -> None:
    """Where one value was not finite, magnitudes are null, whatever became of the others."""
    record = Reader.open(store).record(1)
    none: dict[str, list[Any]] = {"max_abs": [None], "mean_square": [None]}
    one = dataclasses.replace(record, statistics={"residual": {**none, "n_nonfinite": [4]}})
    assert _statistics_errors(one, one)["n_nonfinite of `residual`"] == 0.0
    other = dataclasses.replace(one, statistics={"residual": {**none, "n_nonfinite": [5]}})
    assert _statistics_errors(one, other)["n_nonfinite of `residual`"] == float("inf")


# ---- by name


def test_model_and_corpus_are_found_by_the_names_of_the_last_run(tmp_path: Path) -> None:
    tiny_model("llama")[0].save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts()))
    given = {**SETTINGS, "model": str(tmp_path / "model"), "corpus": f"jsonl:{corpus}:body", "max_time": "1h"}
    store = collect(parse_settings(given), tmp_path / "store").path
    before = whole(store)
    flip(store / f"{ZARR}/residual/c/1/2/0")
    assert repair(store).blocks == (2,)
    assert whole(store) == before
    flip(store / f"{ZARR}/zarr.json")
    assert repair(store).files == (f"{ZARR}/zarr.json",)
    assert whole(store) == before
    shutil.rmtree(store / "runs")
    flip(store / f"{ZARR}/residual/c/1/2/0")
    with pytest.raises(UsageError, match=r"corpus\.jsonl: no such file"):
        repair(store)
    done = repair(store, model=str(tmp_path / "model"), corpus=f"jsonl:{corpus}:body")
    assert done.blocks == (2,)
    assert whole(store) == before


def test_what_a_run_was_allowed_to_do_is_not_taken_over(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(store / f"{ZARR}/zarr.json")
    evil = {**SETTINGS, "model": "evil/model", "trust_remote_code": True, "allow_pickle": True}
    (store / "runs/99999999T000000Z-0.json").write_text(
        json.dumps({"settings": {**evil, "corpus": "docs:python"}})
    )
    seen: list[dict[str, Any]] = []

    def load(model: str, **options: Any) -> Any:
        seen.append({"model": model, **options})
        raise UsageError("not loaded")

    monkeypatch.setattr(models, "load", load)
    with pytest.raises(UsageError, match="not loaded"):
        repair(store)
    assert not seen[0].get("trust_remote_code")
    assert not seen[0].get("allow_pickle")


@pytest.mark.parametrize("name", ["manifest.json", "SEALED"])
def test_a_seal_that_is_made_anew_is_named(name: str, sealed: Path, store: Path) -> None:
    (store / name).write_bytes(b"")
    result = repair(store)
    assert result.files == (name,)
    assert result.note == "1 file put back: the store is as it was sealed"
    assert files_of(store) == files_of(sealed)


def test_when_nothing_vouches_any_more_a_way_out_is_named(sealed: Path, store: Path) -> None:
    for name in ("manifest.json", "SEALED"):
        (store / name).write_bytes(b"")
    with pytest.raises(DamageError, match=r"both damaged.*remove both and run `nearline seal"):
        seal(store)
    with pytest.raises(DamageError, match="restore the store from a copy"):
        repair(store)
    for name in ("manifest.json", "SEALED"):
        (store / name).unlink()
    assert seal(store) == Reader.open(sealed).digest


# ---- experts


def rerouted(n_rows: int) -> Any:
    """A tiny mixtral on a machine whose rounding sends the first rows of a pass to other experts, from the
    MLP of layer 1 on. Passes of the proof are smaller than those it strikes."""
    model, _ = tiny_model("mixtral")
    model = model.to(torch.bfloat16)

    def reroute(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        changed = output.clone()
        rows = changed.reshape(-1, changed.shape[-1])
        rows[: n_rows if len(rows) > 72 else 0] *= -1.5
        return changed

    if n_rows:
        model.model.layers[1].mlp.register_forward_hook(reroute)
    return model


@pytest.mark.parametrize("lost", ["a chunk", "all values"])
def test_single_rows_at_other_experts_are_the_same_block(lost: str, tmp_path: Path) -> None:
    """As the start-up proof has it: in 16 bits, the typical row decides behind the first router."""
    settings = {**SETTINGS, "batch_tokens": 120, "block": 100}
    store = harvest(rerouted(0), tiny_tokenizer(), texts(), tmp_path / "store", **settings)
    chunks = site_chunks(store, 2) if lost == "all values" else [store / f"{ZARR}/residual/c/2/2/0"]
    for path in chunks:
        flip(path)
    before = whole(store)
    with pytest.raises(DamageError, match="collected again is not the block that was lost"):
        repaired(store, rerouted(10_000))
    assert whole(store) == before
    assert repaired(store, rerouted(2)).changed == (2,)
    assert verify(store, level="full").whole

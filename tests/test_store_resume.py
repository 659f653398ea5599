"""Going on with a store: the same bytes whatever was interrupted; other settings are refused and named."""

import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers_points import Crash, flip, some, states
from helpers_store import Synthetic, begin, commit, make_store, synthetic, tree, write_all
from nearline.store import (
    DamageError,
    NearlineError,
    Plan,
    PlanFacts,
    Reader,
    StoreNotSealed,
    UsageError,
    durable,
    info,
    points,
    seal,
)
from nearline.store.beginning import claim_store
from nearline.store.replacing import replace_together

pytestmark = pytest.mark.sampled
SETTINGS: dict[str, Any] = {"n_tokens": 60, "block": 10, "n_layers": 1, "d": 4, "sequence_length": 10}
DATA = synthetic(**SETTINGS)
CHUNK = "activations.zarr/residual/c/0/{}/0"


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these stores has to survive a power cut."""
    monkeypatch.setattr(durable.os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return tree(make_store(tmp_path_factory.mktemp("calm") / "s", **SETTINGS))


def begun(path: Path, blocks: range) -> Path:
    return make_store(path, seal=False, blocks=blocks, **SETTINGS)


# Settings


def _with(section: str, **changes: Any) -> Callable[[Synthetic], Synthetic]:
    def change(data: Synthetic) -> Synthetic:
        found = getattr(data.attributes, section)
        new = {**found, **changes} if isinstance(found, dict) else dataclasses.replace(found, **changes)
        return dataclasses.replace(data, attributes=dataclasses.replace(data.attributes, **{section: new}))

    return change


def _plan(**changes: Any) -> Callable[[Synthetic], Synthetic]:
    def change(data: Synthetic) -> Synthetic:
        plan = dataclasses.replace(data.plan, **changes)
        facts = PlanFacts.of(plan, data.attributes.plan.bos)
        attributes = dataclasses.replace(data.attributes, plan=facts)
        return dataclasses.replace(data, plan=plan, attributes=attributes)

    return change


def _made(**changes: Any) -> Callable[[Synthetic], Synthetic]:
    return lambda data: synthetic(**{**SETTINGS, **changes})


def _swapped(plan: Plan) -> np.ndarray:
    return plan.document[::-1].copy()


CHANGES: dict[str, tuple[Callable[[Synthetic], Synthetic], str]] = {
    "model": (_with("model", name="another"), "`model.name` = 'synthetic', this run has 'another'"),
    "revision": (_with("model", revision="main"), "`model.revision` = None, this run has 'main'"),
    "weights": (_with("model", weights_hash="0" * 64), "weights of the model, `model.weights_hash` = '"),
    "config": (_with("model", config_hash="0" * 64), "configuration of the model"),
    "tokenizer": (_with("tokenizer", fingerprint="0" * 64), "the tokenizer, `tokenizer.fingerprint`"),
    "tokenizer ids": (_with("tokenizer", ids=(1, 2)), "`tokenizer.ids` = [1, 2, 3], this run has [1, 2]"),
    "corpus": (_with("corpus", spec="other.txt"), "`corpus.spec` = 'synthetic:0', this run has 'other.txt'"),
    "texts": (_with("corpus", content_hash="0" * 64), "the texts of the corpus, `corpus.content_hash`"),
    "passages": (_with("corpus", passages=True), "`corpus.passages` = False, this run has True"),
    "tokens": (_made(n_tokens=50), "`plan.n_tokens` = 60, this run has 50"),
    "block": (_made(block=20), "`plan.block` = 10, this run has 20"),
    "sequence length": (_plan(sequence_length=12), "`plan.sequence_length` = 10, this run has 12"),
    "seed": (_plan(seed=3), "`plan.seed` = 0, this run has 3"),
    "batch": (_plan(batch_tokens=99), "`plan.batch_tokens` = 40, this run has 99"),
    "order": (_plan(document=_swapped(DATA.plan)), "the order of the rows, `plan.digest`"),
    "storage dtype": (_made(storage_dtype="float16"), "`storage.dtype` = 'float32', this run has 'float16'"),
    "layers": (_made(layers=[1]), "`model.n_layers` = 1, this run has 2"),
    "compressor": (_made(compressor="zstd"), "`storage.compressor` = None, this run has 'zstd'"),
    "compute dtype": (_with("compute", dtype="bfloat16"), "`compute.dtype` = 'float32'"),
    "attention": (_with("compute", attention="sdpa"), "`compute.attention` = 'eager', this run has 'sdpa'"),
    "device": (_with("compute", device_type="cuda"), "`compute.device_type` = 'cpu', this run has 'cuda'"),
    "threads": (_with("compute", torch_threads=2), "the number of threads, `compute.torch_threads` = 1"),
    "policy": (_with("policies", nonfinite="mask"), "`policies.nonfinite` = 'stop', this run has 'mask'"),
    "version": (_with("versions", numpy="3"), "`versions.numpy` = '2', this run has '3'"),
    "new version": (_with("versions", torch="3"), "`versions.torch` = 'nothing', this run has '3'"),
}


@pytest.mark.parametrize(
    ("name", "sealed"), [*((name, False) for name in CHANGES), ("weights", True), ("order", True)]
)
def test_a_changed_setting_is_refused_and_named_and_nothing_is_touched(
    tmp_path: Path, name: str, sealed: bool
) -> None:
    path = make_store(tmp_path / "s", **SETTINGS) if sealed else begun(tmp_path / "s", range(3))
    before = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.rglob("*")}
    change, message = CHANGES[name]
    with pytest.raises(UsageError) as caught:
        begin(path, change(DATA))
    assert message in str(caught.value)
    assert "name a new folder" in str(caught.value)
    assert str(path) in str(caught.value)
    after = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.rglob("*")}
    assert after == before


def test_hashes_are_shown_short_and_still_differ(tmp_path: Path) -> None:
    path = begun(tmp_path / "s", range(1))
    weights = DATA.attributes.model.weights_hash
    with pytest.raises(UsageError) as caught:
        begin(path, _with("model", weights_hash=weights[:-1] + "0")(DATA))
    assert weights in str(caught.value)  # the first twelve digits would say nothing
    with pytest.raises(UsageError) as caught:
        begin(path, _with("model", weights_hash="0" * 64)(DATA))
    assert f"'{weights[:12]}', this run has '000000000000'" in str(caught.value)


def test_errors_of_the_proof_may_differ_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, calm: dict[str, bytes]
) -> None:
    path = begun(tmp_path / "s", range(3))
    with caplog.at_level(logging.WARNING, "nearline"):
        write_all(path, _with("proof", norm_error=1e-9)(DATA))
    assert "`proof.norm_error` is 0.0 in the store and 1e-09 in this run" in caplog.text
    assert tree(path) == calm  # the store keeps its own


@pytest.mark.parametrize("table", ["documents", "vocabulary"])
def test_another_table_under_the_same_attributes_is_refused(tmp_path: Path, table: str) -> None:
    path = begun(tmp_path / "s", range(3))
    column = {"documents": "key", "vocabulary": "text"}[table]
    found: pa.Table = getattr(DATA, table)
    values = pa.array([f"{value}!" for value in found[column].to_pylist()])
    changed = found.set_column(found.column_names.index(column), column, values)
    before = tree(path)
    with pytest.raises(UsageError, match=rf"{table}.parquet differs in column `{column}`"):
        begin(path, dataclasses.replace(DATA, **{table: changed}))
    assert tree(path) == before


@pytest.mark.parametrize(
    "name",
    [
        "plan.json",
        "documents.parquet",
        "activations.zarr/residual/zarr.json",
        "activations.zarr/norm_weight/c/0/0",
    ],
)
def test_a_damaged_metadata_file_is_named_and_written_anew_when_it_is_removed(
    tmp_path: Path, name: str, calm: dict[str, bytes]
) -> None:
    path = begun(tmp_path / "s", range(3))
    flip(path / name)
    with pytest.raises(DamageError, match=f"{name}.*remove"):
        begin(path, DATA)
    (path / name).unlink()
    write_all(path, DATA)
    assert tree(path) == calm


def test_damage_in_the_root_attributes_is_named(tmp_path: Path) -> None:
    path = begun(tmp_path / "s", range(3))
    content = (path / "activations.zarr/zarr.json").read_bytes()
    (path / "activations.zarr/zarr.json").write_bytes(content[:-9])
    with pytest.raises(DamageError, match=r"activations.zarr/zarr.json"):
        begin(path, DATA)


# Folders of somebody else's


@pytest.mark.parametrize(
    "name", ["runs/tensorboard.events", "film.mp4.partial", "activations.zarr/x.partial"]
)
def test_what_only_looks_like_ours_is_not_taken_for_a_store(tmp_path: Path, name: str) -> None:
    """What fails before its first commit removes what is ours."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=rf"is not empty \(it holds {name}\)"):
        begin(tmp_path, DATA)
    assert (tmp_path / name).read_text() == "mine"


def test_a_persons_partial_file_is_not_swept(tmp_path: Path) -> None:
    path = begun(tmp_path / "s", range(6))
    mine, ours = path / "film.mp4.partial", path / f"plan.json.0123456789ab{durable.PARTIAL}"
    for file in (mine, ours):
        file.write_text("x")
    seal(path)
    assert mine.exists()
    assert not ours.exists()


@pytest.mark.parametrize(
    "name",
    [
        "activations.zarr",
        "blocks",
        "runs",
        "runs/rank-0.lock",
        "replacing",
        "replacing/new/blocks",
        "activations.zarr/residual",
        "activations.zarr/residual/c",
        "activations.zarr/residual/c/0",
        "activations.zarr/residual/c/0/1",
    ],
)
def test_a_store_with_a_link_for_a_folder_is_refused_before_anything_is_touched(
    tmp_path: Path, name: str
) -> None:
    path, outside = begun(tmp_path / "s", range(4)), tmp_path / "outside"
    (path / "runs").mkdir()
    if (path / name).exists():
        (path / name).rename(outside)
    else:
        outside.mkdir()
        (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).symlink_to(outside)
    (path / CHUNK.format(2)).unlink()  # else: its record goes
    (outside / "x.0123456789ab.partial").write_text("mine")  # else: swept
    before = sorted(tmp_path.rglob("*")), tree(tmp_path)
    works: list[Callable[[], object]] = [
        lambda: claim_store(path),
        lambda: begin(path, DATA),
        lambda: seal(path),
        lambda: seal(path, partial=True),
        lambda: replace_together(path, {"plan.json": b"new"}, ["blocks/000001.json"]),
    ]
    for work in works:
        with pytest.raises(UsageError, match=rf"{name} is a link; .*Nothing was changed"):
            work()
        assert (sorted(tmp_path.rglob("*")), tree(tmp_path)) == before


def test_the_folder_of_a_store_may_be_a_link(tmp_path: Path, calm: dict[str, bytes]) -> None:
    begun(tmp_path / "elsewhere", range(4))
    (tmp_path / "s").symlink_to(tmp_path / "elsewhere")
    write_all(tmp_path / "s", DATA)
    assert tree(tmp_path / "elsewhere").keys() == calm.keys()


# Blocks


DAMAGE: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "last block, one bit": (3, lambda path: flip(path / CHUNK.format(3)), "not the one that was committed"),
    "last but one, one bit": (2, lambda path: flip(path / CHUNK.format(2)), "not the one that was committed"),
    "chunk missing": (0, lambda path: (path / CHUNK.format(0)).unlink(), "the file is missing"),
    "chunk cut": (1, lambda path: cut(path / CHUNK.format(1)), "bytes, "),
    "chunk empty": (1, lambda path: (path / CHUNK.format(1)).write_bytes(b""), "0 bytes, "),
    "record cut": (0, lambda path: cut(path / "blocks/000000.json"), "blocks/000000.json"),
    "record empty": (0, lambda path: (path / "blocks/000000.json").write_bytes(b""), "blocks/000000.json"),
    "record of another block": (
        1,
        lambda path: shutil.copy(path / "blocks/000000.json", path / "blocks/000001.json"),
        "another block",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_bad_block_is_found_and_collected_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, calm: dict[str, bytes], name: str
) -> None:
    block, damage, message = DAMAGE[name]
    path = begun(tmp_path / "s", range(4))
    damage(path)
    with caplog.at_level(logging.WARNING, "nearline"):
        writer = begin(path, DATA)
    assert writer.committed == set(range(4)) - {block}
    assert not (path / f"blocks/{block:06d}.json").exists()
    assert f"block {block} is collected again: " in caplog.text
    assert message in caplog.text
    write_all(path, DATA)
    assert tree(path) == calm


def test_a_record_beyond_the_plan_goes(tmp_path: Path, calm: dict[str, bytes]) -> None:
    path = begun(tmp_path / "s", range(2))
    shutil.copy(path / "blocks/000000.json", path / "blocks/000077.json")
    assert begin(path, DATA).committed == {0, 1}
    write_all(path, DATA)
    assert tree(path) == calm


def test_a_file_that_cannot_be_read_now_does_not_cost_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = begun(tmp_path / "s", range(2))

    def busy(path: Path) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("nearline.store.resuming.file_digest", busy)
    with pytest.raises(NearlineError, match="Too many open files; nothing was changed"):
        begin(path, DATA)
    assert len(list((path / "blocks").iterdir())) == 2


def test_a_whole_unfinished_store_is_gone_through_without_being_touched(tmp_path: Path) -> None:
    path = begun(tmp_path / "s", range(6))
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}
    writer = begin(path, DATA)
    assert writer.committed == set(range(6))
    assert not writer.begun_here
    assert not writer.sealed
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()} == before


# Interrupted anywhere


def test_a_kill_at_every_named_point_resumes_to_the_same_bytes(
    tmp_path: Path, calm: dict[str, bytes], request: pytest.FixtureRequest
) -> None:
    found = list(states(lambda: write_all(tmp_path / "s", DATA), tmp_path / "s", tmp_path / "killed"))
    names = {name for name in points.POINTS if name.startswith(("durable.", "writer.", "sealing."))}
    assert {name for name, _ in found} == names
    for name, path in some(found, 6, bool(request.config.getoption("--run-long"))):
        write_all(path, DATA)
        assert tree(path) == calm, f"killed at {name}"


@pytest.mark.parametrize("name", [name for name in points.POINTS if name.startswith(("durable.", "writer."))])
def test_an_exception_at_every_named_point_leaves_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: dict[str, bytes], name: str
) -> None:
    def crash(reached: str) -> None:
        if reached == name:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(points, "hook", crash)
        with pytest.raises(Crash):
            write_all(tmp_path / "s", DATA)
    assert not list((tmp_path / "s").rglob(f"*{durable.PARTIAL}"))
    write_all(tmp_path / "s", DATA)
    assert tree(tmp_path / "s") == calm


# Seal


def test_a_sealed_store_seals_to_the_same_digest(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", **SETTINGS)
    before = tree(path)
    assert seal(path) == Reader.open(path).digest == begin(path, DATA).seal()
    assert tree(path) == before


@pytest.mark.parametrize("content", [b"", b"0" * 130, None], ids=["empty", "zeros", "cut"])
@pytest.mark.parametrize("name", ["SEALED", "manifest.json"])
def test_a_lost_seal_is_written_again_where_the_rest_vouches_for_it(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = make_store(tmp_path / "s", **SETTINGS)
    before = tree(path)
    (path / name).write_bytes(before[name][:50] if content is None else content)
    seal(path)
    assert tree(path) == before


@pytest.mark.parametrize("name", ["blocks/000001.json", "plan.json", "documents.parquet", "SEALED"])
def test_a_store_that_is_not_what_was_sealed_is_not_sealed_again(tmp_path: Path, name: str) -> None:
    path = make_store(tmp_path / "s", **SETTINGS)
    other = make_store(tmp_path / "other" / "s", **{**SETTINGS, "seed": 1})
    shutil.copy(other / name, path / name)
    before = tree(path)
    with pytest.raises(DamageError):
        seal(path)
    assert tree(path) == before


def test_a_sealed_store_without_a_record_is_damage_and_not_unfinished(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", **SETTINGS)
    (path / "blocks/000002.json").unlink()
    with pytest.raises(DamageError, match=r"was sealed and now lacks 1 block records \(2\).*nearline verify"):
        seal(path)


def test_what_is_missing_is_named_with_its_ranks(tmp_path: Path) -> None:
    path = begun(tmp_path / "s", range(1))
    writer = begin(path, DATA)
    with pytest.raises(
        StoreNotSealed, match=r"5 of 6 blocks are missing \(1-5\); the same `nearline collect`"
    ):
        writer.seal()
    for block in (2, 3, 5):
        commit(writer, DATA, block)
    writer.write_run({"rank": 0, "world_size": 3})
    with pytest.raises(StoreNotSealed, match=r"2 of 6 blocks are missing \(1, 4\), blocks of rank 1 of 3;"):
        writer.seal()
    assert info(path)["n_committed"] == 4


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])

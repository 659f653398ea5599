"""verify: each check passes on a good store and fails, at its place, on one that breaks its promise."""

import dataclasses
import errno
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from blake3 import blake3
from helpers_damage import (
    cut,
    edit_column,
    edit_json,
    edit_table,
    edit_values,
    extend,
    flip,
    remanifest,
    reseal,
    swap,
    vouch,
)
from helpers_servers import FileServer
from helpers_store import begin, make_store, statistics, synthetic, write_all
from nearline.store import EnvironmentFault, Reader, StoreNotFound, UsageError, decode, encode, info
from nearline.store.manifest import seal_bytes
from nearline.store.places import LocalPlace, OpenFile
from nearline.store.verify import Verified, verify
from nearline.store.verify_scan import PIECE_BYTES, Magnitudes, scan

SETTINGS: dict[str, Any] = {
    "n_tokens": 500,
    "block": 160,
    "layers": [2, 5],
    "storage_dtype": "float16",
    "d": 8,
}
DATA = synthetic(**SETTINGS)
CHUNK = "activations.zarr/residual/c/1/2/0"  # layer 5, tokens 320-479
ROOT = "activations.zarr/zarr.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("whole") / "s", **SETTINGS)


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "s"))


def kinds(verified: Verified) -> list[str]:
    return sorted(problem.kind for problem in verified.problems)


def only(verified: Verified, kind: str, file: str) -> str:
    """The message of the one problem there is."""
    found = [(problem.kind, problem.file) for problem in verified.problems]
    assert found == [(kind, file)], verified.problems
    problem = verified.problems[0]
    assert Path(verified.url, file).as_posix() in problem.message
    assert "\n" not in problem.message
    return problem.message


# ------------------------------------------------------------------ good stores


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("compressor", [None, "zstd"])
def test_a_good_store_is_whole_at_every_level(tmp_path: Path, dtype: str, compressor: str | None) -> None:
    settings = {**SETTINGS, "storage_dtype": dtype, "compressor": compressor}
    path = make_store(tmp_path / "s", **settings)
    (path / "runs").mkdir()
    (path / "runs/a.json").write_text("not json")
    (path / "README.md").write_text("my own words")
    for level in ("quick", "sample", "full"):
        found = verify(path, level=level)
        assert found.problems == ()
        assert found.whole
        assert found.exit_code == 0
        assert found.digest == Reader.open(path).digest
        assert found.n_objects == 4 * 14
        assert found.n_objects_read == {"quick": 0, "sample": 4 * 10, "full": 4 * 14}[level]


def test_what_was_read_is_counted(whole: Path) -> None:
    n_bytes = sum(
        path.stat().st_size
        for path in whole.rglob("*")
        if path.is_file() and path.name != "README.md" and "runs" not in path.parts
    )
    found = verify(whole, level="full")
    assert found.n_bytes_read == n_bytes
    assert found.n_files + found.n_objects == sum(path.is_file() for path in whole.rglob("*")) - 1  # the card


def test_rows_without_bos_targets_beyond_a_window_and_other_norms_are_fine(tmp_path: Path) -> None:
    data = synthetic(**{**SETTINGS, "bos": False, "norm_kind": "none", "with_positions": False})
    last = data.plan.row_offsets[1] - 1
    data.columns["target_id"][last], data.columns["nll"][last] = 7, 1.5  # the document goes on elsewhere
    writer = begin(tmp_path / "s", data)
    for block in range(data.plan.n_blocks):
        writer.commit(block, *data.block(block), {})
    writer.seal()
    assert verify(tmp_path / "s", level="full").problems == ()


def test_masked_rows_may_hold_anything(tmp_path: Path) -> None:
    path = masked_store(tmp_path / "s", valid=False)
    assert verify(path, level="full").problems == ()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_value_that_is_not_finite_in_a_valid_row_is_named(tmp_path: Path, dtype: str) -> None:
    path = masked_store(tmp_path / "s", valid=True, storage_dtype=dtype)
    found = verify(path, level="full")
    assert kinds(found) == ["values"] * 2  # the site's value, and the loss
    site, loss = sorted(found.problems, key=lambda problem: problem.array == "nll")
    assert (site.array, site.layer, site.token_first, site.token_last) == ("mlp_output", 5, 170, 170)
    assert "token 170: a value is not finite" in site.message
    assert (loss.array, loss.token_first) == ("nll", 170)
    assert verify(path, level="quick").whole


def masked_store(path: Path, *, valid: bool, **changes: Any) -> Path:
    data = synthetic(**{**SETTINGS, **changes})
    data.columns["valid"][170] = valid
    data.columns["nll"][170] = np.inf
    bad = data.sites["mlp_output"]
    bad[1, 170, 3] = np.nan
    bad[1, 170, 4] = -np.inf
    with np.errstate(invalid="ignore"):
        data.stored["mlp_output"][...] = encode(np.where(np.isfinite(bad), bad, 0), data.storage_dtype)
        odd = np.array([np.nan, -np.inf], np.float32)
        data.stored["mlp_output"][1, 170, 3:5] = (
            odd.view(np.uint32) >> 16 if data.storage_dtype == "bfloat16" else odd
        )
    writer = begin(path, data)
    for block in range(data.plan.n_blocks):
        row0, row1 = data.plan.block_range(block)
        found = {site: statistics(values[..., row0:row1, :]) for site, values in data.sites.items()}
        finite = np.where(np.isfinite(bad), bad, 0)[:, row0:row1]
        found["mlp_output"]["max_abs"] = [float(np.abs(layer).max()) for layer in finite]
        writer.commit(block, *data.block(block), found)
    writer.seal()
    return path


def test_a_selection_keeps_the_sequence_numbers_of_its_parent(store: Path, tmp_path: Path) -> None:
    for block in range(4):
        edit_column(store, "sequence", block, lambda values: np.add(values, 10, out=values))
    reseal(store)
    found = verify(store, level="full")
    assert kinds(found) == ["values"] * 4
    assert all(problem.array == "sequence" for problem in found.problems)
    entry = {"kind": "selection", "parent": "0" * 64, "parent_plan": "0" * 64, "layers": [2, 5]}
    entry |= {"sites": ["residual"], "splits": ["fit"], "tokens": 500}
    edit_json(store / ROOT, lambda data: data["attributes"].update(lineage=[entry]))
    reseal(store)
    assert verify(store, level="full").problems == ()
    edit_column(store, "sequence", 1, lambda values: values.__setitem__(slice(None), values[0]))
    edit_column(store, "sequence", 2, lambda values: values.__setitem__(3, 99))
    reseal(store)
    messages = " ".join(problem.message for problem in verify(store, level="full").problems)
    assert "does not grow" in messages
    assert "changes inside a sequence" in messages
    shutil.copy(store / "activations.zarr/sequence/c/0", store / "activations.zarr/sequence/c/3")
    vouch(store, "sequence/c/3")
    reseal(store)
    messages = " ".join(problem.message for problem in verify(store, level="full").problems)
    assert "stands in another block too" in messages


# ------------------------------------------------------------------ damage of files


@pytest.mark.parametrize("level", ["quick", "sample", "full"])
def test_a_missing_chunk_is_named(store: Path, level: str) -> None:
    (store / CHUNK).unlink()
    found = verify(store, level=level)
    message = only(found, "missing", CHUNK)
    assert message.startswith("`residual` layer 5, tokens 320-479 (")
    problem = found.problems[0]
    assert (problem.array, problem.layer, problem.token_first, problem.token_last) == (
        "residual",
        5,
        320,
        479,
    )
    assert found.exit_code == 1
    assert not found.whole


@pytest.mark.parametrize("n_bytes", [0, 1, 1000, -1, -4])
def test_a_cut_chunk_is_found_by_its_size_alone(store: Path, n_bytes: int) -> None:
    cut(store / CHUNK, n_bytes)
    assert "bytes, 2564 were recorded" in only(verify(store), "size", CHUNK)
    extend(store / CHUNK, b"x" * 3000)
    assert "bytes, 2564 were recorded" in only(verify(store), "size", CHUNK)


def test_a_flipped_bit_needs_a_look_at_the_content(store: Path) -> None:
    flip(store / CHUNK, 777)
    assert verify(store).whole
    found = verify(store, level="full")
    assert "its checksum does not match" in only(found, "content", CHUNK)
    assert (found.problems[0].layer, found.problems[0].token_first) == (5, 320)
    assert verify(store, level="sample", sample=1.0).problems == found.problems


def test_another_whole_chunk_is_told_from_the_right_one(store: Path) -> None:
    swap(store / CHUNK, store / CHUNK.replace("/1/2/", "/0/2/"))
    found = verify(store, level="full")
    assert [problem.kind for problem in found.problems] == ["content", "content"]
    assert {problem.layer for problem in found.problems} == {2, 5}
    assert all("whole but not the one that was committed" in problem.message for problem in found.problems)


def test_a_sample_is_a_share_chosen_by_its_seed(store: Path) -> None:
    for path in store.glob("activations.zarr/residual/c/*/*/0"):
        flip(path, 5)  # 8 of the 20 objects of sites
    found = [
        frozenset(p.file for p in verify(store, level="sample", seed=seed).problems) for seed in range(8)
    ]
    assert len(set(found)) > 1
    assert found[3] == {p.file for p in verify(store, level="sample", seed=3).problems}
    assert len(verify(store, level="sample", sample=1.0).problems) == 8
    assert verify(store, level="sample", sample=0.4).n_objects_read == 4 * (9 + 2)
    flip(store / "activations.zarr/nll/c/3", 9)  # token columns are always read
    assert all("nll" in str(verify(store, level="sample", seed=seed).problems) for seed in range(4))


@pytest.mark.parametrize(
    "name",
    [
        "plan.json",
        "documents.parquet",
        "vocabulary.parquet",
        ROOT,
        "activations.zarr/residual/zarr.json",
        "activations.zarr/layer/zarr.json",
        "activations.zarr/layer/c/0",
        "activations.zarr/norm_weight/c/0/0",
        "blocks/000002.json",
    ],
)
def test_every_metadata_file_is_under_the_seal(store: Path, name: str) -> None:
    flip(store / name, 50)
    found = verify(store)
    assert "not the one that was sealed" in only(found, "content", name)
    assert kinds(verify(store, level="full")) == ["content"]  # and nothing else is blamed for it
    cut(store / name, -1)
    assert "were sealed" in only(verify(store), "size", name)
    (store / name).unlink()
    assert "missing" in only(verify(store), "missing", name)
    assert "`nearline repair` puts it back" in found.problems[0].message or name.startswith("blocks/")


def test_a_damaged_record_names_its_tokens_and_its_chunks_are_checked_by_themselves(store: Path) -> None:
    flip(store / "blocks/000002.json", 150)
    flip(store / CHUNK, 5)
    found = verify(store, level="full")
    by_kind = {problem.file: problem for problem in found.problems}
    assert set(by_kind) == {"blocks/000002.json", CHUNK}
    assert by_kind["blocks/000002.json"].token_first == 320
    assert "checksum of the chunk object does not match" in by_kind[CHUNK].message


def test_a_damaged_definition_leaves_the_digests_of_the_records(store: Path) -> None:
    flip(store / "plan.json", 300)
    flip(store / CHUNK, 5)
    found = verify(store, level="full")
    assert {problem.file for problem in found.problems} == {"plan.json", CHUNK}
    assert verify(store, level="full").n_objects_read == 4 * 14


def test_chunks_of_a_small_array_are_checked_though_its_metadata_is_lost(store: Path) -> None:
    flip(store / "activations.zarr/norm_weight/zarr.json", 50)
    flip(store / "activations.zarr/norm_weight/c/0/0", 50)
    assert kinds(verify(store)) == ["content", "content"]


@pytest.mark.parametrize("bit", [0, 9 * 8 + 1, 64 * 8 + 1, 66 * 8, 129 * 8 + 3])
def test_a_damaged_seal_is_named(store: Path, bit: int) -> None:
    flip(store / "SEALED", bit)
    found = verify(store)
    assert "the seal is damaged" in only(found, "seal", "SEALED")
    assert found.digest is None
    assert found.exit_code == 1


def test_a_manifest_without_its_seal_is_named(store: Path) -> None:
    cut(store / "documents.parquet", -1)
    remanifest(store)
    found = verify(store, level="full")
    assert "not the one that was sealed" in next(p.message for p in found.problems if p.kind == "seal")
    assert {problem.file for problem in found.problems} == {"manifest.json", "documents.parquet"}
    (store / "manifest.json").unlink()
    assert "manifest.json" in {problem.file for problem in verify(store).problems}


# ------------------------------------------------------------------ files that nobody knows


@pytest.mark.parametrize(
    "name",
    [
        "activations.zarr/notes.txt",
        "activations.zarr/residual/c/1/4/0",
        "activations.zarr/residual/c/2/0/0",
        "activations.zarr/residual/c/01/0/0",
        "activations.zarr/residual/c/0/99",
        "activations.zarr/attention/c/0",
        "blocks/000004.json",
        "blocks/3.json",
    ],
)
def test_a_file_that_no_reader_looks_at_is_reported_and_harmless(store: Path, name: str) -> None:
    (store / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(store / "blocks/000003.json", store / name)
    found = verify(store, level="full")
    assert found.whole
    assert (found.exit_code, found.strays, found.leftovers) == (0, (name,), ())


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("activations.zarr/attention/zarr.json", "activations.zarr/attention"),
        ("activations.zarr/post_norm_weight/zarr.json", "activations.zarr/post_norm_weight"),
        ("activations.zarr/attention/.zarray", "activations.zarr/attention"),
        ("activations.zarr/.zgroup", "the file"),
    ],
)
def test_what_zarr_would_show_and_nobody_knows_is_a_problem(store: Path, name: str, what: str) -> None:
    (store / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(store / "activations.zarr/nll/zarr.json", store / name)
    found = verify(store)
    assert only(found, "stray", name).endswith(f"programs that read Zarr show it; remove {what}")
    assert found.exit_code == 1
    assert not found.repairable  # repair removes nothing that it does not know
    (store / CHUNK).unlink()
    assert verify(store).repairable


def test_what_file_browsers_leave_is_harmless(store: Path) -> None:
    names = [f"activations.zarr/{name}" for name in (".DS_Store", "residual/c/1/._0", "residual/Thumbs.db")]
    for name in (*names, "blocks/desktop.ini", ".DS_Store"):
        (store / name).write_bytes(b"litter")
    found = verify(store)
    assert found.whole
    assert found.strays == ()
    assert found.leftovers == (*sorted(names), "blocks/desktop.ini")


def test_leftovers_are_reported_and_harmless(store: Path) -> None:
    (store / "activations.zarr/residual/c/1/2/0.abc.partial").write_bytes(b"half")
    (store / "PUSHING").write_bytes(b"left")
    found = verify(store)
    assert found.whole
    assert found.leftovers == ("PUSHING", "activations.zarr/residual/c/1/2/0.abc.partial")


# ------------------------------------------------------------------ what a forger makes consistent


def rename_split(columns: dict[str, list[Any]]) -> None:
    group = next(g for g in columns["group"] if columns["group"].count(g) > 1)
    place = columns["group"].index(group)
    columns["split"][place] = "test" if columns["split"][place] != "test" else "fit"


FORGED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a group in two splits": (
        lambda s: edit_table(s / "documents.parquet", rename_split),
        "documents.parquet",
        r"group \d+ stands in two splits",
    ),
    "a document of another split than its block": (
        lambda s: edit_table(
            s / "documents.parquet",
            lambda columns: columns["split"].__setitem__(
                slice(None), [{"fit": "test", "test": "fit"}.get(v, v) for v in columns["split"]]
            ),
        ),
        "documents.parquet",
        r"document \d+ is of split (fit|test), but block \d+ holds rows of it",
    ),
    "other rows per document": (
        lambda s: edit_table(s / "documents.parquet", lambda columns: columns["n_tokens"].__setitem__(1, 1)),
        "documents.parquet",
        "document 1 has 1 tokens",
    ),
    "documents out of order": (
        lambda s: edit_table(s / "documents.parquet", lambda columns: columns["document"].reverse()),
        "documents.parquet",
        "does not count 0, 1, 2",
    ),
    "an unknown split": (
        lambda s: edit_table(s / "documents.parquet", lambda columns: columns["split"].__setitem__(0, "x")),
        "documents.parquet",
        "split 'x' is none of",
    ),
    "a document too few": (
        lambda s: edit_table(s / "documents.parquet", lambda columns: [v.pop() for v in columns.values()]),
        "documents.parquet",
        "the attributes say",
    ),
    "a row without a value": (
        lambda s: edit_table(s / "documents.parquet", lambda columns: columns["key"].__setitem__(0, None)),
        "documents.parquet",
        "has empty cells",
    ),
    "no table": (
        lambda s: (s / "documents.parquet").write_bytes(b"PAR1 not"),
        "documents.parquet",
        "not a readable Parquet file",
    ),
    "counts of the vocabulary": (
        lambda s: edit_table(
            s / "vocabulary.parquet", lambda columns: columns["count"].__setitem__(0, columns["count"][0] + 1)
        ),
        "vocabulary.parquet",
        "its counts sum to 501",
    ),
    "a token id twice": (
        lambda s: edit_table(s / "vocabulary.parquet", lambda columns: columns["token_id"].__setitem__(0, 1)),
        "vocabulary.parquet",
        "stands twice",
    ),
    "stale consolidated metadata": (
        lambda s: edit_json(
            s / ROOT,
            lambda data: data["consolidated_metadata"]["metadata"]["nll"].update(shape=[400]),
        ),
        ROOT,
        "stale: array `nll` is not as its own zarr.json says",
    ),
    "an array missing from the consolidated metadata": (
        lambda s: edit_json(s / ROOT, lambda data: data["consolidated_metadata"]["metadata"].pop("nll")),
        ROOT,
        "stale: array `nll` is missing from it",
    ),
    "an array too many in the consolidated metadata": (
        lambda s: edit_json(
            s / ROOT,
            lambda data: data["consolidated_metadata"]["metadata"].update(
                more=data["consolidated_metadata"]["metadata"]["nll"]
            ),
        ),
        ROOT,
        "stale: it has an array `more`",
    ),
    "no consolidated metadata": (
        lambda s: edit_json(s / ROOT, lambda data: data.pop("consolidated_metadata")),
        ROOT,
        "consolidated metadata is missing or has another form",
    ),
    "an array of another shape": (
        lambda s: (
            edit_json(s / "activations.zarr/nll/zarr.json", lambda data: data.update(shape=[480])),
            edit_json(
                s / ROOT, lambda data: data["consolidated_metadata"]["metadata"]["nll"].update(shape=[480])
            ),
        ),
        "activations.zarr/nll/zarr.json",
        "`shape` is not what attributes and plan give",
    ),
    "attributes against the plan": (
        lambda s: edit_json(s / ROOT, lambda data: data["attributes"]["plan"].update(n_tokens=501)),
        "plan.json",
        "its `n_tokens` is not the one that the attributes state",
    ),
    "another plan than the attributes name": (
        lambda s: edit_json(s / "plan.json", lambda data: data.update(seed=7)),
        "plan.json",
        "the attributes say",
    ),
    "other layer numbers": (
        lambda s: forge_layers(s),
        "activations.zarr/layer/c/0",
        r"it holds layers \[2, 6\], the attributes say \[2, 5\]",
    ),
    "a weight that is not a number": (
        lambda s: forge_weight(s),
        "activations.zarr/norm_weight/c/0/0",
        "a value is not finite",
    ),
    "a record of another block": (
        lambda s: edit_json(s / "blocks/000002.json", lambda data: data.update(block=1)),
        "blocks/000002.json",
        "belongs to another block",
    ),
    "a record without one of the chunks": (
        lambda s: edit_json(s / "blocks/000002.json", lambda data: data["chunks"].pop("nll/c/2")),
        "blocks/000002.json",
        "does not name the chunks of this store's arrays",
    ),
    "a record with another size": (
        lambda s: (
            cut(s / CHUNK, -4),
            vouch(s, CHUNK.removeprefix("activations.zarr/")),
            edit_json(s / "manifest.json", lambda data: data.update(chunk_bytes=data["chunk_bytes"] - 4)),
        ),
        "blocks/000002.json",
        "the array's chunks have 2564",
    ),
    "a record with another checksum": (
        lambda s: edit_json(
            s / "blocks/000002.json", lambda data: data["chunks"]["nll/c/2"].__setitem__(2, "0" * 8)
        ),
        "blocks/000002.json",
        "recorded 00000000, computed",
    ),
    "a record with statistics of no site": (
        lambda s: edit_json(s / "blocks/000002.json", lambda data: data["statistics"].update(head={})),
        "blocks/000002.json",
        "`statistics.head` does not fit",
    ),
    "statistics of too few layers": (
        lambda s: edit_json(
            s / "blocks/000002.json", lambda data: data["statistics"]["residual"]["max_abs"].pop()
        ),
        "blocks/000002.json",
        "`statistics.residual` does not fit",
    ),
    "a record that is no JSON": (
        lambda s: cut(s / "blocks/000002.json", 50),
        "blocks/000002.json",
        "not valid JSON",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forgery_with_fitting_digests_is_found_by_what_it_says(store: Path, name: str) -> None:
    change, file, words = FORGED[name]
    change(store)
    reseal(store)
    found = verify(store, level="full")
    assert found.digest is not None  # the seal itself is in order
    messages = [problem.message for problem in found.problems if problem.file == file]
    assert any(re.search(words, message) for message in messages), found.problems
    assert found.exit_code == 1


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("n_blocks", 5, "`n_blocks` is 5, plan.json says 4"),
        ("n_tokens", 5, "`n_tokens` is 5, plan.json says 500"),
        ("plan", "0" * 64, "`plan` is 0000"),
        ("n_objects", 5, "`n_objects` is 5, the block records have 56"),
        ("chunk_bytes", 5, "`chunk_bytes` is 5"),
    ],
)
def test_the_totals_of_the_manifest_are_checked(store: Path, key: str, value: object, words: str) -> None:
    reseal(store, lambda data: data.update({key: value}))
    assert words in only(verify(store), "metadata", "manifest.json")


def test_the_manifest_names_the_files_of_this_store_and_no_others(store: Path) -> None:
    reseal(store, lambda data: data["files"].pop("blocks/000001.json"))
    assert "does not name blocks/000001.json" in only(verify(store), "metadata", "manifest.json")
    reseal(store, lambda data: data["files"].update({"blocks/000001.json": [1, "0" * 64]}))
    reseal(store, lambda data: data["files"].update({"blocks/000009.json": [1, "0" * 64]}))
    assert "names blocks/000009.json" in only(verify(store), "metadata", "manifest.json")


def forge_layers(store: Path) -> None:
    path = store / "activations.zarr/layer/c/0"
    forge_whole(path, np.array([2, 6], "<i4"))


def forge_weight(store: Path) -> None:
    path = store / "activations.zarr/norm_weight/c/0/0"
    values = np.frombuffer(path.read_bytes()[:-4], "<f4").copy()
    values[3] = np.nan
    forge_whole(path, values)


def forge_whole(path: Path, values: np.ndarray) -> None:
    body = values.tobytes()
    path.write_bytes(body + int(google_crc32c.value(body)).to_bytes(4, "little"))


COLUMNS: dict[str, tuple[str, int, Callable[[np.ndarray], object], str]] = {
    "position": ("position", 2, lambda v: v.__setitem__(7, 99), "token 327: is 99, the plan says"),
    "document": ("document", 2, lambda v: v.__setitem__(7, 99), "token 327: is 99, the plan says"),
    "sequence": ("sequence", 2, lambda v: v.__setitem__(7, 99), "token 327: is 99, the plan says"),
    "split": ("split", 2, lambda v: v.__setitem__(slice(3, 9), 2), r"token 323: .*and 5 rows more"),
    "special": ("special", 2, lambda v: v.__setitem__(5, ~v[5]), "for token id"),
    "a flag that is no bool": (
        "valid",
        2,
        lambda v: v.view(np.uint8).__setitem__(5, 2),
        "holds 2, not 0 or 1",
    ),
    "a token id below zero": ("token_id", 2, lambda v: v.__setitem__(9, -7), "is -7, which is no token id"),
    "no BOS": (
        "token_id",
        2,
        lambda v: v.__setitem__(0, 5),
        "token 320: is 5 where the plan puts the BOS",
    ),
    "a token id": ("token_id", 2, lambda v: v.__setitem__(9, 59), "vocabulary.parquet|is counted|next token"),
    "a target": ("target_id", 2, lambda v: v.__setitem__(4, 77), "is 77, the next token of the sequence is"),
    "a target below -1": ("target_id", 2, lambda v: v.__setitem__(4, -2), "is -2, which is no token id"),
    "a loss": ("nll", 2, lambda v: v.__setitem__(4, np.nan), "token 324: is nan where `target_id` is"),
    "an infinite loss": ("nll", 2, lambda v: v.__setitem__(4, np.inf), "is inf where `valid` is true"),
    "a loss without a target": ("nll", 2, lambda v: v.__setitem__(np.isnan(v), 1.0), "is 1.0 where"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_forged_column_is_found_by_the_plan(store: Path, name: str) -> None:
    column, block, change, words = COLUMNS[name]
    edit_column(store, column, block, change)
    reseal(store)
    assert verify(store).whole
    for level in ("sample", "full"):
        found = verify(store, level=level)
        assert any(re.search(words, problem.message) for problem in found.problems), found.problems
        assert {p.array for p in found.problems} <= {column, "target_id", "special", "nll", None}
        assert all(problem.kind in ("values", "metadata") for problem in found.problems)


def test_values_that_do_not_fit_the_statistics_of_their_record_are_found(store: Path) -> None:
    key = CHUNK.removeprefix("activations.zarr/")
    edit_values(store, key, lambda values: values.__setitem__(100, 6e4), "<f2")
    reseal(store)
    found = verify(store, level="full")
    assert "the largest |value| is 60000, the block record says 95.8" in only(found, "values", CHUNK)
    edit_json(
        store / "blocks/000002.json", lambda d: d["statistics"]["residual"]["max_abs"].__setitem__(1, 7e4)
    )
    reseal(store)
    assert "the block record says 70000" in only(verify(store, level="full"), "values", CHUNK)


def test_a_count_of_the_statistics_that_does_not_fit_is_found(store: Path) -> None:
    edit_json(
        store / "blocks/000002.json", lambda d: d["statistics"]["residual"]["n_nonfinite"].__setitem__(1, 3)
    )
    reseal(store)
    assert "0 values are not finite, the block record counts 3" in only(
        verify(store, level="full"), "values", CHUNK
    )


# ------------------------------------------------------------------ stores that are not sealed


def test_an_unfinished_store_is_incomplete_and_its_blocks_are_checked_anyway(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", **SETTINGS, seal=False, blocks=[0, 2])
    found = verify(path, level="full")
    assert "2 of 4 blocks are missing (1, 3)" in only(found, "incomplete", "blocks/000001.json")
    assert found.problems[0].token_first is None  # block 2 lies between them, and is there
    assert (found.exit_code, found.digest, found.n_objects_read) == (3, None, 28)
    assert not found.whole
    flip(path / CHUNK, 5)
    found = verify(path, level="full")
    assert kinds(found) == ["content", "incomplete"]
    assert found.exit_code == 1
    (path / CHUNK).unlink()
    found = verify(path)
    assert kinds(found) == ["incomplete", "missing"]
    assert "remove blocks/000002.json, and the same `nearline collect`" in found.problems[1].message


def test_missing_blocks_without_a_gap_are_a_range_of_tokens(tmp_path: Path) -> None:
    problem = verify(make_store(tmp_path / "s", **SETTINGS, seal=False, blocks=[0, 3])).problems[0]
    assert "2 of 4 blocks are missing (1-2)" in problem.message
    assert (problem.token_first, problem.token_last) == (160, 479)


def test_chunks_of_a_block_that_was_not_committed_are_leftovers(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", **SETTINGS, seal=False)
    (path / "blocks/000003.json").unlink()
    found = verify(path)
    assert kinds(found) == ["incomplete"]
    assert len(found.leftovers) == 14
    assert "activations.zarr/residual/c/1/3/0" in found.leftovers


def test_all_blocks_but_no_seal_says_what_to_do(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", **SETTINGS, seal=False)
    found = verify(path, level="full")
    assert "run `nearline seal`" in only(found, "incomplete", "SEALED")
    assert found.exit_code == 3


def test_a_store_that_was_only_half_begun_is_incomplete(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", **SETTINGS, seal=False, blocks=[])
    for name in ("plan.json", "activations.zarr/nll/zarr.json", "activations.zarr/layer/c/0"):
        (path / name).unlink()
    found = verify(path)
    assert set(kinds(found)) == {"incomplete"}
    assert found.exit_code == 3


def test_a_copy_cut_short_says_what_has_not_arrived(store: Path) -> None:
    (store / "SEALED").unlink()
    assert "run `nearline seal`" in only(verify(store), "incomplete", "SEALED")
    for mark, command in (("PULLING", "pull"), ("PUSHING", "push")):
        (store / mark).write_bytes((store / "manifest.json").read_bytes())
        message = only(verify(store), "incomplete", "SEALED")
        assert f"an unfinished {command}: all 4 blocks are there" in message
        assert message.endswith(f"repeat the same `nearline {command}` command")
        (store / mark).unlink()
    (store / CHUNK).unlink()
    (store / "activations.zarr/nll/c/2").unlink()
    found = verify(store)
    assert kinds(found) == ["incomplete", "incomplete"]
    assert any("2 of 14 chunk objects of the block have not arrived" in p.message for p in found.problems)
    assert found.exit_code == 3
    (store / "blocks/000002.json").unlink()
    (store / "activations.zarr/norm_bias/c/0/0").unlink()
    (store / "activations.zarr/norm_bias/zarr.json").unlink()
    found = verify(store)
    assert {problem.file for problem in found.problems} == {
        "blocks/000002.json",
        "activations.zarr/norm_bias/zarr.json",
    }
    (store / "manifest.json").rename(store / "PUSHING")
    assert verify(store).problems[0].kind == "incomplete"
    cut(store / "PUSHING", 100)
    assert any("cut short" in problem.message for problem in verify(store).problems)


def test_a_change_that_was_interrupted_is_named_and_nothing_else(store: Path) -> None:
    (store / "replacing").mkdir()
    (store / "replacing/READY").write_text("{}")
    flip(store / CHUNK, 5)
    found = verify(store, level="full")
    assert "interrupted" in only(found, "incomplete", "replacing/READY")
    assert found.exit_code == 3


# ------------------------------------------------------------------ places


class Unlisted(LocalPlace):
    """A place that cannot be listed, as plain HTTP."""

    def list(self, prefix: str = "") -> dict[str, int] | None:
        return None


def test_a_place_that_cannot_be_listed_is_asked_for_each_file(store: Path) -> None:
    assert verify(Unlisted(store), level="full").problems == ()
    (store / CHUNK).unlink()
    flip(store / "activations.zarr/nll/c/0", 9)
    flip(store / "blocks/000001.json", 9)
    found = verify(Unlisted(store), level="full")
    assert found.problems == verify(store, level="full").problems
    assert len(found.problems) == 3


def test_an_unsealed_place_that_cannot_be_listed(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", **SETTINGS, seal=False, blocks=[0, 2])
    assert "2 of 4 blocks are missing (1, 3)" in verify(Unlisted(path)).problems[0].message


def test_a_store_is_found_by_its_group_and_by_a_place(store: Path) -> None:
    assert verify(store / "activations.zarr").whole
    assert verify(str(store)).whole
    assert verify(f"file://{store}").whole
    assert verify(LocalPlace(store)).url == str(store)


def test_no_store_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    for path in (tmp_path, Unlisted(tmp_path)):
        with pytest.raises(StoreNotFound, match="not a nearline store"):
            verify(path)
    (tmp_path / "run.sh").write_text("#!/bin/sh")
    for look in (verify, info, Reader.open):
        advice = ": check the path" if look is verify else "; `nearline collect"
        with pytest.raises(StoreNotFound, match=f"nothing does not exist{advice}"):
            look(tmp_path / "nothing")
        with pytest.raises(StoreNotFound, match=r"run\.sh is a file, not a store"):
            look(tmp_path / "run.sh")
    with pytest.raises(UsageError, match="level 'all' is unknown"):
        verify(tmp_path, level="all")
    with pytest.raises(UsageError, match="share"):
        verify(tmp_path, level="sample", sample=0)


def test_a_store_behind_plain_http_is_checked_as_one_on_disk(store: Path, tmp_path: Path) -> None:
    """No listing: every file is asked for. One is lost, one is another one's, one is cut short."""
    with FileServer(store) as server:
        assert verify(server.url, level="full").problems == ()
        assert verify(f"{server.url}/activations.zarr", level="quick").whole
        (store / CHUNK).unlink()
        shutil.copy(store / "activations.zarr/nll/c/0", store / "activations.zarr/nll/c/1")
        cut(store / "blocks/000003.json", -1)
        found = verify(server.url, level="full")
        assert found.url == server.url
        expected = [
            (p.kind, p.file, p.array, p.layer, p.token_first) for p in verify(store, level="full").problems
        ]
        assert [(p.kind, p.file, p.array, p.layer, p.token_first) for p in found.problems] == expected
        assert {p.file for p in found.problems} == {CHUNK, "activations.zarr/nll/c/1", "blocks/000003.json"}
        with pytest.raises(StoreNotFound):
            verify(f"{server.url}/nothing")


class Failing(LocalPlace):
    """A place whose network goes away at the n-th opened file."""

    def __init__(self, path: Path, n: int) -> None:
        super().__init__(path)
        self.left = n

    def open(self, name: str) -> OpenFile:
        self.left -= 1
        if self.left < 0:
            raise EnvironmentFault(f"{self.where(name)}: the network is unreachable")
        return super().open(name)


def test_a_network_that_fails_is_no_damage(store: Path) -> None:
    for n in range(0, 80, 7):
        with pytest.raises(EnvironmentFault, match="the network is unreachable"):
            verify(Failing(store, n), level="full")
    assert verify(Failing(store, 10**6), level="full").whole


class BadSector(LocalPlace):
    """A disk that cannot read one file."""

    def open(self, name: str) -> OpenFile:
        file = super().open(name)
        if not name.endswith("residual/c/1/2/0"):
            return file

        class Bad:
            size = file.size

            def readinto(self, view: memoryview) -> int:
                raise OSError(errno.EIO, "Input/output error")

            def close(self) -> None:
                file.close()

        return Bad()


def test_a_file_that_the_disk_cannot_read_is_named(store: Path) -> None:
    found = verify(BadSector(store), level="full")
    assert "Input/output error" in only(found, "unreadable", CHUNK)


def test_a_folder_in_the_place_of_a_file_is_named(store: Path) -> None:
    (store / "blocks/000001.json").unlink()
    (store / "blocks/000001.json").mkdir()
    (store / CHUNK).unlink()
    (store / CHUNK).mkdir()
    found = verify(store, level="full")
    assert {problem.file for problem in found.problems} == {"blocks/000001.json", CHUNK}


def test_progress_counts_blocks(store: Path) -> None:
    calls: list[tuple[int, int]] = []
    verify(store, level="full", progress=lambda stage, done, total, unit: calls.append((done, total)))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


# ------------------------------------------------------------------ the pass over one object


class InMemory:
    """An open file of bytes that come in odd portions."""

    def __init__(self, content: bytes, portion: int) -> None:
        self.size, self._content, self._portion, self._at = len(content), content, portion, 0

    def readinto(self, view: memoryview) -> int:
        part = self._content[self._at : self._at + min(self._portion, len(view))]
        view[: len(part)] = part
        self._at += len(part)
        return len(part)

    def close(self) -> None:
        return


def special_values(dtype: str) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    width = 4 if dtype == "float32" else 2
    yield rng.integers(0, 256, size=3 * PIECE_BYTES // 2, dtype=np.uint8)  # every bit pattern
    yield np.zeros(PIECE_BYTES + width * 24, np.uint8)
    finite = encode(rng.standard_normal(PIECE_BYTES).astype(np.float32) * 1e3, dtype)
    yield finite.view(np.uint8)[: 24 * width * 999]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_magnitudes_are_those_of_the_slow_way(dtype: str) -> None:
    width = 24
    for body in special_values(dtype):
        content = body.tobytes() + b"abcd"
        stored = body.view(encode(np.zeros(1), dtype).dtype)
        n_rows = stored.size // width - 3  # the rest is padding
        found = Magnitudes(dtype, n_rows, width)
        scanned = scan(InMemory(content, 12_345), found)
        values = decode(stored[: n_rows * width].reshape(n_rows, width), dtype)
        finite = np.isfinite(values)
        assert scanned.digest == blake3(content).hexdigest()
        assert (scanned.trailer, scanned.sound) == (b"abcd", False)
        assert found.n_nonfinite == (~finite).sum()
        assert found.bad_rows.tolist() == np.flatnonzero(~finite.all(1)).tolist()
        largest = float(np.abs(np.where(finite, values, 0)).max())
        assert found.shown() == largest
        assert found.is_largest(largest)
        assert not found.is_largest(largest * 1.25 + 1)


def test_the_benchmark_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny, so that it does not rot; no speed is claimed here."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "benchmarks"))
    import bench_verify

    rows = bench_verify.verify_rows(n_layers=1, d=8, block=64, n_blocks=2, repeats=1)
    assert [row["reach"] for row in rows] == [None, None, "0.7", None, None]
    assert all(row["value"] > 0 for row in rows)


def test_seal_bytes_are_what_reseal_writes(store: Path) -> None:
    """The forger of these tests is a good one: it changes nothing where nothing was changed."""
    before = (store / "SEALED").read_bytes(), (store / "manifest.json").read_bytes()
    reseal(store)
    assert ((store / "SEALED").read_bytes(), (store / "manifest.json").read_bytes()) == before
    assert before[0] == seal_bytes(before[1])


def test_an_id_that_is_only_a_target_has_a_count_of_zero(tmp_path: Path) -> None:
    data = synthetic(**SETTINGS)
    extra = pa.table(
        {"token_id": [70], "bytes": [b" x"], "text": [" x"], "count": [0]}, data.vocabulary.schema
    )
    vocabulary = pa.concat_tables([data.vocabulary, extra])
    write_all(tmp_path / "s", dataclasses.replace(data, vocabulary=vocabulary))
    assert verify(tmp_path / "s", level="full").problems == ()

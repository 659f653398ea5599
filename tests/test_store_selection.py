"""A partial pull is a store by itself: the parent's chunk objects byte for byte under new numbers, its rows
where they can be found again, and facts that are true of what was taken.
"""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_disk import open_temporaries
from helpers_places import Cut, MemoryPlace, tree
from helpers_servers import FileServer
from helpers_store import make_store
from nearline.store import (
    DamageError,
    EnvironmentFault,
    NearlineError,
    Reader,
    StoreNotSealed,
    UsageError,
    durable,
    points,
)
from nearline.store import open as open_store
from nearline.store.layout import TOKEN_COLUMNS
from nearline.store.manifest import SEALED
from nearline.store.smaller import smaller_plan
from nearline.store.transfer import pull
from nearline.store.verify import verify

SETTINGS: dict[str, Any] = {
    "n_layers": 3,
    "d": 8,
    "n_tokens": 1130,
    "block": 100,
    "sequence_length": 24,
    "post_norm": True,
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def parent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compressor = "zstd" if request.param == "bfloat16" else None
    folder = tmp_path_factory.mktemp("parents") / request.param
    return make_store(folder, storage_dtype=request.param, compressor=compressor, **SETTINGS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("plain") / "store", **SETTINGS)


@pytest.fixture(autouse=True)
def _no_hook() -> Iterator[None]:
    yield
    points.hook = lambda _: None


def _rows_of(reader: Reader, blocks: list[int]) -> np.ndarray:
    return np.concatenate([np.arange(*reader.block_range(block)) for block in blocks])


@pytest.mark.parametrize(
    ("choice", "layers", "sites", "blocks"),
    [
        ({"layers": "1-2", "sites": "mlp_output,residual"}, [1, 2], ["residual", "mlp_output"], range(12)),
        ({"layers": [0, 2], "split": "fit"}, [0, 2], None, [0, 3, 5, 8, 10]),
        ({"split": ["test", "gate"], "tokens": 301}, [0, 1, 2], None, [1, 2, 4, 6]),
        ({"tokens": 300}, [0, 1, 2], None, [0, 1, 2]),
        ({"tokens": 10**9, "sites": ["embedding"]}, [0, 1, 2], ["embedding"], range(12)),
        ({"split": "test"}, [0, 1, 2], None, [1, 4, 6, 9, 11]),  # with the last block, which is shorter
    ],
)
def test_a_selection_is_a_store_with_the_parents_values(
    choice: dict, layers: list[int], sites: list[str] | None, blocks: list[int], parent: Path, tmp_path: Path
) -> None:
    moved = pull(parent, tmp_path / "part", **choice)
    whole, part = Reader.open(parent), Reader.open(tmp_path / "part")
    rows = _rows_of(whole, list(blocks))
    assert part.layers == tuple(layers)
    assert part.sites == tuple(sites or whole.sites)
    assert (part.n_tokens, part.digest) == (len(rows), moved.digest)
    for site in part.sites:
        for layer in layers if site != "embedding" else [None]:
            ours = part.stored(site, layer, 0, part.n_blocks)
            np.testing.assert_array_equal(ours, whole.stored(site, layer, 0, whole.n_blocks)[rows])
    for name in TOKEN_COLUMNS:
        np.testing.assert_array_equal(part.column(name), whole.column(name)[rows])
    index = [whole.layers.index(layer) for layer in layers]
    for name in ("norm_weight", "norm_bias", "post_norm_weight"):
        np.testing.assert_array_equal(part.affine(name), whole.affine(name)[index])  # pyright: ignore
    np.testing.assert_array_equal(part.position_embedding, whole.position_embedding)  # pyright: ignore
    found = verify(tmp_path / "part", level="full")
    assert found.whole, found.problems


def test_chunk_objects_are_the_parents_bytes(parent: Path, tmp_path: Path) -> None:
    pull(parent, tmp_path / "part", layers=[2], split="gate")
    whole, part = Reader.open(parent), Reader.open(tmp_path / "part")
    array = "residual_bits" if whole.storage_dtype == "bfloat16" else "residual"
    group = "activations.zarr"
    for block, parent_block in enumerate([2, 7]):
        ours, theirs = f"{array}/c/0/{block}/0", f"{array}/c/2/{parent_block}/0"
        assert (tmp_path / "part" / group / ours).read_bytes() == (parent / group / theirs).read_bytes()
        record, of = part.record(block), whole.record(parent_block)
        assert record.chunks[ours] == of.chunks[theirs]
        assert record.statistics["residual"]["max_abs"] == of.statistics["residual"]["max_abs"][2:]
        assert record.statistics["embedding"] == of.statistics["embedding"]
    assert not (tmp_path / "part" / group / array / "c" / "1").exists()


def test_any_zarr_reader_and_ours_open_it(plain: Path, tmp_path: Path) -> None:
    import xarray as xr

    pull(plain, tmp_path / "part", layers=[1, 2], sites="residual", split="fit")
    theirs = xr.open_zarr(tmp_path / "part" / "activations.zarr")
    ours = open_store(tmp_path / "part")
    assert theirs["layer"].values.tolist() == [1, 2]
    wanted = Reader.open(plain).rows("residual", 2, 3, 4)
    np.testing.assert_array_equal(theirs["residual"].sel(layer=2)[100:200].values, wanted)
    np.testing.assert_array_equal(ours["residual"].sel(layer=2)[100:200].values, wanted)


def test_the_facts_are_those_of_what_was_taken(plain: Path, tmp_path: Path) -> None:
    pull(plain, tmp_path / "part", layers=[0, 2], sites="residual", split="fit", tokens=150)
    whole, part = Reader.open(plain), Reader.open(tmp_path / "part")
    assert part.attributes.lineage == (
        {
            "kind": "selection",
            "parent": whole.digest,
            "parent_plan": whole.plan.digest,
            "layers": [0, 2],
            "sites": ["residual"],
            "splits": ["fit"],
            "tokens": 200,
        },
    )
    same = ("model", "tokenizer", "corpus", "compute", "proof", "policies", "versions")
    assert all(getattr(part.attributes, name) == getattr(whole.attributes, name) for name in same)
    assert len(part.attributes.norm.kinds) == 2
    tokens, targets = part.column("token_id"), part.column("target_id")
    ids = sorted({*tokens.tolist(), *targets.tolist()} - {-1})
    vocabulary = part.vocabulary.to_pydict()
    assert vocabulary["token_id"] == ids
    assert vocabulary["count"] == [int((tokens == token).sum()) for token in ids]
    documents, before = part.documents, whole.documents
    held = np.bincount(part.column("document"), minlength=before.num_rows)
    assert documents["n_tokens"].to_pylist() == held.tolist()
    bos = np.bincount(part.plan.document[part.plan.bos], minlength=before.num_rows)
    bos_before = np.bincount(whole.plan.document[whole.plan.bos], minlength=before.num_rows)
    all_tokens = [
        table["n_tokens"].to_numpy() + table["n_dropped"].to_numpy() - of
        for table, of in ((documents, bos), (before, bos_before))
    ]
    np.testing.assert_array_equal(*all_tokens)
    for name in ("document", "key", "content_hash", "group", "split"):
        assert documents[name] == before[name]


def test_everything_chosen_is_a_plain_pull(plain: Path, tmp_path: Path) -> None:
    pull(plain, tmp_path / "all", layers="0-2", tokens=10**9, split="fit,gate,test")
    assert tree(tmp_path / "all") == tree(plain)


def test_a_selection_of_a_selection(plain: Path, tmp_path: Path) -> None:
    pull(plain, tmp_path / "one", layers=[1, 2], split="fit,test")
    pull(tmp_path / "one", tmp_path / "two", layers=[2], split="fit", tokens=250)
    pull(plain, tmp_path / "direct", layers=[2], split="fit", tokens=250)
    two, direct = Reader.open(tmp_path / "two"), Reader.open(tmp_path / "direct")
    assert [entry["layers"] for entry in two.attributes.lineage] == [[1, 2], [2]]
    assert two.attributes.lineage[1]["parent"] == Reader.open(tmp_path / "one").digest
    assert two.plan == direct.plan
    assert [two.record(block).chunks for block in range(3)] == [direct.record(b).chunks for b in range(3)]
    assert two.documents == direct.documents
    assert two.vocabulary == direct.vocabulary
    assert verify(tmp_path / "two", level="full").whole


def test_any_blocks_give_a_valid_plan(plain: Path) -> None:
    plan, rng = Reader.open(plain).plan, random.Random(0)
    for _ in range(50):
        blocks = sorted(rng.sample(range(plan.n_blocks), rng.randrange(1, plan.n_blocks + 1)))
        smaller = smaller_plan(plan, blocks)
        for new, old in enumerate(blocks):
            ours, theirs = smaller.sequences_of(new), plan.sequences_of(old)
            for name in ("document", "start", "length", "bos"):
                column, parent = getattr(smaller, name), getattr(plan, name)
                assert (column[ours.start : ours.stop] == parent[theirs.start : theirs.stop]).all()
            assert list(map(len, smaller.batches_of(new))) == list(map(len, plan.batches_of(old)))
            assert smaller.split_of(new) == plan.split_of(old)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layers": "2-3"}, r"layer 3 is not in .*; it has 0, 1, 2"),
        ({"layers": [7]}, "layer 7 is not in"),
        ({"layers": []}, "no layer was chosen of"),
        ({"layers": "two"}, "'two' is no layer or range"),
        ({"sites": "mlp_input"}, r"site 'mlp_input' is not in .*; it has residual, mlp_output, embedding"),
        ({"split": "train"}, r"split 'train' is not in .*; it has fit, gate, test"),
        ({"tokens": 0}, "tokens=0: at least 1"),
    ],
)
def test_a_choice_that_cannot_be_is_one_sentence(
    choice: dict, message: str, plain: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        pull(plain, tmp_path / "part", **choice)
    assert not (tmp_path / "part").exists()


def test_a_split_that_a_selection_lacks_is_unknown(plain: Path, tmp_path: Path) -> None:
    pull(plain, tmp_path / "fit", split="fit")
    with pytest.raises(UsageError, match=r"split 'test' is not in .*; it has fit"):
        pull(tmp_path / "fit", tmp_path / "part", split="test")


def test_a_selection_that_is_cut_goes_on(plain: Path, tmp_path: Path) -> None:
    choice, source = {"layers": [0], "split": "gate", "tokens": 1}, MemoryPlace.of(plain)
    pull(source, tmp_path / "calm", **choice)
    for number in range(0, len(source.operations), 8):
        target = tmp_path / str(number)
        source = MemoryPlace.of(plain)
        source.cut = Cut(number)
        with pytest.raises(EnvironmentFault):
            pull(source, target, **choice)
        with pytest.raises((StoreNotSealed, UsageError)):
            Reader.open(target)
        source.revive()
        pull(source, target, **choice)
        assert tree(target) | {"README.md": b""} == tree(tmp_path / "calm") | {"README.md": b""}


class Killed(BaseException):
    """Like kill -9."""


@pytest.mark.parametrize(
    "point",
    [p for p in points.POINTS if p.startswith(("transfer.", "sealing.")) and "manifest_there" not in p],
)
def test_a_selection_that_is_killed_goes_on(point: str, plain: Path, tmp_path: Path) -> None:
    choice = {"layers": [1], "split": "gate"}
    pull(plain, tmp_path / "calm" / "part", **choice)

    def kill(name: str) -> None:
        if name == point:
            raise Killed

    points.hook = kill
    with pytest.raises(Killed):
        pull(plain, tmp_path / "part", **choice)
    points.hook = lambda _: None
    if not (tmp_path / "part" / SEALED).exists():
        with pytest.raises(NearlineError):
            Reader.open(tmp_path / "part")
    pull(plain, tmp_path / "part", **choice)
    assert tree(tmp_path / "part") == tree(tmp_path / "calm" / "part")
    again = pull(plain, tmp_path / "part", **choice)
    assert (again.n_files, again.digest) == (0, Reader.open(tmp_path / "part").digest)


def test_another_choice_in_the_same_folder_is_refused(plain: Path, tmp_path: Path) -> None:
    pull(plain, tmp_path / "part", layers=[1])
    before = tree(tmp_path / "part")
    choices: list[dict[str, Any]] = [{"layers": [2]}, {"layers": [1], "tokens": 100}, {}]
    for choice in choices:
        with pytest.raises(UsageError, match="another sealed store"):
            pull(plain, tmp_path / "part", **choice)
    assert tree(tmp_path / "part") == before
    assert pull(plain, tmp_path / "part", layers=[1]).n_files == 0


def test_only_what_was_chosen_is_fetched(plain: Path, tmp_path: Path) -> None:
    with FileServer(plain) as server:
        pull(server.url, tmp_path / "part", layers=[1], sites="residual", split="gate")
        paths = [path for _, path, _ in server.requests]
    chunks = {path for path in paths if "/residual/c/" in path or "/mlp_output/c/" in path}
    assert chunks == {f"/activations.zarr/residual/c/1/{block}/0" for block in (2, 7)}
    assert {path for path in paths if "/blocks/" in path} == {"/blocks/000002.json", "/blocks/000007.json"}


def test_a_selection_fits_and_one_split_alone_says_why_not(tmp_path: Path) -> None:
    from nearline.analyze import FitSettings, fit

    settings = FitSettings(folds=2)

    folder = make_store(tmp_path / "parent", n_layers=3, d=4, n_tokens=3000, block=100, linear=0.9)
    pull(folder, tmp_path / "part", layers=[1], sites="residual,mlp_output", tokens=2000)
    fit(tmp_path / "study", [tmp_path / "part"], settings)
    for split, message in (
        ("fit", "no row of the test split"),
        ("test", "no group of documents has rows to fit"),
    ):
        pull(folder, tmp_path / split, layers=[1], split=split)
        with pytest.raises(UsageError, match=message):
            fit(tmp_path / f"study-{split}", [tmp_path / split], settings)


def test_a_selection_keeps_numbers_by_which_rows_are_joined(plain: Path, tmp_path: Path) -> None:
    pull(plain, tmp_path / "part", split="gate")
    part = Reader.open(tmp_path / "part")
    sequence = part.column("sequence")
    assert sequence[0] > 0  # the parent's number, while the plan's own begin at 0
    runs = np.repeat(np.arange(part.plan.n_sequences), part.plan.length)
    firsts = sequence[part.plan.row_offsets[:-1]]
    np.testing.assert_array_equal(sequence, firsts[runs])
    assert len(set(firsts.tolist())) == part.plan.n_sequences
    assert dataclasses.astuple(part.attributes.corpus) == dataclasses.astuple(
        Reader.open(plain).attributes.corpus
    )


@pytest.mark.parametrize("lost", ["chunk", "record", "table"])
def test_a_sealed_selection_gets_back_what_it_lost(lost: str, plain: Path, tmp_path: Path) -> None:
    chunk = "activations.zarr/residual/c/1/3/0"
    name = {"chunk": chunk, "record": "blocks/000002.json", "table": "vocabulary.parquet"}[lost]
    pull(plain, tmp_path / "part", layers=[1, 2], split="fit")
    before = tree(tmp_path / "part")
    (tmp_path / "part" / name).unlink()
    (tmp_path / "part" / "activations.zarr/residual/c/0/0/0").write_bytes(b"spoiled")
    assert pull(plain, tmp_path / "part", layers=[1, 2], split="fit").n_files == 2
    assert tree(tmp_path / "part") == before
    assert pull(plain, tmp_path / "part", layers=[1, 2], split="fit").n_files == 0


def test_a_file_that_comes_out_otherwise_is_not_put_under_the_old_seal(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are made anew, and another version of their library may write other bytes."""
    pull(plain, tmp_path / "part", split="fit")
    (tmp_path / "part" / "vocabulary.parquet").unlink()
    monkeypatch.setattr("nearline.store.beginning.table_bytes", lambda table: b"of another version")
    with pytest.raises(DamageError, match=r"vocabulary\.parquet is damaged and cannot be made again"):
        pull(plain, tmp_path / "part", split="fit")
    assert not (tmp_path / "part" / "vocabulary.parquet").exists()


def test_many_blocks_need_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = make_store(tmp_path / "many", n_layers=1, d=4, n_tokens=120, block=3, sequence_length=3)
    assert Reader.open(parent).n_blocks == 40
    temporary, numbers = durable._temporary, list[int]()

    def counted(path: Path) -> Any:
        pending = temporary(path)
        numbers.append(open_temporaries())
        return pending

    monkeypatch.setattr(durable, "_temporary", counted)
    monkeypatch.setattr(durable, "OPEN_FILES", 8)
    pull(parent, tmp_path / "part", sites="residual")
    assert len(numbers) > 40
    assert max(numbers) <= 8
    assert verify(tmp_path / "part", level="full").whole

"""Stores travel whole: after any cut nobody can read a half store, and the same command goes on to the same
bytes; damage is not spread, strangers' files leave no folder, and two pushers never mix.
"""

import errno
import json
import random
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_disk import power_cut, unsynced, watched
from helpers_faults import Fault, FaultProxy
from helpers_hub import FakeHub
from helpers_places import Cut, MemoryPlace, resealed, tree
from helpers_servers import Bucket, FileServer, s3_client, use_s3
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
from nearline.store.carrying import Buffers, Piece, batches, fetch, in_parallel
from nearline.store.manifest import MANIFEST, SEALED
from nearline.store.patience import Patience
from nearline.store.places import LocalPlace, _LocalFile
from nearline.store.records import record_name
from nearline.store.remote import remote_place
from nearline.store.transfer import pull, push
from nearline.store.verify import verify

pytest_plugins = ("helpers_servers", "helpers_hub")

SMALL: dict[str, Any] = {"n_layers": 1, "d": 4, "n_tokens": 90, "block": 40, "sequence_length": 16}
CHUNK = "activations.zarr/residual/c/0/1/0"


class Calls(list[tuple[str, int, int, str]]):
    """What progress was reported."""

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        self.append((stage, done, total, unit))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_store(tmp_path_factory.mktemp("stores") / "small", **SMALL)
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "runs" / "a.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "other", seed=1, **SMALL)


@pytest.fixture(autouse=True)
def _no_hook() -> Iterator[None]:
    yield
    points.hook = lambda _: None


def test_a_folder_gets_the_same_bytes_and_no_runs(store: Path, tmp_path: Path) -> None:
    moved = push(store, tmp_path / "a" / "copy")
    assert tree(tmp_path / "a" / "copy", runs=True) == tree(store)
    found = tree(store)
    assert moved.n_files == len(found) - 3  # the card, the manifest and the seal are not counted
    assert (moved.n_kept, moved.digest) == (0, Reader.open(store).digest)
    assert push(store, (tmp_path / "b").as_uri()).n_files == moved.n_files
    assert pull((tmp_path / "b").as_uri(), tmp_path / "c").n_files == moved.n_files
    assert tree(tmp_path / "c", runs=True) == tree(tmp_path / "b", runs=True) == tree(store)


def test_a_place_behind_a_protocol_gets_and_gives_the_same_bytes(store: Path, tmp_path: Path) -> None:
    place = MemoryPlace()
    push(store, place, allow_unsafe_create=True)
    assert place.files == tree(store)
    pull(place, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(store)


def test_data_goes_first_and_the_seal_last(store: Path) -> None:
    place = MemoryPlace()
    push(store, place, allow_unsafe_create=True)
    written = [name for kind, name in place.operations if kind in ("put", "create")]
    kinds = [
        "mark" if name == "PUSHING" else "chunk" if "/c/" in name and "norm" not in name else name
        for name in written
    ]
    last_chunk = max(i for i, name in enumerate(written) if name.startswith("activations.zarr/residual/c/"))
    records = [i for i, name in enumerate(written) if name.startswith("blocks/")]
    metadata = [i for i, name in enumerate(written) if name.endswith("zarr.json") or name == "plan.json"]
    assert kinds[0] == "mark"
    assert last_chunk < min(records)
    assert max(records) < min(metadata)
    assert max(metadata) < len(written) - 2
    assert written[-2:] == [MANIFEST, SEALED]
    assert place.operations[-1] == ("delete", "PUSHING")


def test_a_second_push_or_pull_has_nothing_to_do(store: Path, tmp_path: Path) -> None:
    place = MemoryPlace()
    push(store, place, allow_unsafe_create=True)
    again = push(store, place, allow_unsafe_create=True)
    assert (again.n_files, again.n_bytes, again.n_kept) == (0, 0, 0)
    pull(place, tmp_path / "back")
    assert pull(place, tmp_path / "back").n_files == 0
    assert push(store, store).n_files == 0


def _is_unreadable(place: Any) -> bool:
    """Nobody takes the target for a store, and the refusal is one of ours."""
    with pytest.raises(NearlineError) as caught:
        Reader.open(place)
    return isinstance(caught.value, (StoreNotSealed, UsageError))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_push_that_is_cut_goes_on(store: Path, when: str) -> None:
    _push_cut(store, when, every=4)


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_push_that_is_cut_at_any_operation_goes_on(store: Path, when: str) -> None:
    _push_cut(store, when, every=1)


def _push_cut(store: Path, when: str, every: int) -> None:
    whole, calm = tree(store), MemoryPlace()
    push(store, calm, allow_unsafe_create=True)
    last = len(calm.operations)
    for number in sorted({*range(0, last, every), *range(last - 8, last)}):  # the end is where it matters
        place = MemoryPlace()
        place.cut = Cut(number, when)  # pyright: ignore[reportArgumentType]
        try:
            push(store, place, allow_unsafe_create=True)
        except EnvironmentFault:
            place.revive()
            if SEALED not in place.files:
                assert _is_unreadable(place), number
            else:
                assert {name: place.files[name] for name in whole} == whole, number
        else:  # a lost answer that was settled by reading back, with nothing left to ask
            assert when == "after"
        place.revive()
        push(store, place, allow_unsafe_create=True)
        assert place.files == whole, number


def test_a_pull_that_is_cut_goes_on(store: Path, tmp_path: Path) -> None:
    calm = MemoryPlace.of(store)
    pull(calm, tmp_path / "calm")
    for number in range(0, len(calm.operations), 16):
        _pull_cut(store, tmp_path / str(number), number)


@pytest.mark.long
def test_a_pull_that_is_cut_at_any_operation_goes_on(store: Path, tmp_path: Path) -> None:
    calm = MemoryPlace.of(store)
    pull(calm, tmp_path / "calm")
    for number in range(len(calm.operations)):
        _pull_cut(store, tmp_path / str(number), number)


def _pull_cut(store: Path, target: Path, number: int) -> None:
    source = MemoryPlace.of(store)
    source.cut = Cut(number)
    with pytest.raises(EnvironmentFault):
        pull(source, target)
    assert _is_unreadable(target), number
    source.revive()
    pull(source, target)
    assert tree(target) == tree(store), number


class Killed(BaseException):
    """Like kill -9: nothing but the operating system may clean up."""


POINTS = [name for name in points.POINTS if name.startswith(("durable.", "transfer."))]


@pytest.mark.parametrize("point", POINTS)
def test_a_push_that_is_killed_at_any_point_goes_on(point: str, store: Path, tmp_path: Path) -> None:
    _kill_and_go_on(push, point, store, tmp_path)


@pytest.mark.parametrize("point", ["durable.half_renamed", "transfer.chunks_there", "transfer.sealed_there"])
def test_a_pull_that_is_killed_goes_on(point: str, store: Path, tmp_path: Path) -> None:
    _kill_and_go_on(pull, point, store, tmp_path)


def _kill_and_go_on(move: Callable, point: str, store: Path, tmp_path: Path) -> None:
    seen = 0

    def kill(name: str) -> None:
        nonlocal seen
        seen += name == point
        if name == point and (seen == 2 or name.startswith("transfer.")):
            raise Killed

    points.hook = kill
    with pytest.raises(Killed):
        move(store, tmp_path / "copy")
    points.hook = lambda _: None
    if not (tmp_path / "copy" / SEALED).exists():
        assert _is_unreadable(tmp_path / "copy")
    move(store, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(store)


def test_an_incomplete_copy_says_what_to_do(store: Path) -> None:
    place = MemoryPlace()
    push(store, place, allow_unsafe_create=True)
    number, place = place.operations.index(("create", MANIFEST)), MemoryPlace()
    place.cut = Cut(number)
    with pytest.raises(EnvironmentFault):
        push(store, place, allow_unsafe_create=True)
    place.revive()
    with pytest.raises(StoreNotSealed, match=r"unfinished push.*repeat the same `nearline push`"):
        Reader.open(place)


def test_a_resumed_pull_fetches_only_the_rest_and_replaces_what_was_spoiled(
    store: Path, tmp_path: Path
) -> None:
    source = MemoryPlace.of(store)
    pull(source, tmp_path / "copy")
    (tmp_path / "copy" / "PULLING").write_bytes(source.files[MANIFEST])
    (tmp_path / "copy" / SEALED).unlink()
    spoiled = tmp_path / "copy" / CHUNK
    content = bytearray(spoiled.read_bytes())
    content[5] ^= 1
    spoiled.write_bytes(content)
    moved = pull(source, tmp_path / "copy")
    assert moved.n_files == 1
    assert moved.n_bytes == len(content)
    assert tree(tmp_path / "copy") == tree(store)


def test_a_copy_that_went_on_leaves_nothing_to_the_first_runs_luck(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run's process died: its renames may not be on disk yet, its temporaries lie about."""
    synced: list[Path] = []
    monkeypatch.setattr("nearline.store.carrying.synced_folder", synced.append)
    source = MemoryPlace.of(store)
    source.cut = Cut(60)
    with pytest.raises(EnvironmentFault):
        pull(source, tmp_path / "copy")
    left = tmp_path / "copy" / "activations.zarr" / "residual" / "c" / "0" / "1" / f"0.{'a' * 12}.partial"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"half")
    assert synced == []
    source.revive()
    pull(source, tmp_path / "copy")
    folders = {path for path in (tmp_path / "copy").rglob("*") if path.is_dir()}
    assert set(synced) == folders | {tmp_path / "copy"}
    assert not left.exists()
    pull(source, tmp_path / "fresh")  # has nothing to make up for
    assert set(synced) == folders | {tmp_path / "copy"}


@pytest.mark.parametrize("choice", [{}, {"layers": [0], "sites": "residual"}], ids=["whole", "selection"])
def test_a_pull_that_died_with_only_its_folders_made_survives_a_power_cut(
    choice: dict[str, Any], store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that the first run made, and did not sync, is not one that the second run makes."""
    (root := tmp_path / "disk").mkdir()
    temporary = durable._temporary

    def die(path: Path) -> Any:
        if "activations.zarr" in str(path):
            raise Killed
        return temporary(path)

    with watched(root, monkeypatch) as log:
        with monkeypatch.context() as patch:
            patch.setattr(durable, "_temporary", die)
            with pytest.raises(Killed):
                pull(store, root / "copy", **choice)
        assert [path.name for path in (root / "copy").rglob("*") if path.is_file()] == ["PULLING"]
        assert list((root / "copy" / "activations.zarr").iterdir())
        pull(store, root / "copy", **choice)
    assert unsynced(log) == []
    power_cut(log, len(log.calls), tmp_path / "after")
    assert verify(tmp_path / "after" / "copy", level="full").whole


# A whole copy that was damaged since

SPOILED = [
    CHUNK,
    "activations.zarr/nll/c/1",
    record_name(1),
    "vocabulary.parquet",
    "activations.zarr/nll/zarr.json",
]


def _spoil(folder: Path, names: list[str]) -> None:
    """Every other file is lost, the others have a flipped bit."""
    for number, name in enumerate(names):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).unlink() if number % 2 else (folder / name).write_bytes(content)


@pytest.mark.parametrize("move", [pull, push])
def test_a_sealed_folder_gets_back_what_it_lost(move: Callable, store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    move(store, copy)
    (copy / "README.md").write_text("edited")
    _spoil(copy, [*SPOILED, MANIFEST])
    sealed = (copy / SEALED).stat().st_mtime_ns
    moved = move(store, copy)
    assert moved.n_files == len(SPOILED) + 1
    assert moved.n_kept == len(tree(store)) - 2 - moved.n_files  # without the card and the seal
    assert tree(copy) == {**tree(store), "README.md": b"edited"}
    assert (copy / SEALED).stat().st_mtime_ns == sealed
    assert verify(copy, level="full").whole
    again = move(store, copy)
    assert (again.n_files, again.n_kept) == (0, 0)


def test_a_sealed_place_behind_a_protocol_gets_back_what_it_lists_otherwise(store: Path) -> None:
    place = MemoryPlace()
    push(store, place, allow_unsafe_create=True)
    for name in (CHUNK, "plan.json", MANIFEST):
        del place.files[name]
    place.files[record_name(0)] += b" "
    assert push(store, place, allow_unsafe_create=True).n_files == 4
    assert place.files == tree(store)


def test_damage_at_the_source_does_not_reach_a_whole_copy(store: Path, tmp_path: Path) -> None:
    source = MemoryPlace.of(store)
    pull(source, tmp_path / "copy")
    source.spoil = lambda name, content: bytes(len(content)) if name == CHUNK else content
    assert pull(source, tmp_path / "copy").n_files == 0  # it needs none of it
    (tmp_path / "copy" / CHUNK).unlink()
    with pytest.raises(DamageError, match=CHUNK):
        pull(source, tmp_path / "copy")
    assert not (tmp_path / "copy" / CHUNK).exists()


@pytest.mark.parametrize(("number", "kind"), [(errno.ESTALE, EnvironmentFault), (errno.EIO, DamageError)])
def test_a_passing_error_of_the_disk_is_no_damage(
    number: int, kind: type[NearlineError], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: _LocalFile, view: memoryview) -> int:
        raise OSError(number, "injected")

    monkeypatch.setattr(_LocalFile, "readinto", fail)
    with pytest.raises(kind, match=r"plan\.json: cannot be read \(injected\)") as caught:
        fetch(
            LocalPlace(store), Piece("plan.json", (store / "plan.json").stat().st_size, "0" * 64), Buffers()
        )
    assert isinstance(caught.value, DamageError) == (kind is DamageError)


# What is refused, and before what


def test_a_place_with_anything_else_is_refused(store: Path, other: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"not empty \(it holds notes\.txt"):
        push(store, tmp_path)
    with pytest.raises(UsageError, match="another sealed store"):
        push(store, other)
    with pytest.raises(UsageError, match="lies inside the store"):
        push(store, store / "copy")
    with pytest.raises(UsageError, match="is a file"):
        pull(store, tmp_path / "notes.txt")
    place = MemoryPlace({"somebody/else": b"1"})
    with pytest.raises(UsageError, match=r"not empty \(it holds somebody/else"):
        push(store, place, allow_unsafe_create=True)
    assert place.files == {"somebody/else": b"1"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_an_unfinished_copy_of_another_store_is_refused(store: Path, other: Path, tmp_path: Path) -> None:
    place = MemoryPlace()
    place.cut = Cut(20)
    with pytest.raises(EnvironmentFault):
        push(store, place, allow_unsafe_create=True)
    place.revive()
    before = dict(place.files)
    with pytest.raises(UsageError, match="unfinished push of another store"):
        push(other, place, allow_unsafe_create=True)
    assert place.files == before
    source = MemoryPlace.of(store)
    source.cut = Cut(40)
    with pytest.raises(EnvironmentFault):
        pull(source, tmp_path / "copy")
    with pytest.raises(UsageError, match="unfinished pull of another store"):
        pull(other, tmp_path / "copy")


def test_only_a_sealed_store_moves(tmp_path: Path) -> None:
    unsealed = make_store(tmp_path / "unsealed", seal=False, **SMALL)
    with pytest.raises(StoreNotSealed, match="has all 3 blocks but no seal"):
        push(unsealed, tmp_path / "copy")
    with pytest.raises(StoreNotSealed, match="no seal"):
        pull(unsealed, tmp_path / "copy")
    with pytest.raises(UsageError, match="not a nearline store"):
        pull(MemoryPlace(), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_damage_is_not_spread(store: Path, tmp_path: Path) -> None:
    push(store, tmp_path / "damaged")
    path = tmp_path / "damaged" / CHUNK
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 4]))
    for target in (MemoryPlace(), tmp_path / "copy"):
        with pytest.raises(DamageError, match=f"{CHUNK}: the content is not what was sealed"):
            push(tmp_path / "damaged", target, allow_unsafe_create=True)
        assert _is_unreadable(target)
        arrived = target.files if isinstance(target, MemoryPlace) else tree(target)
        assert CHUNK not in arrived
        path.write_bytes(good)
        push(tmp_path / "damaged", target, allow_unsafe_create=True)  # mended, it goes on
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 4]))


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_store_with_a_missing_or_cut_file_is_refused_before_anything_moves(
    damage: str, store: Path, tmp_path: Path
) -> None:
    push(store, tmp_path / "damaged")
    path = tmp_path / "damaged" / CHUNK
    path.unlink() if damage == "gone" else path.write_bytes(b"short")
    place = MemoryPlace()
    with pytest.raises(DamageError, match=CHUNK):
        push(tmp_path / "damaged", place, allow_unsafe_create=True)
    assert place.operations == []


def test_a_bit_that_flips_on_the_way_is_found(store: Path, tmp_path: Path) -> None:
    source, flips = MemoryPlace.of(store), []

    def flip(times: int) -> Callable[[str, bytes], bytes]:
        def spoil(name: str, content: bytes) -> bytes:
            if name != CHUNK or len(flips) >= times:
                return content
            flips.append(name)
            return content[:3] + bytes([content[3] ^ 16]) + content[4:]

        return spoil

    source.spoil = flip(2)  # twice wrong, then right
    pull(source, tmp_path / "copy")
    assert (len(flips), tree(tmp_path / "copy")) == (2, tree(store))
    source.spoil = flip(1000)
    with pytest.raises(DamageError, match=CHUNK):
        pull(source, tmp_path / "other")
    assert len(flips) == 5  # and no more tries than these three
    assert _is_unreadable(tmp_path / "other")
    assert not (tmp_path / "other" / CHUNK).exists()


def test_a_target_that_loses_an_object_gets_no_seal(store: Path) -> None:
    place = MemoryPlace()
    put = place.put

    def lossy(name: str, source: Path | bytes) -> None:
        put(name, source[:-1] if name == CHUNK and isinstance(source, bytes) else source)

    place.put = lossy  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(EnvironmentFault, match=f"{CHUNK} has .* bytes there"):
        push(store, place, allow_unsafe_create=True)
    assert _is_unreadable(place)
    place.put = put
    push(store, place, allow_unsafe_create=True)
    assert place.files == tree(store)


def test_too_little_space_is_said_before_a_chunk_moves(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1, 1, 1000))
    with pytest.raises(EnvironmentFault, match="are needed"):
        pull(MemoryPlace.of(store), tmp_path / "copy")
    assert not any((tmp_path / "copy").iterdir())  # left as it was found
    monkeypatch.undo()
    pull(store, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(store)


# Stores from strangers


def _name(name: str, size: int = 5) -> Callable[[dict], None]:
    return lambda manifest: manifest["files"].update({name: [size, "0" * 64]})


HOSTILE = {
    "a name that leaves the folder": _name("../evil"),
    "an absolute name": _name("/etc/passwd"),
    "a file that is no part of a store": _name("activations.zarr/setup.py"),
    "a run's file": _name("runs/a.json"),
    "a mark": _name("PUSHING"),
    "an array of another kind": _name("activations.zarr/extra/zarr.json"),
    "a chunk under the manifest": _name(CHUNK),
    "an absurd size": _name("activations.zarr/norm_bias/c/0/0", 2**50),
    "a block too many": _name("blocks/000009.json"),
    "a missing file": lambda manifest: manifest["files"].pop("vocabulary.parquet"),
    "absurd counts": lambda manifest: manifest.update(n_objects=10**12),
    "a wrong sum": lambda manifest: manifest.update(chunk_bytes=10**9),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused_before_anything_is_written(
    change: Callable[[dict], None], store: Path, tmp_path: Path
) -> None:
    with pytest.raises(DamageError):
        pull(MemoryPlace(resealed(tree(store), change)), tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1, 2**40])
def test_an_object_of_an_impossible_size_is_refused(size: int, store: Path, tmp_path: Path) -> None:
    from nearline.store.manifest import FileRecord

    files = tree(store)
    record = json.loads(files[record_name(1)])
    record["chunks"]["residual/c/0/1/0"][0] = size
    content = json.dumps(record).encode()
    found = FileRecord.of(content)
    files = resealed(
        {**files, record_name(1): content},
        lambda manifest: manifest["files"].update({record_name(1): [found.size, found.digest]}),
    )
    with pytest.raises(DamageError, match=r"residual/c/0/1/0 cannot have"):
        pull(MemoryPlace(files), tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_larger_than_any_is_not_read(store: Path, tmp_path: Path) -> None:
    source = MemoryPlace.of(store)
    source.files[SEALED] += b" " * 1000
    with pytest.raises(DamageError, match="seal"):
        pull(source, tmp_path / "copy")


# Two at a time


def test_of_two_stores_pushed_to_one_place_one_is_refused(store: Path, other: Path) -> None:
    for _ in range(10):
        place, gate = MemoryPlace(), threading.Barrier(2)
        works = [partial(push, one, place, allow_unsafe_create=True) for one in (store, other)]
        results = _at_once(works, gate)
        refused = [result for result in results if isinstance(result, UsageError)]
        assert len(refused) == 1, results
        winner = (store, other)[results.index(refused[0]) - 1]
        assert place.files == tree(winner)


def test_one_store_pushed_twice_at_once_is_fine(store: Path, tmp_path: Path) -> None:
    for number in range(5):
        place, gate = MemoryPlace(), threading.Barrier(2)
        results = _at_once([partial(push, store, place, allow_unsafe_create=True)] * 2, gate)
        assert not [result for result in results if isinstance(result, BaseException)], results
        assert place.files == tree(store)
        folder = tmp_path / str(number)
        results = _at_once([partial(push, store, folder)] * 2, threading.Barrier(2))
        assert not [result for result in results if isinstance(result, BaseException)], results
        assert tree(folder) == tree(store)


def _at_once(works: list[Callable], gate: threading.Barrier) -> list:
    def run(work: Callable) -> object:
        gate.wait()
        try:
            return work()
        except NearlineError as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


# Real servers

QUICK = Patience(retries=2, again=1, first_wait_s=0.01, longest_wait_s=0.02, silence_s=5, in_all_s=5)


def test_s3_gets_and_gives_the_same_bytes(store: Path, s3_bucket: Bucket, tmp_path: Path) -> None:
    url = f"{s3_bucket.url}/stores/small"
    push(store, url)
    assert _objects(s3_bucket) == {f"stores/small/{name}": content for name, content in tree(store).items()}
    pull(url, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(store)
    assert push(store, url).n_files == 0


def test_s3_behind_a_connection_that_breaks(
    store: Path, s3_bucket: Bucket, s3_proxy: FaultProxy, tmp_path: Path
) -> None:
    _break_and_go_on(store, s3_bucket, s3_proxy, tmp_path, n_cuts=2)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_s3_behind_a_connection_that_breaks_often(
    store: Path, s3_bucket: Bucket, s3_proxy: FaultProxy, tmp_path: Path
) -> None:
    _break_and_go_on(store, s3_bucket, s3_proxy, tmp_path, n_cuts=25)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_real_s3_server_behind_a_connection_that_breaks(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helpers_radosgw import radosgw

    with radosgw(tmp_path / "ceph") as gateway:
        s3_client(gateway.endpoint, gateway.access, gateway.secret).create_bucket(Bucket="stores")
        with FaultProxy(gateway.endpoint) as proxy:
            use_s3(monkeypatch, proxy.url, gateway.access, gateway.secret)
            push(store, "s3://stores/calm")
            pull("s3://stores/calm", tmp_path / "calm")
            assert tree(tmp_path / "calm") == tree(store)
            _break_and_go_on(store, Bucket("stores", gateway.endpoint), proxy, tmp_path, n_cuts=20)


def _break_and_go_on(store: Path, bucket: Bucket, proxy: FaultProxy, folder: Path, n_cuts: int) -> None:
    """Push and pull, each cut after a random number of bytes and then repeated."""
    rng, whole = random.Random(0), tree(store)
    for number in range(n_cuts):
        place = remote_place(f"{bucket.url}/cut/{number}", QUICK)
        back = folder / f"back-{number}"
        steps = (
            lambda place=place: push(store, place, allow_unsafe_create=True),
            lambda place=place, back=back: pull(place, back),
        )
        for step, target in zip(steps, (place, back), strict=True):
            proxy.die_after(rng.randrange(1, 14_000))
            try:
                step()
            except EnvironmentFault:
                proxy.revive()
                if isinstance(target, Path):
                    assert (target / SEALED).exists() or _is_unreadable(target)
                else:
                    assert target.size(SEALED) is not None or _is_unreadable(target)
            proxy.revive()
            step()
        assert tree(back) == whole
        assert set(place.list() or ()) == set(whole)


def test_a_lost_answer_to_the_seal_is_settled(store: Path, s3_bucket: Bucket, s3_proxy: FaultProxy) -> None:
    s3_proxy.add(Fault("drop_reply", method="PUT", path="SEALED"))
    push(store, f"{s3_bucket.url}/lost")
    assert s3_proxy.struck == 1
    assert len(_objects(s3_bucket)) == len(tree(store))


def test_a_store_where_two_writers_both_win_is_refused_unless_it_is_allowed(
    store: Path, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(s3_bucket.endpoint, strip=("If-None-Match",)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with pytest.raises(EnvironmentFault, match=r"exactly one must win.*--allow-unsafe-create"):
            push(store, f"{s3_bucket.url}/unsafe")
        assert _objects(s3_bucket) == {}
        push(store, f"{s3_bucket.url}/unsafe", allow_unsafe_create=True)
    assert _objects(s3_bucket) == {f"unsafe/{name}": content for name, content in tree(store).items()}


def test_the_hub_gets_a_store_in_few_commits_and_gives_it_back(
    store: Path, other: Path, hub: FakeHub, tmp_path: Path
) -> None:
    calls = Calls()
    push(store, "hf://datasets/me/acts", progress=calls)
    assert hub.files("me/acts") == tree(store)
    commits = hub.commits("me/acts")
    assert len(commits) <= 5  # repository, mark, files, seal, mark
    assert all(MANIFEST in files for files in commits if SEALED in files)
    assert {call[0] for call in calls} == {"check", "push"}
    pull("hf://datasets/me/acts", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(store)
    n_commits = len(hub.commits("me/acts"))
    assert push(store, "hf://datasets/me/acts").n_files == 0
    with pytest.raises(UsageError, match="another sealed store"):
        push(other, "hf://datasets/me/acts")
    assert len(hub.commits("me/acts")) == n_commits


def test_a_push_to_the_hub_that_is_cut_goes_on(
    store: Path, other: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(hub.url) as proxy:
        hub.use(monkeypatch, proxy.url)
        for n_commits in (0, 1, 2):  # the mark, files, manifest and seal
            url = f"hf://datasets/me/cut-{n_commits}"
            proxy.add(Fault("status", path="/commit/", status=400, after=n_commits, times=None))
            with pytest.raises(EnvironmentFault):
                push(store, remote_place(url, QUICK))
            proxy.clear()
            assert _is_unreadable(remote_place(url, QUICK))
            if n_commits:
                with pytest.raises(UsageError, match="unfinished push of another store"):
                    push(other, remote_place(url, QUICK))
            push(store, remote_place(url, QUICK))
            assert hub.files(f"me/cut-{n_commits}") == tree(store)


def test_a_sealed_store_on_the_hub_gets_back_what_it_lost(store: Path, hub: FakeHub) -> None:
    url = "hf://datasets/me/lossy"
    push(store, url)
    remote_place(url).delete(CHUNK)  # pyright: ignore[reportAttributeAccessIssue]
    assert CHUNK not in hub.files("me/lossy")
    assert push(store, url).n_files == 1
    assert hub.files("me/lossy") == tree(store)


def test_damage_is_not_spread_to_the_hub(store: Path, hub: FakeHub, tmp_path: Path) -> None:
    push(store, tmp_path / "damaged")
    path = tmp_path / "damaged" / CHUNK
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DamageError, match=CHUNK):
        push(tmp_path / "damaged", "hf://datasets/me/damaged")
    assert not [name for name in hub.files("me/damaged") if name.startswith("activations.zarr")]


def test_plain_http_gives_the_same_bytes_and_takes_none(store: Path, tmp_path: Path) -> None:
    with FileServer(store) as server:
        pull(server.url, tmp_path / "back")
        with pytest.raises(UsageError, match="can only be read"):
            push(store, server.url)
    assert tree(tmp_path / "back") == tree(store)


def test_an_object_that_vanished_from_a_plain_server_is_damage(store: Path, tmp_path: Path) -> None:
    push(store, tmp_path / "served")
    (tmp_path / "served" / CHUNK).unlink()
    with FileServer(tmp_path / "served") as server, pytest.raises(DamageError, match=f"{CHUNK}: .*missing"):
        pull(server.url, tmp_path / "back")
    assert _is_unreadable(tmp_path / "back")


@pytest.mark.parametrize("fault", [Fault("short", n_bytes=9), Fault("page"), Fault("cut", n_bytes=50)])
def test_a_bad_answer_of_a_plain_server_is_not_taken_for_data(
    fault: Fault, store: Path, tmp_path: Path
) -> None:
    with FileServer(store) as server, FaultProxy(server.url) as proxy:
        proxy.add(replace(fault, path="residual/c/0/1/0", times=None))
        with pytest.raises((DamageError, EnvironmentFault), match="residual/c/0/1/0"):
            pull(remote_place(proxy.url, QUICK), tmp_path / "back")
        assert _is_unreadable(tmp_path / "back")
        proxy.clear()
        proxy.add(replace(fault, path="residual/c/0/1/0", times=1))
        pull(remote_place(proxy.url, QUICK), tmp_path / "back")
    assert tree(tmp_path / "back") == tree(store)


def _objects(bucket: Bucket) -> dict[str, bytes]:
    client: Any = bucket.client()
    listed = client.list_objects_v2(Bucket=bucket.name).get("Contents", [])
    keys = [entry["Key"] for entry in listed]
    return {key: client.get_object(Bucket=bucket.name, Key=key)["Body"].read() for key in keys}


# The parts


def test_progress_counts_bytes_to_the_end(store: Path, tmp_path: Path) -> None:
    calls = Calls()
    moved = push(store, tmp_path / "copy", progress=calls)
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert calls[-1] == ("push", moved.n_bytes, moved.n_bytes, "bytes")


def test_the_benchmark_runs() -> None:
    sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
    import bench_share

    rows = bench_share.share_rows(n_layers=1, d=4, block=16, n_blocks=2, repeats=1)
    assert [row["reach"] for row in rows] == ["0.7"]
    assert all(row["value"] > 0 for row in rows)


def test_batches_keep_all_pieces_in_order_within_their_limits() -> None:
    rng = np.random.default_rng(0)
    pieces = [Piece(str(i), int(size), "") for i, size in enumerate(rng.integers(1, 2**24, size=200))]
    found = list(batches(pieces, 7))
    assert [piece for batch in found for piece in batch] == pieces
    assert max(len(batch) for batch in found) == 7
    assert all(len(batch) == 1 or sum(piece.size for piece in batch) <= 2**25 for batch in found)


@pytest.mark.parametrize("n_threads", [1, 4])
def test_the_first_error_stops_all_threads(n_threads: int) -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item == 20:
            raise UsageError("stop here")
        done.append(item)

    with pytest.raises(UsageError, match="stop here"):
        in_parallel(work, range(10_000_000), n_threads)
    assert len(done) < 10_000_000
    assert set(range(20)) <= set(done)
    in_parallel(done.append, range(-5, 0), n_threads)
    assert set(range(-5, 0)) <= set(done)


def test_any_order_of_copying_is_seen_as_incomplete_until_the_end(store: Path) -> None:
    """Other tools copy in any order: before the last file has arrived nobody takes the copy for whole."""

    whole = {name: content for name, content in tree(store).items() if name != "README.md"}
    rng = random.Random(0)
    for _ in range(5):
        names = rng.sample(sorted(whole), len(whole))
        for count in sorted(rng.sample(range(len(names)), 6)):
            place = MemoryPlace({name: whole[name] for name in names[:count]})
            assert not _is_whole(verify, place), names[:count]
    assert _is_whole(verify, MemoryPlace(whole))


def _is_whole(verify: Callable, place: MemoryPlace) -> bool:
    try:
        return verify(place, level="quick").whole
    except (StoreNotSealed, UsageError):  # nothing, or nothing yet, that claims to be a store
        return False


def test_a_wrong_digest_in_the_target_of_a_push_to_a_folder_is_replaced(store: Path, tmp_path: Path) -> None:
    """A disk that lost what it promised: a resumed push to a folder reads what is there."""
    push(store, tmp_path / "copy")
    (tmp_path / "copy" / SEALED).unlink()
    (tmp_path / "copy" / "PUSHING").write_bytes((store / MANIFEST).read_bytes())
    path = tmp_path / "copy" / CHUNK
    path.write_bytes(bytes(path.stat().st_size))
    assert push(store, tmp_path / "copy").n_files == 1
    assert tree(tmp_path / "copy") == tree(store)


def test_a_card_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """Nothing vouches for the card: a store from elsewhere must not make us publish what it points at."""
    store, secret = make_store(tmp_path / "s", **SMALL), tmp_path / "secret"
    secret.write_text("private")
    (store / "README.md").unlink()
    (store / "README.md").symlink_to(secret)
    push(store, tmp_path / "copy")
    assert not (tmp_path / "copy/README.md").exists()
    assert verify(tmp_path / "copy", level="full").whole

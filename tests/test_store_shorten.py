"""`seal --partial`: an unfinished store becomes a whole smaller one, together or not at all."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from helpers_points import Crash, flip, some, states
from helpers_store import begin, commit, make_store, synthetic, tree, write_all
from nearline.store import (
    DamageError,
    FormatError,
    IncompleteError,
    Reader,
    StoreNotSealed,
    UsageError,
    disk,
    durable,
    info,
    points,
    seal,
    shortening,
)
from nearline.store.parsing import readable
from nearline.store.replacing import LOCK, READY, replace_together
from nearline.store.verify import verify

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


def test_a_shortened_store_is_the_one_that_was_planned_so(tmp_path: Path) -> None:
    """Byte for byte, but for the attributes, which say what it was cut from."""
    path = begun(tmp_path / "s", range(4))
    writer = begin(path, DATA)
    commit(writer, DATA, 5)
    digest = seal(path, partial=True, drop_blocks=True)
    reader = Reader.open(path)
    assert reader.digest == digest
    assert (reader.n_blocks, reader.n_tokens) == (4, 40)
    assert reader.attributes.lineage == (
        {
            "kind": "shortened",
            "planned_tokens": 60,
            "planned_blocks": 6,
            "planned_digest": DATA.plan.digest,
        },
    )
    assert np.array_equal(reader.rows("residual", 0, 0, 4), DATA.sites["residual"][0, :40])
    assert np.array_equal(reader.column("token_id"), DATA.columns["token_id"][:40])
    assert info(path)["n_tokens"] == 40
    planned = dataclasses.replace(
        DATA,
        plan=reader.plan,
        attributes=dataclasses.replace(reader.attributes, lineage=()),
        documents=reader.documents,
        vocabulary=reader.vocabulary,
    )
    write_all(tmp_path / "planned" / "s", planned)
    found, wanted = tree(path), tree(tmp_path / "planned" / "s")
    assert found.keys() == wanted.keys()
    unlike = {name for name in found if found[name] != wanted[name]}
    assert unlike == {"activations.zarr/zarr.json", "manifest.json", "SEALED"}
    assert seal(path, partial=True) == digest  # nothing is left to cut


def test_the_tables_of_a_shortened_store_count_what_is_left(tmp_path: Path) -> None:
    path = begun(tmp_path / "s", range(4))
    seal(path, partial=True)
    reader = Reader.open(path)
    documents, vocabulary = reader.documents, reader.vocabulary
    held = np.bincount(reader.column("document"), minlength=documents.num_rows)
    assert documents["n_tokens"].to_pylist() == held.tolist()
    assert documents.num_rows == DATA.documents.num_rows
    stored = held - np.bincount(
        reader.column("document"), weights=reader.column("special"), minlength=documents.num_rows
    )
    lengths = DATA.documents["n_tokens"].to_numpy() - np.bincount(
        DATA.plan.document, weights=DATA.plan.bos, minlength=documents.num_rows
    )
    assert (documents["n_dropped"].to_numpy() + stored).tolist() == lengths.tolist()
    ids, targets = reader.column("token_id"), reader.column("target_id")
    assert set(vocabulary["token_id"].to_pylist()) == {*ids.tolist(), *targets[targets >= 0].tolist()}
    assert vocabulary["count"].to_pylist() == [
        int((ids == i).sum()) for i in vocabulary["token_id"].to_pylist()
    ]


def test_a_shortened_store_is_not_gone_on_with(tmp_path: Path) -> None:
    path = begun(tmp_path / "s", range(4))
    seal(path, partial=True)
    before = tree(path)
    with pytest.raises(UsageError, match="was shortened to 40 token rows by `nearline seal --partial`"):
        begin(path, DATA)
    assert tree(path) == before


@pytest.mark.parametrize(("blocks", "lacking"), [([], "fit and gate and test"), ([0, 1, 3, 4], "gate")])
def test_a_store_without_all_splits_is_not_shortened(tmp_path: Path, blocks: list[int], lacking: str) -> None:
    path = make_store(tmp_path / "s", seal=False, blocks=blocks, **SETTINGS)
    before = tree(path)
    with pytest.raises(UsageError, match=f"hold nothing of {lacking}; a store needs all of fit, gate, test"):
        seal(path, partial=True)
    assert tree(path) == before


def test_a_bad_block_ends_what_is_kept(tmp_path: Path) -> None:
    path = begun(tmp_path / "s", range(5))
    (path / CHUNK.format(3)).unlink()
    seal(path, partial=True, drop_blocks=True)
    assert Reader.open(path).n_blocks == 3


def test_a_store_is_not_shortened_under_a_collector(tmp_path: Path) -> None:
    path = begun(tmp_path / "s", range(4))
    (path / "runs").mkdir()
    with (path / "runs/rank-0.lock").open("w") as file:
        assert disk.lock(file.fileno())
        with pytest.raises(UsageError, match=r"a collector is at work .*rank-0.lock"):
            seal(path, partial=True)
    seal(path, partial=True)


def test_a_kill_at_every_point_of_a_shortening_ends_in_the_same_store(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = begun(tmp_path / "s", range(4))
    found = list(states(lambda: seal(path, partial=True), path, tmp_path / "killed"))
    whole = tree(path)
    assert {name for name, _ in found if name.startswith("replacing.")} == {
        name for name in points.POINTS if name.startswith("replacing.")
    }
    for name, killed in some(found, 5, bool(request.config.getoption("--run-long"))):
        if (killed / READY).exists():
            with pytest.raises(IncompleteError):
                Reader.open(killed)
        seal(killed, partial=True)
        assert tree(killed) == whole, f"killed at {name}"


def test_a_kill_of_a_shortening_is_finished_or_forgotten_by_whoever_comes_next(
    tmp_path: Path, calm: dict[str, bytes]
) -> None:
    path = begun(tmp_path / "s", range(4))
    for name, killed in states(lambda: seal(path, partial=True), path, tmp_path / "killed"):
        if name == "replacing.staged":  # nothing was decided: the harvest goes on
            write_all(killed, DATA)
            assert tree(killed) == calm
        if name == "replacing.half_moved":
            with pytest.raises(UsageError, match="was shortened"):
                begin(killed, DATA)
            assert tree(killed).keys() >= {"plan.json"}
            assert not (killed / READY).exists()


def test_a_replacement_whose_journal_is_damaged_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = begun(tmp_path / "s", range(4))

    def crash(name: str) -> None:
        if name == "replacing.ready":
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(points, "hook", crash)
        with pytest.raises(Crash):
            replace_together(
                path, {"plan.json": b"new", "blocks/000000.json": b"too"}, ["blocks/000001.json"]
            )
    flip(path / "replacing/new/plan.json")
    with pytest.raises(DamageError, match=r"replacing/new/plan.json is missing or damaged"):
        seal(path)
    flip(path / "replacing/new/plan.json")
    ready = (path / READY).read_bytes()
    (path / READY).write_bytes(ready.replace(b"plan.json", b"../x.json"))
    with pytest.raises(DamageError, match="is not a path inside the folder"):
        seal(path)
    (path / READY).write_bytes(ready)
    with pytest.raises(DamageError, match=r"plan.json"):
        seal(path)  # it is finished first; what it put there is no plan
    assert (path / "plan.json").read_bytes() == b"new"
    assert not (path / "blocks/000001.json").exists()
    assert not (path / "replacing").exists()


@pytest.mark.parametrize("part", ["move", "remove"])
@pytest.mark.parametrize(
    "name", ["out/authorized_keys", "runs/mine.json", "notes.txt", "blocks", "replacing/READY"]
)
def test_a_journal_that_names_what_no_store_has_is_refused(tmp_path: Path, name: str, part: str) -> None:
    """A store may come from elsewhere, in an archive: with a link in it and with a journal."""
    path, home = make_store(tmp_path / "s", **SETTINGS), tmp_path / "home"
    for folder in (home, path / "runs", path / "replacing/new/out"):
        folder.mkdir(parents=True)
    (path / "out").symlink_to(home)
    for file in (home / "authorized_keys", path / "runs/mine.json", path / "notes.txt", path / LOCK):
        file.write_text("mine")
    staged = path / "replacing/new" / name
    staged.parent.mkdir(parents=True, exist_ok=True)
    staged.write_text("theirs")
    move = {name: blake3(b"theirs").hexdigest()} if part == "move" else {}
    remove = [name] if part == "remove" else []
    (path / READY).write_bytes(readable({"schema": 1, "move": move, "remove": remove}))
    before = tree(tmp_path)
    with pytest.raises(FormatError, match="is no file of a store"):
        seal(path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("faster", ["seal --partial", "collect"])
def test_a_shortening_that_another_process_overtook_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    path, whole = begun(tmp_path / "s", range(4)), dict[str, bytes]()
    records = shortening._records

    def overtaken(*args: Any) -> Any:
        monkeypatch.setattr(shortening, "_records", records)
        found = records(*args)
        seal(path, partial=True) if faster == "seal --partial" else write_all(path, DATA)
        whole.update(tree(path))
        return found

    monkeypatch.setattr(shortening, "_records", overtaken)
    with pytest.raises(UsageError, match="was changed by another process meanwhile; nothing was shortened"):
        seal(path, partial=True)
    assert tree(path) == whole
    assert not (path / "replacing").exists()
    assert verify(path, level="full").whole


def test_no_collector_begins_while_a_store_is_shortened(tmp_path: Path) -> None:
    path = begun(tmp_path / "s", range(4))
    (path / "replacing").mkdir()
    with disk.locked(path / LOCK), pytest.raises(UsageError, match="another process is changing"):
        begin(path, DATA)
    begin(path, DATA)


def test_committed_blocks_behind_the_gap_are_removed_only_on_request(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", seal=False, blocks=[0, 1, 2, 4, 5], **SETTINGS)
    before = tree(path)
    with pytest.raises(UsageError, match=r"2 committed blocks \(4-5; 20 token rows\) stand behind .* \(3\)"):
        seal(path, partial=True)
    assert tree(path) == before
    seal(path, partial=True, drop_blocks=True)
    assert Reader.open(path).n_blocks == 3


def test_a_copy_in_the_making_is_not_sealed(tmp_path: Path) -> None:
    """What has not arrived yet would be left out for good."""
    path = make_store(tmp_path / "s", **SETTINGS)
    (path / "manifest.json").rename(path / "PUSHING")
    (path / "SEALED").unlink()
    (path / "activations.zarr/norm_bias/zarr.json").unlink()
    with pytest.raises(StoreNotSealed, match="unfinished push"):
        seal(path)
    assert not (path / "SEALED").exists()

"""Faults while writing: whatever fails, nothing unfinished looks whole, and the error is one sentence."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_points import Crash
from helpers_store import begin, commit, make_store, synthetic, tree, write_all
from nearline.store import (
    EnvironmentFault,
    IncompleteError,
    NearlineError,
    Reader,
    StoreNotFound,
    StoreNotSealed,
    StoreWriter,
    UsageError,
    claim_folder,
    durable,
    info,
)
from nearline.store.beginning import claim_store
from nearline.store.layout import TOKEN_COLUMNS

pytestmark = pytest.mark.sampled
SETTINGS: dict[str, Any] = {"n_tokens": 40, "block": 20, "n_layers": 1, "d": 4, "sequence_length": 10}
DATA = synthetic(**SETTINGS)


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, n: int, error: BaseException) -> Callable[[], int]:
    """Make the n-th call (from 1) of an os function raise, and all later ones too; returns the counter."""
    real, count = getattr(os, name), 0

    def failing(*args: object, **kwargs: object) -> object:
        nonlocal count
        count += 1
        if count >= n:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(durable.os, name, failing)
    return lambda: count


def check_nothing_pretends(path: Path) -> int:
    """Unsealed, refused by the reader; every committed block is whole. Returns how many are."""
    assert not (path / "SEALED").exists()
    assert not list(path.rglob(f"*{durable.PARTIAL}"))
    with pytest.raises((StoreNotSealed, IncompleteError, StoreNotFound)):
        Reader.open(path)
    try:
        reader = Reader.open(path, require_seal=False)
        committed = info(path)["n_committed"]
    except (IncompleteError, StoreNotFound):
        return 0  # it was never begun properly, and says so
    for block in range(reader.n_blocks):
        row0, row1 = reader.block_range(block)
        if (path / f"blocks/{block:06d}.json").exists():
            for site in ("residual", "mlp_output", "embedding"):
                rows = reader.stored(site, 0, block, block + 1)
                assert np.array_equal(rows, DATA.stored[site][..., row0:row1, :].reshape(row1 - row0, -1))
            for name in TOKEN_COLUMNS:
                found = reader.column_block(name, block)
                assert np.array_equal(found, DATA.columns[name][row0:row1], equal_nan=name == "nll")
    return committed


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path) -> int:
    with monkeypatch.context() as patch:
        count = fail_at(patch, name, 10**9, OSError())
        write_all(tmp_path / "counted" / "s", DATA)
        return count()


def ordinals(n_calls: int, step: int, request: pytest.FixtureRequest) -> list[int]:
    """Which calls fail in turn: the first ones, the last ones and every `step`-th; all with --run-long."""
    every = range(1, n_calls + 1)
    if request.config.getoption("--run-long"):
        return list(every)
    return sorted({*every[:2], *every[-2:], *every[::step]})


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests write some hundred stores; none has to survive a power cut."""
    monkeypatch.setattr(durable.os, "fsync", lambda descriptor: None)


FAULTS = {
    "write": (OSError(errno.ENOSPC, "No space left on device"), "no space is left", 5),
    "fsync": (OSError(errno.EIO, "Input/output error"), "Input/output error", 11),
    "replace": (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota is used up", 4),
    "link": (OSError(errno.ENOSPC, "No space left on device"), "no space is left", 4),
    "mkdir": (OSError(errno.EIO, "Input/output error"), "Input/output error", 7),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_at_every_call_is_one_clear_error_and_the_store_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, name: str
) -> None:
    """Nothing pretends to be whole, committed blocks stay, the same steps again give the same bytes."""
    error, message, step = FAULTS[name]
    n_calls = count_calls(monkeypatch, name, tmp_path)
    calm = tree(tmp_path / "counted" / "s")
    assert n_calls > 20
    for n in ordinals(n_calls, step, request):
        path = tmp_path / f"{n}" / "s"
        with monkeypatch.context() as patch:
            fail_at(patch, name, n, error)
            with pytest.raises(EnvironmentFault, match=message):
                write_all(path, DATA)
        n_committed = 0
        if not (path / "SEALED").exists():  # or the sync after the last link failed: it was whole by then
            n_committed = check_nothing_pretends(path)
        writer = begin(path, DATA)
        assert len(writer.committed) >= n_committed
        write_all(path, DATA)
        assert tree(path) == calm


def test_a_crash_at_every_rename_leaves_no_block_without_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Path.replace, 0

    def counted(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls >= stop:
            raise Crash
        return real(self, target)

    monkeypatch.setattr(Path, "replace", counted)
    stop = 10**9
    write_all(tmp_path / "counted", DATA)
    total = calls
    for stop in range(1, total + 1):
        calls = 0
        path = tmp_path / f"s{stop}"
        with pytest.raises(Crash):
            write_all(path, DATA)
        check_nothing_pretends(path)


def test_a_crash_before_the_record_leaves_no_committed_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = begin(tmp_path / "s", DATA)
    commit(writer, DATA, 0)

    def crash(*args: object, **kwargs: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(durable, "create_file", crash)
        with pytest.raises(Crash):
            commit(writer, DATA, 1)
    assert (
        tmp_path / "s/activations.zarr/residual/c/0/1/0"
    ).exists()  # the chunks are there, and are no data
    assert writer.committed == {0}
    assert info(tmp_path / "s")["n_committed"] == 1
    with pytest.raises(IncompleteError, match="tokens 20-39 have no block record"):
        Reader.open(tmp_path / "s", require_seal=False).rows("residual", 0, 1, 2)
    commit(writer, DATA, 1)  # the block can be collected again
    writer.seal()
    assert Reader.open(tmp_path / "s").rows("residual", 0, 0, 2).shape == (40, 4)


def test_space_that_comes_back_lets_the_writer_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = begin(tmp_path / "s", DATA)
    with monkeypatch.context() as patch:
        fail_at(patch, "write", 5, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(EnvironmentFault, match="run again"):
            commit(writer, DATA, 0)
    for block in range(2):
        commit(writer, DATA, block)
    writer.seal()
    assert np.array_equal(Reader.open(tmp_path / "s").rows("residual", 0, 0, 2), DATA.sites["residual"][0])


def test_a_store_that_cannot_fit_is_refused_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs(tmp_path)
    monkeypatch.setattr(durable.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(EnvironmentFault, match="GiB are needed"):
        begin(tmp_path / "s", DATA)
    assert full
    assert not list((tmp_path / "s").iterdir())


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not touch")
    for begin_here in (claim_folder, lambda path: begin(path, DATA)):
        with pytest.raises(UsageError, match=r"not empty \(it holds thesis.txt\)"):
            begin_here(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(UsageError, match="is a file"):
        claim_folder(tmp_path / "thesis.txt")


def test_a_finished_store_is_not_written_over(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", **SETTINGS)
    before = tree(path)
    with pytest.raises(UsageError, match="name a new folder"):
        begin(path, synthetic(**SETTINGS, seed=1))
    writer = begin(path, DATA)  # the same one: nothing is left to do
    assert writer.sealed
    assert writer.committed == {0, 1}
    assert tree(path) == before
    with pytest.raises(UsageError, match="committed already"):
        commit(writer, DATA, 0)


def test_a_folder_that_cannot_be_written_is_an_environment_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)  # chmod would not stop a superuser
    for claim in (claim_folder, claim_store):
        with pytest.raises(EnvironmentFault, match="permission is denied"):
            claim(tmp_path / "new")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(EnvironmentFault, match="permission is denied"):
        begin(tmp_path / "deep" / "new", DATA)


@pytest.mark.parametrize("seed", [0, 1])
def test_two_writers_in_one_empty_folder_share_the_store_or_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    real, first = durable.create_files, []

    def overtaken(*args: Any) -> list[bool]:
        if not first:  # another process begins between the look and the first file
            first.append(True)
            begin(tmp_path / "s", synthetic(**SETTINGS, seed=seed))
        return real(*args)

    monkeypatch.setattr(durable, "create_files", overtaken)
    if seed == 0:
        assert not begin(tmp_path / "s", DATA).begun_here
    else:
        with pytest.raises(UsageError, match=r"was begun with `corpus.spec` = 'synthetic:1'"):
            begin(tmp_path / "s", DATA)
    assert info(tmp_path / "s")["n_blocks"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda columns, sites: sites.pop("embedding"), "`embedding` is missing"),
        (lambda columns, sites: sites.update(attention=sites["residual"]), "`attention` is not an array"),
        (
            lambda columns, sites: sites.update(residual=sites["residual"][:, :-1]),
            r"needed is float32 \(1, 20, 4\)",
        ),
        (lambda columns, sites: sites.update(residual=sites["residual"].astype("f8")), "float64"),
        (lambda columns, sites: columns.update(split=columns["split"] + 1), "`split` is not fit"),
        (lambda columns, sites: columns.update(nll=columns["nll"] * np.nan), "`nll` must be NaN exactly"),
        (
            lambda columns, sites: columns.update(token_id=columns["token_id"].astype("i8")),
            "`token_id` is int64",
        ),
    ],
)
def test_a_block_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[dict, dict], object], message: str
) -> None:
    writer = begin(tmp_path / "s", DATA)
    columns, sites = DATA.block(0)
    change(columns, sites)
    with pytest.raises(UsageError, match=message):
        writer.commit(0, columns, sites, {})
    assert writer.committed == set()
    assert not list((tmp_path / "s/activations.zarr").rglob("residual/c/*"))


def test_a_block_is_committed_once(tmp_path: Path) -> None:
    writer = begin(tmp_path / "s", DATA)
    commit(writer, DATA, 0)
    with pytest.raises(UsageError, match="block 0 is committed already"):
        commit(writer, DATA, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [1]}, "layers"),
        ({"d_model": 5}, "d_model"),
        ({"storage_dtype": "float16"}, "storage dtype"),
        ({"sites": ["residual"]}, "sites"),
        ({"compressor": "zstd"}, "compressor"),
        ({"affine": {"norm_weight": np.ones((2, 4), np.float32)}}, "norm_weight"),
        ({"affine": {"scale": np.ones((1, 4), np.float32)}}, "scale"),
        ({"position_embedding": np.ones((3, 3), np.float32)}, "position_embedding"),
        ({"plan": synthetic(**{**SETTINGS, "n_tokens": 80}).plan}, "plan digest"),
        ({"documents": DATA.vocabulary}, "documents table"),
    ],
)
def test_a_store_that_contradicts_its_attributes_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    arguments = {
        "plan": DATA.plan,
        "attributes": DATA.attributes,
        "layers": DATA.layers,
        "d_model": DATA.d,
        "storage_dtype": DATA.storage_dtype,
        "sites": list(DATA.sites),
        "documents": DATA.documents,
        "vocabulary": DATA.vocabulary,
        "affine": DATA.affine,
    }
    with pytest.raises(NearlineError, match=message):
        StoreWriter.begin(tmp_path / "s", **{**arguments, **changes})
    assert not (tmp_path / "s").exists()

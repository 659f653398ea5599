"""Many collectors, one store: any number of ranks, one after another or at once, give the same bytes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_harvest import texts
from helpers_kills import N_BLOCKS, SETTINGS, Forge, store_files, the_forge
from helpers_models import tiny_model, tiny_tokenizer
from nearline.collect import harvest, parse_settings
from nearline.collect.ranks import Ranks, local_device, ranks_of
from nearline.store import Reader, seal
from nearline.store.errors import StoreNotSealed, UsageError

DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def forge() -> Forge:
    return the_forge()


def run(path: Path, dtype: str = "float32", **changes: Any) -> Path:
    model, _ = tiny_model("llama", dtype=getattr(torch, dtype))
    return harvest(model, tiny_tokenizer(), texts(), path, **{**SETTINGS, "storage_dtype": dtype, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The store of one process, by dtype."""
    folder = tmp_path_factory.mktemp("whole")
    return {dtype: store_files(run(folder / dtype, dtype)) for dtype in DTYPES}


def records(path: Path) -> list[int]:
    return sorted(int(file.stem) for file in (path / "blocks").glob("*.json"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [(0, 1), (2, 0, 1)])
def test_ranks_one_after_another(
    order: tuple[int, ...], dtype: str, whole: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    path, expected = tmp_path / "store", set[int]()
    for rank in order:
        run(path, dtype, rank=rank, world_size=len(order))
        expected |= set(range(rank, N_BLOCKS, len(order)))
        assert records(path) == sorted(expected)
        assert (path / "SEALED").exists() == (rank == order[-1]), "the last one seals, whichever it is"
    assert store_files(path) == whole[dtype]
    assert Reader.open(path).n_blocks == N_BLOCKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_at_once(
    world_size: int, dtype: str, forge: Forge, whole: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    path = tmp_path / "store"
    shared = {"storage_dtype": dtype, "world_size": world_size}
    ranks = [
        {"path": str(path), "dtype": dtype, "settings": {**shared, "rank": rank}}
        for rank in range(world_size)
    ]
    for outcome in forge.run_all(ranks):
        assert (outcome.code, outcome.message) == (0, "")
    assert store_files(path) == whole[dtype]
    if world_size > 1:
        assert not list((path / "runs").glob("*.lock")), "every rank took its lock with it"


def test_ranks_killed_and_started_again_with_another_world_size(
    forge: Forge, whole: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    path = tmp_path / "store"
    shared = {"storage_dtype": "float32", "world_size": 2}
    ranks: list[dict[str, Any]] = [
        {"path": str(path), "settings": {**shared, "rank": rank}, "kill_at": ("writer.chunks_durable", 2)}
        for rank in range(2)
    ]
    assert all(outcome.killed for outcome in forge.run_all(ranks))
    assert records(path) == [0, 1]
    for outcome in forge.run_all(
        [{"path": str(path), "settings": {"rank": r, "world_size": 3}} for r in range(3)]
    ):
        assert outcome.code == 0
    assert store_files(path) == whole["float32"]


def test_what_a_rank_says(forge: Forge, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    first = forge.run(path=path, settings={"rank": 0, "world_size": 2})
    assert f"rank 0 of 2 is done: 3 of {N_BLOCKS} blocks committed; the last rank seals" in first.notes
    last = forge.run(path=path, settings={"rank": 1, "world_size": 2})
    assert f"rank 1 of 2 is done: all {N_BLOCKS} blocks are committed, the store is sealed" in last.notes


def test_missing_ranks_are_named_by_their_blocks(tmp_path: Path) -> None:
    path = run(tmp_path / "store", rank=1, world_size=3)
    with pytest.raises(StoreNotSealed, match=rf"4 of {N_BLOCKS} blocks are missing \(0, 2-3, 5\)"):
        seal(path)
    with pytest.raises(StoreNotSealed, match=r"\(0, 2-3, 5\)"):
        Reader.open(path)


def test_the_same_rank_twice_stops_the_second(
    forge: Forge, whole: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    path, refused = tmp_path / "store", []

    def progress(*_: object) -> None:
        # The first collector stands still while the second, a process of its own, tries.
        if not refused:
            refused.append(forge.run(path=str(path)))
            refused.append(forge.run(path=str(path), settings={"rank": 0, "world_size": 2}))

    run(path, progress=progress)
    assert store_files(path) == whole["float32"]
    for outcome, rank in zip(refused, ("rank 0 of 1", "rank 0 of 2"), strict=True):
        assert outcome.code == 2
        assert f"another process (process {os.getpid()} on " in outcome.message
        assert f"collects {rank} here. Wait for it, or give each process a rank of its own" in outcome.message
        assert "batch" not in outcome.points


def test_the_lock_of_a_process_that_died_is_free(forge: Forge, tmp_path: Path) -> None:
    path = tmp_path / "store"
    assert forge.run(path=str(path), kill_at=("writer.chunks_durable", 2)).killed
    assert (path / "runs/rank-0.lock").exists()
    assert forge.run(path=str(path)).code == 0
    assert not (path / "runs/rank-0.lock").exists()


# ---- which rank a process is


def test_every_block_has_one_rank() -> None:
    for world_size in (1, 2, 3, 7):
        shares = [Ranks(rank, world_size).own(range(20)) for rank in range(world_size)]
        assert sorted(block for share in shares for block in share) == list(range(20))
        assert all(share == sorted(share) for share in shares)


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ({}, {}, (0, 1)),
        ({"rank": 2, "world_size": 4}, {}, (2, 4)),
        ({}, {"RANK": "1", "WORLD_SIZE": "3"}, (1, 3)),
        ({"rank": 0, "world_size": 2}, {"RANK": "1", "WORLD_SIZE": "3"}, (0, 2)),
        ({}, {"RANK": "1"}, (0, 1)),
        ({}, {"WORLD_SIZE": "8"}, (0, 1)),
    ],
)
def test_the_rank_of_a_process(
    settings: dict[str, Any], environment: dict[str, str], expected: tuple[int, int]
) -> None:
    found = ranks_of(parse_settings(settings), environment)
    assert (found.rank, found.world_size) == expected


@pytest.mark.parametrize(
    ("settings", "environment", "says"),
    [
        ({"rank": 1}, {}, "rank is set and world_size is not: give both"),
        ({"world_size": 2}, {}, "world_size is set and rank is not: give both"),
        ({"rank": 2, "world_size": 2}, {}, "rank=2 of world_size=2: ranks count from 0, allowed: 0-1"),
        ({"rank": 1, "world_size": 1}, {}, "allowed: 0$"),
        ({}, {"RANK": "3", "WORLD_SIZE": "3"}, "rank=3 of world_size=3"),
        ({}, {"RANK": "one", "WORLD_SIZE": "3"}, "the environment has RANK='one': a number is needed"),
        ({}, {"RANK": "-1", "WORLD_SIZE": "3"}, "RANK='-1'"),
        ({}, {"RANK": "0", "WORLD_SIZE": "0"}, "rank=0 of world_size=0"),
    ],
)
def test_a_rank_that_cannot_be(settings: dict[str, Any], environment: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ranks_of(parse_settings(settings), environment)


def test_a_wrong_rank_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ranks count from 0"):
        run(tmp_path / "store", rank=5, world_size=5)
    assert not (tmp_path / "store").exists()


def test_torchruns_environment_steers_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert records(run(tmp_path / "store")) == [1, 3, 5]
    run(tmp_path / "store", rank=0, world_size=2)
    assert (tmp_path / "store" / "SEALED").exists()


@pytest.mark.parametrize(
    ("device", "environment", "n_devices", "expected"),
    [
        ("auto", {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 4, "cuda:1"),
        ("auto", {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, 1, "cuda:0"),
        ("auto", {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 0, "auto"),
        ("auto", {"LOCAL_RANK": "1"}, 4, "auto"),
        ("cuda:2", {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 4, "cuda:2"),
        ("cpu", {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 4, "cpu"),
    ],
)
def test_each_local_rank_has_a_gpu_of_its_own(
    device: str, environment: dict[str, str], n_devices: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_devices)
    assert local_device(device, environment) == expected


@pytest.mark.long
def test_torchrun_itself(tmp_path: Path) -> None:
    """Two processes under torchrun, with the command line."""
    collect = [
        "collect",
        "tiny-gpt2",
        "docs:stdlib",
        str(tmp_path / "store"),
        "--tokens",
        "2000",
        "--threads",
        "1",
    ]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "nearline",
        *collect,
    ]
    subprocess.run(launch, check=True, capture_output=True, timeout=240)
    alone = [sys.executable, "-m", "nearline", *collect]
    alone[alone.index(str(tmp_path / "store"))] = str(tmp_path / "alone")
    subprocess.run(alone, check=True, capture_output=True, timeout=240)
    assert store_files(tmp_path / "store") == store_files(tmp_path / "alone")

"""Mutations of the writing of a store: crashes, lost bytes, full disks, rivals, changed settings, odd arrays.

Each ends with the same command given again, and the bytes of a store that nothing ever happened to.
"""

import dataclasses
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_damage import cut, everything, flip, same
from helpers_mutations import (
    DATA,
    SETTINGS,
    Accepted,
    Found,
    Outcome,
    Raised,
    Scene,
    mutation,
    oracle,
    twin_of,
)
from helpers_store import Synthetic, begin, commit, statistics, synthetic, tree, write_all
from nearline.store import (
    DamageError,
    EnvironmentFault,
    NearlineError,
    OutOfRange,
    PlanFacts,
    Reader,
    UsageError,
    decode,
    encode,
    points,
    seal,
)
from nearline.store.manifest import SEALED
from nearline.store.places import LocalPlace
from nearline.store.transfer import pull, push
from nearline.store.verify import verify

WRITING = [name for name in points.POINTS if name.startswith(("durable.", "writer.", "sealing."))]
REPLACING = [name for name in points.POINTS if name.startswith("replacing.")]
TRANSFER = [name for name in points.POINTS if name.startswith("transfer.")]
CHUNK = "activations.zarr/residual/c/1/1/0"


def blocks(path: Path, chosen: range) -> Any:
    writer = begin(path, DATA)
    for block in chosen:
        commit(writer, DATA, block)
    return writer


# 1: the process dies


@mutation(1, "killed at {0}, time {1}", [(name, nth) for name in WRITING for nth in (1, 2)])
def killed(scene: Scene, what: tuple[str, int]) -> Outcome:
    died = scene.crash_at(*what, lambda: write_all(scene.new, DATA))
    assert died or what[1] > 1  # some points are reached once only
    return scene.resumed(scene.new) if died else Accepted(scene.new, "not reached so often")


@mutation(
    1, "killed at {} of the last block's record", ["durable.written", "durable.synced", "durable.created"]
)
def killed_at_last_record(scene: Scene, name: str) -> Outcome:
    writer = blocks(scene.new, range(2))
    nth = 2 if name != "durable.created" else 1  # chunks first, then the record
    assert scene.crash_at(name, nth, lambda: commit(writer, DATA, 2))
    return scene.resumed(scene.new)


@mutation(1, "killed at {} of `seal --partial`", REPLACING)
def killed_while_shortening(scene: Scene, name: str) -> Outcome:
    """The fourth block is missing: the store is cut to three, and the change is made as a whole."""
    data = synthetic(**{**SETTINGS, "n_tokens": 47})
    for path in (scene.new, scene.tmp / "calm" / "store"):
        writer = begin(path, data)
        for block in range(3):
            commit(writer, data, block)
    seal(scene.tmp / "calm" / "store", partial=True)
    assert scene.crash_at(name, 1, lambda: seal(scene.new, partial=True))
    found = verify(scene.new, level="full")
    assert found.exit_code == 3, found.problems
    with pytest.raises(NearlineError):
        Reader.open(scene.new)
    seal(scene.new, partial=True)
    return Accepted(scene.new, "unfinished; repeated: same bytes", tree(scene.tmp / "calm" / "store"))


@mutation(1, "killed at {} of a push", TRANSFER)
def killed_while_pushing(scene: Scene, name: str) -> Outcome:
    assert scene.crash_at(name, 1, lambda: push(scene.store, scene.new))
    if name != "transfer.sealed_there":
        assert verify(scene.new).exit_code == 3
        with pytest.raises(NearlineError):
            Reader.open(scene.new)
    push(scene.store, scene.new)
    return Accepted(scene.new, "unfinished; pushed again: same bytes")


@mutation(1, "killed at {} of a pull", [name for name in TRANSFER if "records" not in name])
def killed_while_pulling(scene: Scene, name: str) -> Outcome:
    assert scene.crash_at(name, 1, lambda: pull(scene.store, scene.new))
    scene.unfinished(scene.new)
    pull(scene.store, scene.new)
    return Accepted(scene.new, "unfinished; pulled again: same bytes")


@mutation(1, "a killed process left temporaries everywhere")
def leftovers(scene: Scene) -> Outcome:
    blocks(scene.new, range(2))
    for folder in [path for path in scene.new.rglob("*") if path.is_dir()]:
        (folder / "0.abcdef012345.partial").write_bytes(b"half a chu")
    found = verify(scene.new, level="full")
    assert found.exit_code == 3
    assert len(found.leftovers) > 20
    return scene.resumed(scene.new)


# 2: the power goes


@mutation(2, "power cut at {}: what was not synced is empty", ["durable.renamed", "writer.chunks_durable"])
def power_cut(scene: Scene, name: str) -> Outcome:
    """Every file whose content was never synced has lost it, though it has its name."""
    synced: set[int] = set()
    with scene.monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
        assert scene.crash_at(name, 2, lambda: write_all(scene.new, DATA))
    lost = [path for path in scene.new.rglob("*") if path.is_file() and path.stat().st_ino not in synced]
    for path in lost:
        path.write_bytes(b"")
    return scene.resumed(scene.new, f"{len(lost)} files lost; resumed to the same bytes")


@mutation(
    2, "a disk that forgot {} of a committed block", ["all of a chunk", "the end of a chunk", "the record"]
)
def forgetful_disk(scene: Scene, what: str) -> Outcome:
    """A disk that lies about syncs: verify says what is lost, and the next run collects the block again."""
    blocks(scene.new, range(2))
    path = scene.new / ("blocks/000001.json" if what == "the record" else CHUNK)
    cut(path, -1 if what == "the end of a chunk" else 0)
    found = verify(scene.new, level="full")
    assert found.exit_code == 1
    assert path.relative_to(scene.new).as_posix() in {problem.file for problem in found.problems}
    write_all(scene.new, DATA)
    return Accepted(scene.new, "found; collected again: same bytes")


@mutation(2, "a disk that zeroed the content of a chunk of the last blocks")
def zeroed(scene: Scene) -> Outcome:
    blocks(scene.new, range(2))
    (scene.new / CHUNK).write_bytes(bytes((scene.new / CHUNK).stat().st_size))
    found = verify(scene.new, level="full")
    assert CHUNK in {problem.file for problem in found.problems}
    write_all(scene.new, DATA)
    return Accepted(scene.new, "found; collected again: same bytes")


# 3: the disk is full


def failing_from(scene: Scene, name: str, n: int, number: int, work: Callable[[], object]) -> bool:
    """The n-th and all later calls of an os function fail; whether that stopped the work."""
    real, count = getattr(os, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count >= n:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    with scene.monkeypatch.context() as patch:
        patch.setattr(os, name, failing)
        try:
            work()
        except EnvironmentFault:
            return True
    return False


@mutation(3, "no space left from write {} on", [1, 2, 9, 33, 57, 80, 101])
def full_disk(scene: Scene, n: int) -> Outcome:
    assert failing_from(scene, "write", n, errno.ENOSPC, lambda: write_all(scene.new, DATA))
    return scene.resumed(scene.new, "EnvironmentFault; resumed to the same bytes")


@mutation(3, "quota used up at a block's first byte")
def quota(scene: Scene) -> Outcome:
    writer = blocks(scene.new, range(1))
    assert failing_from(scene, "write", 1, errno.EDQUOT, lambda: commit(writer, DATA, 1))
    return scene.resumed(scene.new, "EnvironmentFault; resumed to the same bytes")


# 4, 5: rivals


def other_values() -> Synthetic:
    """The same store of a machine that rounds otherwise."""
    other = synthetic(**SETTINGS)
    other.stored["residual"][...] = other.stored["residual"] + np.float16(1)
    other.sites["residual"][...] = decode(other.stored["residual"], "float16")
    return other


@mutation(4, "a rival commits the same block before: {}", ["same bytes", "other bytes"])
def rival_first(scene: Scene, values: str) -> Outcome:
    writer, rival = begin(scene.new, DATA), begin(scene.new, DATA)
    commit(writer, DATA, 0)
    with pytest.raises(UsageError, match="two collectors"):
        commit(rival, DATA if values == "same bytes" else other_values(), 0)
    return scene.resumed(scene.new, "the loser says so; same bytes")


@mutation(
    4,
    "a rival commits between, at {0}, {1}",
    [(n, v) for n in ("durable.synced", "writer.chunks_durable") for v in ("same bytes", "other bytes")],
)
def rival_between(scene: Scene, what: tuple[str, str]) -> Outcome:
    """One wins whole, or the block is missing and said to be; never a mixture that a record vouches for."""
    name, values = what
    writer, rival = begin(scene.new, DATA), begin(scene.new, DATA)
    data = DATA if values == "same bytes" else other_values()
    with pytest.raises(UsageError, match="two collectors"):
        scene.at(name, 1, lambda: commit(rival, data, 0), lambda: commit(writer, DATA, 0))
    scene.unfinished(scene.new)
    if 0 in begin(scene.new, DATA).committed:  # the rival's block stands: with its own bytes
        stored = Reader.open(scene.new, require_seal=False).stored("residual", 5, 0, 1)
        assert np.array_equal(stored, data.stored["residual"][1, :12])
        (scene.new / "blocks/000000.json").unlink()
    return scene.resumed(scene.new, "one wins whole, the loser says so; same bytes")


@mutation(5, "a second sealer is quicker, at {}", ["sealing.consolidated", "sealing.card_written"])
def second_sealer(scene: Scene, name: str) -> Outcome:
    writer = blocks(scene.new, range(3))
    digests: list[str] = []
    digest = scene.at(name, 1, lambda: digests.append(seal(scene.new)), writer.seal)
    assert digests == [digest]
    return Accepted(scene.new, "one SEALED, the other reads it back")


@mutation(5, "8 sealers at once")
def eight_sealers(scene: Scene) -> Outcome:
    blocks(scene.new, range(3))
    digests: list[str] = []
    threads = [threading.Thread(target=lambda: digests.append(seal(scene.new))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 8
    assert len(set(digests)) == 1
    return Accepted(scene.new, "one SEALED, the others read it back")


@mutation(5, "another SEALED appears while sealing")
def foreign_seal(scene: Scene) -> Outcome:
    writer = blocks(scene.new, range(3))
    other = twin_of(scene.tmp / "other", synthetic(**SETTINGS, seed=1))
    with pytest.raises(DamageError, match="sealed as something else"):
        scene.at(
            "sealing.card_written", 1, lambda: shutil.copy(other / SEALED, scene.new / SEALED), writer.seal
        )
    return Found("manifest.json", path=scene.new)


# 12, 13: copies that are disturbed


class LostReply(LocalPlace):
    """A server that takes a file, and whose reply is lost; a client that tries again is told it exists."""

    def __init__(self, path: Path, how: str) -> None:
        super().__init__(path)
        self.how = how

    def create(self, name: str, content: bytes) -> bool:
        done = super().create(name, content)
        if self.how == "the reply is lost" and done:
            raise EnvironmentFault(f"{self.where(name)}: connection reset")
        return False if self.how == "the retry gets 412" else done


@mutation(13, "SEALED is taken, {}", ["the reply is lost", "the retry gets 412"])
def lost_reply(scene: Scene, how: str) -> Outcome:
    push(scene.store, LostReply(scene.new, how))
    return Accepted(scene.new, "settled by reading back; same bytes")


class Cable:
    """A place behind a cable that is pulled at the n-th file that goes in or out."""

    def __init__(self, path: Path, n: int) -> None:
        self._inner, self._left = LocalPlace(path), n
        self.url, self.where = self._inner.url, self._inner.where
        self.read, self.size, self.list = self._inner.read, self._inner.size, self._inner.list
        self.create, self.delete = self._inner.create, self._inner.delete

    def open(self, name: str) -> Any:
        self._count(name)
        return self._inner.open(name)

    def put(self, name: str, source: Path | bytes) -> None:
        self._count(name)
        self._inner.put(name, source)

    def _count(self, name: str) -> None:
        self._left -= 1
        if self._left <= 0:
            raise EnvironmentFault(f"{self.where(name)}: connection reset")


@mutation(13, "a pull is cut off at file {}", [1, 20, 60])
def pull_cut_off(scene: Scene, n: int) -> Outcome:
    with pytest.raises(EnvironmentFault, match="connection reset"):
        pull(Cable(scene.store, n), scene.new)
    scene.unfinished(scene.new)
    pull(scene.store, scene.new)
    return Accepted(scene.new, "unfinished; pulled again: same bytes")


@mutation(13, "a push is cut off at file {}", [1, 20, 60])
def push_cut_off(scene: Scene, n: int) -> Outcome:
    with pytest.raises(EnvironmentFault, match="connection reset"):
        push(scene.store, Cable(scene.new, n), allow_unsafe_create=True)
    scene.unfinished(scene.new)
    push(scene.store, scene.new)
    return Accepted(scene.new, "unfinished; pushed again: same bytes")


# 14: the clock


@mutation(14, "the clock is {} hours off while a block is written", [2, -2])
def clock(scene: Scene, hours: int) -> Outcome:
    real, real_ns = time.time, time.time_ns
    writer = begin(scene.new, DATA)
    with scene.monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + hours * 3600)
        patch.setattr(time, "time_ns", lambda: real_ns() + hours * 3600 * 10**9)
        commit(writer, DATA, 0)
    blocks(scene.new, range(1, 3))
    seal(scene.new)
    return Accepted(scene.new)


# 15: cleaning up beside a living writer


@mutation(15, "another process begins, and cleans up, at {}", [n for n in WRITING if "durable" in n])
def clean_up(scene: Scene, name: str) -> Outcome:
    writer = blocks(scene.new, range(1))
    scene.at(name, 1, lambda: begin(scene.new, DATA), lambda: commit(writer, DATA, 1))
    assert writer.committed == {0, 1}
    commit(writer, DATA, 2)
    writer.seal()
    return Accepted(scene.new, "nothing of the writer was removed; same bytes")


# 16: other settings


def attribute(section: str, **changes: Any) -> Callable[[], Synthetic]:
    def make() -> Synthetic:
        found = dataclasses.replace(getattr(DATA.attributes, section), **changes)
        return dataclasses.replace(DATA, attributes=dataclasses.replace(DATA.attributes, **{section: found}))

    return make


def _other_seed() -> Synthetic:
    plan = dataclasses.replace(DATA.plan, seed=DATA.plan.seed + 1)
    attributes = dataclasses.replace(DATA.attributes, plan=PlanFacts.of(plan, DATA.attributes.plan.bos))
    return dataclasses.replace(DATA, plan=plan, attributes=attributes)


CHANGED: dict[str, Callable[[], Synthetic]] = {
    "revision": attribute("model", revision="main"),
    "weights": attribute("model", weights_hash="0" * 64),
    "tokenizer": attribute("tokenizer", fingerprint="0" * 64),
    "corpus": attribute("corpus", content_hash="0" * 64),
    "compute dtype": attribute("compute", dtype="bfloat16"),
    "threads": attribute("compute", torch_threads=7),
    "plan": _other_seed,
    "storage dtype": lambda: synthetic(**{**SETTINGS, "storage_dtype": "bfloat16"}),
    "sequence length": lambda: synthetic(**{**SETTINGS, "sequence_length": 5}),
    "block": lambda: synthetic(**{**SETTINGS, "block": 10}),
    "layers": lambda: synthetic(**{**SETTINGS, "layers": [2, 4]}),
    "compressor": lambda: synthetic(**{**SETTINGS, "compressor": "zstd"}),
}


@mutation(16, "resumed with another {}", CHANGED)
def changed(scene: Scene, what: str) -> Outcome:
    scene.crash_at("writer.chunks_durable", 2, lambda: write_all(scene.new, DATA))
    before = tree(scene.new)
    with pytest.raises(UsageError):
        begin(scene.new, CHANGED[what]())
    assert tree(scene.new) == before
    return scene.resumed(scene.new, "refused, nothing touched; resumed: same bytes")


# 19: processes


@mutation(19, "verify and read in a child forked beside threads")
def forked(scene: Scene) -> Outcome:
    store = scene.store
    assert verify(store, level="full").whole  # its threads have run in this process
    busy, stop = threading.Event(), threading.Event()

    def work() -> None:
        busy.set()
        while not stop.is_set():
            verify(store)

    thread = threading.Thread(target=work)
    thread.start()
    busy.wait()
    child = os.fork()
    if not child:  # pragma: no cover  (another process)
        good = verify(store, level="full").whole and same(everything(store), oracle(scene))
        os._exit(0 if good else 1)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
    return Accepted(store, "no hang, same bytes")


@mutation(19, "a block's task runs twice")
def twice(scene: Scene) -> Outcome:
    writer = blocks(scene.new, range(2))
    with pytest.raises(UsageError, match="committed already"):
        commit(writer, DATA, 1)
    return scene.resumed(scene.new, "counted once; same bytes")


@mutation(19, "a worker is dead, another one takes its blocks over")
def taken_over(scene: Scene) -> Outcome:
    scene.crash_at("writer.chunks_durable", 3, lambda: write_all(scene.new, DATA))
    return scene.resumed(scene.new)


# 20: arrays of all kinds


@mutation(20, "{} arrays", ["Fortran-order", "strided", "reversed"])
def odd_arrays(scene: Scene, how: str) -> Outcome:
    def odd(values: np.ndarray) -> np.ndarray:
        if how == "Fortran-order":
            return np.asfortranarray(values)
        if how == "strided":
            wide = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
            wide[..., ::2] = values
            return wide[..., ::2]
        return values[::-1].copy()[::-1]

    writer = begin(scene.new, DATA)
    for block in range(3):
        columns, sites = DATA.block(block)
        made = {name: odd(values) for name, values in columns.items()}
        writer.commit(block, made, {site: odd(values) for site, values in sites.items()}, stats(block))
    writer.seal()
    return Accepted(scene.new)


@mutation(20, "buffers used again right after a commit")
def reused(scene: Scene) -> Outcome:
    writer = begin(scene.new, DATA)
    for block in range(3):
        columns, sites = DATA.block(block)
        columns = {name: values.copy() for name, values in columns.items()}
        sites = {name: values.copy() for name, values in sites.items()}
        writer.commit(block, columns, sites, stats(block))
        for values in (*columns.values(), *sites.values()):
            values[...] = 1
    writer.seal()
    return Accepted(scene.new)


def stats(block: int) -> dict[str, Any]:
    row0, row1 = DATA.plan.block_range(block)
    return {site: statistics(values[..., row0:row1, :]) for site, values in DATA.sites.items()}


@mutation(20, "a value beyond float16's range")
def overflow(scene: Scene) -> Outcome:
    with pytest.raises(OutOfRange):
        encode(np.array([1.0, 70000.0], np.float32), "float16")
    return Raised("OutOfRange, nothing is written")


@mutation(20, "an infinity that a writer let through")
def infinity(scene: Scene) -> Outcome:
    data = synthetic(**SETTINGS)
    data.stored["residual"][1, 14, 2] = np.inf
    twin_of(scene.tmp / "new", data)
    return Found(
        CHUNK, "residual", 5, (14, 14), path=scene.tmp / "new" / "store", place=LocalPlace(scene.new)
    )


@mutation(20, "nll is NaN where there is a target")
def nan_loss(scene: Scene) -> Outcome:
    data = synthetic(**SETTINGS)
    row = int(np.flatnonzero(data.columns["target_id"] >= 0)[4])
    data.columns["nll"][row] = np.nan
    with pytest.raises(UsageError, match="`nll` must be NaN exactly"):
        write_all(scene.new, data)
    return scene.resumed(scene.new, "refused; resumed to the same bytes")


@mutation(20, "bfloat16 with every special value, masked where it is not finite")
def bfloat16(scene: Scene) -> Outcome:
    """Bits come back as they were, payloads of NaN too."""
    data = synthetic(**{**SETTINGS, "storage_dtype": "bfloat16"})
    special = np.array([0x7FC1, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x7F7F, 0xFF7F], np.uint16)
    data.stored["residual"][1, 12:14] = special.reshape(2, 4)
    data.columns["valid"][12] = False
    writer = begin(scene.new, data)
    for block in range(3):
        writer.commit(block, *data.block(block), {})
    writer.seal()
    assert verify(scene.new, level="full").problems == ()
    stored = Reader.open(scene.new).stored("residual", 5, 0, 3)
    assert stored.tobytes() == data.stored["residual"][1].tobytes()
    rows = Reader.open(scene.new).rows("residual", 5, 0, 3)
    assert (rows.view(np.uint32) >> 16).astype(np.uint16).tobytes() == stored.tobytes()
    bits = CHUNK.replace("residual", "residual_bits")
    flip(scene.new / bits, 14)
    return Found(bits, "residual", 5, (12, 23), place=LocalPlace(scene.new))

"""Writing, dying, going on, sealing, damage, repair and copying in any order, beside an oracle in memory.

The oracle is the arrays that went in, and the files of a store that nothing ever happened to. Whatever the
order: a read gives the oracle's values or raises; verify names the blocks that the oracle calls bad, and no
others; a sealed store that verify accepts is the oracle, byte for byte.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_damage import cut, flip, swap
from helpers_points import Crash
from helpers_store import begin, commit, synthetic, tree, write_all
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from nearline.store import NearlineError, Reader, StoreWriter, points
from nearline.store.layout import TOKEN_COLUMNS
from nearline.store.transfer import pull, push
from nearline.store.verify import verify

DATA = synthetic(
    n_tokens=40,
    block=10,
    layers=[2, 5],
    d=2,
    sequence_length=5,
    storage_dtype="float16",
    documents_per_group=2,
)
N_BLOCKS = DATA.plan.n_blocks
DYING = [name for name in points.POINTS if name.startswith(("durable.", "writer.", "sealing."))]
COPYING = [name for name in points.POINTS if name.startswith("transfer.")]
SEAL = {"SEALED", "manifest.json"}


class Machine(RuleBasedStateMachine):
    calm: dict[str, bytes]  # the files of an undisturbed store
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(dir=self.folder))
        self.path = self.home / "store"
        self.writer: StoreWriter | None = None
        self.n_copies = 0

    def teardown(self) -> None:
        shutil.rmtree(self.home)

    # what the oracle says

    @property
    def sealed(self) -> bool:
        return (self.path / "SEALED").exists()

    def there(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def committed(self) -> set[int]:
        """Blocks that must be there: those with a record, and all of a sealed store."""
        records = range(N_BLOCKS)
        return {b for b in records if self.sealed or (self.path / f"blocks/{b:06d}.json").exists()}

    def bad(self) -> set[str]:
        """Files that are not those of the undisturbed store."""
        committed, names = self.committed(), set(self.calm) - {"README.md"}
        if not self.sealed:  # nothing is promised of other files yet
            names = {name for name in names if block_of(name) in committed}
        return {name for name in names if self.there(name) != self.calm[name]}

    # the life of a store

    @initialize(n_blocks=st.integers(-1, N_BLOCKS + 1))
    def start(self, n_blocks: int) -> None:
        """With nothing, with some blocks, or with a sealed store."""
        if n_blocks > N_BLOCKS:
            write_all(self.path, DATA)
        elif n_blocks >= 0:
            self.writer = begin(self.path, DATA)
            for block in range(n_blocks):
                commit(self.writer, DATA, block)

    @precondition(lambda self: self.writer is None or self.bad())
    @rule()
    def go_on(self) -> None:
        """Another process begins, or goes on."""
        bad = self.bad() if self.path.exists() else set()
        self.writer = None
        try:
            writer = begin(self.path, DATA)
        except NearlineError:
            assert bad - set(filter(is_block_file, bad))  # only a damaged definition keeps it from going on
            return
        self.writer = writer
        assert writer.committed <= self.committed()
        if not self.sealed:
            lost = {block_of(name) for name in bad} - writer.committed
            assert not {block for block in lost if block in self.committed()}  # their records are gone

    @precondition(lambda self: self.writer is not None and not self.sealed)
    @rule(choice=st.integers(0, 99))
    def write(self, choice: int) -> None:
        assert self.writer is not None
        missing = sorted(set(range(N_BLOCKS)) - self.writer.committed)
        if not missing:
            return
        block = missing[choice % len(missing)]
        commit(self.writer, DATA, block)
        assert block not in {block_of(name) for name in self.bad()}

    @precondition(lambda self: self.writer is not None and not self.sealed)
    @rule(name=st.sampled_from(DYING), nth=st.integers(1, 3))
    def die(self, name: str, nth: int) -> None:
        """While the next block is written, or while sealing."""
        work = self._next_step()
        with crashing(name, nth):
            try:
                work()
            except (Crash, NearlineError):  # sealing refuses chunks of another size
                pass
        self.writer = None

    @precondition(lambda self: not self.sealed)
    @rule()
    def finish(self) -> None:
        """Write what is missing, and seal."""
        writer = self.writer or begin(self.path, DATA)
        for block in sorted(set(range(N_BLOCKS)) - writer.committed):
            commit(writer, DATA, block)
        bad = self.bad()
        try:
            writer.seal()
        except NearlineError:
            assert bad
        self.writer = None

    def _next_step(self) -> Callable[[], object]:
        writer = self.writer
        assert writer is not None
        missing = sorted(set(range(N_BLOCKS)) - writer.committed)
        return (lambda: commit(writer, DATA, missing[0])) if missing else writer.seal

    # damage and repair

    @precondition(lambda self: self.committed())
    @rule(how=st.sampled_from(["flip", "cut", "delete", "swap"]), choice=st.integers(0, 10**6))
    def corrupt(self, how: str, choice: int) -> None:
        names = sorted(name for name in self.calm if self._promised(name, how) and self.there(name))
        if not names:
            return
        name = names[choice % len(names)]
        path, size = self.path / name, (self.path / name).stat().st_size
        if how == "flip":
            flip(path, choice % (8 * size))
        elif how == "cut":
            cut(path, choice % size)
        elif how == "delete":
            path.unlink()
        else:
            swap(path, self.path / names[(choice // 7) % len(names)])

    def _promised(self, name: str, how: str) -> bool:
        """Files that something vouches for: before the seal, chunk objects, and the form of records."""
        if name == "README.md":
            return False
        if self.sealed:
            return True
        if name.startswith("blocks/"):
            return how in ("cut", "delete")
        return block_of(name) in self.committed()

    @precondition(lambda self: self.sealed and self.bad())
    @rule()
    def repair(self) -> None:
        """Bad blocks are collected again, a bad definition is fetched from a copy."""
        for name in self.bad():
            if is_block_file(name):
                (self.path / f"blocks/{block_of(name):06d}.json").unlink(missing_ok=True)
            else:
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                (self.path / name).write_bytes(self.calm[name])
        (self.path / "SEALED").unlink()
        write_all(self.path, DATA)
        self.writer = None
        assert not self.bad()

    # what users see

    @precondition(lambda self: self.path.exists())
    @rule()
    def check(self) -> None:
        bad, found = self.bad(), verify(self.path, level="full")
        named = {problem.file for problem in found.problems}
        if not self.sealed:
            committed = self.committed()
            assert not found.whole
            blocks = {block_of(p.file) for p in found.problems if block_of(p.file) in committed}
            assert blocks == {block_of(name) for name in bad}
            assert bad or found.exit_code == 3
            return
        assert named <= bad
        assert found.whole == (not bad)
        assert found.exit_code == (1 if bad else 0)
        if bad & SEAL:
            assert named & SEAL
            return  # then nothing vouches for the rest
        untold = {block_of(name) for name in bad if name.startswith("blocks/")}
        assert {name for name in bad if "/c/" not in name or block_of(name) not in untold} <= named
        assert {block_of(name) for name in bad} == {block_of(name) for name in named}
        if found.whole:
            assert {name: self.there(name) for name in self.calm} == self.calm

    @precondition(lambda self: self.path.exists())
    @rule()
    def read(self) -> None:
        bad = self.bad()
        try:
            reader = Reader.open(self.path, require_seal=self.sealed)
        except NearlineError:
            assert bad or not self.sealed
            return
        assert not bad & SEAL
        for block in self.committed():
            row0, row1 = reader.block_range(block)
            for site in ("residual", "mlp_output"):
                for index, layer in enumerate(DATA.layers):
                    right = DATA.stored[site][index, row0:row1]
                    self._compare(f"{site}/c/{index}/{block}/0", right, reader.stored, site, layer, block)
            right = DATA.stored["embedding"][row0:row1]
            self._compare(f"embedding/c/{block}/0", right, reader.stored, "embedding", None, block)
            for name in TOKEN_COLUMNS:
                right = DATA.columns[name][row0:row1]
                self._compare(f"{name}/c/{block}", right, reader.column_block, name, block)

    def _compare(self, key: str, right: np.ndarray, read: Callable[..., np.ndarray], *asked: Any) -> None:
        """The right values, or an error; an error only where something is wrong."""
        block = block_of(f"activations.zarr/{key}")
        stop = (block + 1,) if read.__name__ == "stored" else ()
        try:
            found = read(*asked, *stop)
        except NearlineError:
            assert {f"activations.zarr/{key}", f"blocks/{block:06d}.json"} & self.bad()
        else:
            assert found.tobytes() == right.tobytes()

    @precondition(lambda self: self.sealed)
    @rule(
        move=st.sampled_from([push, pull]),
        name=st.sampled_from([None, *COPYING]),
        choice=st.fixed_dictionaries({}, optional={"layers": st.just([5]), "tokens": st.just(25)}),
    )
    def copy(self, move: Callable[..., Any], name: str | None, choice: dict[str, Any]) -> None:
        """Whole, cut off and repeated, or a selection."""
        self.n_copies += 1
        target, bad = self.home / f"copy{self.n_copies}", self.bad()
        chosen = choice if move is pull else {}
        try:
            if name is not None:
                with crashing(name, 1):
                    try:
                        move(self.path, target, **chosen)
                    except Crash:
                        assert name == "transfer.sealed_there" or not verify(target).whole
            move(self.path, target, **chosen)
        except NearlineError:
            assert bad
            assert not (target / "SEALED").exists()
            return
        assert verify(target, level="full").problems == ()
        if chosen:
            rows = Reader.open(target).stored("residual", 5, 0, 1)
            assert rows.tobytes() == DATA.stored["residual"][1, :10].tobytes()
        else:
            assert not bad
            assert {name: content for name, content in tree(target).items() if name != "README.md"} == {
                name: content for name, content in self.calm.items() if name != "README.md"
            }
        shutil.rmtree(target)


class crashing:
    """The n-th time that a named point is reached, the process dies."""

    def __init__(self, name: str, nth: int) -> None:
        self.name, self.left = name, nth

    def __enter__(self) -> None:
        self.before, points.hook = points.hook, self

    def __exit__(self, *error: object) -> None:
        points.hook = self.before

    def __call__(self, reached: str) -> None:
        self.left -= reached == self.name
        if reached == self.name and self.left == 0:
            raise Crash


def block_of(name: str) -> int:
    """The block of a chunk object or a record; -1 of any other file."""
    if name.startswith("blocks/"):
        return int(name[7:13])
    parts = name.split("/")
    if parts[0] != "activations.zarr" or len(parts) < 4:
        return -1
    if parts[1] in ("residual", "mlp_output"):
        return int(parts[4])
    return int(parts[3]) if parts[1] in ("embedding", *TOKEN_COLUMNS) else -1


def is_block_file(name: str) -> bool:
    return block_of(name) >= 0


def run(folder: Path, n_examples: int, n_steps: int) -> None:
    calm = folder / "calm" / "store"  # the card names the folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # none of these stores has to survive a power cut
        write_all(calm, DATA)
        patch.setattr(Machine, "calm", tree(calm), raising=False)
        patch.setattr(Machine, "folder", folder, raising=False)
        run_state_machine_as_test(
            Machine, settings=settings(max_examples=n_examples, stateful_step_count=n_steps, deadline=None)
        )


def test_whatever_happens_in_whatever_order(tmp_path: Path) -> None:
    run(tmp_path, 20, 15)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_whatever_happens_in_whatever_order_at_length(tmp_path: Path) -> None:
    run(tmp_path, 200, 50)

"""The mutation list: every failure on purpose, what must come of it, and the table of what did.

In: functions that injure a small store, or disturb the writing of one, each registered with the number of the
failure mode that it stands for. Out: one row per injection: accepted with the right bytes, or found and
named. An injection that verify accepts while a reader gets other bytes is a silent case, and fails.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_damage import everything, same
from helpers_points import Crash
from helpers_store import Synthetic, synthetic, tree, write_all
from nearline import store as nearline_store
from nearline.store import NearlineError, StoreNotFound, points
from nearline.store.places import Place
from nearline.store.verify import Verified, verify

MODES = {
    1: "kill -9 during a chunk or block",
    2: "power cut: rename seen, bytes lost",
    3: "disk full, quota",
    4: "two collectors, same block",
    5: "two sealers",
    6: "truncated chunk",
    7: "zero-length chunk",
    8: "bit flip in data, swapped chunks",
    9: "bit flip in zarr.json, block record, manifest, SEALED",
    10: "missing chunk; 404; 403 posing as 404",
    11: "stale consolidated metadata",
    12: "partial or out-of-order copy",
    13: "multipart abandoned; reply lost, retry gets 412",
    14: "clock skew",
    15: "clean-up of leftovers during a live write",
    16: "leftovers, then resume with a changed config",
    17: "429, 5xx, timeouts, short bodies",
    18: "ESTALE, delayed visibility, Windows sharing",
    19: "fork beside threads; dead worker; task run twice",
    20: "f2 overflow, bf16 bits, F-order, reused buffers, NaN",
}
NOT_HERE = {
    13: "real multipart uploads are tested against real servers",
    17: "bounded retries are tested against a server that answers by script",
    18: "Windows sharing violations need Windows",
}
SETTINGS: dict[str, Any] = {
    "n_tokens": 35,
    "block": 12,
    "layers": [2, 5],
    "d": 4,
    "sequence_length": 6,
    "storage_dtype": "float16",
}
DATA = synthetic(**SETTINGS)


@dataclass(frozen=True)
class Found:
    """verify fails and names this place."""

    file: str | None = None
    array: str | None = None
    layer: int | None = None
    tokens: tuple[int, int] | None = None  # first and last
    path: Path | None = None  # where it is not the scene's own copy
    place: Place | None = None
    level: str = "full"
    incomplete: bool = False  # nothing is damaged: exit code 3


@dataclass(frozen=True)
class Accepted:
    """verify accepts the store, and all files under its seal are those of the untouched twin."""

    path: Path
    how: str = "accepted, same bytes"
    twin: dict[str, bytes] | None = None


@dataclass(frozen=True)
class Raised:
    """The operation itself refused, which the injection has asserted; nothing was left to verify."""

    how: str


Outcome = Found | Accepted | Raised


class Scene:
    """A copy of a small sealed store, made good again when it is first asked for, and its untouched twin."""

    def __init__(self, twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.twin, self.tmp, self.monkeypatch, self.data = twin, tmp_path, monkeypatch, DATA
        self._store: Path | None = None

    @property
    def store(self) -> Path:
        """One copy serves all injections: what the one before changed is put back, which is quicker."""
        if self._store is None:
            self._store = self.twin.parent / "copy" / "store"
            put_back(self._store, self.twin)
        return self._store

    @property
    def new(self) -> Path:
        """A path where a store may be written."""
        return self.tmp / "new" / "store"  # the card names the folder

    def crash_at(self, name: str, nth: int, work: Callable[[], object]) -> bool:
        """Do `work` until a named point is reached for the n-th time; whether it was."""
        seen = 0

        def hook(reached: str) -> None:
            nonlocal seen
            seen += reached == name
            if reached == name and seen == nth:
                raise Crash

        with self.monkeypatch.context() as patch:
            patch.setattr(points, "hook", hook)
            try:
                work()
            except Crash:
                return True
        return False

    def at(self, name: str, nth: int, do: Callable[[], object], work: Callable[[], Any]) -> Any:
        """Do `work`, and at a named point, reached for the n-th time, something else in between."""
        seen = 0

        def hook(reached: str) -> None:
            nonlocal seen
            seen += reached == name
            if reached == name and seen == nth:
                seen += 1
                do()

        with self.monkeypatch.context() as patch:
            patch.setattr(points, "hook", hook)
            return work()

    def unfinished(self, path: Path) -> Verified | None:
        """What a crash left is called unfinished, never damaged and never whole; then it is gone on with."""
        try:
            found = verify(path, level="full")
        except StoreNotFound:
            found = None
        else:
            assert found.exit_code == (0 if (path / "SEALED").exists() else 3), found.problems
        return found

    def resumed(self, path: Path, how: str = "unfinished; resumed to the same bytes") -> Accepted:
        """Called unfinished first; the same command then gives the bytes of an undisturbed store."""
        self.unfinished(path)
        write_all(path, self.data)
        return Accepted(path, how)


@dataclass(frozen=True)
class Mutation:
    mode: int
    name: str
    run: Callable[[Scene], Outcome]
    long: bool


REGISTRY: list[Mutation] = []
TABLE: list[tuple[int, str, str, str]] = []


def mutation(
    mode: int, name: str, over: Iterable[Any] = (None,), *, long: bool = False
) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Register an injection; `over`: once for each of these values, which the name may show as {}."""

    def register(run: Callable[..., Outcome]) -> Callable[..., Outcome]:
        for value in over:
            if value is None:
                REGISTRY.append(Mutation(mode, name, run, long))
            else:
                shown = value if isinstance(value, tuple) else (value,)
                REGISTRY.append(Mutation(mode, name.format(*shown), lambda s, v=value: run(s, v), long))
        return run

    return register


def judge(found: Mutation, scene: Scene) -> str:
    """Run an injection, hold it to its outcome, add its row to the table; the text of the row."""
    outcome = found.run(scene)
    if isinstance(outcome, Accepted):
        how, where = outcome.how, _accepted(scene, outcome)
    elif isinstance(outcome, Found):
        how, where = _found(scene, outcome)
    else:
        how, where = f"refused: {outcome.how}", ""
    TABLE.append((found.mode, found.name, how, where))
    return row_text(TABLE[-1])


def row_text(row: tuple[int, str, str, str]) -> str:
    mode, name, how, where = row
    return f"{mode:>2}  {name:<66} {how:<44} {where}"


def _accepted(scene: Scene, outcome: Accepted) -> str:
    verified = verify(outcome.path, level="full")
    assert verified.problems == ()
    expected = tree(scene.twin) if outcome.twin is None else outcome.twin
    there = tree(outcome.path)
    assert {name: there.get(name) for name in expected if name != "README.md"} == {
        name: content for name, content in expected.items() if name != "README.md"
    }
    if outcome.twin is None:
        assert same(everything(outcome.path), oracle(scene))
    return ""


def _found(scene: Scene, outcome: Found) -> tuple[str, str]:
    path = outcome.path or scene.store
    verified = verify(outcome.place or path, level=outcome.level)
    assert verified.exit_code == (3 if outcome.incomplete else 1), verified.problems
    matching = [
        problem
        for problem in verified.problems
        if outcome.file in (None, problem.file)
        and outcome.array in (None, problem.array)
        and outcome.layer in (None, problem.layer)
        and outcome.tokens in (None, (problem.token_first, problem.token_last))
    ]
    assert matching, f"{outcome} is not among {verified.problems}"
    problem = matching[0]
    assert problem.file.rpartition("/")[2] in problem.message
    if outcome.place is None:
        assert_no_reader_lies(path, scene)
    where = problem.file
    if problem.array:
        where += f" `{problem.array}`" + ("" if problem.layer is None else f" layer {problem.layer}")
    if problem.token_first is not None:
        where += f" tokens {problem.token_first}-{problem.token_last}"
    return f"found: {problem.kind}", where


_ORACLE: dict[Path, dict[str, Any]] = {}


def oracle(scene: Scene) -> dict[str, Any]:
    """All that a reader gets from the untouched twin."""
    if scene.twin not in _ORACLE:
        _ORACLE[scene.twin] = everything(scene.twin)
    return _ORACLE[scene.twin]


def assert_no_reader_lies(path: Path, scene: Scene) -> None:
    """Reading everything raises, or gives the right values; so does the lazy Dataset."""
    try:
        values = everything(path)
    except NearlineError:
        pass
    else:
        assert same(values, oracle(scene))
    try:
        data = nearline_store.open(path, chunks=None).load()
    except NearlineError:
        return
    for site in ("residual", "mlp_output"):
        for layer in SETTINGS["layers"]:
            expected = oracle(scene)[f"{site} {layer}"]
            assert np.array_equal(data[site].sel(layer=layer).values, expected, equal_nan=True)


def put_back(copy: Path, twin: Path) -> None:
    """Make `copy` the same as `twin` again."""
    if not copy.exists():
        shutil.copytree(twin, copy)
        return
    right, found = tree(twin), tree(copy)
    for name in found.keys() - right.keys():
        (copy / name).unlink()
    for name, content in right.items():
        if found.get(name) != content:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)


def twin_of(folder: Path, data: Synthetic = DATA) -> Path:
    write_all(folder / "store", data)
    return folder / "store"

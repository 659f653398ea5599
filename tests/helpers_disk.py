"""A disk under a microscope: every call that changes it, in order, and what a power cut would leave of it.

In: work that writes below a folder. Out: its calls; from them, what was synced when, and the folder as it is
after a cut at any moment: a file has the bytes it had at its last fsync (or, at random, some of the later
ones), a folder the entries it had at its last fsync (or some later state). Cost: all contents in memory.
"""

import os
import random
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("open", "close", "write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir")


@dataclass(frozen=True)
class Call:
    """`inode` numbers the file or folder from 0, a new one for each that is created."""

    kind: str  # file, folder, write, sync, put, drop, mark
    inode: int = -1
    folder: int = -1  # put, drop: the folder whose entry changes
    name: str = ""  # of the entry; of a mark
    content: bytes = b""


@dataclass
class Log:
    """Calls below `root`, whose inode is 0."""

    root: Path
    calls: list[Call] = field(default_factory=list)
    paths: dict[str, int] = field(default_factory=dict)  # as they are now
    descriptors: dict[int, int] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)
    n_inodes: int = 1

    def mark(self, name: str) -> None:
        self.calls.append(Call("mark", name=name))

    def inode(self, path: object) -> int | None:
        return self.paths.get(os.path.abspath(os.fspath(path)))  # type: ignore[arg-type]  # noqa: PTH100

    def put(self, path: object, inode: int) -> None:
        whole = os.path.abspath(os.fspath(path))  # type: ignore[arg-type]  # noqa: PTH100
        folder, name = os.path.split(whole)
        self.paths[whole] = inode
        self.calls.append(Call("put", inode, self.paths[folder], name))

    def drop(self, path: object) -> None:
        whole = os.path.abspath(os.fspath(path))  # type: ignore[arg-type]  # noqa: PTH100
        folder, name = os.path.split(whole)
        inode = self.paths.pop(whole)
        self.calls.append(Call("drop", inode, self.paths[folder], name))

    def new(self, kind: str) -> int:
        self.n_inodes += 1
        self.calls.append(Call(kind, self.n_inodes - 1))
        return self.n_inodes - 1


@contextmanager
def watched(root: Path, monkeypatch: pytest.MonkeyPatch, *, real_sync: bool = False) -> Generator[Log]:
    """Log every change below `root`, which must be an empty folder."""
    log = Log(root.absolute())
    log.paths[str(log.root)] = 0
    real = {name: getattr(os, name) for name in NAMES}

    def wrap(name: str, after: Callable[..., None]) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            with log.lock:
                if name == "fsync" and not real_sync:
                    result = None
                else:
                    result = real[name](*args, **kwargs)
                after(result, *args, **kwargs)
                return result

        patch.setattr(os, name, call)

    def whole(path: Any, dir_fd: int | None) -> Any:
        """A path that is given relative to an open folder."""
        if dir_fd not in log.descriptors:
            return path
        folder = next(name for name, inode in log.paths.items() if inode == log.descriptors[dir_fd])
        return f"{folder}/{path}"

    def opened(result: int, path: Any, flags: int, *_: object, dir_fd: int | None = None) -> None:
        path = whole(path, dir_fd)
        inside = isinstance(path, (str, os.PathLike)) and str(log.root) in os.path.abspath(os.fspath(path))  # noqa: PTH100
        if not inside:
            return
        if log.inode(path) is None and flags & os.O_CREAT:
            log.put(path, log.new("file"))
        found = log.inode(path)
        if found is not None:
            log.descriptors[result] = found

    def written(result: int, descriptor: int, content: Any, *_: object) -> None:
        if descriptor in log.descriptors:
            data = bytes(memoryview(content).cast("B")[:result])
            log.calls.append(Call("write", log.descriptors[descriptor], content=data))

    def closed(_: None, descriptor: int) -> None:
        log.descriptors.pop(descriptor, None)

    def synced(_: None, descriptor: int) -> None:
        if descriptor in log.descriptors:
            log.calls.append(Call("sync", log.descriptors[descriptor]))

    def replaced(_: None, source: object, target: object) -> None:
        found = log.inode(source)
        if found is not None:
            log.put(target, found)
            log.drop(source)

    def linked(_: None, source: object, target: object, *__: object) -> None:
        found = log.inode(source)
        if found is not None:
            log.put(target, found)

    def removed(_: None, path: Any, dir_fd: int | None = None) -> None:
        if log.inode(whole(path, dir_fd)) is not None:
            log.drop(whole(path, dir_fd))

    def made(_: None, path: object, *__: object) -> None:
        if log.inode(os.path.dirname(os.path.abspath(os.fspath(path)))) is not None:  # type: ignore[arg-type]  # noqa: PTH100, PTH120
            log.put(path, log.new("folder"))

    with monkeypatch.context() as patch:
        wrap("open", opened)
        wrap("close", closed)
        wrap("write", written)
        wrap("fsync", synced)
        wrap("replace", replaced)
        wrap("link", linked)
        wrap("unlink", removed)
        wrap("rmdir", removed)
        wrap("mkdir", made)
        yield log


def unsynced(log: Log) -> list[str]:
    """Every file that got a name before its bytes were synced, or whose folder was not synced after."""
    names = {inode: path for path, inode in log.paths.items()}
    problems: list[str] = []
    dirty: set[int] = set()  # files with bytes that no sync followed
    pending: dict[int, set[str]] = {}  # by folder, new entries that no sync of the folder followed
    for call in log.calls:
        if call.kind == "write":
            dirty.add(call.inode)
        elif call.kind == "sync":
            dirty.discard(call.inode)
            pending.pop(call.inode, None)
        elif call.kind == "put" and not call.name.endswith(".partial"):
            if call.inode in dirty:
                problems.append(f"{call.name} got its name before its bytes were synced")
            pending.setdefault(call.folder, set()).add(call.name)
        elif call.kind == "drop":
            pending.get(call.folder, set()).discard(call.name)
    for folder, entries in pending.items():
        problems += [f"{names.get(folder, folder)}: entry {name} was not synced" for name in sorted(entries)]
    return problems


def power_cut(log: Log, moment: int, to: Path, rng: random.Random | None = None) -> None:
    """The folder as a power cut after `moment` calls leaves it: with `rng` some unsynced things survive."""
    content: dict[int, list[bytes]] = {}  # of files: at the last sync, and now
    entries: dict[int, list[dict[str, int]]] = {
        0: [{}]
    }  # of folders: at the last sync, and after each change
    for call in log.calls[:moment]:
        if call.kind == "file":
            content[call.inode] = [b"", b""]
        elif call.kind == "folder":
            entries[call.inode] = [{}]
        elif call.kind == "write":
            content[call.inode][1] += call.content
        elif call.kind == "sync" and call.inode in content:
            content[call.inode][0] = content[call.inode][1]
        elif call.kind == "sync" and call.inode in entries:
            entries[call.inode] = entries[call.inode][-1:]
        elif call.kind == "put":
            entries[call.folder].append({**entries[call.folder][-1], call.name: call.inode})
        elif call.kind == "drop":
            left = {name: inode for name, inode in entries[call.folder][-1].items() if name != call.name}
            entries[call.folder].append(left)

    def build(inode: int, path: Path) -> None:
        path.mkdir(parents=True)
        found = entries[inode][0] if rng is None else rng.choice(entries[inode])
        for name, child in found.items():
            if child in entries:
                build(child, path / name)
            else:
                (path / name).write_bytes(survivor(*content[child]))

    def survivor(durable: bytes, now: bytes) -> bytes:
        if rng is None or now == durable:
            return durable
        length = rng.randint(
            len(durable), len(now)
        )  # the tail is lost, or its place is there without its bytes
        return now[:length] if rng.random() < 0.5 else now[:length].ljust(len(now), b"\0")

    build(0, to)


def open_temporaries() -> int:
    """How many temporary files this process has open now (Linux)."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            names.append(entry.readlink().name)
    return sum(name.endswith(".partial") for name in names)

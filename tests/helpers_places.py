"""A place in memory, and one whose connection breaks: for tests of moving stores, operation by operation.

In: files, and which operation fails and how. Out: a WritablePlace that is no folder, so that the code takes
the path it takes to a server. `Cut("before")`: nothing happens, and every later operation fails too;
`Cut("after")`: the operation takes effect, its answer is lost. Cost: none; nothing sleeps.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from nearline.store import EnvironmentFault
from nearline.store.parsing import MAX_JSON_BYTES
from nearline.store.places import check_limit

T = TypeVar("T")


@dataclass
class Cut:
    """The operation that breaks the connection, counted from 0; `then` what is known of it."""

    at: int
    when: Literal["before", "after"] = "before"


class MemoryFile:
    def __init__(self, content: bytes) -> None:
        self.size = len(content)
        self._left = memoryview(content)

    def readinto(self, view: memoryview) -> int:
        n = min(len(view), len(self._left), 7000)  # short reads are the rule on a network
        view[:n] = self._left[:n]
        self._left = self._left[n:]
        return n

    def close(self) -> None:
        pass


class MemoryPlace:
    """Files by name. `spoil(name, content)` may change what a reader gets."""

    def __init__(self, files: dict[str, bytes] | None = None, *, name: str = "one") -> None:
        self.files: dict[str, bytes] = dict(files or {})
        self.url = f"memory://{name}"
        self.cut: Cut | None = None
        self.operations: list[tuple[str, str]] = []
        self.spoil: Callable[[str, bytes], bytes] = lambda _, content: content
        self.lock = threading.RLock()

    @classmethod
    def of(cls, folder: Path) -> "MemoryPlace":
        return cls(tree(folder))

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _do(self, kind: str, name: str, act: Callable[[], T]) -> T:
        with self.lock:
            number = len(self.operations)
            self.operations.append((kind, name))
            broken = self.cut is not None and number >= self.cut.at
            if broken and not (self.cut and self.cut.when == "after" and number == self.cut.at):
                raise EnvironmentFault(f"{self.where(name)}: the connection broke off")
            result = act()
            if broken:
                raise EnvironmentFault(f"{self.where(name)}: the answer was lost")
            return result

    def revive(self) -> None:
        self.cut, self.operations = None, []

    def _content(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(self.where(name))
        return self.spoil(name, self.files[name])

    def open(self, name: str) -> MemoryFile:
        return self._do("open", name, lambda: MemoryFile(self._content(name)))

    def read(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        content = self._do("read", name, lambda: self._content(name))
        check_limit(len(content), limit, self.where(name))
        return content

    def size(self, name: str) -> int | None:
        return self._do("size", name, lambda: len(self.files[name]) if name in self.files else None)

    def list(self, prefix: str = "") -> dict[str, int] | None:
        return self._do(
            "list", prefix, lambda: {n: len(c) for n, c in self.files.items() if n.startswith(prefix)}
        )

    def put(self, name: str, source: Path | bytes) -> None:
        content = source if isinstance(source, bytes) else source.read_bytes()
        self._do("put", name, lambda: self.files.update({name: content}))

    def create(self, name: str, content: bytes) -> bool:
        def act() -> bool:
            if name in self.files:
                return False
            self.files[name] = content
            return True

        return self._do("create", name, act)

    def delete(self, name: str) -> None:
        self._do("delete", name, lambda: self.files.pop(name, None))


def tree(folder: Path, *, runs: bool = False) -> dict[str, bytes]:
    """Every file below a folder, by name; without temporaries, and without runs/ unless they are wanted."""
    names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in sorted(names.items())
        if not name.endswith(".partial") and (runs or not name.startswith("runs/"))
    }


def resealed(files: dict[str, bytes], change: Callable[[dict[str, Any]], None]) -> dict[str, bytes]:
    """The files with a manifest that somebody changed and sealed again: whole by its own account."""
    import json

    from nearline.store.manifest import MANIFEST, SEALED, seal_bytes

    manifest = json.loads(files[MANIFEST])
    change(manifest)
    content = json.dumps(manifest).encode()
    return {**files, MANIFEST: content, SEALED: seal_bytes(content)}

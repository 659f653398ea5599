"""What a kill leaves behind: copies of a store as it is whenever a named point is reached.

In: work on a store folder. Out: the folder's copies, temporaries included, as a killed process would leave
them. Cost: one copy per point reached.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from nearline.store import points


class Crash(BaseException):
    """The process dies here: no handler of ours may catch it and carry on."""


def states(work: Callable[[], object], path: Path, to: Path) -> Iterator[tuple[str, Path]]:
    """Copies of the folder as a kill at every named point would leave it; temporaries included."""
    found: list[tuple[str, Path]] = []

    def keep(name: str) -> None:
        if path.exists():
            copy = Path(shutil.copytree(path, to / f"{len(found)}" / path.name))
            found.append((name, copy))

    points.hook = keep
    try:
        work()
    finally:
        points.hook = lambda name: None
    yield from found


def some(found: list[tuple[str, Path]], step: int, every: bool) -> list[tuple[str, Path]]:
    """Of every point the first and the last time it was reached, and every `step`-th state."""
    first = {name: index for index, (name, _) in reversed(list(enumerate(found)))}
    last = {name: index for index, (name, _) in enumerate(found)}
    chosen = {*first.values(), *last.values(), *range(0, len(found), step)}
    return [state for index, state in enumerate(found) if every or index in chosen]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

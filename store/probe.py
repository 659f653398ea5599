"""What a place really does, tried on it: ranges, absent files, listing, and whether `create` has one winner.

In: a writable place. Out: a table of yes and no; nothing of the trial stays behind. Not every server that
speaks S3 keeps the promise that of several writers of one new file exactly one wins (OpenStack Swift: 4 of
8), and no documentation can be trusted on it: so `require_exclusive_create` tries it, before anything relies
on it. Cost: about 50 small requests; `create` is raced three times by 8 threads.
"""

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from .errors import EnvironmentFault, NearlineError
from .places import LocalPlace, WritablePlace

RACERS = 8
ROUNDS = 3
CONTENT = bytes(range(256)) * 16


def probe(place: WritablePlace) -> dict[str, bool]:
    """`put`, `absent`, `range`, `listing`, `create_refused` (a second create in sequence), `create_race`."""
    names = _names()
    found: dict[str, bool] = {}
    try:
        place.put(names[0], CONTENT)
        found["put"] = place.read(names[0]) == CONTENT and place.size(names[0]) == len(CONTENT)
        found["absent"] = _is_absent(place, names[1])
        found["range"] = _has_ranges(place, names[0])
        listed = place.list(names[0].rpartition("/")[0] + "/")
        found["listing"] = listed == {names[0]: len(CONTENT)}
        found["create_refused"] = place.create(names[2], b"first") and not place.create(names[2], b"second")
        found["create_race"] = all(_winners(place, name) == 1 for name in names[3:])
    finally:
        _sweep(place, names)
    return found


def require_exclusive_create(place: WritablePlace, *, allowed: bool = False) -> None:
    """Refuse a place where two writers can both create one file; `allowed`: the user said that none will.

    The Hub is not raced: a commit names its parent there, and each try would stay in the history.
    """
    if allowed or isinstance(place, LocalPlace) or hasattr(place, "upload"):
        return
    names = _names()[3:]
    try:
        counts = [_winners(place, name) for name in names]
    finally:
        _sweep(place, names)
    if any(count != 1 for count in counts):
        shown = ", ".join(map(str, counts))
        raise EnvironmentFault(
            f"{place.url}: when {RACERS} writers create one new file, exactly one must win; here {shown} "
            "did. Two pushes to this place could mix. Take another store, or, if nobody else writes there, "
            "allow it by name: --allow-unsafe-create"
        )


def _names() -> list[str]:
    folder = f"nearline-probe-{secrets.token_hex(8)}"  # two probes at once do not meet
    races = [f"{folder}-race-{i}" for i in range(ROUNDS)]
    return [f"{folder}/file", f"{folder}/none", f"{folder}-create", *races]


def _is_absent(place: WritablePlace, name: str) -> bool:
    if place.size(name) is not None:
        return False
    try:
        place.read(name)
    except FileNotFoundError:
        return True
    return False


def _has_ranges(place: WritablePlace, name: str) -> bool:
    """Asked of the client below; nothing needs ranges, a broken download is cheaper with them."""
    fetcher: Callable[[str], Callable[[int, str | None], Any]] | None = getattr(place, "_fetcher", None)
    if fetcher is None:
        return True
    try:
        result = fetcher(name)(100, None)
        return int(result.range[0]) == 100 and bytes(result.bytes()) == CONTENT[100:]
    except Exception:
        return False


def _winners(place: WritablePlace, name: str) -> int:
    """How many of the racers, each with its own content, were told that they created the file."""
    start = threading.Barrier(RACERS)

    def race(racer: int) -> bool:
        start.wait()
        try:
            return place.create(name, f"racer {racer} {secrets.token_hex(8)}".encode())
        except EnvironmentFault as error:  # of the place: its user knows nothing of the file of a trial
            raise EnvironmentFault(str(error).replace(place.where(name), place.url)) from None

    with ThreadPoolExecutor(RACERS) as threads:
        return sum(threads.map(race, range(RACERS)))


def _sweep(place: WritablePlace, names: list[str]) -> None:
    for name in names:
        with suppress(NearlineError):
            place.delete(name)
    if isinstance(place, LocalPlace):
        with suppress(OSError):
            (place.path / names[0]).parent.rmdir()

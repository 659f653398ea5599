"""Is a store whole? Every promise of the format, checked on any place, and every broken one named.

In: a path, URL or Place and a level. Out: a Verified with all problems; damage is listed and never raised.
quick: seal, manifest, all metadata, all block records, presence and size of every chunk object, stray files.
sample: also the content of every token column and of a share of the other chunk objects of each block,
chosen by a seed. full: all content. Cost: each object is read once, on threads, a piece at a time; memory
does not grow with the store, but for its listing (about 200 bytes a file).
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from .errors import UsageError
from .finding import check_there, no_store
from .folder import GROUP
from .places import LocalPlace, Place, parent_of, place_of
from .progress import Progress, silent
from .verify_blocks import BlockChecks
from .verify_findings import KINDS as KINDS
from .verify_findings import Findings
from .verify_findings import Problem as Problem
from .verify_findings import Verified as Verified
from .verify_inventory import Totals, blocks_to_check, check_strays
from .verify_metadata import survey
from .verify_objects import Job, read_values

LEVELS = ("quick", "sample", "full")
REMOTE_THREADS = 32  # they wait for the network

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def verify(
    where: str | Path | Place,
    *,
    level: str = "quick",
    sample: float = 0.05,
    seed: int = 0,
    progress: Progress = silent,
) -> Verified:
    """Check a store. UsageError when there is none; EnvironmentFault when disk or network fail."""
    if level not in LEVELS:
        raise UsageError(f"level {level!r} is unknown; allowed: {', '.join(LEVELS)}")
    if level == "sample" and not 0 < sample <= 1:
        raise UsageError(f"sample is {sample}: it must be a share above 0 and at most 1")
    place = _place(where)
    findings = Findings(place)
    ground = survey(place, findings)
    if ground is None:  # a change was interrupted: until it is finished nothing else can be said
        return findings.verdict(level, None)
    blocks = blocks_to_check(place, ground, findings)
    check_strays(ground, findings, blocks)
    share = {"quick": 0.0, "sample": sample, "full": 1.0}[level]
    checks, totals = BlockChecks(place, ground, findings, share, seed), Totals(ground, findings)
    n_threads = min(16, os.cpu_count() or 1) if isinstance(place, LocalPlace) else REMOTE_THREADS
    n_blocks = 0
    with ThreadPoolExecutor(n_threads, thread_name_prefix="nearline-verify") as pool:

        def jobs() -> Iterator[Job]:
            nonlocal n_blocks
            for block, found in zip(blocks, _ahead(pool, checks.check, blocks, n_threads), strict=True):
                totals.add(block, found)
                n_blocks += 1
                progress("verify blocks", n_blocks, len(blocks), "blocks")
                yield from found.jobs

        try:
            for _ in _ahead(
                pool, lambda job: read_values(place, ground, findings, job), jobs(), 2 * n_threads
            ):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    totals.check()
    return findings.verdict(level, ground.digest)


def _place(where: str | Path | Place) -> Place:
    """The store's place, from itself or from its activations.zarr; whether a store is there is seen later."""
    place = place_of(where)
    if place.url.rstrip("/\\").endswith(GROUP) and place.size(f"{GROUP}/zarr.json") is None:
        place = parent_of(place)
    if isinstance(place, LocalPlace) and not place.path.is_dir():
        check_there(where)
        raise no_store(place)
    return place


def _ahead(
    pool: ThreadPoolExecutor, work: Callable[[_Item], _Result], items: Iterable[_Item], n_ahead: int
) -> Iterator[_Result]:
    """Results in order, computed on threads a few items ahead."""
    pending: deque[Future[_Result]] = deque()
    for item in items:
        pending.append(pool.submit(work, item))
        if len(pending) >= n_ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()

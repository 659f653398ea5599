"""Missing blocks in words: how many, which, and whose they are.

In: a place and the numbers that are missing. Out: one phrase. Cost: the run facts of the last run are read,
where several ranks collected.
"""

from .errors import NearlineError
from .folder import RUNS, show_numbers
from .parsing import get_int, get_object, parse_json
from .places import Place


def missing_in_words(place: Place, missing: set[int], n_blocks: int) -> str:
    """`6 of 10 blocks are missing (2-3, 5, 7-9), those of rank 1 of 4`."""
    counted = f"{len(missing)} of {n_blocks} blocks are missing ({show_numbers(missing)})"
    world_size = _world_size(place)
    if world_size < 2:
        return counted
    ranks = {block % world_size for block in missing}
    whose = f"rank {next(iter(ranks))}" if len(ranks) == 1 else f"ranks {show_numbers(ranks)}"
    return f"{counted}, blocks of {whose} of {world_size}"


def _world_size(place: Place) -> int:
    """How many ranks the latest run that left its facts was one of; 1 where none did."""
    names = sorted(name for name in place.list(f"{RUNS}/") or () if name.endswith(".json"))
    try:
        facts = get_object(parse_json(place.read(names[-1]), names[-1]), names[-1]) if names else {}
        return get_int(facts, "world_size", names[-1], 1) if facts else 1
    except (NearlineError, FileNotFoundError):
        return 1  # runs/ is not under the seal: it may hold anything

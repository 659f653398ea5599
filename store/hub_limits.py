"""Whether a store may live on the Hugging Face Hub: its limits, as `hub_upload` keeps them.

In: how many files a store has, how many entries its fullest folder, its largest file and all its bytes. Out:
each limit with the store's number and whether it fits. Pure arithmetic; the Hub changes its limits now and
then, and has the last word.
"""

from dataclasses import dataclass

from .hub_upload import FILES_PER_COMMIT, MAX_ENTRIES, MAX_FILE_BYTES, MAX_FILES

MAX_COMMITS = 128  # in an hour, as seen
FREE_PRIVATE_BYTES = 100 * 10**9  # of a free account; public repositories have more


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit; `value` is the store's own number."""

    name: str
    value: int
    limit: int
    fits: bool


def hub_limits(*, n_files: int, most_entries: int, largest_bytes: int, n_bytes: int) -> tuple[Limit, ...]:
    """Every limit of the Hub, fitting or not."""
    found = {
        "files in the repository": (n_files, MAX_FILES),
        "entries of a folder": (most_entries, MAX_ENTRIES),
        "bytes of a file": (largest_bytes, MAX_FILE_BYTES),
        "commits of an upload, within an hour": (-(-n_files // FILES_PER_COMMIT), MAX_COMMITS),
        "bytes, if private on a free account": (n_bytes, FREE_PRIVATE_BYTES),
    }
    return tuple(Limit(name, value, limit, value <= limit) for name, (value, limit) in found.items())

"""Named places where a process may die: the tests kill it at each of them, and then go on.

In: the name of the place that was reached. Out: nothing; a hook, which tests set, may raise or never return.
Every name that the code reaches stands in POINTS, and every name there is reached (a test compares them).
Cost: one call of an empty function.
"""

from collections.abc import Callable

POINTS = (
    # durable: every batch of files, and every file that must not exist
    "durable.written",  # the temporaries have their content, none is on disk for sure
    "durable.synced",  # the temporaries are on disk, none has its name
    "durable.half_renamed",  # the first of several has its name
    "durable.renamed",  # all have their names, the folders are not on disk for sure
    "durable.folders_synced",
    "durable.created",  # a file that must not exist has its name; its folder is not on disk for sure
    # writer
    "writer.root_begun",  # the root's zarr.json is there, and nothing else
    "writer.metadata_begun",  # everything but the blocks is there
    "writer.chunks_durable",  # all chunk objects of a block, without its record
    "writer.record_created",
    # sealing
    "sealing.consolidated",
    "sealing.manifest_written",
    "sealing.card_written",
    "sealing.sealed",
    # replacing: several files of a store, all or none
    "replacing.staged",  # all new contents are there, the replacement is not decided yet
    "replacing.ready",  # decided; none is in its place
    "replacing.half_moved",
    "replacing.moved",  # all are in their places; what goes is still there
    "replacing.removed",  # only the journal is left
    # transfer: a copy of a store at another place
    "transfer.begun",
    "transfer.chunks_there",
    "transfer.records_there",
    "transfer.metadata_there",
    "transfer.manifest_there",
    "transfer.sealed_there",
)


def _nothing(name: str) -> None:
    return


hook: Callable[[str], None] = _nothing


def reached(name: str) -> None:
    """Called by the code at each place."""
    hook(name)

"""Which blocks of an unfinished store are committed for sure, before a run goes on after them.

In: a store folder. Out: their numbers; a block whose record or chunk objects are not right loses its record
and is collected again. Cost: every record is read and every chunk object looked at (its size); of the last
blocks, which a crash of the machine may have hit, every byte is read.
"""

import errno
import logging
from pathlib import Path

from blake3 import blake3

from . import durable, in_place
from .attributes import Attributes
from .disk import claimed
from .errors import DamageError, EnvironmentFault
from .folder import GROUP, RUNS, WHOLE_ARRAYS, chunk_keys, committed_blocks, load_record, specs_of
from .metadata import ArraySpec
from .plan import Plan
from .records import FOLDER as BLOCKS
from .records import LOCKED, BlockRecord, record_name

LAST = 2
PIECE_BYTES = 2**22

logger = logging.getLogger("nearline")


def checked_blocks(folder: Path, attributes: Attributes, plan: Plan) -> set[int]:
    """Committed blocks: of the last ones all bytes are checked, of the others records and sizes."""
    specs = specs_of(attributes, plan)
    found = sorted(committed_blocks(folder))
    kept: set[int] = set()
    for block in found:
        path = folder / record_name(block)
        before = _identity(path)
        problem = block_problem(folder, specs, plan, block, whole=block in found[-LAST:])
        if problem is None:
            kept.add(block)
        elif _identity(path) == before:  # or another process has just committed it anew
            logger.warning("block %d is collected again: %s", block, problem)
            in_place.remove_file(path)
    return kept


def block_problem(
    folder: Path, specs: dict[str, ArraySpec], plan: Plan, block: int, *, whole: bool
) -> str | None:
    """Why a committed block cannot be kept; None when it can. `whole`: every byte is read."""
    name = record_name(block)
    if block >= plan.n_blocks:
        return f"{folder / name}: the plan has blocks 0-{plan.n_blocks - 1}"
    try:
        content = (folder / name).read_bytes()
        record = load_record(content, plan, specs, block, str(folder / name))
        if record.to_bytes() != content:
            return f"{folder / name}: the record is not written as records are"
    except DamageError as error:
        return str(error)
    except OSError as error:
        return f"{folder / name}: {_damage(folder / name, error)}"
    return chunk_problem(folder, record, specs, whole=whole)


def chunk_problem(
    folder: Path, record: BlockRecord, specs: dict[str, ArraySpec], *, whole: bool
) -> str | None:
    """The first chunk object that is not the one of the record, by its size or by all of its bytes."""
    names = chunk_keys(specs, record.block)
    for key, chunk in record.chunks.items():
        path = folder / GROUP / key
        spot = f"`{names[key][0]}`, tokens {record.row0}-{record.row1 - 1} ({path})"
        try:
            size = path.stat().st_size
            if size != chunk.size:
                return f"{spot}: {size} bytes, {chunk.size} expected"
            if whole and file_digest(path) != chunk.digest:
                return f"{spot}: the chunk object is not the one that was committed"
        except OSError as error:
            return f"{spot}: {_damage(path, error)}"
    return None


def _damage(path: Path, error: OSError) -> str:
    """An error that says that the file is lost; any other says nothing about the file and is raised."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EIO):
        raise EnvironmentFault(f"cannot read {path}: {error.strerror}; nothing was changed") from error
    return "the file is missing" if error.errno != errno.EIO else "the disk cannot read it"


def file_digest(path: Path) -> str:
    digest = blake3()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def sweep_leftovers(folder: Path, specs: dict[str, ArraySpec]) -> None:
    """Remove temporaries of dead processes, but for those in the folders of one block (see `commit`)."""
    group, growing = folder / GROUP, {spec.name for spec in specs.values()}
    folders = [folder, folder / BLOCKS, folder / RUNS, group]
    folders += [place for name in growing for place in (group / name, group / name / "c")]
    for name in WHOLE_ARRAYS:
        folders += [group / name, *(place for place in (group / name).rglob("*") if place.is_dir())]
    count = sum(durable.sweep(place) for place in folders)
    if count:
        logger.info("%s: %d leftovers of runs that ended early were removed", folder, count)


def sweep_locks(folder: Path) -> None:
    """Remove the locks of commits that were killed, once every block has its record."""
    for path in sorted((folder / BLOCKS).glob(f"*{LOCKED}")):
        with claimed(path):
            pass  # it goes unless a living process holds it


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What tells a file from another one that took its name."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size

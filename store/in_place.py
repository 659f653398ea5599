"""Finished files and folders in the place of older ones, and files removed: durably, each in one step.

In: paths. Out: the new in the place of the old, or an EnvironmentFault. Cost: a rename, and a sync of the
folder.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from .disk import fault, sync_folder, synced_folder, together


def replace_file(source: Path, target: Path) -> None:
    """Put a finished file in the place of an older one, in one step."""
    with fault(target, "replace"):
        source.replace(target)
        sync_folder(target.parent)


def replace_files(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Put finished files (the first of a pair) in the place of older ones, one by one; each folder is synced
    once.
    """
    for source, target in pairs:
        with fault(target, "replace"):
            source.replace(target)
    together(synced_folder, [(folder,) for folder in dict.fromkeys(target.parent for _, target in pairs)])


def replace_folder(source: Path, target: Path) -> None:
    """Put a finished folder in the place of an older one; in between there is none, never a mixture."""
    with fault(target, "replace"):
        if target.exists():
            shutil.rmtree(target)
        source.replace(target)
        sync_folder(target.parent)


def remove_file(path: Path) -> None:
    """Remove a file, durably; one that is absent is fine."""
    unlink_file(path)
    if path.parent.is_dir():
        synced_folder(path.parent)


def unlink_file(path: Path) -> None:
    """Remove a file; one that is absent is fine. The caller syncs its folder."""
    with fault(path, "remove"):
        path.unlink(missing_ok=True)

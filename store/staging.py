"""Results of one step written aside, and put in place together when the step is done.

In: a study's folder. Out: a `Study` whose tables, routing and groups go to a folder aside and whose readers
find them there first; `commit` moves them to where they belong. So a step that fails, or is stopped, leaves
the results before it as they were. What belongs to a fit with a name of its own (`NAME@…`) goes straight in
place: that fit is a step of its own. Cost: one rename a file.
"""

import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from . import durable
from .disk import claimed
from .errors import UsageError
from .study import Study
from .tables import write_table
from .whole import open_arrays, write_arrays

if TYPE_CHECKING:
    import xarray as xr

ASIDE = ".results.partial"
LOCK = ".results.lock"


class StagedStudy(Study):
    """A study whose results wait aside for `commit`; everything else is as in `Study`."""

    @property
    def aside(self) -> Path:
        return self.path / ASIDE

    @contextmanager
    def at_work(self) -> Generator[None]:
        """Only one process writes results at a time; what an earlier one left aside goes first and last."""
        with claimed(self.path / LOCK) as mine:
            if mine is False:
                raise UsageError(f"another process is analysing {self.path}; let it finish first")
            self._sweep()
            try:
                yield
            finally:
                self.discard()

    def tidy(self) -> None:
        """Remove what a process has left that died after its last result was in place."""
        if (self.path / LOCK).exists() or self.aside.exists():
            with self.at_work():
                pass

    def discard(self) -> None:
        """Forget what was written and not committed."""
        if self.aside.exists():
            shutil.rmtree(self.aside)

    def _sweep(self) -> None:
        """Remove what a process that died has left: results aside, and temporaries anywhere."""
        self.discard()
        for folder in [self.path, *(path for path in self.path.rglob("*") if path.is_dir())]:
            if durable.is_temporary(folder.name):
                shutil.rmtree(folder)
            elif folder.exists():
                durable.sweep(folder)

    def commit(self, outputs: Sequence[str], before: Sequence[str] = ()) -> None:
        """Put these outputs in place, and remove those of `before` that are not written any more."""
        for output in outputs:
            source, target = self.aside / output, self.path / output
            if source.is_dir():
                durable.make_folder(target.parent)
                durable.replace_folder(source, target)
            elif source.exists():
                durable.make_folder(target.parent)
                durable.replace_file(source, target)
        for output in sorted(set(before) - set(outputs)):
            self.remove_output(output)
        self.discard()

    # What goes aside, and is found there first

    def write_group(self, name: str, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> str:
        target = super().group_path(name)
        if "@" in name:
            return super().write_group(name, arrays, attrs)
        durable.make_folder(self.aside)
        write_arrays(self.aside / target.name, arrays, attrs)
        return target.name

    def group(self, name: str) -> "xr.Dataset":
        return open_arrays(self._found(super().group_path(name)))

    def _write(self, path: Path, table: pa.Table) -> str:
        relative = path.relative_to(self.path)
        staged = relative.parts[0] == "tables" and "@" not in relative.name
        if not staged and relative.parts[:2] != ("tokens", "routing"):
            return super()._write(path, table)
        write_table(self.aside / relative, table)
        return relative.as_posix()

    def _read(self, path: Path) -> pa.Table:
        return super()._read(self._found(path))

    def _found(self, path: Path) -> Path:
        aside = self.aside / path.relative_to(self.path)
        return aside if os.path.lexists(aside) else path

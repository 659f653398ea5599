"""Results of one step written aside, and put in place together when the step is done.

In: a study's folder. Out: a `Study` whose results go to a folder aside and whose readers find them there
first; `commit` moves them to where they belong. So a step that fails, or is stopped, leaves the results
before it as they were. A step that makes another one first (nofly makes fits) commits that before it writes
anything of its own. Cost: one rename a file.
"""

import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import durable, in_place
from .disk import claimed, held
from .errors import IncompleteError, UsageError
from .study import Study

ASIDE = ".results.partial"
LOCK = ".results.lock"


class StagedStudy(Study):
    """A study whose results wait aside for `commit`; everything else is as in `Study`."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._at_work = False

    @classmethod
    @contextmanager
    def writing(cls, study: Study) -> Generator["StagedStudy"]:
        """`study` itself where it is at work already, else one that is until the block ends."""
        if isinstance(study, StagedStudy) and study._at_work:
            yield study
        else:
            staged = cls(study.path)
            with staged.at_work():
                yield staged

    @property
    def aside(self) -> Path:
        return self.path / ASIDE

    @contextmanager
    def at_work(self) -> Generator[None]:
        """Only one process writes results at a time; what an earlier one left aside goes first and last."""
        with claimed(self.path / LOCK) as mine:
            if mine is False:
                raise UsageError(f"another process is writing results of {self.path}; let it finish first")
            self._sweep()
            self._at_work = True
            try:
                yield
            finally:
                self._at_work = False
                self.discard()

    def tidy(self) -> None:
        """Remove what a process has left that died after its last result was in place; what a living one
        has there is its own.
        """
        if ((self.path / LOCK).exists() or self.aside.exists()) and not held(self.path / LOCK):
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
        sources = {output: self.aside / output for output in outputs}
        if missing := [output for output, source in sources.items() if not source.exists()]:
            raise IncompleteError(f"{self.path}: {missing[0]} was not written: run the same again")
        pairs = [(source, self.path / output) for output, source in sources.items()]
        for folder in dict.fromkeys(target.parent for _, target in pairs):
            durable.make_folder(folder)
        in_place.replace_files([pair for pair in pairs if not pair[0].is_dir()])
        for source, target in pairs:
            if source.is_dir():
                in_place.replace_folder(source, target)
        for output in sorted(set(before) - set(outputs)):
            self.remove_output(output)
        self.discard()

    # What goes aside, and is found there first

    def _target(self, path: Path) -> Path:
        return self.aside / path.relative_to(self.path)

    def _found(self, path: Path) -> Path:
        aside = self._target(path)
        return aside if os.path.lexists(aside) else path

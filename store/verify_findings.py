"""What `verify` reports: problems, each at its place, and the verdict.

In: problems from any thread, and what was read. Out: a frozen Verified: what was looked at, how much was
read, and every problem with file, array, layer (the model's number) and token range.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import DamageError, EnvironmentFault
from .names import printable
from .places import Place

KINDS = {
    "incomplete": "not finished yet; the command that writes the store continues it",
    "seal": "SEALED or manifest.json is not what was written",
    "missing": "a file that must be there is not",
    "size": "a file has another size than was recorded",
    "content": "a file has its size but not the bytes that were recorded",
    "unreadable": "a file cannot be read or is not of its form",
    "metadata": "files that are whole contradict each other",
    "values": "values break a promise of the format, or the statistics of their record",
    "stray": "a file that other programs take for a part of the store, and nothing under the seal knows",
}
RESTORE = "`nearline repair` puts it back, or fetch it from a copy"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    kind: str  # of KINDS
    file: str  # inside the store
    array: str | None  # site, column or small array
    layer: int | None  # the model's number
    token_first: int | None
    token_last: int | None
    message: str  # one sentence; names the place


@dataclass(frozen=True, slots=True)
class Verified:
    """The verdict on a store."""

    url: str
    level: str  # quick, sample or full
    digest: str | None  # of the seal; None: no seal, or a damaged one
    n_files: int  # metadata files and block records that were read
    n_objects: int  # chunk objects of committed blocks that were looked at
    n_objects_read: int  # those whose content was read
    n_bytes_read: int
    problems: tuple[Problem, ...]
    leftovers: tuple[str, ...]  # harmless: temporary files, and chunk objects of blocks not committed
    strays: tuple[str, ...]  # harmless: files among those of the store that no reader looks at

    @property
    def whole(self) -> bool:
        """Nothing is wrong, as far as the level looks."""
        return not self.problems

    @property
    def damaged(self) -> bool:
        return any(problem.kind != "incomplete" for problem in self.problems)

    @property
    def repairable(self) -> bool:
        """Something is wrong that `nearline repair` may undo; it removes no file that it does not know."""
        return any(problem.kind not in ("incomplete", "stray") for problem in self.problems)

    @property
    def exit_code(self) -> int:
        """0 whole, 1 damaged, 3 only unfinished."""
        return 1 if self.damaged else 3 if self.problems else 0

    def counts(self) -> dict[str, int]:
        """Problems by kind."""
        return dict(Counter(problem.kind for problem in self.problems))


class Findings:
    """Problems and counts as they come, from any thread."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.n_files = self.n_objects = self.n_objects_read = self.n_bytes_read = 0
        self.leftovers: list[str] = []
        self.strays: list[str] = []
        self.fetched: set[str] = set()  # names of the small files that were looked for
        self._problems: list[Problem] = []
        self._lock = threading.Lock()

    def add(
        self,
        kind: str,
        file: str,
        text: str,
        *,
        array: str | None = None,
        layer: int | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> None:
        """A problem of one file; `tokens` is a half-open range."""
        assert kind in KINDS, kind
        first, last = (tokens[0], tokens[1] - 1) if tokens else (None, None)
        named = [f"`{array}`" + ("" if layer is None else f" layer {layer}")] if array else []
        named += [f"tokens {first}-{last}"] if tokens else []
        where = self.place.where(file)
        spot = f"{', '.join(named)} ({where})" if named else where
        message = printable(f"{spot}: {text}")
        with self._lock:
            self._problems.append(Problem(kind, file, array, layer, first, last, message))

    def count(self, *, files: int = 0, objects: int = 0, objects_read: int = 0, bytes_read: int = 0) -> None:
        with self._lock:
            self.n_files += files
            self.n_objects += objects
            self.n_objects_read += objects_read
            self.n_bytes_read += bytes_read

    def fetch(
        self,
        name: str,
        absent: str | None = f"the file is missing; {RESTORE}",
        tokens: tuple[int, int] | None = None,
    ) -> bytes | None:
        """Content of a small file. None where there is none, which is a problem unless `absent` is None."""
        self.fetched.add(name)
        try:
            content = self.place.read(name)
        except FileNotFoundError:
            if absent is not None:
                self.add("missing", name, absent, tokens=tokens)
            return None
        except DamageError as error:
            self.add("unreadable", name, reason(error, self.place.where(name)), tokens=tokens)
            return None
        except OSError as error:
            raise fault(self.place, name, error) from error
        self.count(files=1, bytes_read=len(content))
        return content

    def verdict(self, level: str, digest: str | None) -> Verified:
        return Verified(
            self.place.url,
            level,
            digest,
            self.n_files,
            self.n_objects,
            self.n_objects_read,
            self.n_bytes_read,
            tuple(sorted(self._problems, key=_order)),
            tuple(sorted(self.leftovers)),
            tuple(sorted(self.strays)),
        )


def fault(place: Place, name: str, error: OSError) -> EnvironmentFault:
    """The error of a disk or network that fails, as ours."""
    if isinstance(error, EnvironmentFault):
        return error
    return EnvironmentFault(f"{place.where(name)}: cannot be read ({error.strerror or error})")


def reason(error: BaseException, where: str) -> str:
    """The words of an error without the place, which the problem names itself."""
    return str(error).removeprefix(f"{where}: ").removeprefix(where).strip()


def shown(names: Iterable[str], limit: int = 3) -> str:
    """The first few names."""
    ordered = sorted(names)
    return ", ".join(ordered[:limit]) + (f" and {len(ordered) - limit} more" if len(ordered) > limit else "")


def _order(problem: Problem) -> tuple[int, str, str]:
    return (-1 if problem.token_first is None else problem.token_first, problem.file, problem.message)

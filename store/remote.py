"""Places behind URLs: s3://, gs:// and az:// through obstore, http(s):// for reading, hf:// by way of hub.py.

In: a URL without credentials. Out: a Place (store/places.py says what that is). Credentials come from the
provider's own chain, at each opening anew, and are never written, shown or pickled: a pickled place is its
URL.

Requests that fail for a passing reason (429, 5xx, a broken or silent connection) are repeated a bounded
number of times with growing, jittered waits: by obstore below, and here where it cannot know that a repeat is
safe. What remains is an EnvironmentFault that names file, place and cause in our words: no server is quoted.
An absent file is a FileNotFoundError. A body shorter than announced is an error, never data. Cost: one
request per file, and one more after each `put`, which compares sizes; an object above 8 MiB goes up in parts,
and a failure aborts them.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from .bodies import NoRanges, RemoteFile
from .clients import client_of
from .errors import EnvironmentFault, StoreNotFound
from .parsing import MAX_JSON_BYTES
from .patience import PATIENCE, Patience, fail, is_passing
from .places import OpenFile, Place, read_whole
from .scrub import Address, address_of, check_name

T = TypeVar("T")
PART_BYTES = 8 * 2**20  # S3 asks for 5 MiB or more, and allows 10,000 parts
PARTS_AT_ONCE = 4
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # what servers answer to a listing


def remote_place(url: str, patience: Patience | None = None) -> Place:
    """The place behind a URL; nothing is asked of the server yet."""
    address = address_of(url)
    if address.scheme == "hf":
        from .hub import hub_place

        return hub_place(url, patience)
    if address.scheme in ("http", "https"):
        return HttpPlace(address, patience or PATIENCE)
    return ObjectPlace(address, patience or PATIENCE)


class HttpPlace:
    """Files below a URL, for reading; nothing can be listed."""

    def __init__(self, address: Address, patience: Patience) -> None:
        self._address, self.patience = address, patience
        _ = self._store  # a missing package or a wrong setting is said now

    def __reduce__(self) -> tuple[Callable[[str], Place], tuple[str]]:
        return remote_place, (self.url,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def url(self) -> str:
        return self._address.url

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    @cached_property
    def _store(self) -> Any:
        return client_of(self._address, self.patience)

    def open(self, name: str) -> OpenFile:
        return RemoteFile(self._fetcher(name), self.where(name), self.patience)

    def read(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        return read_whole(self.open(name), limit, self.where(name))

    def size(self, name: str) -> int | None:
        import obstore

        path = check_name(name, self.url)
        try:
            return int(self._try(name, lambda: obstore.head(self._store, path))["size"])
        except FileNotFoundError:
            return None

    def list(self, prefix: str = "") -> dict[str, int] | None:
        return None

    def _fetcher(self, name: str) -> Callable[[int, str | None], Any]:
        import obstore

        path = check_name(name, self.url)

        def fetch(offset: int, etag: str | None) -> Any:
            options: dict[str, Any] = {"range": {"offset": offset}} if offset else {}
            if etag is not None:
                options["if_match"] = etag
            return self._try(name, lambda: obstore.get(self._store, path, options=cast("Any", options)))

        return fetch

    def _try(self, name: str, ask: Callable[[], T]) -> T:
        """One request; its failure in our words."""
        try:
            return ask()
        except FileNotFoundError:
            raise FileNotFoundError(self.where(name)) from None
        except Exception as error:
            if type(error).__name__ == "NotSupportedError":
                raise NoRanges from None
            fail(self.where(name), error)


class ObjectPlace(HttpPlace):
    """Objects below a prefix of a bucket or container: can be written and listed too."""

    def list(self, prefix: str = "") -> dict[str, int] | None:
        import obstore

        folder = prefix.rpartition("/")[0]
        base = f"{check_name(folder, self.url)}/" if folder else None

        def walk() -> dict[str, int]:
            pages = obstore.list(self._store, base, chunk_size=1000)
            return {entry["path"]: int(entry["size"]) for page in pages for entry in page}

        try:
            found = self._try(prefix, walk)
        except (FileNotFoundError, EnvironmentFault) as error:
            if isinstance(error, FileNotFoundError) or any(code in str(error) for code in NO_BUCKET):
                raise StoreNotFound(self._no_bucket()) from None
            raise
        return {name: size for name, size in found.items() if name.startswith(prefix)}

    def put(self, name: str, source: Path | bytes) -> None:
        """Write a file; a repeat is safe, because it writes the same bytes."""
        import obstore

        path, size = check_name(name, self.url), _length(source)

        def send() -> None:
            obstore.put(self._store, path, source, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

        try:
            self._persist(name, send)
        except FileNotFoundError:
            raise EnvironmentFault(self._no_bucket()) from None
        found = self.size(name)
        if found != size:
            raise EnvironmentFault(
                f"{self.where(name)}: sent {size} bytes, the store shows {found}; repeat the command"
            )

    def create(self, name: str, content: bytes) -> bool:
        """Conditional write.

        When the answer is lost, or says that a file is there, the file is read back: if it holds exactly
        `content` it counts as written by this call. So callers with equal content may all get True; of
        callers with different contents exactly one does.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        path = check_name(name, self.url)
        for attempt in range(self.patience.again + 1):
            try:
                self._create_once(path, content)
                return True
            except FileNotFoundError:
                raise EnvironmentFault(self._no_bucket()) from None
            except (AlreadyExistsError, PreconditionError):
                lost: Exception | None = None
            except Exception as error:
                lost = error
                if not is_passing(error):
                    fail(self.where(name), error)
            holds = self._holds(name, content)
            if holds is not None:
                return holds
            if lost is not None and attempt == self.patience.again:
                fail(self.where(name), lost)
            self.patience.wait(attempt)
        raise EnvironmentFault(
            f"{self.where(name)}: the store says both that the file exists and that it does not"
        )

    def delete(self, name: str) -> None:
        import obstore

        path = check_name(name, self.url)
        try:
            self._persist(name, lambda: obstore.delete(self._store, path))
        except FileNotFoundError:
            return

    def _no_bucket(self) -> str:
        return f"{self.url}: there is no bucket {self._address.host!r}"

    def _create_once(self, path: str, content: bytes) -> None:
        import obstore

        obstore.put(self._store, path, content, mode="create")

    def _holds(self, name: str, content: bytes) -> bool | None:
        """Whether the file is exactly this, None when there is none; one of another size is not fetched."""
        size = self.size(name)
        return None if size is None else size == len(content) and self.read(name) == content

    def _persist(self, name: str, act: Callable[[], object]) -> None:
        for attempt in range(self.patience.again + 1):
            try:
                act()
                return
            except FileNotFoundError:
                raise  # delete: it is gone; put: there is no such bucket
            except Exception as error:
                if attempt == self.patience.again or not is_passing(error):
                    fail(self.where(name), error)
                self.patience.wait(attempt)


def _length(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size

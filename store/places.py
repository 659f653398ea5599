"""Where a store lies: a folder of files, on this disk or behind a URL, with one interface for all of them.

In: a path or a URL. Out: a Place, which opens, reads, sizes, lists and (where it can) writes files by their
name inside the store. A name is a relative path with "/" ("blocks/000012.json"). An absent file is a
FileNotFoundError, everything else that goes wrong an EnvironmentFault that names the file. A URL that is
shown or kept never holds credentials. Cost: a local file is read straight into the caller's memory; a
remote one is one request.
"""

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import unquote

from . import durable
from .errors import DamageError, EnvironmentFault, FormatError, NearlineError, UsageError
from .parsing import MAX_JSON_BYTES

SCHEMES = ("file", "s3", "gs", "az", "hf", "http", "https")
_BAD_FILE = (errno.EIO, errno.EISDIR, errno.EBADMSG, errno.ELOOP, errno.ENXIO)
_URL = re.compile(r"(?:([a-z][a-z0-9+.-]+)://|(file):)")


class OpenFile(Protocol):
    """A file opened for one pass from its start to its end."""

    @property
    def size(self) -> int: ...

    def readinto(self, view: memoryview) -> int:
        """Fill `view` as far as one read goes; 0 at the end."""
        ...

    def close(self) -> None: ...


class Place(Protocol):
    """A folder of files that can be read."""

    @property
    def url(self) -> str:
        """The path or URL, without credentials: what messages and records show."""
        ...

    def where(self, name: str) -> str:
        """How messages name one file."""
        ...

    def open(self, name: str) -> OpenFile:
        """Open a file; FileNotFoundError when there is none."""
        ...

    def read(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        """The whole content; FormatError, before anything is read, when it is larger than `limit`."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file, None when there is none."""
        ...

    def list(self, prefix: str = "") -> dict[str, int] | None:
        """Names and sizes of all files whose name starts with `prefix`; None where nothing can be listed."""
        ...


class WritablePlace(Place, Protocol):
    """A place that takes files. A file is there whole, or not at all."""

    def put(self, name: str, source: Path | bytes) -> None:
        """Write a file, replacing an older one in one step."""
        ...

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that must not exist; False when it does. Of several callers one gets True."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file; one that is absent is fine."""
        ...


class _LocalFile:
    __slots__ = ("_descriptor", "size")

    def __init__(self, path: Path) -> None:
        # Without O_NONBLOCK a named pipe in the place of a file would hold us for ever.
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._descriptor)
            raise DamageError(f"{path}: not a file but something else of that name")
        self.size = found.st_size

    def readinto(self, view: memoryview) -> int:
        return os.readv(self._descriptor, [view])

    def close(self) -> None:
        os.close(self._descriptor)


class LocalPlace:
    """A folder on this machine's disks."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"LocalPlace({str(self.path)!r})"

    def __str__(self) -> str:
        return self.url

    @property
    def url(self) -> str:
        return str(self.path)

    def where(self, name: str) -> str:
        return str(self.path / name)

    def open(self, name: str) -> OpenFile:
        try:
            return _LocalFile(self.path / name)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(self.where(name)) from None
        except DamageError:
            raise
        except OSError as error:
            raise refused(self.where(name), "opened", error) from error

    def read(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        return read_whole(self.open(name), limit, self.where(name))

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise EnvironmentFault(f"{self.where(name)}: cannot be looked at ({error.strerror})") from error

    def list(self, prefix: str = "") -> dict[str, int] | None:
        found: dict[str, int] = {}
        base = os.path.join(self.path, "")  # noqa: PTH118 - text: 800,000 Path objects take half a minute
        for root, _, names in os.walk(base + prefix.rpartition("/")[0], onerror=_refuse):
            inside = root[len(base) :].replace(os.sep, "/").strip("/")
            inside += "/" if inside else ""
            for name in names:
                if (relative := inside + name).startswith(prefix):
                    with contextlib.suppress(OSError):  # a link to nothing, or gone in the meantime: no file
                        found[relative] = os.stat(f"{root}{os.sep}{name}").st_size  # noqa: PTH116
        return found

    def put(self, name: str, source: Path | bytes) -> None:
        content = source if isinstance(source, bytes) else source.read_bytes()
        durable.write_file(self.path / name, content)

    def create(self, name: str, content: bytes) -> bool:
        return durable.create_file(self.path / name, content)

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def refused(where: str, action: str, error: OSError) -> DamageError | EnvironmentFault:
    """What the system says of a file: bad itself, or out of reach for a reason that may pass."""
    kind = DamageError if error.errno in _BAD_FILE else EnvironmentFault
    return kind(f"{where}: cannot be {action} ({error.strerror})")


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise EnvironmentFault(f"{error.filename}: cannot be listed ({error.strerror})") from error


def read_whole(file: OpenFile, limit: int, where: str) -> bytes:
    """The content of a file just opened, which is closed then."""
    try:
        check_limit(file.size, limit, where)
        content = bytearray(file.size)
        view = memoryview(content)
        while len(view):
            n_read = file.readinto(view)
            if n_read == 0:
                raise DamageError(f"{where}: the file ended early")
            view = view[n_read:]
        return bytes(content)
    except OSError as error:
        if isinstance(error, NearlineError):
            raise
        raise refused(where, "read", error) from error
    finally:
        file.close()


def check_limit(size: int, limit: int, where: str) -> None:
    """Refuse a file before it is read."""
    if size > limit:
        raise FormatError(f"{where}: {size} bytes, at most {limit} are read")


def parent_of(place: Place) -> Place:
    """The folder around `place`: what a URL that ends in activations.zarr lies in."""
    parent, _, _ = place.url.rstrip("/").rpartition("/")
    return LocalPlace(place.path.parent) if isinstance(place, LocalPlace) else place_of(parent)


def scheme_of(where: str | Path) -> str | None:
    """The scheme of a URL; None for a path."""
    match = None if isinstance(where, Path) else _URL.match(where)
    return (match[1] or match[2]) if match else None


def place_of(where: "str | Path | Place") -> Place:
    """The place that a path or URL names; it need not exist. A Place is itself."""
    if not isinstance(where, (str, Path)):
        return where
    scheme = scheme_of(where)
    if scheme is None:
        return LocalPlace(where)
    if scheme == "file":
        return LocalPlace(_file_path(str(where)))
    if scheme not in SCHEMES:
        raise UsageError(f"{scheme}:// is not a place for stores; allowed: {', '.join(SCHEMES)}, or a folder")
    from .remote import remote_place  # needs the [share] extra

    return remote_place(str(where))


def _file_path(url: str) -> Path:
    """The folder of `file:relative`, `file:/absolute` or `file:///absolute`, as an absolute path: whoever
    keeps it may look from another folder."""
    rest = url.removeprefix("file:")
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise UsageError(
                f"{url}: {host!r} stands where a host belongs; write file:{host}{slash}{path}, or "
                "file:///PATH for an absolute path"
            )
        rest = slash + path
    if not rest:
        raise UsageError(f"{url}: names no folder; write file:PATH")
    return Path(unquote(rest)).absolute()


def writable_place_of(where: str | Path | Place) -> WritablePlace:
    """As `place_of`, refused where nothing can be written."""
    place = place_of(where)
    if not hasattr(place, "put"):
        raise UsageError(f"{place.url} can only be read; push to a folder, s3://, gs://, az:// or hf://")
    return cast("WritablePlace", place)

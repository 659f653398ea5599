"""Rows of data sets that the `datasets` library reads: from the Hub, or from a folder here.

In: a `DatasetSpec`. Out: rows in the order of the split, under the keys NAME:ROW with a count of our own from
0, so that a stream, a cached copy and the same rows in a folder are the same corpus; what identifies it is
our hash of its contents, not the library's fingerprint. A folder that `save_to_disk` wrote is mapped; one of
data files is read as a stream, so that no copy of it is cached. Code that comes with a data set never runs:
the library has no loading scripts any more. Cost: a second to import the library, then decoding one column.
"""

import difflib
import logging
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from huggingface_hub import errors as hub
from huggingface_hub import utils as hub_utils

from ..store.errors import EnvironmentFault, NearlineError, UsageError
from .documents import Row
from .sources import HUB_ID, hub_unreachable
from .specs import DATASET_FORM, DEFAULT_SPLIT, DatasetSpec, dataset_name
from .tables import ROWS_AT_ONCE, require_column, values_of, whole

SAVED = ("state.json", "dataset_dict.json")  # what save_to_disk writes
UNREADABLE = ("::", "[")  # in the name of a folder: patterns to the library
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
logger = logging.getLogger("nearline")
_UNREACHABLE = (ConnectionError, TimeoutError, hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)


def read_dataset(spec: DatasetSpec, *, streaming: bool) -> Generator[Row]:
    """The rows of one split; from the Hub as a stream, or downloaded to the library's cache first."""
    library, place = _library(), f"hf:{spec.name}"
    with _explained(library, spec), ExitStack() as stack:
        split = _split_of(_opened(library, spec, streaming, stack), spec)
        columns = list(split.column_names or next(iter(split), {}))
        require_column(spec.column, columns, place, DATASET_FORM)
        values = _values(split.select_columns([spec.column]), spec.column)
        name = dataset_name(spec) if spec.local else spec.name.partition("@")[0]
        with whole(place):
            for number, value in enumerate(islice(values, spec.start, spec.stop), start=spec.start):
                yield Row(f"{name}:{number}", value, f"{place}, row {number}: column {spec.column!r}")


def _values(split: Any, column: str) -> Iterator[object]:
    """What a column holds, a thousand rows at a time. Where its rows are of several forms, the library keeps
    them as JSON, which only it can undo."""
    if "Json(" in repr((split.features or {}).get(column)):
        for part in split.iter(ROWS_AT_ONCE):
            yield from part[column]
    else:
        for part in split.with_format("arrow").iter(ROWS_AT_ONCE):
            yield from values_of(part.column(0))


def _library() -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise EnvironmentFault(
            "hf: needs the package datasets, which is not installed: pip install 'nearline[collect]'. "
            "Parquet files can be read without it: parquet:PATH."
        ) from None
    return datasets


def _opened(library: ModuleType, spec: DatasetSpec, streaming: bool, stack: ExitStack) -> Any:
    """A data set with all its splits; one that was saved alone has none."""
    path = Path(spec.name)
    if spec.local and any((path / name).is_file() for name in SAVED):
        if spec.config:
            raise UsageError(f"hf:{path}: a saved data set has no configurations. Name it hf:{path}::SPLIT.")
        return library.load_from_disk(str(path.resolve()))
    if spec.local:
        if any(mark in str(path.resolve()) for mark in UNREADABLE):
            raise UsageError(f"hf:{path}: the library reads no folder with :: or [ in its path; rename it.")
        folder = stack.enter_context(TemporaryDirectory())  # the library locks and lists what it reads
        return _loaded(library, str(path.resolve()), spec.config, streaming=True, cache_dir=folder)
    name, _, revision = spec.name.partition("@")
    # To the library `json` and its like are no data sets, but whatever such files the working folder holds.
    if not HUB_ID.fullmatch(name) or name in library.packaged_modules._PACKAGED_DATASETS_MODULES:
        kind = "a file, not a folder; name files text:, jsonl: or parquet:" if path.is_file() else "no folder"
        raise UsageError(f"hf:{path}: {kind}, and it is no Hub id (OWNER/NAME).")
    return _loaded(library, name, spec.config, revision=revision or None, streaming=streaming)


def _loaded(library: ModuleType, name: str, config: str, **options: Any) -> Any:
    with _quiet(library), _cache_alone(library, not Path(name).is_absolute() and hub_unreachable()):
        return library.load_dataset(name, config or None, **options)


def _split_of(opened: Any, spec: DatasetSpec) -> Any:
    if not isinstance(opened, dict):
        named = str(opened.split or DEFAULT_SPLIT)
        if spec.split not in (named, DEFAULT_SPLIT):
            raise UsageError(f"hf:{spec.name}: no split {spec.split!r}; it was saved alone, as {named!r}.")
        return opened
    if spec.split not in opened:
        raise UsageError(
            f"hf:{spec.name}: no split {spec.split!r}; {_choice(spec.split, list(opened), 'splits')}. Name "
            f"one: {DATASET_FORM}."
        )
    if len(opened) > 1 and spec.split == DEFAULT_SPLIT:
        logger.info("hf:%s: takes split %s of %s", spec.name, spec.split, ", ".join(opened))
    return opened[spec.split]


def _choice(wanted: str, names: Sequence[str], what: str) -> str:
    near = difflib.get_close_matches(wanted, names, n=1)
    hint = f" (did you mean {near[0]}?)" if near and len(names) > 1 else ""
    return f"its {what} are {', '.join(names)}{hint}"


@contextmanager
def _quiet(library: ModuleType) -> Generator[None]:
    """No progress bars, unless the environment asks for them."""
    with ExitStack() as stack:
        if "HF_DATASETS_DISABLE_PROGRESS_BARS" not in os.environ:
            if not library.are_progress_bars_disabled():
                stack.callback(library.enable_progress_bars)
            library.disable_progress_bars()
        if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
            stack.enter_context(hub_utils.disable_progress_bars())
        yield


@contextmanager
def _cache_alone(library: ModuleType, alone: bool) -> Generator[None]:
    """Without network only the cache can answer: the client would retry for twenty seconds before."""
    before = library.config.HF_HUB_OFFLINE
    library.config.HF_HUB_OFFLINE = before or alone
    try:
        yield
    finally:
        library.config.HF_HUB_OFFLINE = before


@contextmanager
def _explained(library: ModuleType, spec: DatasetSpec) -> Generator[None]:
    """Our own error for whatever the library raises; none repeats a request's address, headers or token."""
    try:
        yield
    except NearlineError:
        raise
    except Exception as error:
        raise _error(library, spec, error) from None


def _error(library: ModuleType, spec: DatasetSpec, error: Exception) -> NearlineError:
    place, said = f"hf:{spec.name}", str(error)
    if "scripts are no longer supported" in said:
        return UsageError(
            f"{place}: comes with a loading script, which is code and never runs here. {_FILES}"
        )
    if isinstance(error, hub.GatedRepoError) or "is a gated dataset" in said:
        return UsageError(f"{place}: gated on the Hub. Accept its conditions on its page, then {LOG_IN}.")
    if isinstance(error, library.exceptions.DatasetNotFoundError | hub.RepositoryNotFoundError):
        return UsageError(
            f"{place}: neither a folder here nor a data set on the Hub (or it is private, or has no such "
            f"revision). Check the spelling, or {LOG_IN}."
        )
    if isinstance(error, library.exceptions.DataFilesNotFoundError | library.data_files.EmptyDatasetError):
        return UsageError(f"{place}: holds no data files that the library reads. {_FILES}")
    if "BuilderConfig" in said or "Config name is missing" in said:
        names = library.get_dataset_config_names(spec.name.partition("@")[0])
        wrong = f"no configuration {spec.config!r}" if spec.config else "it has several configurations"
        return UsageError(
            f"{place}: {wrong}; {_choice(spec.config, names, 'configurations')}. Name one: {DATASET_FORM}."
        )
    if isinstance(error, StopIteration):
        return UsageError(f"{place}: its files hold no row.")
    if isinstance(error, library.table.CastError):
        return UsageError(f"{place}: its files do not have the same columns. {_FILES}")
    if isinstance(error, hub.HfHubHTTPError):
        return EnvironmentFault(
            f"{place}: the Hub answered with an error (HTTP {error.response.status_code}). Try again later, "
            "or give a local folder."
        )
    if not spec.local and isinstance(error, _UNREACHABLE):
        return EnvironmentFault(
            f"{place}: no folder here and not in the cache of the library, and the Hub cannot be reached. "
            "Give a local folder (of data files, or from save_to_disk), or try again with network."
        )
    reason = _reason(error) if spec.local else type(error).__name__
    return UsageError(f"{place}: the library cannot read it ({reason}). {_FILES}")


_FILES = "Give its files: parquet:PATH, jsonl:PATH or text:PATH."


def _reason(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line[:300].rstrip(". ")

"""Whether files are still what they were, without reading them each time.

In: a folder or a file. Out: two digests: of names, sizes and times of the files, and of their content. Where
the first one is as it was, so is the content; where it is not (the files were copied, say), the content
decides. Cost: a look at each file; one read of all of them where something looks new.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from blake3 import blake3

# What of a model's folder decides over its numbers and its tokens.
MODEL_FILES: Final = (
    "config.json",
    "adapter_config.json",
    "*.safetensors",
    "*.bin",
    "*.gguf",
    "*.model",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
ALL: Final = ("**/*",)
_READ_BYTES: Final = 2**24


def fingerprint(path: Path, patterns: tuple[str, ...] = ALL) -> dict[str, str] | None:
    """Digests of a file, or of the files of a folder; None where there is nothing."""
    files = list(_files(path, patterns))
    if not files:
        return None
    return {"seen": _seen(path, files), "content": _content(path, files)}


def is_same(known: Mapping[str, str], path: Path, patterns: tuple[str, ...] = ALL) -> bool:
    """Whether these are the files that `known` is of. Files that are gone say nothing: a store stays good."""
    files = list(_files(path, patterns))
    if not files or _seen(path, files) == known.get("seen"):
        return True
    return _content(path, files) == known.get("content")


def _files(path: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    found = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    yield from sorted(file for file in found if not _is_hidden(file.relative_to(path)))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _name(path: Path, file: Path) -> str:
    """Inside of its folder, wherever that stands."""
    return "" if file == path else file.relative_to(path).as_posix()


def _seen(path: Path, files: list[Path]) -> str:
    found = blake3()
    for file in files:
        state = file.stat()
        found.update(f"{_name(path, file)}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _content(path: Path, files: list[Path]) -> str:
    found = blake3()
    for file in files:
        found.update(f"{_name(path, file)}\0{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while piece := stream.read(_READ_BYTES):
                found.update(piece)
    return found.hexdigest()

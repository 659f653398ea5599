"""Stores and studies as an attacker would write them: changed on purpose, then sealed again by hand.

In: a good store, a file of it, a change. Out: the store with that change, its digests made right from the
bottom up, so that no checksum gives it away. What a reader then refuses, it refuses for what it says.
"""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from blake3 import blake3
from nearline.store import Reader, info
from nearline.store.manifest import seal_bytes

ROOT = "activations.zarr/zarr.json"
UNDER_SEAL = ("plan.json", "documents.parquet", "vocabulary.parquet", "activations.zarr/", "blocks/")


@dataclass(frozen=True)
class Bytes:
    """A change in the bytes themselves, for what no JSON writer would write."""

    of: Callable[[bytes], bytes]


Change = Callable[[Any], Any] | Bytes | bytes


def author(store: Path, name: str, change: Change) -> None:
    """Change one file of a store, then seal the store again."""
    author_json(store / name, change, compact=name == "plan.json")
    if name == "plan.json":
        follow_plan(store)
    if name != "SEALED":
        reseal(store, manifest=name != "manifest.json")


def author_json(path: Path, change: Change, *, compact: bool = False) -> None:
    """Change one file: new bytes, a change of its bytes, or a change of its JSON as a value."""
    if isinstance(change, bytes):
        path.write_bytes(change)
    elif isinstance(change, Bytes):
        path.write_bytes(change.of(path.read_bytes()))
    else:
        found = json.loads(path.read_bytes())
        changed = change(found)
        path.write_bytes(written(found if changed is None else changed, compact=compact))


def written(data: Any, *, compact: bool = False) -> bytes:
    """JSON as the store writes it; numbers that it would never write included."""
    if compact:
        return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    return (json.dumps(data, sort_keys=True, indent=1) + "\n").encode()


def follow_plan(store: Path) -> None:
    """Give attributes and block records the digest of the plan as it now stands."""
    digest = blake3((store / "plan.json").read_bytes()).hexdigest()
    root = json.loads((store / ROOT).read_bytes())
    root["attributes"]["plan"]["digest"] = digest
    (store / ROOT).write_bytes(written(root))
    for path in (store / "blocks").glob("*.json"):
        record = json.loads(path.read_bytes())
        path.write_bytes(written(record | {"plan": digest}))


def reseal(store: Path, *, manifest: bool = True) -> None:
    """Make the digests of manifest.json and SEALED right; without `manifest`, of SEALED alone."""
    path = store / "manifest.json"
    if manifest:
        data = json.loads(path.read_bytes())
        for name in data["files"]:
            if (store / name).is_file():
                content = (store / name).read_bytes()
                data["files"][name] = [len(content), blake3(content).hexdigest()]
        data["plan"] = blake3((store / "plan.json").read_bytes()).hexdigest()
        path.write_bytes(written(data))
    (store / "SEALED").write_bytes(seal_bytes(path.read_bytes()))


def put(path: str, value: Any) -> Callable[[Any], None]:
    """A change of one value; `path` is keys and indices joined by dots, a last "+" appends."""
    *parents, last = path.split(".")
    if last == "json":  # a file's name
        parents, last = parents[:-1], f"{parents[-1]}.json"

    def change(data: Any) -> None:
        for part in parents:
            data = data[int(part) if isinstance(data, list) else part]
        if last == "+":
            data.append(value)
        else:
            data[int(last) if isinstance(data, list) else last] = value

    return change


def drop(path: str) -> Callable[[Any], None]:
    """A change that removes one key."""
    *parents, last = path.split(".")

    def change(data: Any) -> None:
        for part in parents:
            data = data[part]
        del data[last]

    return change


def text(old: bytes, new: bytes) -> Bytes:
    """One piece of the file replaced by another."""

    def change(content: bytes) -> bytes:
        assert old in content, old
        return content.replace(old, new, 1)

    return Bytes(change)


def read_all(store: Path) -> None:
    """Everything that a reader may ask of a store."""
    info(store)
    reader = Reader.open(store)
    assert reader.documents.num_rows
    assert reader.vocabulary.num_rows
    for name in ("norm_weight", "norm_bias", "post_norm_weight", "post_norm_bias"):
        reader.affine(name)
    assert reader.position_embedding is None or reader.position_embedding.size
    for block in range(reader.n_blocks):
        for site in reader.sites:
            layer = None if site == "embedding" else reader.layers[-1]
            assert np.isfinite(reader.rows(site, layer, block, block + 1)).all()
    assert reader.column("nll").shape == (reader.n_tokens,)
    xr.open_dataset(store, engine="nearline")["residual"][0, :2].load()


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """All files below a folder, with size and time of the last change."""
    found = {path: path.lstat() for path in sorted(folder.rglob("*")) if not path.is_dir()}
    return {path.relative_to(folder).as_posix(): (s.st_size, s.st_mtime_ns) for path, s in found.items()}


def snapshot(folder: Path) -> dict[str, bytes]:
    """The content of all files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def restore(folder: Path, content: dict[str, bytes], before: dict[str, tuple[int, int]]) -> None:
    """Put back what was changed since `before`, and remove what was added."""
    for name in set(found := listing(folder)) - set(content):
        (folder / name).unlink()
    for name in content:
        if found.get(name) != before[name]:
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(content[name])


def peak_bytes(action: Callable[[], object]) -> int:
    """The most memory that Python and numpy held at once beyond what they held before."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

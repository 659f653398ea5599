"""Damage on purpose: flips, cuts and swaps, and edits that a forger would make consistent.

In: a store folder. Out: the same folder, damaged. `vouch` and `reseal` rewrite records, manifest and seal so
that every digest fits again: what is then still found is found by meaning and not by digest.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from blake3 import blake3
from nearline.store import Reader
from nearline.store.layout import TOKEN_COLUMNS
from nearline.store.manifest import MANIFEST, SEALED, seal_bytes
from nearline.store.parsing import readable
from nearline.store.places import Place
from nearline.store.tables import parse_table, table_bytes

GROUP = "activations.zarr"


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def cut(path: Path, n_bytes: int) -> None:
    """Keep so many bytes; a negative number cuts from the end."""
    path.write_bytes(path.read_bytes()[:n_bytes])


def extend(path: Path, more: bytes = b"\0\0\0\0") -> None:
    path.write_bytes(path.read_bytes() + more)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_bytes())
    change(data)
    path.write_bytes(readable(data))


def edit_table(path: Path, change: Callable[[dict[str, list[Any]]], object]) -> None:
    table = parse_table(path.read_bytes(), None, str(path))
    columns = table.to_pydict()
    change(columns)
    path.write_bytes(table_bytes(pa.table(columns, schema=table.schema)))


def edit_values(store: Path, key: str, change: Callable[[np.ndarray], object], dtype: str) -> None:
    """Change the values of an uncompressed chunk object and vouch for the result in its block record."""
    path = store / GROUP / key
    values = np.frombuffer(path.read_bytes()[:-4], dtype).copy()
    change(values)
    body = values.tobytes()
    path.write_bytes(body + int(google_crc32c.value(body)).to_bytes(4, "little"))
    vouch(store, key)


def edit_column(store: Path, name: str, block: int, change: Callable[[np.ndarray], object]) -> None:
    edit_values(store, f"{name}/c/{block}", change, TOKEN_COLUMNS[name][0].str)


def vouch(store: Path, key: str) -> None:
    """Let the block record of a chunk object say what is there now."""
    content = (store / GROUP / key).read_bytes()
    entry = [len(content), blake3(content).hexdigest(), content[-4:].hex()]
    for path in (store / "blocks").glob("*.json"):
        data = json.loads(path.read_bytes())
        if key in data["chunks"]:
            data["chunks"][key] = entry
            path.write_bytes(readable(data))
            return
    raise KeyError(key)


def remanifest(store: Path, change: Callable[[dict[str, Any]], object] | None = None) -> None:
    """Let the manifest say what is there now, without a seal for it."""
    data = json.loads((store / MANIFEST).read_bytes())
    for name in data["files"]:
        if (store / name).exists():
            content = (store / name).read_bytes()
            data["files"][name] = [len(content), blake3(content).hexdigest()]
    if change is not None:
        change(data)
    (store / MANIFEST).write_bytes(readable(data))


def reseal(store: Path, change: Callable[[dict[str, Any]], object] | None = None) -> None:
    """Let manifest and seal say what is there now; `change` edits the manifest first."""
    remanifest(store, change)
    (store / SEALED).write_bytes(seal_bytes((store / MANIFEST).read_bytes()))


def sealed_files(store: Path) -> list[str]:
    """Every file under the seal, the seal and the manifest."""
    files = sorted(path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file())
    return [name for name in files if name != "README.md" and not name.startswith("runs/")]


def everything(store: Path | str | Place) -> dict[str, np.ndarray | pa.Table]:
    """All that a reader can get out of a store."""
    reader = Reader.open(store)
    found: dict[str, Any] = {name: reader.column(name) for name in TOKEN_COLUMNS}
    for site in reader.sites:
        for layer in reader.layers if site != "embedding" else (None,):
            found[f"{site} {layer}"] = reader.rows(site, layer, 0, reader.n_blocks)
    for name in ("norm_weight", "norm_bias", "post_norm_weight", "post_norm_bias"):
        found[name] = reader.affine(name)
    found["position_embedding"] = reader.position_embedding
    found["documents"], found["vocabulary"] = reader.documents, reader.vocabulary
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(_same(found, other[name]) for name, found in one.items())


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, np.ndarray):
        form = (found.dtype, found.shape, found.tobytes())
        return isinstance(expected, np.ndarray) and form == (
            expected.dtype,
            expected.shape,
            expected.tobytes(),
        )
    if isinstance(found, pa.Table):
        return isinstance(expected, pa.Table) and found.equals(expected)
    return found is expected  # None: the store has no such array

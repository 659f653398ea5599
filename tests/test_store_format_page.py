"""The page on the format is true: its reader reads stores as ours does, and it names every field there is."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_hostile import ROOT, author
from helpers_store import make_store, normalise, synthetic
from nearline.store import Attributes, Plan, Reader
from nearline.store.attributes import LINEAGE_KINDS
from nearline.store.dtypes import SITES
from nearline.store.layout import AFFINE, TOKEN_COLUMNS
from nearline.store.manifest import Manifest
from nearline.store.plan import MAX_BLOCKS
from nearline.store.records import _STATISTICS, BlockRecord, ChunkRecord
from nearline.store.tables import DOCUMENTS, VOCABULARY

PAGE = Path(__file__).parent.parent / "docs/format.md"
SETTINGS: dict[str, Any] = {"n_tokens": 500, "block": 160, "layers": [2, 5], "d": 16}
MOST_LINES = 30
NORM_TOLERANCE = 2e-6  # float32 against the same formula in float64


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def code(text: str) -> str:
    (found,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return found


def run(code: str, store: Path, index: int) -> dict[str, Any]:
    """What the page's reader has found at its end."""
    here = code.replace('Path("STORE"), 0', f"Path({str(store)!r}), {index}")
    assert here != code
    names: dict[str, Any] = {}
    exec(compile(here, "docs/format.md", "exec"), names)
    return names


def test_the_reader_has_thirty_lines(code: str) -> None:
    assert len([line for line in code.splitlines() if line.strip()]) <= MOST_LINES
    assert "nearline" not in code


@pytest.mark.parametrize(
    "settings",
    [
        {"storage_dtype": "float32"},
        {"storage_dtype": "float16", "norm_kind": "rmsnorm"},
        {"storage_dtype": "bfloat16", "compressor": "zstd"},
        {"storage_dtype": "float32", "norm_kind": "none", "compressor": "zstd", "with_positions": False},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_reader_of_the_page_reads_what_ours_reads(
    settings: dict[str, Any], code: str, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "s", **SETTINGS, **settings)
    reader, data = Reader.open(store), synthetic(**SETTINGS, **settings)
    for index, layer in enumerate(reader.layers):
        found = run(code, store, index)
        residual = reader.rows("residual", layer, 0, reader.n_blocks)
        assert np.array_equal(found["residual"], residual)
        assert np.array_equal(found["y"], reader.rows("mlp_output", layer, 0, reader.n_blocks))
        expected = normalise(residual, settings.get("norm_kind", "layernorm"), data.affine, index)
        assert np.allclose(found["x"], expected, rtol=NORM_TOLERANCE, atol=NORM_TOLERANCE)


def flip(store: Path, name: str) -> None:
    content = bytearray((store / name).read_bytes())
    content[len(content) // 2] ^= 1
    (store / name).write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda store: flip(store, "SEALED"),
        lambda store: flip(store, "manifest.json"),
        lambda store: flip(store, "plan.json"),
        lambda store: flip(store, "blocks/000002.json"),
        lambda store: flip(store, "activations.zarr/residual/c/0/2/0"),
        lambda store: flip(store, "activations.zarr/norm_weight/c/0/0"),
    ],
    ids=["seal", "manifest", "plan", "record", "chunk", "norm"],
)
def test_the_reader_of_the_page_finds_damage(
    damage: Callable[[Path], None], code: str, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "s", **SETTINGS)
    damage(store)
    with pytest.raises(AssertionError):
        run(code, store, 0)


def fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]


def test_every_field_stands_on_the_page(text: str) -> None:
    """So that the page cannot fall behind the code."""
    attributes = fields(Attributes)
    inner = [
        name
        for field in dataclasses.fields(Attributes)
        if dataclasses.is_dataclass(field.type)
        for name in fields(field.type)
    ]
    names = [
        *attributes,
        *inner,
        *fields(Plan),
        *fields(BlockRecord),
        *fields(ChunkRecord),
        *fields(Manifest),
    ]
    names += [
        *LINEAGE_KINDS,
        *SITES,
        *AFFINE,
        *TOKEN_COLUMNS,
        *DOCUMENTS.names,
        *VOCABULARY.names,
        *_STATISTICS,
    ]
    assert [name for name in names if f"`{name}`" not in text] == []
    assert f"{MAX_BLOCKS:,} blocks" in text


def test_every_key_that_is_written_stands_on_the_page(text: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", **SETTINGS)
    root = json.loads((store / ROOT).read_bytes())["attributes"]
    keys = {*root, *(key for section in root.values() if isinstance(section, dict) for key in section)}
    keys -= {*root["proof"], *root["policies"], *root["versions"]}
    for name in ("plan.json", "manifest.json", "blocks/000000.json"):
        keys |= set(json.loads((store / name).read_bytes()))
    assert sorted(key for key in keys if f"`{key}`" not in text) == []
    files = {path.relative_to(store).parts[0] for path in store.rglob("*") if path.is_file()}
    assert sorted(name for name in files if name not in text) == []


def test_the_page_says_what_is_under_the_seal(text: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", **SETTINGS)
    before = Reader.open(store).digest
    author(store, "README.md", b"anything")
    assert Reader.open(store).digest == before
    assert "not under the seal" in text

"""A store from elsewhere is data, not a friend: hostile files are refused by name, before they cost anything.

Each case is one change to a good store, sealed again by its author so that every digest is right. Refused
means: one of our errors, naming the file and what is wrong in it; no memory taken for what it promises; no
file written.
"""

import ast
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import nearline
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3
from helpers_hostile import (
    ROOT,
    Bytes,
    author,
    drop,
    listing,
    peak_bytes,
    put,
    read_all,
    reseal,
    restore,
    snapshot,
    text,
)
from helpers_store import make_store
from nearline.store import DamageError, FormatError, MissingChunk, Reader, UsageError
from nearline.store.metadata import decompress
from nearline.store.names import printable
from nearline.store.parsing import SMALL_JSON_BYTES, parse_json
from nearline.store.records import check_key
from nearline.store.verify import verify

SETTINGS: dict[str, Any] = {"n_tokens": 240, "block": 160, "layers": [2, 5], "d": 16}
PEAK_BYTES = 24 * 2**20  # a good store of this size takes 2 MiB; what hostile ones promise starts at 1 GiB
BLOCK = "blocks/000001.json"
SITE = "activations.zarr/residual/zarr.json"
NORM = "activations.zarr/norm_weight/zarr.json"
POSITIONS = "activations.zarr/position_embedding/zarr.json"
CHUNK = "activations.zarr/residual/c/1/1/0"
KEY = "residual/c/1/1/0"
ESCAPE = "\x1b]0;owned\x07\x1b[2J"

NAMES = [
    "../up",
    "/etc/passwd",
    "a//b",
    "a/../b",
    "a\\b",
    "c:/x",
    "a/.",
    "",
    "a\nb",
    "a\0b",
    "x" * 600,
    "a/" + "x" * 221,
    "NUL",
    "blocks/con.json",
    "a/COM1/b",
    "a/lpt¹",
    "aux .txt",
    "a. ",
    "a.",
    "b /c",
    "\u202eexe",
    "~\x7f",
]


def statistics(value: Any) -> Callable[[Any], None]:
    return put("statistics.residual", value)


def rename_chunk(name: str) -> Callable[[Any], None]:
    def change(record: Any) -> None:
        record["chunks"][name] = record["chunks"].pop(KEY)

    return change


def codecs(*found: Any) -> Callable[[Any], None]:
    return put("codecs", list(found))


def consolidated(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda root: change(root["consolidated_metadata"]["metadata"]["residual"])


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = {"a": found}
    return found


BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
BLOSC = {
    "name": "blosc",
    "configuration": {"cname": "zstd", "clevel": 9, "shuffle": "shuffle", "typesize": 4},
}

# Where the contradiction shows: in the file that is compared with the changed one.
ALSO_NAMED = {
    "10^18 tokens in the attributes": ["plan.json"],
    "chunks of 167 MB": ["plan.json"],
    "another block": ["plan.json"],
    "more positions than are there": ["position_embedding/c/0/0"],
    "a chunk of one byte more": [KEY],
    "a plan of 10^18 bytes": ["plan.json"],
    "a manifest without the plan": ["plan.json"],
}

# file, change, what the error says (a regular expression; the file's own name is asked for besides)
CASES: dict[str, tuple[str, Any, str]] = {
    # attributes
    "10^7 layers": (ROOT, put("attributes.model.n_layers", 10**7), "n_layers"),
    "d = 10^9": (ROOT, put("attributes.model.d_model", 10**9), "d_model"),
    "10^18 tokens in the attributes": (ROOT, put("attributes.plan.n_tokens", 10**18), "n_tokens"),
    "a list of 200,000 layers": (ROOT, put("attributes.storage.layers", list(range(2 * 10**5))), "layers"),
    "an integer of 30 digits": (ROOT, put("attributes.plan.seed", 10**30), "64 bits"),
    "an integer of 10,000 digits": (ROOT, text(b'"seed": 0', b'"seed": ' + b"9" * 10_000), "64 bits"),
    "True for an integer": (ROOT, put("attributes.model.n_layers", True), "n_layers"),
    "a float for an integer": (ROOT, put("attributes.model.d_model", 16.0), "d_model"),
    "1e400": (ROOT, text(b'"norm_error": 0.0', b'"norm_error": 1e400'), "1e400"),
    "NaN": (ROOT, text(b'"norm_error": 0.0', b'"norm_error": NaN'), "NaN"),
    "-Infinity": (ROOT, text(b'"norm_error": 0.0', b'"norm_error": -Infinity'), "Infinity"),
    "a key twice": (ROOT, text(b'"seed": 0', b'"seed": 0, "seed": 1'), "'seed' stands twice"),
    "a newer schema": (ROOT, put("attributes.nearline.schema", 2), "schema 2"),
    "an unknown key": (ROOT, put("attributes.model.code", "import os"), "unknown key 'code'"),
    "an unknown key of the schema": (ROOT, put("attributes.nearline.plugin", "x"), "unknown key 'plugin'"),
    "an unknown section": (ROOT, put("attributes.hooks", {}), "unknown key 'hooks'"),
    "an unknown key of the group": (ROOT, put("extensions", []), "unknown key 'extensions'"),
    "a missing section": (ROOT, drop("attributes.norm"), "'norm' is missing"),
    "an escape sequence": (ROOT, put("attributes.model.name", f"gpt2{ESCAPE}"), "control characters"),
    "a line end in a name": (ROOT, put("attributes.corpus.spec", "a\nsealed yes"), "control characters"),
    "text that runs backwards": (ROOT, put("attributes.model.name", "a\u202eb"), "control characters"),
    "half of a surrogate pair": (ROOT, put("attributes.model.name", "a\ud800"), "surrogate"),
    "a name of a megabyte": (ROOT, put("attributes.model.name", "a" * 10**6), "4096 characters"),
    "an escape sequence as a key": (ROOT, put(f"attributes.versions.{ESCAPE}", "1"), "not a name"),
    "an escape sequence in a policy": (ROOT, put("attributes.policies.bos", ESCAPE), "control characters"),
    "deep policies": (ROOT, put("attributes.policies.deep", nested(10)), "too deeply"),
    "very deep policies": (ROOT, put("attributes.policies.deep", nested(500)), "too deeply"),
    "an unknown lineage": (ROOT, put("attributes.lineage", [{"kind": "blessed"}]), "shortened"),
    "a site twice": (ROOT, put("attributes.storage.sites.+", "residual"), "different sites"),
    "a site elsewhere": (ROOT, put("attributes.storage.sites.0", "../../etc"), "etc"),
    "another compressor": (ROOT, put("attributes.storage.compressor", "pickle"), "pickle"),
    "a compressor that no array has": (ROOT, put("attributes.storage.compressor", "zstd"), "zarr.json"),
    "another dtype": (ROOT, put("attributes.storage.dtype", "object"), "object"),
    "chunks wider than they are": (ROOT, put("attributes.model.d_model", 17), "zarr.json"),
    "chunks of 167 MB": (ROOT, put("attributes.model.d_model", 2**18), "`block` 160 makes chunks"),
    "another block": (ROOT, put("attributes.plan.block", 161), "`block`"),
    "no UTF-8": (ROOT, text(b"synthetic", b"synth\xfftic"), "not valid JSON"),
    "UTF-16": (ROOT, Bytes(lambda content: content.decode().encode("utf-16")), "not valid JSON"),
    "nothing": (ROOT, b"", "not valid JSON"),
    "an array for a group": (ROOT, put("node_type", "array"), "group"),
    # consolidated metadata: what xarray would believe
    "consolidated shape": (ROOT, consolidated(put("shape.1", 10**15)), "consolidated_metadata"),
    "consolidated codecs": (ROOT, consolidated(codecs(BYTES, BLOSC, CRC)), "consolidated_metadata"),
    "a consolidated array more": (
        ROOT,
        lambda root: root["consolidated_metadata"]["metadata"].update(
            secret=root["consolidated_metadata"]["metadata"]["nll"]
        ),
        "consolidated_metadata",
    ),
    # plan
    "10^18 tokens": ("plan.json", put("n_tokens", 10**18), "n_tokens"),
    "a block of 2^31 rows": ("plan.json", put("block", 2**31), "block"),
    "one sequence of 2^31 rows": ("plan.json", put("length.0", 2**31), "length"),
    "sequences of 10^12 rows": ("plan.json", put("sequence_length", 10**12), "sequence_length"),
    "10,000 blocks": ("plan.json", put("block_rows", [160] * 10_000), "block_rows"),
    "a plan of True": ("plan.json", put("min_length", True), "min_length"),
    "a plan of floats": ("plan.json", put("n_tokens", 240.0), "n_tokens"),
    "floats in a column": ("plan.json", put("document.0", 0.0), "document"),
    "a negative zero": ("plan.json", text(b'"seed":0', b'"seed":-0.0'), "seed"),
    "an unknown key in the plan": ("plan.json", put("x", 1), "unknown key 'x'"),
    "a plan of another schema": ("plan.json", put("schema", 3), "schema"),
    "a plan written with spaces": ("plan.json", text(b'"seed":0', b'"seed": 0'), "digest"),
    "many lists": ("plan.json", lambda plan: [[]] * (2**20 + 1), "lists and objects"),
    "a deep plan": ("plan.json", Bytes(lambda content: b"[" * 100_000), "JSON"),
    "fractions beyond one": ("plan.json", put("fractions", [10**18, 0, 0]), "fractions"),
    # arrays that grow
    "a shape of 10^15 rows": (SITE, put("shape.1", 10**15), "metadata of the array"),
    "other chunks": (
        SITE,
        put("chunk_grid.configuration.chunk_shape", [2, 500, 16]),
        "metadata of the array",
    ),
    "a rectilinear grid": (SITE, put("chunk_grid.name", "rectilinear"), "metadata of the array"),
    "other keys of chunks": (SITE, put("chunk_key_encoding.name", "v2"), "metadata of the array"),
    "another dtype of an array": (SITE, put("data_type", "float64"), "metadata of the array"),
    "another fill value": (SITE, put("fill_value", 0.0), "metadata of the array"),
    "another codec": (SITE, codecs(BYTES, BLOSC, CRC), "metadata of the array"),
    "big-endian": (SITE, put("codecs.0.configuration.endian", "big"), "metadata of the array"),
    "no checksum": (SITE, codecs(BYTES), "metadata of the array"),
    "other dimensions": (
        SITE,
        put("dimension_names", ["layer", "feature", "token"]),
        "metadata of the array",
    ),
    "attributes of an array": (SITE, put("attributes", {"a": 1}), "metadata of the array"),
    "a storage transformer": (SITE, put("storage_transformers", [{"name": "x"}]), "metadata of the array"),
    "an unknown key of an array": (SITE, put("must_understand", True), "metadata of the array"),
    # small arrays
    "10^15 layers of a norm": (NORM, put("shape.0", 10**15), "norm_weight"),
    "another width of a norm": (NORM, put("shape.1", 17), "norm_weight"),
    "a shape whose product overflows": (NORM, put("shape", [2**40, 2**40]), "shape"),
    "a chunk whose product overflows": (
        NORM,
        put("chunk_grid.configuration.chunk_shape", [2**32, 2**32]),
        "chunk_shape",
    ),
    "10^12 positions": (POSITIONS, put("shape.0", 10**12), "shape"),
    "a position embedding of 4 GiB": (
        POSITIONS,
        lambda array: (
            put("chunk_grid.configuration.chunk_shape.0", 2**26)(array) or put("shape.0", 2**26)(array)
        ),
        "chunk_shape",
    ),
    "more positions than are there": (
        POSITIONS,
        lambda array: (
            put("chunk_grid.configuration.chunk_shape.0", 2**16)(array) or put("shape.0", 2**16)(array)
        ),
        "bytes, .* expected",
    ),
    "no dimension": (NORM, put("shape", []), "norm_weight"),
    "a dimension of 0": (NORM, put("shape.0", 0), "shape"),
    "a negative dimension": (NORM, put("shape.0", -1), "shape"),
    "a dimension of True": (NORM, put("shape.0", True), "shape"),
    "float64 norms": (NORM, put("data_type", "float64"), "norm_weight"),
    "object norms": (NORM, put("data_type", "object"), "data_type"),
    "pickled norms": (NORM, codecs({"name": "numcodecs.pickle"}), "codecs"),
    "big-endian norms": (NORM, put("codecs.0.configuration.endian", "big"), "codecs"),
    "a fill value for norms": (NORM, put("fill_value", 1.0), "fill_value"),
    "attributes of norms": (NORM, put("attributes.x", 1), "attributes"),
    "an unknown key of norms": (NORM, put("x", 1), "unknown key 'x'"),
    # block records
    "a chunk of 10^18 bytes": (BLOCK, put(f"chunks.{KEY}.0", 10**18), KEY),
    "a chunk of one byte more": (BLOCK, put(f"chunks.{KEY}.0", 160 * 16 * 4 + 5), "residual"),
    "a chunk of True bytes": (BLOCK, put(f"chunks.{KEY}.0", True), KEY),
    "a chunk less": (BLOCK, drop(f"chunks.{KEY}"), "chunks"),
    "a chunk of another block": (BLOCK, rename_chunk("residual/c/1/2/0"), "chunks"),
    "rows of another block": (BLOCK, put("rows", [160, 10**18]), "another block"),
    "rows of 1e18": (BLOCK, put("rows", [160, 1e18]), "rows"),
    "100,000 statistics": (BLOCK, statistics({"max_abs": [1.0] * 10**5}), "statistics.residual"),
    "negative counts": (BLOCK, statistics({"n_nonfinite": [-1, 0]}), "n_nonfinite"),
    "counts of 40 digits": (BLOCK, statistics({"n_nonfinite": [10**40, 0]}), "64 bits"),
    "a negative size": (BLOCK, statistics({"max_abs": [-1.0, 0.0]}), "max_abs"),
    "statistics of no site": (BLOCK, put("statistics.gradient", {}), "statistics.gradient"),
    "statistics that steer": (BLOCK, put(f"statistics.{ESCAPE}", {}), "no site"),
    "an unknown statistic": (BLOCK, statistics({"median": [1, 1]}), "median"),
    "a record of another schema": (BLOCK, put("schema", 2), "schema"),
    "an unknown key in a record": (BLOCK, put("code", "x"), "unknown key 'code'"),
    # manifest and seal
    "another number of tokens": ("manifest.json", put("n_tokens", 10**18), "n_tokens"),
    "10^9 blocks": ("manifest.json", put("n_blocks", 10**9), "n_blocks"),
    "a plan of 10^18 bytes": ("manifest.json", put("files.plan.json", [10**18, "0" * 64]), "plan.json"),
    "a float of bytes": ("manifest.json", put("files.x", [1.0, "0" * 64]), "files|'x'|x"),
    "a manifest without the plan": (
        "manifest.json",
        lambda found: found["files"].pop("plan.json") and None,
        "plan",
    ),
    "a manifest of another schema": ("manifest.json", put("schema", 9), "schema"),
    "a short seal": ("SEALED", b"00", "seal is damaged"),
    "a seal of a megabyte": ("SEALED", b"0" * 2**20, "seal is damaged"),
    "a seal of other bytes": ("SEALED", b"\xff" * 130, "seal is damaged"),
}
CASES |= {
    f"a chunk called {name[:20]!r} {len(name)}": (
        BLOCK,
        rename_chunk(name),
        "inside the folder|surrogate|chunks of",
    )
    for name in NAMES
}
CASES |= {
    f"a file called {name[:20]!r} {len(name)}": (
        "manifest.json",
        lambda found, name=name: found["files"].update({name: [1, "0" * 64]}),
        "inside the folder",
    )
    for name in NAMES
}


# Those that promise more than there is: their price is measured.
COSTLY = [case for case in CASES if re.search(r"\d|overflows", case) and " called " not in case]


def table(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return sink.getvalue()


def documents(store: Path) -> dict[str, Any]:
    found = pq.read_table(store / "documents.parquet")
    return {name: found[name].combine_chunks() for name in found.column_names}


def one_word(n_rows: int, n_bytes: int) -> pa.Array:
    """Small in the file, large in memory: one word, and a run of indices."""
    words = pa.array(["x" * n_bytes])
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(n_rows, np.int32)), words)


def bad_text(store: Path) -> bytes:
    raw = table(**documents(store) | {"key": pa.array([b"\xff\xfe"] * len(documents(store)["key"]))})
    binary = pq.read_table(io.BytesIO(raw))
    schema = pq.read_table(store / "documents.parquet").schema
    key = pa.StringArray.from_buffers(len(binary), *binary["key"].combine_chunks().buffers()[1:])
    columns = [key if name == "key" else binary[name] for name in schema.names]
    sink = io.BytesIO()
    pq.write_table(pa.table(columns, names=schema.names), sink)
    return sink.getvalue()


TABLES: dict[str, tuple[str, Callable[[Path], bytes], str]] = {
    "no table": ("documents.parquet", lambda store: b"PAR1" + b"\0" * 40 + b"PAR1", "not a readable"),
    "a table cut short": (
        "documents.parquet",
        lambda store: (store / "documents.parquet").read_bytes()[:-9],
        "not a readable",
    ),
    "a row too many": (
        "documents.parquet",
        lambda store: table(**{k: pa.concat_arrays([v, v[:1]]) for k, v in documents(store).items()}),
        "rows, .* expected",
    ),
    "a column more": (
        "documents.parquet",
        lambda store: table(**documents(store), x=documents(store)["key"]),
        "'x'",
    ),
    "another type": (
        "documents.parquet",
        lambda store: table(**documents(store) | {"group": documents(store)["group"].cast("int64")}),
        "columns",
    ),
    "a nested column": (
        "documents.parquet",
        lambda store: table(**documents(store) | {"key": pa.array([["a"]] * len(documents(store)["key"]))}),
        "columns",
    ),
    "empty cells": (
        "documents.parquet",
        lambda store: table(**documents(store) | {"group": pa.nulls(len(documents(store)["key"]), "int32")}),
        "'group' has empty cells",
    ),
    "no UTF-8 in a key": ("documents.parquet", bad_text, "UTF8|UTF-8"),
    "10^8 tokens of vocabulary": (
        "vocabulary.parquet",
        lambda store: table(
            token_id=np.zeros(10**6, np.int32),
            bytes=pa.array([b""] * 10**6),
            text=[""] * 10**6,
            count=np.zeros(10**6, np.int64),
        ),
        "at most 60 are possible",
    ),
    "vocabulary of 60 GB": (
        "vocabulary.parquet",
        lambda store: table(
            token_id=np.arange(60, dtype=np.int32),
            bytes=pa.array([b"x" * 2**20] * 60),
            text=["x" * 2**20] * 60,
            count=np.zeros(60, np.int64),
        ),
        "more text than the file",
    ),
}


COSTLY += [case for case in TABLES if re.search(r"\d", case)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = make_store(tmp_path_factory.mktemp("whole") / "s", **SETTINGS)
    reseal(store)
    read_all(store)  # our own re-sealing is not what is refused
    assert verify(store, level="full").whole
    return store


@pytest.fixture(scope="module")
def saved(whole: Path) -> tuple[dict[str, bytes], dict[str, tuple[int, int]]]:
    return snapshot(whole), listing(whole)


@pytest.fixture
def store(whole: Path, saved: tuple[dict[str, bytes], dict[str, tuple[int, int]]]) -> Iterator[Path]:
    """The same folder for every case (a copy of it would cost more than the case), put right afterwards."""
    yield whole
    restore(whole, *saved)
    saved[1].update(listing(whole))


def hostile(store: Path, case: str) -> tuple[Path, str]:
    """Make this change to the store; the file, and what the error must say."""
    if case in TABLES:
        file, make, message = TABLES[case]
        author(store, file, make(store))
    else:
        file, change, message = CASES[case]
        author(store, file, change)
    return store / file, message


@pytest.mark.parametrize("case", [*CASES, *TABLES])
def test_a_hostile_file_is_refused_by_name_and_costs_nothing(case: str, store: Path) -> None:
    file, message = hostile(store, case)
    before = listing(store)
    found: list[str] = []

    def refused() -> None:
        with pytest.raises((FormatError, DamageError, UsageError), match=f"(?s){message}") as caught:
            read_all(store)
        found.append(str(caught.value))
        verified = verify(store)
        assert not verified.whole
        found.extend(problem.message for problem in verified.problems)

    if case in COSTLY:
        assert peak_bytes(refused) < PEAK_BYTES + 16 * file.stat().st_size
    else:
        refused()
    assert any(name in found[0] for name in (file.name, *ALSO_NAMED.get(case, ())))
    assert max(map(len, found)) < 1200
    assert not any("\x1b" in text for text in found)
    assert listing(store) == before


def test_what_is_promised_is_not_allocated(whole: Path, tmp_path: Path) -> None:
    """All costly cases again, in a process that cannot have more than 384 MiB beyond what imports took."""
    for number, case in enumerate(COSTLY):
        hostile(Path(shutil.copytree(whole, tmp_path / f"{number}")), case)
    script = """
import pathlib, resource, sys
sys.path.insert(0, sys.argv[1])
from helpers_hostile import read_all
from nearline.store import NearlineError
from nearline.store.verify import verify
read_all(pathlib.Path(sys.argv[2]))
if sys.platform == "linux":
    size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 384 * 2**20,) * 2)
for folder in sorted(pathlib.Path(sys.argv[3]).iterdir()):
    try:
        read_all(folder)
        print("read", folder.name)
    except NearlineError as error:
        if isinstance(error.__context__, MemoryError):
            print("memory", folder.name)
    if verify(folder).whole:
        print("whole", folder.name)
print("done")
"""
    arguments = [sys.executable, "-c", script, str(Path(__file__).parent), str(whole), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.stdout == "done\n", (done.stdout, done.stderr, dict(enumerate(COSTLY)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" " * (SMALL_JSON_BYTES + 1), "at most 16777216 are read"),
        (b"[" + b"[]," * 2**20 + b"1]", "lists and objects"),
        (b"[" * 25 + b"]" * 25, "too deeply"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "\xed\xa0\x80"}', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"a": 1e999}', "beyond a float"),
        (b'{"a": 9223372036854775808}', "64 bits"),
        (b"{" + b"".join(b'"%d":0,' % key for key in range(10**5)) + b'"99999":1}', "'99999' stands twice"),
    ],
)
def test_json_that_is_too_much_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=f"here.*{message}"):
        parse_json(content, "here")


def test_json_that_is_just_allowed_is_read() -> None:
    assert parse_json(b"[" * 24 + b"]" * 24, "here")
    assert parse_json(b'[-9223372036854775807, "\\ud83d\\ude42", -0]', "here") == [1 - 2**63, "🙂", 0]


# Chunk objects


def zstd_frame(content: bytes, *, stated: int | None) -> bytes:
    """A zstd frame of raw blocks that states this content size, or none: RFC 8878 by hand."""
    head = b"\x28\xb5\x2f\xfd" + (b"\x00\x58" if stated is None else b"\xe0" + stated.to_bytes(8, "little"))
    pieces = [content[start : start + 2**16] for start in range(0, len(content), 2**16)]
    blocks = [
        ((len(piece) << 3) | (at == len(pieces) - 1)).to_bytes(3, "little") + piece
        for at, piece in enumerate(pieces)
    ]
    return head + b"".join(blocks)


def bomb(n_bytes: int) -> bytes:
    """A frame that grows to so many zeros: runs of 128 KiB in four bytes each."""
    n_runs = n_bytes // 2**17
    runs = [((2**17 << 3) | 2 | (at == n_runs - 1)).to_bytes(3, "little") + b"\0" for at in range(n_runs)]
    return b"\x28\xb5\x2f\xfd\xe0" + n_bytes.to_bytes(8, "little") + b"".join(runs)


@pytest.mark.parametrize(
    ("packed", "found"),
    [
        (zstd_frame(b"x" * 4096, stated=4096), 4096),
        (zstd_frame(b"x" * 4095, stated=4096), -1),
        (zstd_frame(b"x" * 8192, stated=4096), -1),
        (zstd_frame(b"x" * 4096, stated=None), -1),
        (zstd_frame(b"x" * 4096, stated=2**62), 2**62),
        (zstd_frame(b"x" * 4096, stated=4096) * 2, -1),
        (bomb(2**30), 2**30),
        (b"", -1),
        (b"\x28\xb5\x2f\xfd", -1),
        (b"\x50\x2a\x4d\x18" + b"\0" * 20, -1),
        (b"\xff" * 40, -1),
    ],
)
def test_a_packed_chunk_takes_the_memory_of_its_array_and_no_more(packed: bytes, found: int) -> None:
    out = np.zeros(4096, np.uint8)
    sizes: list[int] = []
    assert peak_bytes(lambda: sizes.append(decompress(np.frombuffer(packed, np.uint8), out))) < 2**20
    assert sizes == [found]
    assert (bytes(out) == b"x" * 4096) == (found == 4096)


def chunk_object(store: Path, body: bytes) -> None:
    """Put a chunk object in place, with checksum, digest and size made right."""
    content = body + int(google_crc32c.value(body)).to_bytes(4, "little")
    (store / CHUNK).write_bytes(content)
    record = [len(content), blake3(content).hexdigest(), content[-4:].hex()]
    author(store, BLOCK, put(f"chunks.{KEY}", record))


def test_a_chunk_that_grows_when_unpacked_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", **SETTINGS, compressor="zstd")
    for body in (bomb(2**27), zstd_frame(b"x" * 100, stated=None), b"\xff" * 100):
        chunk_object(store, body)

        def refused() -> None:
            with pytest.raises(DamageError, match=r"`residual` layer 5, tokens 160-239.*unpacks to"):
                Reader.open(store).rows("residual", 5, 1, 2)
            assert not verify(store, level="full").whole

        assert peak_bytes(refused) < PEAK_BYTES


def test_a_huge_chunk_file_is_refused_by_its_size(tmp_path: Path) -> None:
    for compressor in (None, "zstd"):
        store = make_store(tmp_path / f"{compressor}", **SETTINGS, compressor=compressor)
        with (store / CHUNK).open("r+b") as file:
            file.truncate(2**40)  # a hole: it takes no disk
        author(store, BLOCK, put(f"chunks.{KEY}.0", 2**40))
        with pytest.raises(DamageError, match=KEY):
            Reader.open(store).rows("residual", 5, 1, 2)
        assert not verify(store).whole


# Things that are no plain files


@pytest.mark.parametrize("name", [CHUNK, "plan.json", "SEALED", "manifest.json", BLOCK, "documents.parquet"])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_does_not_hold_the_reader(name: str, store: Path) -> None:
    content = (store / name).read_bytes()
    for make in (os.mkfifo, Path.mkdir):
        (store / name).unlink()
        make(store / name)
        with pytest.raises(DamageError, match=Path(name).name):
            read_all(store)
        assert not verify(store, level="full").whole
        (store / name).rmdir() if (store / name).is_dir() else (store / name).unlink()
        (store / name).write_bytes(content)


def test_links_are_followed_when_read_and_a_link_to_nothing_is_a_missing_file(
    store: Path, tmp_path: Path
) -> None:
    """The Hub's cache is links to files elsewhere; what they lead to must be what was sealed."""
    content = (store / CHUNK).read_bytes()
    for name in (CHUNK, "plan.json", "activations.zarr/zarr.json"):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        target = tmp_path / "elsewhere" / Path(name).name
        shutil.move(store / name, target)
        (store / name).symlink_to(target)
    read_all(store)
    (tmp_path / "elsewhere" / Path(CHUNK).name).write_bytes(content[:-8] + b"\0" * 8)
    with pytest.raises(DamageError, match=KEY):
        read_all(store)
    (tmp_path / "elsewhere" / Path(CHUNK).name).unlink()
    with pytest.raises(MissingChunk, match=KEY):
        read_all(store)
    assert not verify(store).whole
    for name in ("plan.json", "activations.zarr/zarr.json"):
        (store / name).unlink()


# Names and text


@pytest.mark.parametrize("name", NAMES)
def test_names_that_leave_a_folder_or_that_a_system_would_change_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="inside the folder"):
        check_key(name, "here")


@pytest.mark.parametrize(
    "name",
    ["plan.json", "a/b/c.json", "tokens/need/layer=05/python docs.parquet", "surrogates@x.zarr/ü", "console"],
)
def test_ordinary_names_are_allowed(name: str) -> None:
    assert check_key(name, "here") == name


def test_printed_text_cannot_steer_a_terminal() -> None:
    assert printable("gpt2 ü 東京 🙂\u200d") == "gpt2 ü 東京 🙂\u200d"
    assert printable(f"a{ESCAPE}") == "a\\u001b]0;owned\\u0007\\u001b[2J"
    assert printable("\x9b2J\u202e\r\n\ud800") == "\\u009b2J\\u202e\\u000d\\u000a\\ud800"


# No code in data


def test_no_module_unpickles_or_evaluates_what_it_reads() -> None:
    """`pickle` and its kin, `eval` and `exec`, YAML and loaders that unpickle occur nowhere."""
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
    # Calls between this process and the workers of a Dask cluster, which unpickle whatever they are sent
    # anyway; these modules read no file.
    to_workers = {"compute_cluster.py", "compute_place.py", "compute_worker.py"}
    calls = {"eval", "exec", "compile", "__import__", "read_pickle", "unsafe_load"}
    root = Path(str(nearline.__file__)).parent
    files = [
        path
        for part in ("store", "analyze", "collect", "reports", "workflows")
        for path in (root / part).rglob("*.py")
    ]
    assert len(files) > 80
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            known = {"pickle"} if path.name in to_workers else set()
            assert not set(_imported(node)) & modules - known, f"{path}: {ast.unparse(node)[:80]}"
            if known and isinstance(node, ast.Attribute):
                assert node.attr not in ("load", "open", "read_bytes"), f"{path}: {ast.unparse(node)}"
            if not isinstance(node, ast.Call):
                continue
            bare = node.func.id if isinstance(node.func, ast.Name) else None
            whole = ast.unparse(node.func)
            assert bare not in calls, f"{path}:{node.lineno}: {whole}"
            assert whole not in ("torch.load", "os.system", "pd.read_pickle"), (
                f"{path}:{node.lineno}: {whole}"
            )
            for word in node.keywords:
                steered = word.arg in ("allow_pickle", "shell", "trust_remote_code")
                assert not (steered and ast.unparse(word.value) == "True"), (
                    f"{path}:{node.lineno}: {word.arg}"
                )


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return (
        [(node.module or "").partition(".")[0]] if isinstance(node, ast.ImportFrom) and not node.level else []
    )

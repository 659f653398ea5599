"""Fuzzing every reader of a small file: whatever the bytes, a value or one of our errors comes back.

Three ways of being wrong: any JSON at all; a good file with keys and values dropped, doubled or replaced at
any depth; a good file with its bytes changed. Never another exception, never a hang, never more memory than
a file of that size is worth: each example is held to 3 GiB beyond what the process has.
"""

import contextlib
import copy
import json
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers_hostile import read_all, reseal
from helpers_store import make_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nearline.store import NearlineError, Plan, Reader, Study, parse_attributes
from nearline.store.folder import check_group, load_record, parse_group, parse_plan, parse_whole, specs_of
from nearline.store.manifest import parse_manifest, read_seal
from nearline.store.metadata import parse_array
from nearline.store.names import printable
from nearline.store.parsing import MAX_JSON_BYTES, parse_json
from nearline.store.places import LocalPlace
from nearline.store.records import parse_record
from nearline.store.tables import DOCUMENTS, VOCABULARY, parse_table
from nearline.store.verify import verify

EXTRA_BYTES = 3 * 2**30  # threads reserve 2 GiB that they never touch
HANG_S = 120  # no example takes a second; a machine that is this slow has stopped
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
QUICK = settings(max_examples=20, suppress_health_check=SLOW)
LONG = settings(max_examples=1000, suppress_health_check=SLOW)

HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 160, 2**31, 2**31 - 1, 2**63 - 1, 2**63, 10**18, -(10**18), 10**40,
    0.0, -0.0, 0.5, 1e18, 1e308, 5e-324, "", "residual", "float32", "zstd", "../../x", "/etc/passwd", "NUL",
    "a\x1b[2J", "\ud800", "\u202e", "0" * 64, "x" * 5000, [], {}, [[]], [0], [2**62] * 4, ["a"] * 300,
    {"a": 1}, {"schema": 1}, {"name": "bytes"}, [1, "0" * 64], [1, "0" * 64, "0" * 8],
]  # fmt: skip
JUNK = st.recursive(
    st.sampled_from(HOSTILE) | st.text(max_size=8) | st.integers() | st.floats(allow_nan=True),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)


@contextlib.contextmanager
def only_our_errors() -> Generator[None]:
    """Lets an error of ours pass that a person can read. An alarm ends what hangs; what a hostile size would
    take is not there to be taken: a MemoryError, which does not pass."""

    def hung(*_: Any) -> None:
        raise AssertionError(f"no answer after {HANG_S} s")

    caught: NearlineError | None = None
    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANG_S)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + EXTRA_BYTES, hard))
    try:
        yield
    except NearlineError as error:
        caught = error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if caught is not None:
        assert len(str(caught)) < 1500, str(caught)[:200]
        assert printable(str(caught)) == str(caught)
        assert not isinstance(caught.__context__, MemoryError), str(caught)


# Ways of being wrong


def spots(data: Any) -> list[tuple[Any, Any]]:
    """All places in a JSON value: container and key."""
    found: list[tuple[Any, Any]] = []
    stack = [data]
    while stack:
        here = stack.pop()
        inner = list(here.items()) if isinstance(here, dict) else list(enumerate(here[:6]))
        found += [(here, key) for key, _ in inner]
        stack += [value for _, value in inner if isinstance(value, (dict, list)) and value]
    return found


def mutate_json(draw: Callable[[Any], Any], content: bytes) -> bytes:
    """Drop, replace, double or add at one to three places."""
    data = json.loads(content)
    twice: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        places = spots(data)
        if not places:
            break
        here, key = places[draw(st.integers(0, len(places) - 1))]
        action = draw(st.sampled_from(["drop", "replace", "replace", "double", "add", "swap"]))
        value = copy.deepcopy(draw(st.sampled_from(HOSTILE) | JUNK))  # it may be changed in the next round
        if action == "drop":
            del here[key]
        elif action == "replace":
            here[key] = value
        elif action == "swap":
            other, other_key = places[draw(st.integers(0, len(places) - 1))]
            with contextlib.suppress(LookupError, TypeError):
                here[key] = json.loads(json.dumps(other[other_key]))
        elif isinstance(here, list):
            here.insert(0, here[key] if action == "double" else value)
        elif action == "double":
            twice.append((key, value))
        else:
            here[draw(st.text(max_size=6))] = value
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    for key, value in twice:
        text = text.replace(
            f"{json.dumps(key)}:", f"{json.dumps(key)}:{json.dumps(value)},{json.dumps(key)}:", 1
        )
    return text.encode()


def mutate_bytes(draw: Callable[[Any], Any], content: bytes) -> bytes:
    """Flip, overwrite, cut, double or insert at one to four places."""
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        action = draw(st.sampled_from(["flip", "set", "cut", "insert", "double", "remove"]))
        if action == "flip" and found:
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif action == "set":
            piece = draw(st.binary(max_size=8))
            found[at : at + len(piece)] = piece
        elif action == "cut":
            del found[at:]
        elif action == "insert":
            found[at:at] = draw(
                st.sampled_from([b"9" * 400, b"[" * 2000, b"\x00", b"\xed\xa0\x80", b'"', b"1e999"])
            )
        elif action == "double":
            found[at:at] = found[at : at + draw(st.integers(1, 64))]
        else:
            del found[at : at + draw(st.integers(1, 64))]
    return bytes(found)


def wrong(draw: Callable[[Any], Any], content: bytes, *, is_json: bool) -> bytes:
    ways = ["bytes", "json", "junk"] if is_json else ["bytes"]
    way = draw(st.sampled_from(ways))
    if way == "bytes":
        return mutate_bytes(draw, content)
    if way == "json":
        return mutate_json(draw, content)
    return json.dumps(draw(JUNK)).encode()


# Readers


class Ground:
    """A good store and a good study, and for each of their small files the ways in which it is read."""

    def __init__(self, folder: Path) -> None:
        self.store = make_store(folder / "s", n_tokens=240, block=160, layers=[2, 5], d=8)
        reseal(self.store)
        self.reader = Reader.open(self.store)
        self.study = Study.create(folder / "study")
        arrays = {"layer": np.arange(2, dtype=np.int32), "weight": np.zeros((2, 3, 3), np.float32)}
        written = [self.study.write_surrogates(arrays, {"fit_on": "s"})]
        table = pa.table({"a": [1, 2], "b": ["x", None], "c": [0.5, 1.5]})
        written.append(self.study.write_table("t", table))
        self.study.write_settings({"s": self.study.path / "s"}, {"alpha": "cv", "grid": [0.1, 1.0]})
        self.study.record_step(
            "fit", inputs={"s": "0" * 64}, settings={"k": 5}, outputs=written, facts={"n": 2}
        )

    def read(self, name: str, content: bytes) -> None:
        """Hand these bytes to every reader of the file."""
        READERS[name](self, content)

    def in_store(self, name: str) -> bytes:
        return (self.store / name).read_bytes()


def _plan(ground: Ground, content: bytes) -> None:
    plan = Plan.parse(parse_json(content, "here", MAX_JSON_BYTES), "here")
    assert Plan.parse(json.loads(plan.to_json_bytes())) == plan
    parse_plan(content, ground.reader.attributes, "here")


def _group(ground: Ground, content: bytes) -> None:
    attributes = parse_group(content, "here")
    assert parse_attributes(json.loads(json.dumps(attributes.to_dict()))) == attributes
    specs_of(attributes, ground.reader.plan)
    check_group(content, attributes, ground.reader.plan, "here")


def _array(ground: Ground, content: bytes) -> None:
    spec = parse_array(parse_json(content, "here"), "x", "here")
    assert spec.chunk_bytes < 2**27
    for name in ("norm_weight", "position_embedding"):
        with only_our_errors():
            parse_whole(content, name, ground.reader.attributes, "here")


def _record(ground: Ground, content: bytes) -> None:
    specs = specs_of(ground.reader.attributes, ground.reader.plan)
    record = parse_record(parse_json(content, "here"), "here")
    assert parse_record(json.loads(record.to_bytes()), "here") == record
    load_record(content, ground.reader.plan, specs, 1, "here")


def _manifest(ground: Ground, content: bytes) -> None:
    manifest = parse_manifest(parse_json(content, "here"), "here")
    assert parse_manifest(json.loads(manifest.to_bytes()), "here") == manifest


def _seal(ground: Ground, content: bytes) -> None:
    (folder := ground.store.parent / "seal").mkdir(exist_ok=True)
    (folder / "SEALED").write_bytes(content)
    assert len(read_seal(LocalPlace(folder)) or "") == 64


def _documents(ground: Ground, content: bytes) -> None:
    n_rows = ground.reader.attributes.corpus.n_documents
    assert parse_table(content, DOCUMENTS, "here", n_rows=n_rows).num_rows == n_rows


def _vocabulary(ground: Ground, content: bytes) -> None:
    parse_table(content, VOCABULARY, "here", most_rows=60).to_pylist()


def _in_study(name: str, read: Callable[[Study], Any]) -> Callable[[Ground, bytes], None]:
    def check(ground: Ground, content: bytes) -> None:
        path = ground.study.path / name
        good = path.read_bytes()
        path.write_bytes(content)
        try:
            read(Study(ground.study.path))
        finally:
            path.write_bytes(good)

    return check


READERS: dict[str, Callable[[Ground, bytes], None]] = {
    "plan.json": _plan,
    "activations.zarr/zarr.json": _group,
    "activations.zarr/residual/zarr.json": _array,
    "activations.zarr/position_embedding/zarr.json": _array,
    "blocks/000001.json": _record,
    "manifest.json": _manifest,
    "SEALED": _seal,
    "documents.parquet": _documents,
    "vocabulary.parquet": _vocabulary,
    "study.toml": _in_study("study.toml", lambda study: (study.settings(), study.stores())),
    "provenance.json": _in_study(
        "provenance.json", lambda study: study.step_is_current("fit", {"s": "0" * 64}, {"k": 5})
    ),
    "surrogates.zarr/zarr.json": _in_study(
        "surrogates.zarr/zarr.json", lambda study: study.surrogates().load()
    ),
    "tables/t.parquet": _in_study("tables/t.parquet", lambda study: study.table("t").to_pylist()),
}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("fuzz"))


def good(ground: Ground, name: str) -> bytes:
    inside = ground.store / name
    return (inside if inside.exists() else ground.study.path / name).read_bytes()


@pytest.mark.parametrize("name", READERS)
def test_the_good_file_is_read(name: str, ground: Ground) -> None:
    ground.read(name, good(ground, name))


def fuzz_file(name: str, ground: Ground, data: st.DataObject) -> None:
    content = wrong(data.draw, good(ground, name), is_json=name.endswith(".json"))
    with only_our_errors():
        ground.read(name, content)


@pytest.mark.parametrize("name", READERS)
@QUICK
@given(data=st.data())
def test_any_bytes_give_a_value_or_an_error_of_ours(name: str, ground: Ground, data: st.DataObject) -> None:
    fuzz_file(name, ground, data)


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
@LONG
@given(data=st.data())
def test_any_bytes_give_a_value_or_an_error_of_ours_long(
    name: str, ground: Ground, data: st.DataObject
) -> None:
    fuzz_file(name, ground, data)


# A whole store, sealed again over the change


IN_STORE = [name for name in READERS if not name.startswith(("study", "provenance", "surrogates", "tables"))]


def fuzz_store(ground: Ground, data: st.DataObject) -> None:
    """The change in place, every digest above it right again: reader and `verify` say what is so."""
    name = data.draw(st.sampled_from(IN_STORE))
    content = wrong(data.draw, ground.in_store(name), is_json=name.endswith(".json"))
    trial = ground.store.parent / "trial"
    shutil.copytree(ground.store, trial)
    try:
        (trial / name).write_bytes(content)
        if name not in ("SEALED", "manifest.json") and data.draw(st.booleans()):
            reseal(trial)
        with only_our_errors():
            verified = verify(trial, level=data.draw(st.sampled_from(["quick", "full"])))
            assert all(printable(problem.message) == problem.message for problem in verified.problems)
        with only_our_errors():
            read_all(trial)
    finally:
        shutil.rmtree(trial)


@settings(QUICK, max_examples=15)
@given(data=st.data())
def test_a_store_with_any_change_is_read_or_refused(ground: Ground, data: st.DataObject) -> None:
    fuzz_store(ground, data)


@pytest.mark.long
@settings(LONG, max_examples=300)
@given(data=st.data())
def test_a_store_with_any_change_is_read_or_refused_long(ground: Ground, data: st.DataObject) -> None:
    fuzz_store(ground, data)

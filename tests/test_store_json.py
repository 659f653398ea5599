"""Untrusted JSON: hostile plans, attributes, block records and manifests are refused, and say why."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers_store import synthetic
from nearline.store import FormatError, Plan, parse_attributes
from nearline.store.manifest import parse_manifest
from nearline.store.parsing import parse_json
from nearline.store.records import parse_record

DATA = synthetic(n_tokens=500, block=160)
PLAN = json.loads(DATA.plan.to_json_bytes())
ATTRIBUTES = json.loads(json.dumps(DATA.attributes.to_dict()))
RECORD = {
    "schema": 1,
    "block": 0,
    "rows": [0, 160],
    "plan": "0" * 64,
    "chunks": {"nll/c/0": [644, "1" * 64, "2" * 8]},
    "statistics": {"residual": {"max_abs": [1.0, None], "n_nonfinite": [0, 0]}},
}
MANIFEST = {
    "schema": 1,
    "plan": "0" * 64,
    "n_tokens": 5,
    "n_blocks": 1,
    "n_objects": 3,
    "chunk_bytes": 100,
    "files": {"blocks/000000.json": [3, "1" * 64]},
}
PARSERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plan": (Plan.parse, PLAN),
    "attributes": (parse_attributes, ATTRIBUTES),
    "record": (parse_record, RECORD),
    "manifest": (parse_manifest, MANIFEST),
}


def put(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value changed; `path` is keys and indices joined by dots."""
    changed = copy.deepcopy(data)
    *parents, last = [int(part) if part.lstrip("-").isdigit() else part for part in path.split(".")]
    spot: Any = changed
    for part in parents:
        spot = spot[part]
    spot[last] = value
    return changed


@pytest.mark.parametrize("kind", PARSERS)
def test_good_json_is_accepted(kind: str) -> None:
    parse, data = PARSERS[kind]
    assert parse(copy.deepcopy(data), "here")


def test_plan_and_attributes_survive_the_round_trip() -> None:
    assert Plan.parse(PLAN).to_json_bytes() == DATA.plan.to_json_bytes()
    assert Plan.parse(PLAN) == DATA.plan
    assert Plan.parse(PLAN).digest == DATA.plan.digest
    assert parse_attributes(ATTRIBUTES) == DATA.attributes


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize("bad", [None, 3, "text", [], [1], {}, {"schema": 1}])
def test_other_kinds_of_json_are_refused(kind: str, bad: object) -> None:
    with pytest.raises(FormatError, match="here"):
        PARSERS[kind][0](bad, "here")


@pytest.mark.parametrize("kind", PARSERS)
def test_every_key_is_needed_and_no_other_is_allowed(kind: str) -> None:
    parse, data = PARSERS[kind]
    for key in data:
        with pytest.raises(FormatError, match=key):
            parse({name: value for name, value in data.items() if name != key}, "here")
    with pytest.raises(FormatError, match="surprise"):
        parse({**data, "surprise": 1}, "here")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("n_tokens", -1, "n_tokens"),
        ("n_tokens", 10**30, "n_tokens"),
        ("n_tokens", True, "n_tokens"),
        ("n_tokens", 499, "n_tokens"),
        ("block", 0, "block"),
        ("block", 159, "159"),
        ("seed", 1.5, "seed"),
        ("schema", 2, "schema"),
        ("bos_id", None, "bos_id"),
        ("bos_id", -3, "bos_id"),
        ("pattern", [], "pattern"),
        ("pattern", ["fit", "train"], "pattern"),
        ("fractions", [0.5, 0.5, 0.5], "fractions"),
        ("fractions", [2, -1, 0], "fractions"),
        ("document.0", -1, "document"),
        ("document.0", 2**31, "document"),
        ("document", [1, 2], "document"),
        ("start.0", "0", "start"),
        ("length.0", 0, "row"),
        ("length.0", 10_000, "10000"),
        ("bos.0", 7, "bos"),
        ("sequence_block.0", 1, "sequence_block"),
        ("sequence_batch.0", 5, "sequence_batch"),
        ("sequence_batch", [0] * DATA.plan.n_sequences, "batch"),
        ("block_split.0", 3, "block_split"),
        ("block_split", [0], "block_split"),
        ("block_rows.0", 100, "block"),
        ("block_rows", [], "block"),
    ],
)
def test_a_plan_that_breaks_its_promises_is_refused(path: str, value: object, message: str) -> None:
    with pytest.raises(FormatError, match=f"here.*{message}"):
        Plan.parse(put(PLAN, path, value), "here")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("nearline.schema", 99, "schema 99"),
        ("model.d_model", "576", "d_model"),
        ("model.d_model", 0, "d_model"),
        ("model.parallel", 1, "parallel"),
        ("model.name", None, "name"),
        ("model.extra", 1, "extra"),
        ("storage.dtype", "float8", "float8"),
        ("storage.sites.0", "../../etc", "etc"),
        ("storage.layers", [1, 0], "layers"),
        ("storage.layers", [0, 99], "layers"),
        ("storage.layers", [], "layers"),
        ("storage.compressor", "gzip", "gzip"),
        ("norm.kinds", ["layernorm"], "kinds"),
        ("norm.kinds.0", "batchnorm", "batchnorm"),
        ("norm.epsilons.0", "small", "epsilons"),
        ("plan.bos", "maybe", "maybe"),
        ("tokenizer.ids.0", 1.0, "ids"),
        ("proof.norm_error", "tiny", "norm_error"),
        ("versions.numpy", 2, "numpy"),
        ("compute", [], "compute"),
    ],
)
def test_attributes_that_are_wrong_are_refused(path: str, value: object, message: str) -> None:
    with pytest.raises(FormatError, match=f"here.*{message}"):
        parse_attributes(put(ATTRIBUTES, path, value), "here")


@pytest.mark.parametrize(
    ("kind", "key"),
    [("record", "chunks"), ("manifest", "files")],
)
@pytest.mark.parametrize(
    "name", ["../up", "/etc/passwd", "a//b", "a/../b", "a\\b", "c:/x", "a/.", "", "a\nb", "x" * 600]
)
def test_names_that_leave_the_folder_are_refused(kind: str, key: str, name: str) -> None:
    parse, data = PARSERS[kind]
    value = next(iter(data[key].values()))
    with pytest.raises(FormatError, match="inside the folder"):
        parse({**data, key: {name: value}}, "here")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rows", [160, 0]),
        ("rows", [0]),
        ("plan", "xyz"),
        ("plan", "A" * 64),
        ("chunks.nll/c/0", [644, "1" * 64]),
        ("chunks.nll/c/0", [-1, "1" * 64, "2" * 8]),
        ("chunks.nll/c/0", [644, 5, "2" * 8]),
        ("statistics.residual", {"median": [1]}),
        ("statistics.residual.max_abs", ["big"]),
    ],
)
def test_block_records_that_are_wrong_are_refused(path: str, value: object) -> None:
    with pytest.raises(FormatError, match="here"):
        parse_record(put(RECORD, path, value), "here")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1, "a": 2}',
        b"\xff\xfe",
        b"[" * 200_000,
        b"1" * 10_000,
    ],
)
def test_bytes_that_are_no_strict_json_are_refused(content: bytes) -> None:
    with pytest.raises(FormatError, match="here"):
        parse_json(content, "here")

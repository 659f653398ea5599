"""Nothing is written past the durable path: a search through the code, and its own proof."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from helpers_store import synthetic
from nearline.store import points

SETTINGS: dict[str, Any] = {"n_tokens": 30, "block": 10, "n_layers": 1, "d": 4, "sequence_length": 10}
DATA = synthetic(**SETTINGS)
PACKAGE = Path(points.__file__).parents[1]
PARTS = ("store", "collect", "analyze", "reports", "workflows")


def test_every_named_point_is_reached_and_every_point_reached_is_named() -> None:
    reached = {
        call.args[0].value
        for _, call in calls_of("store")
        if isinstance(call.func, ast.Attribute)
        and (ast.unparse(call.func.value), call.func.attr) == ("points", "reached")
        and isinstance(call.args[0], ast.Constant)
    }
    assert reached == set(points.POINTS)
    assert len(points.POINTS) == len(set(points.POINTS))


TRAINING = "makes the models that the package bundles; no run of a user's comes here"
ALLOWED: dict[tuple[str, str], str] = {
    ("store/disk.py", "os.open"): "descriptors for locks and syncs",
    ("store/disk.py", "os.write"): "this is the durable path",
    ("store/durable.py", "os.open"): "this is the durable path",
    ("store/durable.py", "os.link"): "this is the durable path",
    ("store/durable.py", "replace"): "this is the durable path",
    ("store/in_place.py", "replace"): "this is the durable path",
    ("store/durable.py", "touch"): "a probe that is removed at once",
    ("collect/ranks.py", "os.open"): "the lock of a rank: what it holds is for a person to read",
    ("collect/ranks.py", "os.write"): "the same",
    ("collect/ranks.py", "os.ftruncate"): "the same",
    ("analyze/compute_cluster.py", "tempfile.TemporaryDirectory"): "scratch of worker processes",
    ("analyze/gate_rows.py", "tempfile.TemporaryFile"): "rows that do not fit memory, for one run, unnamed",
    ("analyze/gate_rows.py", "os.pwrite"): "the same",
    ("collect/train_bundled.py", "save_file"): TRAINING,
    ("collect/train_bundled.py", "save_pretrained"): TRAINING,
    ("collect/train_bundled.py", "write_text"): TRAINING,
    ("collect/train_bundled.py", "replace"): TRAINING,
    (
        "collect/measured_pieces.py",
        "np.memmap",
    ): "losses of rows, synced before their sums",
    ("collect/tuned_export.py", "save_pretrained"): "a folder of transformers, put in place when it is whole",
    ("collect/stopping.py", "os.write"): "a word on the terminal, from a signal's handler",
    ("workflows/cli.py", "os.open"): "the null device, when a reader of our output went away",
}


def test_nothing_is_written_past_the_durable_path() -> None:
    found: dict[tuple[str, str], str] = {}
    for path, call in (item for part in PARTS for item in calls_of(part)):
        if (kind := writing(call)) is not None:
            name = path.relative_to(PACKAGE).as_posix()
            found.setdefault((name, kind), f"{name}:{call.lineno}: {kind}")
    unknown = [spot for key, spot in found.items() if key not in ALLOWED]
    assert not unknown, f"write with store/durable.py, or give a reason here: {unknown}"
    assert not set(ALLOWED) - set(found), "these exceptions are not needed any more"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("open(path, 'w')", "open"),
        ("open(path, mode='ab')", "open"),
        ("path.open('xb')", "open"),
        ("path.open(mode)", "open"),
        ("path.write_text(text)", "write_text"),
        ("path.write_bytes(content)", "write_bytes"),
        ("os.open(path, os.O_WRONLY | os.O_CREAT)", "os.open"),
        ("os.replace(a, b)", "os.replace"),
        ("a.replace(b)", "replace"),
        ("a.rename(b)", "rename"),
        ("shutil.copyfile(a, b)", "shutil.copyfile"),
        ("np.save(path, values)", "np.save"),
        ("values.tofile(path)", "tofile"),
        ("pq.write_table(table, path)", "write_table"),
        ("frame.write_parquet(path)", "write_parquet"),
        ("data.to_zarr(path)", "to_zarr"),
        ("tempfile.mkdtemp()", "tempfile.mkdtemp"),
        ("open(path)", None),
        ("open(path, 'rb')", None),
        ("path.open('rb', buffering=0)", None),
        ("text.replace('a', 'b')", None),
        ("dataclasses.replace(plan, n=1)", None),
        ("os.open(path, os.O_RDONLY)", None),
        ("os.open(path, os.O_RDONLY | os.O_CREAT)", "os.open"),
        ("os.open(path, flags)", "os.open"),
        ("os.write(descriptor, content)", "os.write"),
        ("save_file(tensors, path)", "save_file"),
        ("store.open(path)", None),
        ("pq.write_table(table, sink)", None),
    ],
)
def test_the_search_knows_a_write_when_it_sees_one(code: str, kind: str | None) -> None:
    call = ast.parse(code).body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert writing(call.value) == kind


def calls_of(part: str) -> list[tuple[Path, ast.Call]]:
    found = []
    for path in sorted((PACKAGE / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                found.append((path, node))
    return found


WRITES = {
    "write_text",
    "write_bytes",
    "rename",
    "touch",
    "hardlink_to",
    "symlink_to",
    "tofile",
    "write_parquet",
    "write_csv",
    "write_ipc",
    "write_json",
    "to_zarr",
    "to_netcdf",
    "to_parquet",
    "save_file",
    "save_pretrained",
}
FLAGS = re.compile("O_(WRONLY|RDWR|CREAT|TRUNC|APPEND)")
MODULE_WRITES = {
    "os": {
        "write",
        "pwrite",
        "ftruncate",
        "replace",
        "rename",
        "renames",
        "link",
        "symlink",
        "truncate",
        "mkfifo",
    },
    "shutil": {"copy", "copy2", "copyfile", "copytree", "move"},
    "np": {"save", "savez", "savez_compressed", "savetxt", "memmap"},
    "torch": {"save"},
    "tempfile": {"mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile"},
    "zarr": {"open", "create_array", "create_group", "save"},
}


def writing(call: ast.Call) -> str | None:
    """How a call would write to a disk, past the durable path; None where it would not."""
    if isinstance(call.func, ast.Name):
        if call.func.id == "open":
            return "open" if _writes(call, 1) else None
        return call.func.id if call.func.id in WRITES else None
    if not isinstance(call.func, ast.Attribute):
        return None
    owner, name = ast.unparse(call.func.value), call.func.attr
    if name in MODULE_WRITES.get(owner, ()):
        return f"{owner}.{name}"
    if owner == "os" and name == "open":
        flags = ast.unparse(call.args[1])
        return None if "os.O_RDONLY" in flags and not FLAGS.search(flags) else "os.open"
    if name == "open" and owner not in ("os", "store", "Reader", "zarr", "Study", "webbrowser"):
        return "open" if _writes(call, 0) else None
    if name == "replace":
        return "replace" if len(call.args) == 1 and not call.keywords and owner != "dataclasses" else None
    if name == "write_table":
        return None if len(call.args) < 2 or ast.unparse(call.args[1]) == "sink" or owner != "pq" else name
    return name if name in WRITES else None


def _writes(call: ast.Call, place: int) -> bool:
    """Whether the mode of an `open` is for writing, or is not known."""
    modes = [word.value for word in call.keywords if word.arg == "mode"] or call.args[place : place + 1]
    if not modes:
        return False
    mode = modes[0]
    if isinstance(mode, ast.Constant) and isinstance(mode.value, str):
        return bool(set(mode.value) & set("wax+"))
    return isinstance(mode, ast.Name) and mode.id == "mode"

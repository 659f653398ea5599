"""The benchmarks of the store run, tiny, so that they do not rot; no speed is claimed here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import bench_batches
import bench_store


def test_commit_rows_have_values() -> None:
    rows = bench_store.commit_rows(n_layers=2, d=8, block=64, n_blocks=2)
    assert {row["unit"] for row in rows} == {"MiB/s", "x", "s/GiB"}
    assert all(row["value"] > 0 for row in rows if row["unit"] != "s/GiB")
    assert all(set(row) == {"name", "value", "unit", "reach", "note"} for row in rows)


def test_layer_read_rows_cover_every_dtype() -> None:
    rows = bench_store.layer_read_rows(n_layers=2, d=8, block=64, n_blocks=2, repeats=1)
    assert [row["reach"] for row in rows] == ["0.5", None] * 3
    assert all(row["value"] > 0 for row in rows)


def test_batch_rows_have_values() -> None:
    rows = bench_batches.batch_rows(d=8, block=64, n_blocks=4, repeats=1, pool="4 KiB")
    assert [row["unit"] for row in rows] == ["x"] * 4 + ["MiB"]
    assert all(row["value"] > 0 for row in rows)

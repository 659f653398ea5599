"""The benchmarks of fits run, tiny, so that they do not rot; and memory is bounded as they measure it."""

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_store import make_store
from nearline.analyze import FitSettings
from nearline.analyze.engine import Job, fit_surrogates
from nearline.analyze.layers import layer_source
from nearline.analyze.moments import MomentBuffers
from nearline.analyze.population import fold_of_documents, load_population
from nearline.analyze.tasks import Evaluated, range_moments, range_needs
from nearline.store import Reader

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import bench_fit


@pytest.mark.parametrize(
    ("benchmark", "sizes"),
    [
        (bench_fit.fit_vs_gridsearch, {"d": 16, "n": 1600, "block": 160}),
        (bench_fit.fit_vs_floor, {"d": 16, "n": 1600, "block": 160}),
        (bench_fit.peak_memory, {"d": 16, "n": 1600, "block": 160}),
    ],
)
def test_benchmarks_give_rows(benchmark: object, sizes: dict[str, int]) -> None:
    rows = benchmark(**sizes)  # type: ignore[operator]
    assert rows
    for row in rows:
        assert set(row) == {"name", "value", "unit", "reach", "note"}
        assert row["value"] > 0


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Moments of five blocks and of all take the same; needs take their columns on top of that."""
    reader = Reader.open(make_store(tmp_path / "store", n_tokens=16_000, d=64, block=320))
    where = load_population(reader, fold_of_documents(reader, 5, 0), "store")
    source, buffers = layer_source(reader, 0), MomentBuffers(64, 64, n_sums=6, buffer_rows=256)
    some, every = range(5), range(reader.n_blocks)
    range_moments(source, every, where, buffers)  # whatever is kept from now on (block records) is kept
    few = peak(lambda: range_moments(source, some, where, buffers))
    many = peak(lambda: range_moments(source, every, where, buffers))
    assert many < 1.05 * few
    rules = FitSettings().rules
    fit = fit_surrogates(Job([0], Evaluated("store", {0: source}, where), [], rules, 5), 1)[0]
    returned = 2 * sum(values.nbytes for values in range_needs(source, every, where, fit).values())
    few = peak(lambda: range_needs(source, some, where, fit))
    many = peak(lambda: range_needs(source, every, where, fit))
    assert many < few + 1.05 * returned

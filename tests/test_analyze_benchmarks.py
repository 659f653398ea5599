"""The benchmarks of fits and analyses run, tiny, so that they do not rot; memory is bounded."""

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_store import make_store
from nearline.analyze import FitSettings
from nearline.analyze.compute import session
from nearline.analyze.engine import fit_surrogates, one_family
from nearline.analyze.layers import LayerSource, layer_source
from nearline.analyze.moments import MomentBuffers
from nearline.analyze.population import fold_of_documents, load_population
from nearline.analyze.tasks import Evaluated, range_moments, range_needs
from nearline.store import Reader

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import bench_analyze
import bench_fit

ANALYSED: dict[str, Any] = {"n": 2400, "d": 12, "n_layers": 1, "block": 160, "length": 16, "vocabulary": 30}


@pytest.mark.parametrize(
    ("benchmark", "sizes"),
    [
        (bench_fit.fit_vs_gridsearch, {"d": 16, "n": 1600, "block": 160}),
        (bench_fit.fit_vs_floor, {"d": 16, "n": 1600, "block": 160}),
        (bench_fit.peak_memory, {"d": 16, "n": 800, "block": 160, "most": 1}),
        (bench_analyze.analyses, ANALYSED | {"flat": (1200, 1, 12)}),
        (bench_analyze.peak_memory, ANALYSED | {"n": 1200, "most": 1}),
    ],
)
def test_benchmarks_give_rows(benchmark: object, sizes: dict[str, Any]) -> None:
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
    source = layer_source(reader, 0)
    buffers = (MomentBuffers(64, 64, n_sums=count, buffer_rows=256) for count in (6, 2))
    given = source, where, where.fold, *buffers
    some, every = range(5), range(reader.n_blocks)
    moments(every, *given)  # whatever is kept from now on (block records) is kept
    few = peak(lambda: moments(some, *given))
    many = peak(lambda: moments(every, *given))
    assert many < 1.05 * few
    settings = FitSettings(workers=1)
    with session(settings) as workers:
        job = one_family({"store": Evaluated("store", {0: source}, where)}, "store", [0], settings.rules, 5)
        fit = fit_surrogates(job, workers)[0]
    by = [(fit, where.fold)]
    returned = 2 * sum(values.nbytes for values in range_needs(source, every, where, by)[0].values())
    few = peak(lambda: range_needs(source, some, where, by))
    many = peak(lambda: range_needs(source, every, where, by))
    assert many < few + 1.05 * returned


def moments(blocks: range, source: LayerSource, *given: Any) -> object:
    return range_moments(source, blocks, *given)

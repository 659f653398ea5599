"""Speed and memory of a fit: against GridSearchCV(Ridge), against its own floor, and at N and 4 N rows.

In: sizes. Out: rows of name, value, unit, what is to be reached, and how it was measured. Stores are
synthetic noise through a linear map and a tanh; only sizes matter here. All ratios are taken inside one run,
BLAS on as many threads as each side uses by default, page cache warm; the floor in CPU seconds.
"""

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
from helpers_store import begin, synthetic
from nearline.analyze.compute import session
from nearline.analyze.engine import fit_surrogates, one_family
from nearline.analyze.layers import layer_source
from nearline.analyze.moments import BUFFER_ROWS
from nearline.analyze.population import FIT, TEST, fold_of_documents, load_population
from nearline.analyze.settings import FitSettings
from nearline.analyze.tasks import Evaluated
from nearline.store import Reader, encode
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, PredefinedSplit
from threadpoolctl import threadpool_limits

SETTINGS = FitSettings()
Row = dict[str, Any]


# The peak of the process's own memory: `ru_maxrss` starts at the peak of the process that started it.
PRINT_PEAK_KIB = """
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


def rows() -> list[Row]:
    """Every row of `make bench` about fits."""
    return [*fit_vs_gridsearch(), *fit_vs_floor(), *peak_memory()]


def fit_vs_gridsearch(d: int = 576, n: int = 50_000, n_layers: int = 2, block: int = 2_500) -> list[Row]:
    """Surrogates of all layers from a store, against GridSearchCV(Ridge) on one layer's fit rows in memory.

    `n` counts stored rows, of which two fifths are fitted, and two fifths more are tested by our side only.
    """
    with tempfile.TemporaryDirectory() as folder:
        evaluated = _evaluated(_write_store(Path(folder) / "store", n, d, n_layers, block))
        layers = list(evaluated.sources)
        ours = _seconds(lambda: _fit(evaluated, layers, SETTINGS.n_workers)) / n_layers
        x, y, folds = _rows_in_memory(evaluated)
    theirs = _seconds(lambda: _grid_search(x, y, folds))
    note = (
        f"{x.shape[0]} fit rows x {d}, {theirs:.2f} s a layer in memory, ours {ours:.2f} s a layer from disk"
    )
    return [
        _row("fit: speed against GridSearchCV(Ridge), 5 folds x 9 alphas", theirs / ours, "x", ">= 10", note)
    ]


def fit_vs_floor(d: int = 576, n: int | None = None, n_layers: int = 2, block: int = 4_800) -> list[Row]:
    """The same fit on one thread against its floor: read, norm, centre, products, eigendecompositions."""
    n = 135 * d if n is None else n  # four fifths of it, less sinks, are fitted or tested: 100·d rows
    with tempfile.TemporaryDirectory() as folder:
        evaluated = _evaluated(_write_store(Path(folder) / "store", n, d, n_layers, block))
        layers = list(evaluated.sources)
        with threadpool_limits(1):
            terms = _floor_terms(evaluated, layers[0])
            ours = min(_cpu_seconds(lambda: _fit(evaluated, layers, 1)) for _ in range(3))
        one = _seconds(lambda: _fit(evaluated, layers, 1))
        two = _seconds(lambda: _fit(evaluated, layers, 2))
    used = evaluated.population.rows(FIT).size + evaluated.population.rows(TEST).size
    floor = n_layers * sum(terms.values())
    spelt = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in terms.items())
    note = f"{used} rows x {d}, CPU seconds a layer: ours {ours / n_layers:.2f} s; {spelt}"
    return [
        _row("fit: time against its floor, one thread", ours / floor, "x", "<= 1.4", note),
        _row("fit: time of two workers against one", two / one, "x", "", f"{n_layers} layers, {two:.2f} s"),
    ]


def peak_memory(
    n: int = 20_000, d: int = 576, n_layers: int = 1, block: int = 2_000, most: int = 4
) -> list[Row]:
    """Peak resident memory of a whole fit in a fresh process, with n and with `most` · n rows."""
    peaks: list[float] = []
    for size in dict.fromkeys((n, most * n)):
        with tempfile.TemporaryDirectory() as folder:
            store = _write_store(Path(folder) / "store", size, d, n_layers, block)
            peaks.append(_peak_of_fit(store, Path(folder) / "study"))
    note = (
        f"{n} rows {peaks[0]:.0f} MiB, {most * n} rows {peaks[-1]:.0f} MiB, {d} features, blocks of {block}"
    )
    return [_row("fit: peak memory at 4 N against N", peaks[-1] / peaks[0], "x", "about 1", note)]


def _peak_of_fit(store: Path, study: Path) -> float:
    program = (
        "import sys\nfrom nearline.analyze.fit import fit\nfit(sys.argv[1], [sys.argv[2]])\n" + PRINT_PEAK_KIB
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(study), str(store)], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1]) / 1024


def _write_store(path: Path, n: int, d: int, n_layers: int, block: int, dtype: str = "float16") -> Path:
    """A store of n rows, made block by block; its plan is that of a small synthetic store."""
    small = synthetic(
        n_layers=n_layers, d=2, n_tokens=n, block=block, storage_dtype=dtype, norm_kind="rmsnorm"
    )
    rng = np.random.default_rng(0)
    mix = (rng.standard_normal((d, d)) / np.sqrt(d)).astype(np.float32)
    model = dataclasses.replace(small.attributes.model, d_model=d)
    storage = dataclasses.replace(small.attributes.storage, sites=("residual", "mlp_output"))
    data = dataclasses.replace(
        small,
        d=d,
        sites={"residual": np.empty(0), "mlp_output": np.empty(0)},
        stored={},
        attributes=dataclasses.replace(small.attributes, model=model, storage=storage),
        affine={"norm_weight": np.ones((n_layers, d), np.float32)},
        position_embedding=None,
    )
    writer = begin(path, data)
    for index in range(data.plan.n_blocks):
        row0, row1 = data.plan.block_range(index)
        residual = rng.standard_normal((n_layers, row1 - row0, d), dtype=np.float32)
        sites = {"residual": residual, "mlp_output": np.tanh(residual @ mix)}
        writer.commit(index, data.block(index)[0], {site: encode(v, dtype) for site, v in sites.items()}, {})
    writer.seal()
    return path


def _evaluated(path: Path) -> Evaluated:
    reader = Reader.open(path)
    folds = fold_of_documents(reader, SETTINGS.folds, SETTINGS.seed)
    sources = {layer: layer_source(reader, layer) for layer in reader.layers}
    return Evaluated("store", sources, load_population(reader, folds, "store"))


def _fit(evaluated: Evaluated, layers: list[int], workers: int) -> object:
    job = one_family({"store": evaluated}, "store", layers, SETTINGS.rules, SETTINGS.folds)
    with session(SETTINGS.model_copy(update={"workers": workers})) as threads:
        return fit_surrogates(job, threads)


def _rows_in_memory(evaluated: Evaluated) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    source, population = next(iter(evaluated.sources.values())), evaluated.population
    blocks = [source.inputs(block) for block in range(evaluated.reader.n_blocks)]
    fitted = population.rows(FIT)
    x, y = (np.concatenate([block[site] for block in blocks])[fitted] for site in (0, 1))
    return x, y, population.fold[fitted]


def _grid_search(x: np.ndarray, y: np.ndarray, folds: np.ndarray) -> None:
    """λ of one whole fit stands for that of each fold: the same work, in float32 as the rows are."""
    mean_variance = float(x.var(axis=0).mean())
    grid = {"alpha": [alpha * mean_variance * x.shape[0] for alpha in SETTINGS.alphas]}
    GridSearchCV(Ridge(), grid, cv=PredefinedSplit(folds), scoring="neg_mean_squared_error").fit(x, y)


def _floor_terms(evaluated: Evaluated, layer: int) -> dict[str, float]:
    """CPU seconds that no program can save for one layer, each measured here on one thread."""
    source, population, d = evaluated.sources[layer], evaluated.population, evaluated.reader.d_model
    used = population.rows(FIT).size + population.rows(TEST).size
    read_s = min(_cpu_seconds(lambda: _read_and_centre(evaluated, layer)) for _ in range(2))
    rows = source.inputs(0)[0][:BUFFER_ROWS]
    other = rows.copy()
    gemm_s = min(_cpu_seconds(lambda: [rows.T @ other for _ in range(4)]) / 4 for _ in range(5))
    gemm_rate = 2 * rows.shape[0] * d * d / gemm_s
    scatter = (rows.T @ rows).astype(np.float64)
    eigh_s = min(
        _cpu_seconds(lambda: scipy.linalg.eigh(scatter, driver="evd", check_finite=False)) for _ in range(3)
    )
    return {
        "read, decode, norm, centre": read_s,
        "products": 3 * d * d * used / gemm_rate,
        "eigendecompositions": (SETTINGS.folds + 1) * eigh_s,
    }


def _read_and_centre(evaluated: Evaluated, layer: int) -> None:
    source, population = evaluated.sources[layer], evaluated.population
    for block in range(evaluated.reader.n_blocks):
        start, _ = evaluated.reader.block_range(block)
        if population.split[start] in (FIT, TEST):
            x, y = source.inputs(block)
            x -= x.mean(axis=0)
            y -= y.mean(axis=0)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Of this process: on one thread the same as wall time on a quiet machine, and steady on a busy one."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _row(name: str, value: float, unit: str, reach: str, note: str) -> Row:
    return {"name": name, "value": value, "unit": unit, "reach": reach, "note": note}

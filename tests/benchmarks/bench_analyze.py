"""Speed and memory of a fit and all analyses: against their floor, gates against a scikit-learn loop, and
peak memory at N and 4 N rows.

In: sizes. Out: rows of name, value, unit, what is to be reached, and how it was measured. Two stores of one
synthetic model: token and position embeddings, noise for a context, a tanh for an MLP. The noise has a
spectrum of 1/i, near that of real activations: how many steps a gate takes, here and in scikit-learn, depends
on it; all else depends on sizes. Gates are compared under a flat spectrum too, at a smaller size.
All ratios are taken inside one run, page cache warm. At full size: 5 GB under the temporary folder, twenty
minutes; `python tests/benchmarks/bench_analyze.py --n 20000 --d 256 --n-layers 4` is a smaller one.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from bench_fit import PRINT_PEAK_KIB
from bench_fit import _cpu_seconds as cpu_seconds
from bench_fit import _row as row
from helpers_store import begin, synthetic
from nearline.analyze import AnalyzeSettings, FitSettings, analyze
from nearline.analyze.fit import fit
from nearline.analyze.gathering import gather
from nearline.analyze.layers import layer_source
from nearline.analyze.moments import BUFFER_ROWS
from nearline.analyze.partition import SAMPLE_ROWS
from nearline.analyze.parts import parts_source
from nearline.analyze.population import GATE, TEST
from nearline.store import Reader, Study, encode
from scipy.linalg import eigh
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

Row = dict[str, Any]
Stores = dict[str, Path]
Spectrum = Literal["1/i", "flat"]
SETTINGS = AnalyzeSettings()
STEPS = ("decomposition", "identity", "gates", "nofly", "clusters", "regression")
# Feature sets as wide as the model that gates are fitted on, and the rows of the width that they add up to.
GATE_WIDTHS = 10
GATE_STEPS = 8  # of the solver, as `analyze.gates` counts them
SHARES = 5  # products of width × width a row, in `analyze.decomposition`
COMPARED = ("input", "context")
FLAT = (20_000, 4, 384)  # rows, layers, width


def rows() -> list[Row]:
    """Every row of `make bench` about analyses."""
    return [*analyses(), *peak_memory()]


def analyses(
    n: int = 100_000,
    d: int = 768,
    n_layers: int = 12,
    block: int = 2_500,
    length: int = 256,
    vocabulary: int = 2_000,
    flat: tuple[int, int, int] = FLAT,
) -> list[Row]:
    """A fit and every analysis, step by step, of n rows and of n / 5 rows in a second store; and the gates of
    a store whose noise has a flat spectrum, of so many rows, layers and so wide.
    """
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"a": n, "b": n // 5}
        stores = {
            name: write_store(Path(folder) / name, rows, d, n_layers, block, length, vocabulary, seed)
            for seed, (name, rows) in enumerate(sizes.items())
        }
        study = Path(folder) / "study"
        spent = {"fit": _spent(lambda: fit(study, stores))}
        for step in STEPS:
            settings = AnalyzeSettings(only=(step,))
            spent[step] = _spent(lambda settings=settings: analyze(study, settings))
        with threadpool_limits(1):
            floor = _floor(stores, n_layers)
        return [
            *_against_floor(spent, floor, sizes, n_layers, d),
            *_against_scikit_learn(study, *spent["gates"]),
            *_flat_spectrum(Path(folder), *flat, block, length, vocabulary),
        ]


def _flat_spectrum(
    folder: Path, n: int, n_layers: int, d: int, block: int, length: int, vocabulary: int
) -> list[Row]:
    """As `_against_scikit_learn`, under noise without directions of its own: few steps, for both."""
    store = write_store(folder / "flat", n, d, n_layers, block, length, vocabulary, 0, spectrum="flat")
    study = folder / "flat study"
    fit(study, [store])
    analyze(study, AnalyzeSettings(only=("decomposition",)))
    spent = _spent(lambda: analyze(study, AnalyzeSettings(only=("gates",))))
    found = _against_scikit_learn(study, *spent)
    size = f"{n} rows x {n_layers} layers x {d}"
    return [
        one | {"name": f"{one['name']}; flat spectrum", "note": f"{size}; {one['note']}"} for one in found
    ]


def _against_floor(
    spent: dict[str, tuple[float, float]],
    floor: dict[str, float],
    sizes: dict[str, int],
    n_layers: int,
    d: int,
) -> list[Row]:
    wall, cpu = (sum(pair[index] for pair in spent.values()) for index in (0, 1))
    workers = SETTINGS.n_workers
    each = ", ".join(
        f"{step} {pair[0]:.1f} s (CPU {pair[1]:.1f} s, floor {floor.get(step, 0.0):.1f} s)"
        for step, pair in spent.items()
    )
    size = f"{' + '.join(map(str, sizes.values()))} rows x {n_layers} layers x {d}"
    total = sum(floor.values())
    return [
        row(
            f"fit and all analyses: wall of {workers} workers against the floor",
            wall * workers / total,
            "x",
            "",
            f"{size}: {wall:.1f} s; {each}",
        ),
        row(
            "fit and all analyses: CPU time against the floor",
            cpu / total,
            "x",
            "",
            f"{cpu:.1f} s, floor {total:.1f} s",
        ),
    ]


def _floor(stores: Stores, n_layers: int) -> dict[str, float]:
    """CPU seconds that no program can save: bytes read once a pass, products at the measured rate,
    eigendecompositions. Work on columns alone (identity, regression, the null of no-fly) counts as nothing.
    """
    first, second = (Reader.open(path) for path in stores.values())
    n_a, n_b, d = first.n_tokens, second.n_tokens, first.d_model
    n, parts = n_a + n_b, FitSettings().folds + 1
    learned, tested = 0.4, 0.4  # of a store's rows; the rest is gate
    gated = 1.0 - learned - tested
    pair, x, flop, eigen = _rates(first)
    solves = parts * eigen
    fit_s = (
        pair * ((learned + tested) * n_a + n) + flop * (3 * (learned + tested) * n_a + 2 * n) * d**2 + solves
    )
    context = (
        pair * (learned * n_a + tested * n) + flop * (2 * learned * n_a + 2 * SHARES * tested * n) * d**2
    )
    steps = GATE_STEPS * 4 * len(SETTINGS.c_grid) * (SETTINGS.folds + 1)
    gates = (
        1.5 * pair * (gated * n_a + tested * n)
        + flop * GATE_WIDTHS * gated * n_a * (d**2 + steps * d)
        + flop * 2 * (gated * n_a + tested * n) * d**2
        + GATE_WIDTHS * eigen
    )
    named = (
        pair * ((learned + tested) * n_b + n)
        + flop * (3 * (learned + tested) * n_b + 4 * n) * d**2
        + 2 * solves
    )
    sampled = min(learned, SAMPLE_ROWS / n_a)
    clusters = (
        x * ((learned + sampled + 1.0) * n_a + tested * n_b)
        + flop * (learned * n_a * d**2 + 2 * n * d * SETTINGS.components)
        + eigen
    )
    by_layer = {"fit": fit_s, "decomposition": context, "gates": gates, "nofly": named, "clusters": clusters}
    return {step: n_layers * seconds for step, seconds in by_layer.items()}


def _rates(reader: Reader) -> tuple[float, float, float, float]:
    """CPU seconds to read and norm a row of both sites, to read and norm a row of the input, of a flop of a
    product, and of an eigendecomposition; each the best of a few, on one thread.
    """
    source, d = layer_source(reader, reader.layers[0]), reader.d_model
    blocks = range(min(4, reader.n_blocks))
    counted = reader.block_range(blocks[-1])[1]
    sample = source.inputs(0)[0]
    many = np.resize(sample, (BUFFER_ROWS, d))
    scatter = (many.T @ many).astype(np.float64)

    def best(work: Callable[[], object]) -> float:
        return min(cpu_seconds(work) for _ in range(3))

    both = best(lambda: [source.inputs(block) for block in blocks])
    output = best(lambda: [reader.rows("mlp_output", reader.layers[0], block, block + 1) for block in blocks])
    product = best(lambda: [many.T @ many.copy() for _ in range(4)]) / 4
    eigen = best(lambda: eigh(scatter, driver="evd", check_finite=False))
    return both / counted, max(both - output, 0.0) / counted, product / (2 * BUFFER_ROWS * d * d), eigen


def _against_scikit_learn(study: Path, seconds: float, cpu: float) -> list[Row]:
    """Gates of all layers and wide feature sets against StandardScaler and LogisticRegression over the same C
    and as many folds, on the rows of one layer and two feature sets in memory; scaled by parameters.
    """
    evidence = gather(Study.open(study), SETTINGS)
    name, layer, need = evidence.fit_on, evidence.layers[-1], evidence.needs[0]
    table = evidence.study.table("gates").to_pylist()
    wide = [
        one
        for one in table
        if one["store"] == name
        and one["size"] == "linear"
        and one["n_parameters"] > evidence.fitted.reader.d_model
    ]
    ours = {one["features"]: one["auc"] for one in wide if one["layer"] == layer and one["need"] == need}
    theirs, their_cpu, apart, counted = 0.0, 0.0, 0.0, 0
    population = evidence.fitted.population
    learned, tested = population.rows(GATE), population.rows(TEST)
    values = evidence.need_columns(layer, name)[need]
    easy = values <= np.median(values[learned])
    for features in COMPARED:
        x = _features(evidence.fitted.reader, layer, features)
        start, start_cpu = time.perf_counter(), time.process_time()
        score = _plain_gate(x[learned], easy[learned], population.group[learned], x[tested])
        theirs += time.perf_counter() - start
        their_cpu += time.process_time() - start_cpu
        apart = max(apart, abs(roc_auc_score(easy[tested], score) - ours[features]))
        counted += x.shape[1] + 1
    scale = sum(one["n_parameters"] for one in wide) / counted
    note = (
        f"{learned.size} gate rows, {len(wide)} wide gates: ours {seconds:.1f} s with narrow ones, theirs "
        f"{theirs:.1f} s for {len(COMPARED)}"
    )
    speed, cpu_speed = scale * theirs / seconds, scale * their_cpu / cpu
    return [
        row("gates: speed against a scikit-learn loop, 5 folds x 6 C", speed, "x", ">= 3", note),
        row("gates: CPU time of a scikit-learn loop against ours", cpu_speed, "x", "", note),
        row("gates: largest difference of AUC from scikit-learn", apart, "", "<= 0.005", ", ".join(COMPARED)),
    ]


def _features(reader: Reader, layer: int, features: str) -> np.ndarray:
    source = parts_source(reader, layer)
    taken = {"input": "x", "context": "k"}[features]
    return np.concatenate([getattr(source.block(block), taken) for block in range(reader.n_blocks)])


def _plain_gate(x: np.ndarray, easy: np.ndarray, group: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """What one would write: the C of the lowest held-out loss, then all rows."""
    losses = dict.fromkeys(SETTINGS.c_grid, 0.0)
    for c in SETTINGS.c_grid:
        for kept, left in GroupKFold(SETTINGS.folds).split(x, easy, group):
            p = _regression(c).fit(x[kept], easy[kept]).predict_proba(x[left])[:, 1]
            losses[c] += log_loss(easy[left], p, labels=[False, True], normalize=False)
    best = min(losses, key=losses.__getitem__)
    return _regression(best).fit(x, easy).predict_proba(tested)[:, 1]


def _regression(c: float) -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=2000))


def peak_memory(
    n: int = 100_000,
    d: int = 768,
    n_layers: int = 2,
    block: int = 2_500,
    length: int = 256,
    vocabulary: int = 2_000,
    most: int = 4,
) -> list[Row]:
    """Peak resident memory of a fit and all analyses in a fresh process, with n and with `most` · n rows."""
    peaks: list[float] = []
    for size in dict.fromkeys((n, most * n)):
        with tempfile.TemporaryDirectory() as folder:
            stores = {
                name: write_store(Path(folder) / name, rows, d, n_layers, block, length, vocabulary, seed)
                for seed, (name, rows) in enumerate({"a": size, "b": size // 5}.items())
            }
            peaks.append(_peak(Path(folder) / "study", list(stores.values())))
    note = (
        f"{n} rows {peaks[0]:.0f} MiB, {most * n} rows {peaks[-1]:.0f} MiB, {n_layers} layers x {d}, "
        f"memory_limit {LIMIT}"
    )
    return [
        row("fit and all analyses: peak memory", peaks[0], "MiB", "<= 2048", note),
        row("fit and all analyses: peak memory at 4 N against N", peaks[-1] / peaks[0], "x", "about 1", note),
    ]


LIMIT = "1.5 GiB"
PROGRAM = f"""
import sys
from nearline.analyze import AnalyzeSettings, FitSettings, analyze
from nearline.analyze.fit import fit
fit(sys.argv[1], sys.argv[2:], FitSettings(memory_limit="{LIMIT}"))
analyze(sys.argv[1], AnalyzeSettings(memory_limit="{LIMIT}"))
{PRINT_PEAK_KIB}"""


def _peak(study: Path, stores: Sequence[Path]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(study), *map(str, stores)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1]) / 1024


def write_store(
    path: Path,
    n: int,
    d: int,
    n_layers: int,
    block: int,
    length: int,
    vocabulary: int,
    seed: int,
    dtype: str = "float16",
    spectrum: Spectrum = "1/i",
) -> Path:
    """A store of n rows, made block by block; its plan and columns are those of a small synthetic store."""
    small = synthetic(
        n_layers=n_layers,
        d=2,
        n_tokens=n,
        block=block,
        storage_dtype=dtype,
        norm_kind="rmsnorm",
        sequence_length=length,
        vocab_size=vocabulary,
        seed=seed,
    )
    weights, rng = np.random.default_rng(0), np.random.default_rng((seed, 1))
    tokens = weights.standard_normal((vocabulary, d), np.float32)
    positions = 0.3 * weights.standard_normal((length, d), np.float32)
    mix = (weights.standard_normal((d, d)) / np.sqrt(d)).astype(np.float32)
    axes = np.linalg.qr(weights.standard_normal((d, d)))[0]
    variance = 1.0 / np.arange(1, d + 1) if spectrum == "1/i" else np.ones(d)
    colour = (axes * np.sqrt(variance / variance.mean())).astype(np.float32).T
    data = dataclasses.replace(
        small,
        d=d,
        sites=dict.fromkeys(("residual", "mlp_output", "embedding"), np.empty(0)),
        stored={},
        attributes=dataclasses.replace(
            small.attributes, model=dataclasses.replace(small.attributes.model, d_model=d)
        ),
        affine={"norm_weight": np.ones((n_layers, d), np.float32)},
        position_embedding=positions,
    )
    writer = begin(path, data)
    for index in range(data.plan.n_blocks):
        columns, _ = data.block(index)
        embedding = tokens[columns["token_id"]] + positions[columns["position"]]
        residual = embedding + rng.standard_normal((n_layers, *embedding.shape), np.float32) @ colour
        sites = {"residual": residual, "mlp_output": np.tanh(residual @ mix), "embedding": embedding}
        writer.commit(index, columns, {site: encode(values, dtype) for site, values in sites.items()}, {})
    writer.seal()
    return path


def _spent(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of this process."""
    start, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    """Both benchmarks at other sizes; memory with as many layers as there are workers, on any disk."""
    parser = argparse.ArgumentParser(description="Speed and memory of a fit and all analyses.")
    for name, default in (("n", 100_000), ("d", 768), ("n-layers", 12), ("block", 2_500), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = vars(parser.parse_args())
    n_layers = sizes.pop("n_layers")
    for found in (lambda: analyses(n_layers=n_layers, **sizes), lambda: peak_memory(**sizes)):
        for one in found():
            print(f"{one['name']:<66} {one['value']:>10.3g} {one['unit']:<5} {one['note']}", flush=True)


if __name__ == "__main__":
    main()

"""CPU seconds of a fit and of each analysis beforehand: a few terms that grow with rows, width and layers.

In: rows, width and number of layers, and settings. Out: `Work` of each: operations of products, width³ of
eigendecompositions, and passes over values, which the speed of a core (core_speed.py) turns into seconds.
Products and eigendecompositions are counted from what the modules of `analyze` do, as the floor in
tests/benchmarks/bench_analyze.py counts them. Passes are measured, not counted: reading a stored row with its
checksum and its norm, sorting, bookkeeping of a solver. They were fitted to CPU seconds of ten runs of both
bundled models (1 to 3 stores of 21,000 to 30,000 rows × 192) and SmolLM2-135M (1, 3 and 5 stores of 6,000 to
12,000 rows × 576), and to the benchmark of 120,000 rows × 768; docs/lab-log.md has planned beside measured.
Cost: none.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from .analyze import ANALYSES_BY_NAME
from .analyze_settings import AnalyzeSettings
from .core_speed import CoreSpeed
from .gate_features import FEATURES, WIDE, choose_features
from .gate_fit import COMPONENTS, Rules
from .needs import NEEDS
from .nofly import ITEM_BYTES, LAYERS_AT_ONCE
from .nofly_family import SIGNIFICANT
from .nofly_null import enough_shuffles
from .partition import SAMPLE_ROWS
from .settings import FitSettings

# Passes over each value: of both sites of a row that is read, or of the input alone.
READ_BOTH, READ_INPUT = 9.0, 3.0
# Of a row and column: moments of identity and regression; a gate's curve, area and intervals on a test row.
COLUMN, GATE_ROW = 300.0, 2000.0
# A shuffle of a row of `nofly` (a random number, a sort of documents), and of each of its columns.
SHUFFLE, SHUFFLED_COLUMN = 50.0, 1.5
# Of each step and problem of the solver of gates: over its rows (sigmoid, residual), and over its features
# (ten remembered moves, copied and used twice). Products of few columns reach two thirds of the speed.
SOLVER_ROW, SOLVER_FEATURE, SOLVER_PRODUCT = 10.0, 300.0, 1.5
# Steps of a problem: 8 with many rows a feature; the fewer rows, the nearer to separable, the more (21 at a
# quarter of a feature a row, 46 at a half). 3 to 7 of one feature.
STEPS, STEPS_SPARSE, STEPS_NARROW = 6.0, 75.0, 5.0
K_MEANS = 8.0  # passes of Lloyd's iterations over distances
CURVES = 1.5  # a fit's learning curve, ranks and variants add half to its solves
ANALYSIS_S = 0.3  # of a fit and of each analysis that runs: tables, digests
OUTPUT_SHARES: Final = 5  # products of width × width a row, in `analyze.decomposition`


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of products, Σ width³ of eigendecompositions, passes times values, and seconds beside."""

    flops: float = 0.0
    cubes: float = 0.0
    values: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.cubes + other.cubes,
            self.values + other.values,
            self.seconds + other.seconds,
        )

    def times(self, n: int | float) -> "Work":
        return Work(n * self.flops, n * self.cubes, n * self.values, n * self.seconds)

    def hours(self, speed: CoreSpeed) -> float:
        """On one core."""
        counted = self.flops / speed.flops_per_s + self.cubes * speed.eigen_s + self.values * speed.value_s
        return (counted + self.seconds) / 3600


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of width `d` of a study that will be: `fit`, `gate` and `own` (all) of the store that is fitted,
    those of each store, and `test` of all stores."""

    d: float
    fit: float
    gate: float
    own: float
    stores: tuple[float, ...]
    test: float

    @property
    def all(self) -> float:
        return sum(self.stores)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the formulas of one layer are made of."""

    rows: Rows
    settings: AnalyzeSettings
    n_layers: int
    solve: Work


def fit_work(rows: Rows, n_layers: int, settings: FitSettings) -> Work:
    """Moments of the rows fitted and tested, needs of all rows, an eigendecomposition a fold and one more."""
    summed = rows.fit + rows.test
    flops = rows.d**2 * (3 * summed + 2 * rows.all)
    read = READ_BOTH * rows.d * (summed + rows.all)
    each = Work(flops, values=read) + _solve(rows, settings).times(CURVES)
    return each.times(n_layers) + Work(seconds=ANALYSIS_S)


def analyze_work(
    rows: Rows, n_layers: int, settings: AnalyzeSettings, fitted: FitSettings
) -> dict[str, Work]:
    """Of each analysis that is asked for, and of those that must run before."""
    before = (ANALYSES_BY_NAME[name].after for name in settings.analyses)
    wanted = {*settings.analyses}.union(*before)
    asked = _Asked(rows, settings, n_layers, _solve(rows, fitted))
    return {
        name: of(asked).times(n_layers) + Work(seconds=ANALYSIS_S)
        for name, of in _LAYER.items()
        if name in wanted
    }


def _solve(rows: Rows, settings: FitSettings) -> Work:
    """A surrogate and those of its folds, one layer."""
    return Work(cubes=(settings.folds + 1) * rows.d**3)


def _decomposition(asked: _Asked) -> Work:
    """k̂ by ridge on the rows fitted, then shares of the output of test rows, all rows looked at before."""
    rows = asked.rows
    flops = rows.d**2 * 2 * (rows.fit + OUTPUT_SHARES * rows.test)
    return Work(flops, values=READ_BOTH * rows.d * (rows.fit + rows.test + rows.all)) + asked.solve


def _identity(asked: _Asked) -> Work:
    """Columns alone: needs against token ids."""
    return Work(values=COLUMN * asked.rows.all * len(asked.settings.need))


def _gates(asked: _Asked) -> Work:
    """Every C and fold of every feature set, then every gate on the test rows."""
    rows, settings = asked.rows, asked.settings
    grid = Rules(settings.c_grid).grid
    problems = len(grid) * (settings.folds + 1) * len(settings.need)
    names = choose_features(settings.features, has_positions=True)
    found = Work(values=READ_BOTH * rows.d * (rows.gate + rows.test))
    pieces = {piece for name in names for piece in FEATURES[name].pieces if piece in WIDE}
    found += Work(flops=2 * rows.gate * rows.d**2 * (len(pieces) + ("token_all+context_only" in names)))
    for name in names:
        width = rows.d * sum(piece in WIDE for piece in FEATURES[name].pieces)
        spectra = len(settings.need) if FEATURES[name].by_need else 1
        found += Work(cubes=spectra * width**3) + _solver(rows.gate, width, problems)
    n_gates = len(names)
    if "input" in names:
        found += _solver(rows.gate, 0.0, problems).times(len(COMPONENTS))
        n_gates += 1 + len(COMPONENTS)
    return found + Work(values=GATE_ROW * rows.test * n_gates * len(settings.need))


def _solver(rows: float, width: float, problems: int) -> Work:
    """Logistic regressions of one feature set; `width` 0 for a set of one number a row."""
    steps = problems * (STEPS + STEPS_SPARSE * width / max(rows, 1.0) if width else STEPS_NARROW)
    flops = 4 * rows * width + 8 * width**2
    return Work(SOLVER_PRODUCT * flops, values=SOLVER_ROW * rows + SOLVER_FEATURE * width).times(steps)


def _nofly(asked: _Asked) -> Work:
    """Fits named after stores and of all of them together, then shuffles of each pair of stores."""
    rows, settings, n_stores = asked.rows, asked.settings, len(asked.rows.stores)
    if n_stores < 2:
        return Work()
    offline = sum(need in NEEDS for need in settings.need)
    found = Work()
    if offline:  # the store of the main fit has its surrogates already; each row has needs by those of all
        learned = 0.8 * rows.all
        found += Work(
            rows.d**2 * (3 * learned + 2 * n_stores * rows.all),
            values=READ_BOTH * rows.d * (learned + rows.all),
        ) + asked.solve.times(n_stores * CURVES)
    shuffles = enough_shuffles(settings.permutations, asked.n_layers, SIGNIFICANT)
    columns = 3 * offline + len(settings.need) - offline
    for first, second in itertools.combinations(rows.stores, 2):
        both = first + second
        share = max(1.0, min(LAYERS_AT_ONCE, asked.n_layers, ITEM_BYTES // (both * (24 * columns + 100))))
        found += Work(values=shuffles * both * (SHUFFLE / share + SHUFFLED_COLUMN * columns))
    return found


def _clusters(asked: _Asked) -> Work:
    """A scatter and its components, k-means on a sample, a cluster for every row that is scored."""
    rows, settings = asked.rows, asked.settings
    sample = min(rows.fit, float(SAMPLE_ROWS))
    others = rows.test * (1.0 - rows.own / rows.all)
    read = READ_INPUT * rows.d * (rows.fit + sample + rows.own + others)
    means = K_MEANS * sample * settings.components * settings.clusters
    return Work(2 * rows.fit * rows.d**2, 0.25 * rows.d**3, read + means)


_LAYER: Final[Mapping[str, Callable[[_Asked], Work]]] = {
    "decomposition": _decomposition,
    "identity": _identity,
    "gates": _gates,
    "nofly": _nofly,
    "clusters": _clusters,
    "regression": _identity,  # columns alone, as many passes
}

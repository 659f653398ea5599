"""No-fly: whether the tokens that need the nonlinearity in one corpus need it in another. A fitted study of
two stores or more in, tables `nofly` and `nofly_tokens` out.

All pairs of stores, every need, keyed by the token that the MLP processes (`input`) and by the one that it
helps to predict (`target`). Needs are by the surrogate of either store and by one of all stores, each on rows
that it has not seen, so that a difference between corpora is not one between surrogates; needs that a run of
the model brought exist for the main fit alone. Body rows of all splits count. A text that stands in both
stores is left out of the second, with its near-duplicates: its noise would be shared. Cost: the named fits,
then per layer and pair `permutations` shuffles of the rows, a few milliseconds each.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from .compute import Session
from .compute_tasks import Here, Task
from .evidence import Evidence, StoreRows
from .examples import Texts
from .named_fits import ensure, surrogate_of
from .needs import NEEDS
from .nofly_family import SIGNIFICANT
from .nofly_null import enough_shuffles
from .nofly_statistics import MIN_TYPES
from .nofly_tables import Pair, Row, nofly_rows, token_rows
from .nofly_task import KEYS, Column, Found, Item, Shared, Side, compare_needs
from .results import to_table

POOLED: Final = "pooled"
TOP: Final = 10
# Layers of one item share shuffles; their columns are in memory together. Results do not depend on either.
LAYERS_AT_ONCE: Final = 4
ITEM_BYTES: Final = 64 * 2**20
_BYTES_A_VALUE: Final = 24
_BYTES_A_ROW: Final = 100  # of keys, permutations and sorts
_LOG = logging.getLogger("nearline")


def run(evidence: Evidence, session: Session) -> list[str]:
    """Write both tables, empty ones for a study of one store; returns their paths inside the study."""
    if len(evidence.stores) < 2:
        _LOG.info("nofly: not applicable to one store; its tables are empty")
        return _write(evidence, [], [])
    if any(need in NEEDS for need in evidence.needs):
        ensure(evidence, [*evidence.stores, POOLED], session)
    pairs = list(itertools.combinations(evidence.stores, 2))
    rows = [_rows(evidence, pair) for pair in pairs]
    parts = [
        _Part(number, pair, rows[number], layers)
        for number, pair in enumerate(pairs)
        for layers in _chunks(
            evidence.layers,
            _layer_bytes(evidence, pair, rows[number]),
            max(1, len(evidence.layers) * len(pairs) // session.n_workers),
        )
    ]
    by_pair = _compare(evidence, session, _shared(evidence, pairs, rows), parts)
    for pair, results in by_pair.items():
        _say_what_helps(pair, results, evidence.settings.occurrences)
    seed = evidence.settings.seed
    return _write(
        evidence,
        [row for pair, results in by_pair.items() for row in nofly_rows(pair, results, seed)],
        [row for pair, results in by_pair.items() for row in _tokens(evidence, pair, results)],
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What one item is made from: some layers of a pair, and the rows of both stores."""

    number: int  # of the pair
    pair: Pair
    rows: tuple[np.ndarray, np.ndarray]
    layers: tuple[int, ...]


def _compare(
    evidence: Evidence, session: Session, shared: Shared, parts: Sequence[_Part]
) -> dict[Pair, list[Found]]:
    """The results of each pair. Needs are read when their item is started."""
    tasks = [
        Task(
            compare_needs,
            Here(partial(_item, evidence, part)),
            weight=len(part.layers),
            label=f"nofly of {' and '.join(part.pair)}, layers {part.layers[0]}-{part.layers[-1]}",
        )
        for part in parts
    ]
    need = max(len(part.layers) * _layer_bytes(evidence, part.pair, part.rows) for part in parts)
    workers = session.at_once(need, "nofly", "or analyse one `need` at a time")
    found = session.run(shared, tasks, lambda _, result: result, "nofly", workers, unit="layers")
    by_pair: dict[Pair, list[Found]] = {part.pair: [] for part in parts}
    for part, results in zip(parts, found, strict=True):
        by_pair[part.pair].extend(results)
    return by_pair


def _write(evidence: Evidence, rows: list[Row], tokens: list[Row]) -> list[str]:
    tables = {"nofly": rows, "nofly_tokens": tokens}
    return [evidence.study.write_table(name, to_table(name, found)) for name, found in tables.items()]


def _tokens(evidence: Evidence, pair: Pair, results: Sequence[Found]) -> Iterator[Row]:
    """Of the first need, by the surrogate of all stores where it has one."""
    need = evidence.needs[0]
    surrogate = POOLED if need in NEEDS else evidence.fit_on
    shown = [one for one in results if (one.column.surrogate, one.column.need) == (surrogate, need)]
    return token_rows(pair, shown, Texts(evidence.stores[pair[0]].reader))


def _columns(evidence: Evidence, pair: Pair) -> list[tuple[str, str]]:
    """Surrogates and needs that are compared, in the order of the table."""
    offline = [(surrogate, need) for surrogate in (*pair, POOLED) for need in evidence.needs if need in NEEDS]
    return offline + [(evidence.fit_on, need) for need in evidence.needs if need not in NEEDS]


def _layer_bytes(evidence: Evidence, pair: Pair, rows: tuple[np.ndarray, np.ndarray]) -> int:
    """Working memory of one layer of a pair."""
    n_rows = sum(one.size for one in rows)
    return n_rows * (len(_columns(evidence, pair)) * _BYTES_A_VALUE + _BYTES_A_ROW)


def _chunks(layers: Sequence[int], layer_bytes: int, share: int) -> Iterator[tuple[int, ...]]:
    """Layers by items, as many as fit into memory and leave work for every worker."""
    most = max(1, min(LAYERS_AT_ONCE, share, ITEM_BYTES // max(layer_bytes, 1)))
    n_items = -(-len(layers) // most)
    for item in range(n_items):
        yield tuple(layers[item * len(layers) // n_items : (item + 1) * len(layers) // n_items])


def _rows(evidence: Evidence, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Body rows of both stores; of the second without the groups that hold a text of the first."""
    a, b = (evidence.stores[name] for name in pair)
    shared = np.flatnonzero(np.isin(_texts(b), _texts(a)))
    groups = np.unique(b.reader.documents["group"].to_numpy()[shared])
    body = np.flatnonzero(b.population.body)
    kept = body[~np.isin(b.population.group[body], groups)]
    if shared.size:
        _LOG.info(
            "nofly: %d documents stand in %s and in %s: these and their near-duplicates are left out of %s",
            *(shared.size, *pair, b.name),
        )
    return np.flatnonzero(a.population.body), kept


def _texts(store: StoreRows) -> np.ndarray:
    return np.array(store.reader.documents["content_hash"].to_pylist(), dtype=str)


def _shared(
    evidence: Evidence, pairs: Sequence[Pair], rows: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Shared:
    settings = evidence.settings
    sides = []
    for pair, numbers in zip(pairs, rows, strict=True):
        a, b = (_side(evidence.stores[name], found) for name, found in zip(pair, numbers, strict=True))
        sides.append((a, b))
    n_shuffles = enough_shuffles(settings.permutations, len(evidence.layers), SIGNIFICANT)
    return Shared(tuple(sides), settings.occurrences, n_shuffles, settings.seed, TOP)


def _side(store: StoreRows, rows: np.ndarray) -> Side:
    population = store.population
    groups, group = np.unique(population.group[rows], return_inverse=True)
    return Side(
        token_id=population.token_id[rows],
        target_id=population.target_id[rows],
        group=group.astype(np.int32),
        document=population.document[rows],
        n_groups=int(groups.size),
    )


def _item(evidence: Evidence, part: _Part) -> Item:
    columns = _columns(evidence, part.pair)
    a, b = (
        {
            Column(layer, surrogate, need): values
            for layer in part.layers
            for surrogate, need, values in _values(evidence, store, layer, columns, rows)
        }
        for store, rows in zip(part.pair, part.rows, strict=True)
    )
    return Item(part.number, (a, b))


def _values(
    evidence: Evidence, store: str, layer: int, columns: Sequence[tuple[str, str]], rows: np.ndarray
) -> Iterator[tuple[str, str, np.ndarray]]:
    for surrogate in dict.fromkeys(name for name, _ in columns):
        for named in (True, False):
            needs = [need for name, need in columns if name == surrogate and (need in NEEDS) is named]
            if needs:
                fit = surrogate_of(evidence, surrogate) if named else None
                for need, values in evidence.need_columns(layer, store, needs, surrogate=fit).items():
                    yield surrogate, need, values[rows]


def _say_what_helps(pair: Pair, results: Sequence[Found], occurrences: int) -> None:
    for key in KEYS:
        n_types = min((one.comparison.n_types for one in results if one.key == key), default=0)
        if n_types < MIN_TYPES:
            _LOG.warning(
                "nofly: %s and %s share %d %s tokens with %d occurrences in two groups of documents; "
                "fewer than %d cannot tell: harvest more `tokens`, or set `occurrences` lower",
                *(*pair, n_types, key, occurrences, MIN_TYPES),
            )

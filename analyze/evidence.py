"""What every analysis reads: a fitted study and its stores in, one value out that can go to a worker.

Workers get readers of stores (which open again there) and the identity of rows; needs are read here, in the
process that holds the study, and travel with the items. So workers must reach the stores, not the study.
Cost: about 40 bytes a token row; needs are read layer by layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64

from ..store import IncompleteError, Reader, Study, UsageError
from ..store.names import typed
from ..store.settings import nearest_known
from .analyze_settings import AnalyzeSettings
from .layers import LayerSource, layer_source
from .needs import NEEDS
from .population import FIT, GATE, TEST, Population

# Needs that no fit brings, and what does.
BROUGHT_BY = {
    "loss": "nearline measure",
    "kl": "nearline measure",
    "loss_single": "nearline measure",
    "loss_estimate": "a store harvested with `mlp_output_grad` among its sites",
}


@dataclass(frozen=True, slots=True, eq=False)
class StoreRows:
    """A store and the identity of its rows."""

    name: str
    reader: Reader
    population: Population

    def source(self, layer: int) -> LayerSource:
        return layer_source(self.reader, layer)


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The stores of a study and what was asked of them. `fit_on`: the store whose `fit` and `gate` rows
    whatever an analysis learns is learned from; every store's `test` rows are scored.
    """

    stores: Mapping[str, StoreRows]
    fit_on: str
    layers: Sequence[int]
    needs: Sequence[str]
    settings: AnalyzeSettings
    study: Study = field(repr=False)
    _test_rows: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    _need_files: dict[tuple[int, str], dict[str, list[str]]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def fitted(self) -> StoreRows:
        return self.stores[self.fit_on]

    def need_columns(
        self, layer: int, store: str, needs: Sequence[str] | None = None, surrogate: str | None = None
    ) -> dict[str, Float32[np.ndarray, "token"]]:
        """Needs of every row of a store at a layer, NaN where there is none."""
        return need_columns(self.study, layer, store, needs or self.needs, surrogate)

    def need_files(self, layer: int, store: str) -> dict[str, list[str]]:
        """The columns of each file of needs of a layer in a store, by the file's path inside the study."""
        if (layer, store) not in self._need_files:
            study, found = self.study, dict[str, list[str]]()
            for step in (None, *study.need_steps(layer, store)):
                path = study.need_path(layer, store, step=step)
                if not path.exists():
                    raise _not_there(path, study)
                found[path.relative_to(study.path).as_posix()] = study.need_names(layer, store, step=step)
            self._need_files[layer, store] = found
        return self._need_files[layer, store]

    def test_rows(self, store: str) -> Int64[np.ndarray, "row"]:
        """Row numbers of a store's held-out rows: body rows of its test split in groups without a document
        that stands among the fit or gate documents of `fit_on`.
        """
        if store not in self._test_rows:
            self._test_rows[store] = held_out_rows(self.stores[store], self.fitted)
        return self._test_rows[store]


def held_out_rows(tested: StoreRows, fitted: StoreRows) -> Int64[np.ndarray, "row"]:
    """Body rows of `tested`'s test split in groups without a text that something learned on `fitted` has
    seen: by group, so that a near-duplicate goes with the document that was learned from.
    """
    population = tested.population
    rows = population.rows(TEST)
    if tested.name == fitted.name:
        return rows
    learned = fitted.population
    seen_groups = np.unique(learned.group[np.isin(learned.split, (FIT, GATE))])
    documents = fitted.reader.documents
    seen = set(
        np.array(documents["content_hash"].to_pylist(), object)[
            np.isin(documents["group"].to_numpy(), seen_groups)
        ].tolist()
    )
    theirs = tested.reader.documents
    known = np.array([text in seen for text in theirs["content_hash"].to_pylist()], bool)
    taken = np.unique(theirs["group"].to_numpy()[known])
    return rows[~np.isin(population.group[rows], taken)]


def need_columns(
    study: Study, layer: int, store: str, needs: Sequence[str], surrogate: str | None = None
) -> dict[str, Float32[np.ndarray, "token"]]:
    """The named needs, whichever step brought them; UsageError names what is there where one is missing."""
    steps: list[str | None] = [None, *(study.need_steps(layer, store) if surrogate is None else [])]
    found: dict[str, np.ndarray] = {}
    known: list[str] = []
    n_rows = 0
    for step in steps:
        path = study.need_path(layer, store, surrogate=surrogate, step=step)
        if not path.exists():
            raise _not_there(path, study)
        table = study.need(layer, store, surrogate=surrogate, step=step)
        if n_rows and table.num_rows != n_rows:
            raise UsageError(
                f"{path}: {table.num_rows} rows where the fit has {n_rows}: measure the study again"
            )
        n_rows = table.num_rows
        known += table.column_names
        for need in needs:
            if need in table.column_names:
                found[need] = table[need].to_numpy().astype(np.float32, copy=False)
    for need in needs:
        if need not in found:
            raise missing_need(need, known, store)
    return {need: found[need] for need in needs}


def _not_there(path: Path, study: Study) -> IncompleteError:
    return IncompleteError(f"{path} does not exist; run `nearline fit {typed(study.path)} STORE…` again")


def missing_need(need: str, known: Sequence[str], store: str) -> UsageError:
    """What to say of a need that no column holds."""
    there = ", ".join(name for name in known if name in NEEDS or name in BROUGHT_BY)
    hint = f"; {BROUGHT_BY[need]} brings it" if need in BROUGHT_BY else nearest_known(need, known)
    return UsageError(f"need={need}: store {store} has no such column in this study; it has {there}{hint}")

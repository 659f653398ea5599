"""Moments that a study keeps, so that a store is not read again: a folder `moments@STORE` a store.

In: moments of layers as a fit makes them. Out: the same in a later fit, where the store, the folds and the
layers are those of before; anything else is summed again. Each folder is a step of its own in the record of
the study. Cost: 2·(K + 3)·8·d² bytes a layer on disk, and one digest of them when they are looked for.
"""

import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from jaxtyping import Int32

from ..store import NearlineError, Study, durable, in_place
from .engine import Saved
from .evidence import StoreRows
from .moments_file import open_moments, save_moments
from .moments_source import MomentsSource, document_table, store_facts, with_layers
from .population import FIT, UNSEEN
from .settings import FitSettings
from .surrogates import LayerMoments

PREFIX: Final = "moments@"

Folds = Int32[np.ndarray, "token"]


def keeps_moments(study: Study) -> bool:
    """Whether an earlier fit was asked to keep moments here."""
    return any(name.startswith(PREFIX) for name in study.provenance())


def saved_moments(
    study: Study,
    stores: Mapping[str, StoreRows],
    folds: Mapping[str, Folds],
    settings: FitSettings,
    layers: Sequence[int],
) -> Saved:
    """What is there of these stores for these folds and layers, and what is to be kept of the others."""
    if not (settings.keep_moments or keeps_moments(study)):
        return Saved()
    found = {name: _usable(study, rows, folds[name], settings, layers) for name, rows in stores.items()}
    load = {name: source.layer for name, source in found.items() if source is not None}
    return Saved(load, tuple(name for name in stores if name not in load))


def moments_are_kept(
    study: Study, name: str, inputs: Mapping[str, str], settings: FitSettings, layers: Sequence[int]
) -> bool:
    """Whether the moments of a store with this digest are there, for these folds and layers at least."""
    step = study.provenance().get(PREFIX + name)
    if step is None or not set(step["settings"].get("layers", ())) >= set(layers):
        return False
    resolved = _resolved(settings, step["settings"]["layers"])
    return study.step_is_current(PREFIX + name, {name: inputs[name]}, resolved)


def stale_moments(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Recorded moments of stores that are not those of the main fit any more, or of other folds."""
    main = steps["fit"]
    return [
        name
        for name, step in steps.items()
        if name.startswith(PREFIX)
        and (
            any(main["inputs"].get(store) != digest for store, digest in step["inputs"].items())
            or any(step["settings"].get(key) != main["settings"].get(key) for key in ("folds", "seed"))
        )
    ]


def _usable(
    study: Study, rows: StoreRows, folds: Folds, settings: FitSettings, layers: Sequence[int]
) -> MomentsSource | None:
    if not moments_are_kept(study, rows.name, _inputs(rows), settings, layers):
        return None
    try:
        source = open_moments(study.path / (PREFIX + rows.name), rows.name)
    except NearlineError:  # not what this version writes: it is summed again
        return None
    given = dict(zip(*(source.documents[name].to_pylist() for name in ("content_hash", "fold")), strict=True))
    return source if given == _by_document(rows, folds) else None


def _inputs(rows: StoreRows) -> dict[str, str]:
    return {rows.name: str(rows.reader.digest)}


def _resolved(settings: FitSettings, layers: Sequence[int]) -> dict[str, Any]:
    return {"folds": settings.folds, "seed": settings.seed, "layers": list(layers)}


def _by_document(rows: StoreRows, folds: Folds) -> dict[str, int]:
    """Content hash → fold, of the documents that have rows; the others have no fold."""
    hashes: list[str] = rows.reader.documents["content_hash"].to_pylist()
    of_document = np.full(len(hashes), UNSEEN, np.int32)
    of_document[rows.population.document] = folds
    return dict(zip(hashes, of_document.tolist(), strict=True))


class MomentsKeeper(AbstractContextManager["MomentsKeeper"]):
    """Takes moments layer by layer, in any order; `save` writes the folder of each store once all are there.

    Layers wait on disk, each as a folder of its own, so that memory holds one.
    """

    def __init__(
        self,
        study: Study,
        stores: Mapping[str, StoreRows],
        folds: Mapping[str, Folds],
        settings: FitSettings,
        layers: Sequence[int],
    ) -> None:
        """`stores`: those whose moments are kept."""
        self._study, self._stores, self._settings = study, stores, settings
        self._sources = {name: _source(rows, folds[name], settings, layers) for name, rows in stores.items()}
        self._aside = study.path / f"moments.{secrets.token_hex(6)}{durable.PARTIAL}"

    def add(self, layer: int, found: Mapping[str, LayerMoments]) -> None:
        """Keep what was found of a layer, by store."""
        for name, moments in found.items():
            attributes = with_layers(self._sources[name].attributes, [layer])
            load = {layer: moments}.__getitem__
            one = replace(self._sources[name], attributes=attributes, layers=(layer,), load=load)
            save_moments(self._layer_folder(name, layer), one)

    def save(self) -> None:
        """Put the folders in place and record each as a step."""
        for name, source in self._sources.items():
            folder = PREFIX + name

            def load(layer: int, name: str = name) -> LayerMoments:
                return open_moments(self._layer_folder(name, layer)).layer(layer)

            save_moments(self._aside / folder, replace(source, load=load))
            in_place.replace_folder(self._aside / folder, self._study.path / folder)
            inputs, settings = _inputs(self._stores[name]), _resolved(self._settings, source.layers)
            self._study.record_step(folder, inputs=inputs, settings=settings, outputs=[folder], facts={})

    def _layer_folder(self, name: str, layer: int) -> Path:
        return self._aside / name / str(layer)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)


def _source(rows: StoreRows, folds: Folds, settings: FitSettings, layers: Sequence[int]) -> MomentsSource:
    """What the moments of a store are of, without the moments."""
    population, documents = rows.population, rows.reader.documents
    fitted = population.rows(FIT)
    fitted = fitted[folds[fitted] >= 0]
    n_fit = np.bincount(population.document[fitted], minlength=documents.num_rows)
    return MomentsSource(
        name=rows.name,
        attributes=with_layers(rows.reader.attributes, layers),
        sources=(store_facts(rows.reader),),
        documents=document_table(documents, _by_document(rows, folds), n_fit),
        n_folds=settings.folds,
        seed=settings.seed,
        layers=tuple(layers),
        load=_no_layer,
    )


def _no_layer(layer: int) -> LayerMoments:
    raise KeyError(layer)

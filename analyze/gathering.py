"""What an analysis starts from: a study and settings in, `Evidence` out, or one sentence on what is missing.

Everything is looked at before any work starts and before anything is written: the fit, its stores (there,
sealed, and those that were fitted), the files of the fit, layers, needs, groups. Cost: the token columns of
the stores, and one digest of the fit's files that are used.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..store import IncompleteError, NearlineError, Reader, Study, UsageError
from ..store.names import printable, typed
from ..store.settings import parse_layers
from ..store.whole import digest_of
from .analyze_settings import AnalyzeSettings
from .evidence import BROUGHT_BY, Evidence, StoreRows, missing_need
from .moments_file import is_moments_folder
from .needs import NEEDS
from .population import FIT, GATE, fold_of_documents, load_population
from .stores import spell_layers

SURROGATES = "surrogates.zarr"


def gather(study: Study, settings: AnalyzeSettings) -> Evidence:
    """The stores of a fitted study as its fit saw them, the one it was fitted on first; and the layers and
    needs asked for.
    """
    fitted = _fit_record(study)
    resolved = fitted["settings"]
    layers = _choose_layers(settings, resolved["layers"], study)
    fit_on = resolved["fit_on"]
    _check_rows(study, fit_on)
    readers = _open_stores(study, fitted["inputs"])
    folds = fold_of_documents(readers[fit_on], resolved["folds"], resolved["seed"])
    rows = {
        name: StoreRows(name, reader, load_population(reader, folds, name))
        for name, reader in sorted(readers.items(), key=lambda item: (item[0] != fit_on, item[0]))
    }
    return Evidence(rows, fit_on, layers, settings.need, settings, study)


def _fit_record(study: Study) -> Mapping[str, Any]:
    record = study.provenance().get("fit")
    if record is None:
        raise IncompleteError(
            f"{study.path} is not fitted yet: run `nearline fit {typed(study.path)} STORE…` first"
        )
    return record


def _choose_layers(settings: AnalyzeSettings, fitted: Sequence[int], study: Study) -> list[int]:
    if settings.layers == "all":
        return list(fitted)
    layers = parse_layers(settings.layers)
    if missing := sorted(set(layers) - set(fitted)):
        raise UsageError(
            f"layers={settings.layers}: layer {missing[0]} was not fitted in {study.path}; "
            f"it has {spell_layers(fitted)}"
        )
    return layers


def _check_rows(study: Study, fit_on: str) -> None:
    where = study.stores().get(fit_on)
    if where is not None and is_moments_folder(where):
        raise UsageError(
            f"{study.path} was fitted on {fit_on}, a folder of moments without rows, and analyses learn from "
            f"rows: make another study that is fitted on a store, `nearline fit NEW STORE…`"
        )


def _open_stores(study: Study, seals: Mapping[str, str]) -> dict[str, Reader]:
    return {name: _open_store(study, name, path, seals.get(name)) for name, path in study.stores().items()}


def _open_store(study: Study, name: str, path: str | Path, seal: str | None) -> Reader:
    again = f"`nearline fit {typed(study.path)} STORE…` names its new place, or fits without it"
    try:
        reader = Reader.open(path)
    except NearlineError as error:
        # The kind of error stays (usage, damage, environment); what it means for the study is added.
        raise type(error)(f"store {name} of {study.path} cannot be read: {error}; {again}") from None
    if reader.digest != seal:
        was = "none" if seal is None else f"{seal[:12]}…"
        raise UsageError(
            f"store {name} of {study.path} ({printable(reader.path)}) is not what was fitted (seal {was}, "
            f"now {str(reader.digest)[:12]}…): put the fitted store back, or run `nearline fit` again"
        )
    return reader


def check_sites(evidence: Evidence, analyses: Iterable[str]) -> None:
    """`analyses` split the MLP input and need the stored embedding."""
    for store in evidence.stores.values():
        if "embedding" not in store.reader.sites:
            raise UsageError(
                f"store {store.name} has no `embedding`, which {' and '.join(analyses)} take; harvest it "
                "with `embedding` among its sites, or name other analyses with --only"
            )


def check_needs(evidence: Evidence) -> None:
    """Every need that was asked for is there, in every store and layer."""
    for store in evidence.stores:
        for layer in evidence.layers:
            files = evidence.need_files(layer, store)
            names = [column for columns in files.values() for column in columns]
            for need in evidence.needs:
                if need not in names or need not in (*NEEDS, *BROUGHT_BY):
                    raise missing_need(need, names, store)


def check_groups(evidence: Evidence, split: int, what: str) -> None:
    """Groups of `fit_on` enough for the folds that `what` asks for."""
    fitted, folds = evidence.fitted, evidence.settings.folds
    n_groups = fitted.population.n_groups(fitted.population.rows(split))
    if n_groups < folds:
        name = {FIT: "fit", GATE: "gate"}[split]
        raise UsageError(
            f"store {fitted.name} has {_groups(n_groups)} in its {name} split, too few for the {folds} folds "
            f"of {what}: harvest more tokens, or lower `folds`"
        )


def check_fits(evidence: Evidence) -> None:
    """Groups enough in every store for a fit of its own, which nofly makes with the folds of the main fit."""
    folds = _fit_record(evidence.study)["settings"]["folds"]
    for name, store in evidence.stores.items():
        n_groups = store.population.n_groups(store.population.rows(FIT))
        if n_groups < folds:
            raise UsageError(
                f"store {name} has {_groups(n_groups)} in its fit split, too few for the {folds} folds of "
                "the fit that nofly makes of it: harvest more tokens, fit with fewer `folds`, or name other "
                "analyses with --only"
            )


def _groups(n: int) -> str:
    return f"{n} group{'s' * (n != 1)} of documents"


def check_pairs(evidence: Evidence) -> None:
    """Two stores at least, with a token that occurs often enough in both of some pair."""
    least, counts = evidence.settings.occurrences, _occurrences(evidence)
    pairs = [np.minimum(*pair).max() for pair in itertools.combinations(counts, 2)]
    if not pairs:
        raise UsageError(
            f"nofly compares tokens between stores, and {evidence.study.path} has one ({evidence.fit_on}): "
            "fit it on two or more"
        )
    if (most := int(max(pairs))) < least:
        raise UsageError(
            f"occurrences={least}: no token occurs so often in two of the stores "
            f"{', '.join(evidence.stores)} (at most {most} times): lower `occurrences`, or harvest more "
            "tokens"
        )


def _occurrences(evidence: Evidence) -> list[np.ndarray]:
    """How often each token id stands in the body rows of each store."""
    populations = [store.population for store in evidence.stores.values()]
    n_ids = 1 + max(int(population.token_id.max()) for population in populations)
    return [np.bincount(one.token_id[one.body], minlength=n_ids) for one in populations]


def check_files(study: Study, paths: Iterable[str]) -> None:
    """Files that other steps recorded are what these wrote."""
    recorded = {
        output: (step, digest)
        for step, record in study.provenance().items()
        for output, digest in record["outputs"].items()
    }
    for path in paths:
        step, digest = recorded.get(path, ("fit", ""))
        if not (study.path / path).exists():
            raise IncompleteError(
                f"{study.path / path} is gone: run `nearline {step}` again, which writes it"
            )
        if digest and digest_of(study.path / path) != digest:
            raise UsageError(
                f"{study.path / path} is not what `nearline {step}` wrote: run `nearline {step}` again"
            )

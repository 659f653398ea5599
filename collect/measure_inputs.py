"""Digests of what a visit of the model is made from: stores, files of the fit, what replacements route by.

In: the evidence of a study, and which stores and replacements are used. Out: digests by name; what no step
has recorded is refused. Cost: none; digests are those of the records.
"""

from collections.abc import Sequence

from ..analyze.evidence import Evidence
from ..analyze.gathering import SURROGATES
from ..store import IncompleteError, Study
from ..store.names import typed
from .gate_digests import Gates
from .interventions import Intervention
from .made_with import gate_route, need_route, types_route
from .measure_settings import MeasureSettings


def inputs_of(evidence: Evidence, stores: Sequence[str]) -> dict[str, str]:
    """Digests of what all results depend on: stores by name, files of the fit by their path."""
    study, measured = evidence.study, dict.fromkeys((evidence.fit_on, *stores))
    rows = [rows_path(study, name) for name in measured]
    found = {path: recorded_digest(study, path) for path in (SURROGATES, *rows)}
    return found | {name: str(evidence.stores[name].reader.digest) for name in measured}


def rows_path(study: Study, store: str) -> str:
    return study.rows_path(store).relative_to(study.path).as_posix()


def routes_of(
    evidence: Evidence,
    stores: Sequence[str],
    used: Sequence[Intervention],
    gates: Gates | None,
    settings: MeasureSettings,
) -> dict[str, str]:
    """Digests of what replacements route by, under names that are no paths: other gates make no result wrong
    that was measured with those before, only not current.
    """
    found: dict[str, str] = {}
    for one in used:
        need = one.need or settings.need
        for layer in evidence.layers:
            if one.features is not None and gates is not None:
                gate = f"{one.features}@{one.size}"
                found[gate_route(gate, need, layer)] = gates.digest(gate, need, layer)
            elif one.kind == "token_list" and gates is not None:
                found[types_route(need, layer)] = gates.types_digest(need, layer)
            elif one.kind == "oracle":
                for name in dict.fromkeys((evidence.fit_on, *stores)):
                    found[need_route(need, name, layer)] = _digest_of_need(evidence, need, name, layer)
    return found


def _digest_of_need(evidence: Evidence, need: str, store: str, layer: int) -> str:
    """Of the file that holds a need."""
    files = evidence.need_files(layer, store)
    return next(recorded_digest(evidence.study, path) for path, columns in files.items() if need in columns)


def recorded_digest(study: Study, path: str) -> str:
    """The digest of a file that a step wrote."""
    files = {path: digest for step in study.provenance().values() for path, digest in step["outputs"].items()}
    if path not in files:
        raise IncompleteError(
            f"{study.path / path} is recorded by no step: run `nearline fit {typed(study.path)} STORE…` again"
        )
    return files[path]

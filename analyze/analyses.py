"""The analyses that there are, and what the results of each are made from.

In: nothing. Out: a table of `Analysis`, by name. Cost: none; an analysis imports its module when it runs,
since `nearline --help` must not wait for scikit-learn.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from .compute import Session
from .evidence import Evidence
from .population import FIT, GATE


def _decomposition(evidence: Evidence, workers: Session) -> list[str]:
    from .decomposition import run

    return run(evidence, workers)


def _identity(evidence: Evidence, workers: Session) -> list[str]:
    from .identity import run

    return run(evidence, workers)


def _gates(evidence: Evidence, workers: Session) -> list[str]:
    from .gates import run

    return run(evidence, workers)


def _nofly(evidence: Evidence, workers: Session) -> list[str]:
    from .nofly import run

    return run(evidence, workers)


def _clusters(evidence: Evidence, workers: Session) -> list[str]:
    from .clusters import run

    return run(evidence, workers)


def _regression(evidence: Evidence, workers: Session) -> list[str]:
    from .regression import run

    return run(evidence, workers)


@dataclass(frozen=True, slots=True)
class Analysis:
    """One analysis and what its results are made from."""

    run: Callable[[Evidence, Session], list[str]]
    version: int = 1  # raised whenever the same inputs and settings give other results
    after: tuple[str, ...] = ()
    reads_needs: bool = True
    reads_surrogates: bool = False
    reads_named_fits: bool = False
    reads_embedding: bool = False
    folds_of: int | None = None  # the split whose groups it folds


ANALYSES_BY_NAME: Final[Mapping[str, Analysis]] = {
    "decomposition": Analysis(
        _decomposition, reads_needs=False, reads_surrogates=True, reads_embedding=True, folds_of=FIT
    ),
    "identity": Analysis(_identity),
    "gates": Analysis(_gates, version=3, after=("decomposition",), reads_embedding=True, folds_of=GATE),
    "nofly": Analysis(_nofly, reads_named_fits=True),
    "clusters": Analysis(_clusters),
    "regression": Analysis(_regression),
}

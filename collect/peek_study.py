"""What a study knows that a preview needs: its surrogates, the model it is for, and how its text was cut.

In: a study's folder, and which of its stores counts. Out: a frozen `StudyFacts`; surrogates are read one
layer at a time. The stores themselves are not looked at: a study may have come without them. Cost: two small
tables.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..analyze.ridge import Surrogate
from ..store import Study
from ..store.errors import FormatError, IncompleteError, UsageError
from ..store.names import typed
from ..store.parsing import INT32_MAX, get_int, get_ints, get_object, get_str
from ..store.sections import MAX_ENTRIES
from ..store.settings import parse_layers
from ..store.study_files import PROVENANCE

STEP = "fit"
NEEDED = {
    "weight": ("layer", "feature_out", "feature_in"),
    "bias": ("layer", "feature_out"),
    "mean_y": ("layer", "feature_out"),
    "spread": ("layer",),
}


@dataclass(frozen=True, slots=True, eq=False)
class StudyFacts:
    """A fitted study, seen from one of its stores."""

    study: str
    store: str
    model: str
    weights_hash: str
    n_layers: int
    d_model: int
    compute_dtype: str
    sequence_length: int
    bos_id: int | None
    fingerprint: str
    special_ids: tuple[int, ...]
    r2_test: Mapping[int, float]
    layers: tuple[int, ...]
    _surrogates: Any  # an xarray Dataset, read lazily

    def surrogate(self, layer: int) -> Surrogate:
        """The surrogate of one layer, fitted on every fit row."""
        one = self._surrogates.isel(layer=self.layers.index(layer))
        return Surrogate(
            weight=np.asarray(one["weight"].values, np.float32),
            bias=np.asarray(one["bias"].values, np.float32),
            mean_y=np.asarray(one["mean_y"].values, np.float64),
            spread=float(one["spread"].values),
            alpha=float("nan"),
            penalty=float("nan"),
            condition=float("nan"),
        )

    def choose_layers(self, layers: int | str | Collection[int] | None) -> tuple[int, ...]:
        """The layers asked for: a number, several, or a text such as 0-5,8; None: all that were fitted."""
        if layers is None or layers == "all":
            return self.layers
        several = parse_layers(layers) if isinstance(layers, str) else layers
        try:
            chosen = sorted({index(one) for one in (several if isinstance(several, Iterable) else [several])})
        except TypeError:
            raise UsageError(f"layers={layers!r}: a layer is a whole number; write 0-5,8 or all") from None
        if not chosen:
            raise UsageError("layers=(): name at least one layer, or leave it out for all of them")
        if missing := [layer for layer in chosen if layer not in self.layers]:
            raise UsageError(
                f"layer {missing[0]} is not in study {self.study}, which has layers "
                f"{', '.join(map(str, self.layers))}"
            )
        return tuple(chosen)


def study_facts(study: str | Path | Study, store: str | None = None) -> StudyFacts:
    """Open a fitted study. `store`: one of its stores by name; default: the one that was fitted on."""
    if not isinstance(study, Study | str | PathLike):
        raise UsageError(f"a study is expected, and {type(study).__name__} was given: give its folder")
    found = study if isinstance(study, Study) else Study.open(study)
    name, command = found.path.resolve().name, typed(found.path)
    step = found.provenance().get(STEP)
    if step is None:
        raise IncompleteError(
            f"study {name} ({found.path}) is not fitted: run `nearline fit {command} STORE`"
        )
    surrogates = found.surrogates()
    chosen = str(surrogates.attrs.get("fit_on", "")) if store is None else store
    rows = {row["store"]: row for row in found.table("harvest").to_pylist()}
    if chosen not in rows:
        raise UsageError(f"{chosen!r} is none of the stores of study {name}, which has {', '.join(rows)}")
    row = rows[chosen]
    where = f"{found.path / PROVENANCE}: {STEP}.facts"
    tokenizer = get_object(get_object(step["facts"], where).get("tokenizers", {}), where).get(chosen)
    if tokenizer is None:
        raise IncompleteError(
            f"study {name} was fitted by an earlier nearline: {where} says nothing about the tokenizer; run "
            f"`nearline fit {command} STORE` again"
        )
    tokenizer = get_object(tokenizer, where, keys=("fingerprint", "bos_id", "special_ids"))
    _check_arrays(surrogates, int(row["d_model"]), str(found.path / "surrogates.zarr"))
    return StudyFacts(
        study=name,
        store=chosen,
        model=row["model"],
        weights_hash=row["weights_hash"],
        n_layers=int(row["n_layers"]),
        d_model=int(row["d_model"]),
        compute_dtype=row["compute_dtype"],
        sequence_length=int(row["sequence_length"]),
        bos_id=get_int(tokenizer, "bos_id", where, high=INT32_MAX) if row["bos"] == "always" else None,
        fingerprint=get_str(tokenizer, "fingerprint", where),
        special_ids=tuple(get_ints(tokenizer, "special_ids", where, high=INT32_MAX, most=MAX_ENTRIES)),
        r2_test=_r2_test(found, chosen),
        layers=tuple(map(int, surrogates["layer"].values)),
        _surrogates=surrogates,
    )


def _r2_test(study: Study, store: str) -> dict[int, float]:
    columns = study.table("surrogates").select(["store", "layer", "r2_test"]).to_pylist()
    return {int(row["layer"]): float(row["r2_test"]) for row in columns if row["store"] == store}


def _check_arrays(surrogates: Any, d_model: int, where: str) -> None:
    """Every array that `error` takes is there, for a model of this width."""
    for name, dims in NEEDED.items():
        if name not in surrogates or surrogates[name].dims != dims:
            raise FormatError(
                f"{where}: `{name}` with axes {', '.join(dims)} is not in it, and errors of new tokens need "
                "it; run `nearline fit` again"
            )
        widths = surrogates[name].shape[1:]
        if any(width != d_model for width in widths):
            raise FormatError(f"{where}: `{name}` has shape {surrogates[name].shape}, not width {d_model}")

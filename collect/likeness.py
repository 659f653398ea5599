"""Whether a block that was collected again is the block that was lost, where its bytes are not the same.

In: the block as it stands in the damaged store, and as this machine gives it now. Out: the largest error, or
a DamageError. Another machine sums in another order, so values may differ as far as the start-up proof allows
for a batch of another shape, and no further: each undamaged chunk of the block is compared with the new one,
row by row; the statistics of its record are compared with the new ones; what follows from the plan must be
equal. Where no site chunk of the block survived, the statistics of its record alone have to do; where the
record is lost too, nothing is left to compare with, and the block is refused. Where a model of experts runs
in 16 bits, rounding sends single rows to other experts: behind the first router the typical row decides, as
in the proof. Cost: reads both blocks once.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from ..store.chunks import read_chunk
from ..store.dtypes import GRADIENT, LAYER_SITES, SITES, decode
from ..store.errors import DamageError
from ..store.folder import GROUP, chunk_keys, specs_of
from ..store.places import LocalPlace
from ..store.reader import Reader
from ..store.records import BlockRecord
from .agreement import row_error
from .proof import TOLERANCES

MEASURED = ("nll",)  # columns that come from the model; all others follow from the plan


def require_alike(
    folder: Path,
    block: int,
    record: BlockRecord | None,
    bad: set[str],
    new: Reader,
    routes_from: int | None = None,
) -> float:
    """The largest error of what is left of `block`; DamageError where it is too large. `record` is the
    block's own, None where that is lost; `bad` are the keys of damaged chunk objects; `routes_from`: the
    first layer that sends rows to experts."""
    compute = getattr(torch, new.attributes.compute.dtype)
    limit = TOLERANCES[compute].batch
    if compute == torch.float32:
        routes_from = None
    errors: dict[str, float] = {}
    n_sites = 0
    for key, (name, index), now in _chunks(new, block):
        if key in bad or (then := _stored(folder, new, block, key, name, record)) is None:
            if name not in (*SITES, *MEASURED):
                _require_same_bytes(folder, block, key, record, new)
            continue
        n_sites += name in SITES
        layer = "" if index is None else f" layer {new.layers[index]}"
        typical = _may_switch(name, None if index is None else new.layers[index], routes_from)
        errors[f"`{name}`{layer}"] = _error(name, now, then, new, typical=typical)
    if record is not None:
        free = {site: _switching(site, new, routes_from) for site in record.statistics}
        errors |= _statistics_errors(record, new.record(block), free)
    if not n_sites and record is None:
        raise DamageError(
            f"{folder}: block {block} has lost its record and all its values, and collecting it again gives "
            "other bytes, so nothing says that it is the same block; restore it from a copy"
        )
    worst = max(errors, key=lambda spot: errors[spot])
    if not errors[worst] <= limit:
        raise DamageError(
            f"{folder}: block {block} collected again is not the block that was lost: {worst} differs by "
            f"{errors[worst]:.2g} (relative), allowed {limit:.2g}; nothing was changed. Repair it on a "
            "machine like the first one, or restore it from a copy"
        )
    return errors[worst]


def _chunks(new: Reader, block: int) -> Iterator[tuple[str, tuple[str, int | None], np.ndarray]]:
    """Each chunk of the block: key, site or column with its layer's index, and the new values as stored."""
    for key, (name, index) in chunk_keys(specs_of(new.attributes, new.plan), block).items():
        if name in SITES:
            layer = None if index is None else new.layers[index]
            yield key, (name, index), new.stored(name, layer, block, block + 1)
        else:
            yield key, (name, index), new.column_block(name, block)


def _stored(
    folder: Path, new: Reader, block: int, key: str, name: str, record: BlockRecord | None
) -> np.ndarray | None:
    """What the damaged store holds under this key; None where its own checksum says that it is damaged."""
    spec = specs_of(new.attributes, new.plan)[name]
    rows, width = (
        int(new.plan.block_rows[block]),
        spec.shape[1:] if spec.dims[0] == "token" else spec.shape[2:],
    )
    out = np.empty((rows, *width), spec.dtype)
    known = None if record is None else record.chunks[key]
    try:
        compressor = new.attributes.storage.compressor
        read_chunk(LocalPlace(folder), f"{GROUP}/{key}", spec, compressor, out, key, known)
    except DamageError:
        return None
    return out


def _error(name: str, now: np.ndarray, then: np.ndarray, new: Reader, *, typical: bool = False) -> float:
    """Relative root mean square over the rows, as in the proof, or its typical row's error; infinite where
    equal values were needed."""
    if name in SITES:
        pair = [torch.from_numpy(decode(values, new.storage_dtype)) for values in (now, then)]
        if not torch.equal(*(torch.isfinite(values) for values in pair)):
            return float("inf")
        finite = torch.isfinite(pair[0]).all(dim=1)
        if not finite.any():
            return 0.0
        rows_off = row_error(pair[0][finite], pair[1][finite])
        return float(rows_off.median() if typical else rows_off.square().mean().sqrt())
    if name not in MEASURED:
        return 0.0 if np.array_equal(now, then) else float("inf")
    if not np.array_equal(np.isnan(now), np.isnan(then)):
        return float("inf")
    pair = [torch.from_numpy(values[~np.isnan(values)])[None] for values in (now, then)]
    if typical and pair[0].numel():
        return float(row_error(pair[0].T, pair[1].T).median())
    return float(row_error(*pair))


def _switching(site: str, new: Reader, routes_from: int | None) -> np.ndarray:
    """Of each layer's entry in a site's statistics: whether single rows may be others there."""
    layers = new.layers if site in LAYER_SITES else (None,)
    return np.array([_may_switch(site, layer, routes_from) for layer in layers])


def _may_switch(name: str, layer: int | None, routes_from: int | None) -> bool:
    """Whether single rows may have gone to other experts before this site; losses come behind them all."""
    if routes_from is None:
        return False
    if name == GRADIENT:  # it comes back through all of them
        return True
    if layer is None:
        return name in MEASURED
    return layer > routes_from or (layer == routes_from and name == "mlp_output")


def _statistics_errors(
    then: BlockRecord, now: BlockRecord, free: Mapping[str, np.ndarray] | None = None
) -> dict[str, float]:
    """Of each site: largest magnitude and root mean square, relative; as many values must be finite. `free`:
    entries whose largest magnitude says nothing, as it is that of a single row."""
    errors: dict[str, float] = {}
    for site, found in then.statistics.items():
        same = found["n_nonfinite"] == now.statistics[site]["n_nonfinite"]
        errors[f"n_nonfinite of `{site}`"] = 0.0 if same else float("inf")
        for name, root in (("max_abs", False), ("mean_square", True)):
            pair = [
                np.array([np.nan if value is None else value for value in one[name]], np.float64)
                for one in (found, now.statistics[site])
            ]
            was, has = (np.sqrt(values) if root else values for values in pair)
            apart = np.abs(has - was) / np.maximum(np.abs(was), np.finfo(np.float64).tiny)
            apart[np.isnan(was) & np.isnan(has)] = 0.0  # neither had a finite value to measure
            if free is not None and name == "max_abs":
                apart[free[site] & np.isfinite(was) & np.isfinite(has)] = 0.0
            errors[f"{name} of `{site}`"] = float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max())
    return errors


def _require_same_bytes(folder: Path, block: int, key: str, record: BlockRecord | None, new: Reader) -> None:
    if record is not None and record.chunks[key].digest != new.record(block).chunks[key].digest:
        raise DamageError(
            f"{folder}: {key} follows from plan and corpus, and is not what was sealed; nothing was changed"
        )

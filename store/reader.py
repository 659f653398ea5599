"""Reading a store: rows of a site, columns, small arrays and tables, each checked against the block
records.

In: a sealed store in a folder or behind a URL (or, on request, an unsealed one). Out: numpy arrays, decoded
to float32 or as stored. A chunk object that should be there and is not, has another size or another checksum
raises an error that names site, layer and token range; nothing is ever filled in. Cost: one read straight
into the result and one crc32c per chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Shaped

from .batches import Batches, batches
from .checked_files import CheckedFiles, opened
from .dtypes import GRADIENT, LAYER_SITES, decode_into
from .errors import UsageError
from .folder import DOCUMENTS, VOCABULARY
from .layout import AFFINE, TOKEN_COLUMNS
from .metadata import ArraySpec
from .places import Place
from .tables import DOCUMENTS as DOCUMENTS_SCHEMA
from .tables import VOCABULARY as VOCABULARY_SCHEMA
from .tables import parse_table


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Reader(CheckedFiles):
    """Handle on a store; safe to share between threads; sent to another process, it opens again there."""

    @classmethod
    def open(cls, where: str | Path | Place, *, require_seal: bool = True) -> "Reader":
        """Open a store by its folder, its URL or its activations.zarr; an unsealed one with
        `require_seal=False`. Nothing is taken from a copy or a harvest that is not whole."""
        return cls(*opened(where, require_seal=require_seal))

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.place, self.manifest is not None)

    def __repr__(self) -> str:
        return f"Reader({self.path!r}: {self.n_tokens:,} rows, {len(self.layers)} layers)"

    def _repr_html_(self) -> str:
        from .shown import store_html

        return store_html(self)

    @property
    def path(self) -> str:
        """Where the store lies: its folder, or its URL without credentials."""
        return self.place.url

    @property
    def layers(self) -> tuple[int, ...]:
        return self.attributes.storage.layers

    @property
    def sites(self) -> tuple[str, ...]:
        return self.attributes.storage.sites

    @property
    def d_model(self) -> int:
        return self.attributes.model.d_model

    @property
    def storage_dtype(self) -> str:
        return self.attributes.storage.dtype

    @property
    def n_tokens(self) -> int:
        return self.plan.n_tokens

    @property
    def n_blocks(self) -> int:
        return self.plan.n_blocks

    def block_range(self, block: int) -> tuple[int, int]:
        return self.plan.block_range(block)

    def rows(
        self, site: str, layer: int | None, block_start: int, block_stop: int
    ) -> Float32[np.ndarray, "token feature"]:
        """Rows of a site in blocks [block_start, block_stop), as float32; `layer` by the model's number. A
        gradient comes without the power of two that it is stored with."""
        if self.storage_dtype == "float32":
            return self._unscaled(site, layer, self.stored(site, layer, block_start, block_stop))
        out = np.empty((self._n_rows(block_start, block_stop), self.d_model), dtype=np.float32)
        for block, part in self._blocks(block_start, block_stop):
            decode_into(self.stored(site, layer, block, block + 1), self.storage_dtype, out[part])
        return self._unscaled(site, layer, out)

    def stored(
        self, site: str, layer: int | None, block_start: int, block_stop: int
    ) -> Shaped[np.ndarray, "token feature"]:
        """As `rows`, in the storage dtype (bfloat16: its bits), with a gradient's power of two."""
        spec, index = self._locate(site, layer)
        out = np.empty((self._n_rows(block_start, block_stop), self.d_model), dtype=spec.dtype)
        for block, part in self._blocks(block_start, block_stop):
            self._read_block(site, spec, index, block, out[part])
        return out

    def read_into(
        self, site: str, layer: int | None, block: int, out: Shaped[np.ndarray, "token feature"]
    ) -> None:
        """Rows of one block as `stored` gives them, into an array of the caller's (contiguous, its dtype)."""
        spec, index = self._locate(site, layer)
        self._read_block(site, spec, index, block, out)

    def batches(
        self,
        sites: str | Sequence[str] = ("mlp_input", "mlp_output"),
        *,
        layers: int | str | Sequence[int] = "all",
        splits: str | Sequence[str] = "all",
        rows: str = "all",
        batch_size: int = 4096,
        seed: int | None = 0,
        epoch: int = 0,
        dtype: Any = "float32",
        drop_last: bool = False,
        start: int = 0,
        pool_memory: int | str = "512 MiB",
    ) -> Batches:
        """Batches for training, each row once: `for x, y in reader.batches(layers=3, splits="fit"): …`.

        Sites are aligned row for row: (row, feature) for one layer, (layer, row, feature) for several (a
        list, `"0-5"`, all). `rows="body"` leaves out what fits leave out: position 0, special tokens, values
        that are not finite. Rows are shuffled by `seed` and `epoch`, mixed within pools of whole blocks of
        at most `pool_memory`; two pools are held. `seed=None` keeps the order of the store. `start` resumes
        at a batch. docs/transcoder.md says what the shuffle guarantees.
        """
        return batches(
            self,
            sites,
            layers=layers,
            splits=splits,
            rows=rows,
            batch_size=batch_size,
            seed=seed,
            epoch=epoch,
            dtype=dtype,
            drop_last=drop_last,
            start=start,
            pool_memory=pool_memory,
        )

    def _unscaled(self, site: str, layer: int | None, values: np.ndarray) -> np.ndarray:
        """The values themselves, in place: exact, as the factor is a power of two."""
        if site == GRADIENT and layer is not None:
            exponent = self.attributes.storage.gradient_exponent(layer)
            if exponent:
                values *= np.float32(2.0**-exponent)
        return values

    def column(self, name: str) -> Shaped[np.ndarray, " token"]:
        """A whole token column."""
        out = np.empty(self.n_tokens, dtype=self._column_spec(name).dtype)
        for block, part in self._blocks(0, self.n_blocks):
            self._read_block(name, self._specs[name], None, block, out[part])
        return out

    def column_block(self, name: str, block: int) -> Shaped[np.ndarray, " token"]:
        """A token column in one block."""
        out = np.empty(int(self.plan.block_rows[block]), dtype=self._column_spec(name).dtype)
        self._read_block(name, self._specs[name], None, block, out)
        return out

    def affine(self, name: str) -> Float32[np.ndarray, "layer feature"] | None:
        """An effective norm parameter (norm_weight, norm_bias, post_norm_weight, post_norm_bias), or None."""
        if name not in AFFINE:
            raise UsageError(f"{name!r} is no norm parameter; allowed: {', '.join(AFFINE)}")
        return self._whole(name)

    @property
    def position_embedding(self) -> Float32[np.ndarray, "position feature"] | None:
        """The absolute position embedding, of models that have one."""
        return self._whole("position_embedding")

    @property
    def documents(self) -> pa.Table:
        where, n_rows = self.place.where(DOCUMENTS), self.attributes.corpus.n_documents
        return parse_table(self._small(DOCUMENTS), DOCUMENTS_SCHEMA, where, n_rows=n_rows)

    @property
    def vocabulary(self) -> pa.Table:
        where, most = self.place.where(VOCABULARY), self.attributes.model.vocab_size
        return parse_table(self._small(VOCABULARY), VOCABULARY_SCHEMA, where, most_rows=most)

    def _n_rows(self, block_start: int, block_stop: int) -> int:
        if not 0 <= block_start < block_stop <= self.n_blocks:
            raise UsageError(
                f"blocks {block_start}..{block_stop}: this store has blocks 0-{self.n_blocks - 1}"
            )
        return self.block_range(block_stop - 1)[1] - self.block_range(block_start)[0]

    def _blocks(self, block_start: int, block_stop: int) -> list[tuple[int, slice]]:
        """Each block, and where its rows stand among the rows asked for."""
        first = self.block_range(block_start)[0]
        ranges = [(block, self.block_range(block)) for block in range(block_start, block_stop)]
        return [(block, slice(row0 - first, row1 - first)) for block, (row0, row1) in ranges]

    def _locate(self, site: str, layer: int | None) -> tuple[ArraySpec, int | None]:
        if site not in self.sites:
            raise UsageError(f"site {site!r} is not in this store; it has {', '.join(self.sites)}")
        if site not in LAYER_SITES:
            return self._specs[site], None
        if layer not in self.layers:
            raise UsageError(
                f"`{site}` layer {layer}: this store has layers {', '.join(map(str, self.layers))}"
            )
        return self._specs[site], self.layers.index(layer)

    def _column_spec(self, name: str) -> ArraySpec:
        if name not in TOKEN_COLUMNS:
            raise UsageError(f"column {name!r} is unknown; this store has {', '.join(TOKEN_COLUMNS)}")
        return self._specs[name]


def _reopen(place: Place, require_seal: bool) -> Reader:
    return Reader.open(place, require_seal=require_seal)

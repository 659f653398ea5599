"""Values that must not be stored: found while a harvest runs, told with the token where they stand.

In: site, layer and row of a block from the recorder. Out: the user's error with document, position, the dtype
to use instead and what is safe. Cost: none until there is one.
"""

import numpy as np

from ..store.errors import NotFinite, OutOfRange
from .preparing import Prepared
from .rows import block_columns


class ValueRefused(Exception):
    """A value that must not be stored, by its row in the block; the harvest adds which token that is."""

    def __init__(self, site: str, layer: int | None, row: int, value: float, limit: float) -> None:
        super().__init__(f"{site} layer {layer} row {row}: {value}")
        self.site, self.layer, self.row, self.value, self.limit = site, layer, row, value, limit
        self.block = 0  # whoever knows it says so
        self.maskable = True  # whether on_nonfinite=mask would help

    def explained(self, prepared: Prepared, n_committed: int) -> NotFinite | OutOfRange:
        """The user's error: site, layer, token, the dtype to use instead, and what is safe."""
        plan, tokens, row = prepared.planned.plan, prepared.tokens, self.row
        columns = block_columns(plan, self.block, tokens.ids, tokens.special_ids)
        token, position = int(columns["token_id"][row]), int(columns["position"][row])
        key = prepared.corpus.documents[int(columns["document"][row])].key
        token_row = plan.block_range(self.block)[0] + row
        where = f"token row {token_row:,} (token id {token}, position {position}, document {key!r})"
        safe = f"The {n_committed} blocks committed before are intact."
        return self._told(
            prepared.shape.storage_dtype, where, safe if n_committed else "Nothing was committed."
        )

    def _told(self, storage_dtype: str, where: str, safe: str) -> NotFinite | OutOfRange:
        site = f"`{self.site}`" + ("" if self.layer is None else f" layer {self.layer}")
        if not np.isfinite(self.value):
            mask = ", or on_nonfinite=mask to store such rows as not valid" if self.maskable else ""
            return NotFinite(
                f"{site}, {where}: the model gave a value that is not finite. Try another compute dtype "
                f"(dtype=float32){mask}. {safe}"
            )
        other = "bfloat16 (same range as float32) or float32" if storage_dtype == "float16" else "float32"
        return OutOfRange(
            f"{site}, {where}: |value| {self.value:,.6g} does not fit {storage_dtype}, whose largest is "
            f"{self.limit:,.6g}. Use storage_dtype={other}. {safe}"
        )

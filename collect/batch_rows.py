"""Which rows of a store are in a forward pass: what a substitute has to know of them beside activations.

In: arrays of (sequence, position), on the host, padding included. Out: one frozen value, flattened the way
modules flatten their rows. Cost: none.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int


@dataclass(frozen=True, slots=True, eq=False)
class BatchRows:
    """The rows of one forward pass. `row` is -1, and nothing covered, at padding and at a BOS that the store
    has no row of."""

    token_id: Int[np.ndarray, "sequence position"]
    position: Int[np.ndarray, "sequence position"]
    covered: Bool[np.ndarray, "sequence position"]
    """Rows that the fit covers: real, valid, not special, not at position 0. Others keep the true MLP."""
    row: Int[np.ndarray, "sequence position"]
    """The row's number in its store, by which it is drawn at random or found in a column."""

    def __post_init__(self) -> None:
        shapes = {values.shape for values in (self.token_id, self.position, self.covered, self.row)}
        if len(shapes) != 1 or len(self.row.shape) != 2:
            raise ValueError(f"rows of one pass have one shape (sequence, position), not {shapes}")

    @property
    def shape(self) -> tuple[int, int]:
        n_sequences, n_positions = self.row.shape
        return n_sequences, n_positions

    @property
    def real(self) -> Bool[np.ndarray, "sequence position"]:
        """Rows of the store; the rest is padding."""
        return self.row >= 0

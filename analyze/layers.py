"""One layer of one store as the fit sees it: blocks of stored rows in, (residual, x, y) in float32 out.

x = norm(residual) is recomputed, y is the raw MLP output. One block is held at a time. Cost: one read, one
decode and one norm a block.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float32

from ..store import Reader
from ..store.norms import norm_of
from .norms import Contribution, Norm, apply_norm, parse_kind

GRADIENT: Final = "mlp_output_grad"
Rows = Float32[np.ndarray, "token feature"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerSource:
    """Where a layer's rows come from, and what turns them into the MLP's input and contribution."""

    reader: Reader
    layer: int
    norm: Norm
    contribution: Contribution

    def inputs(self, block: int) -> tuple[Rows, Rows]:
        """MLP input and MLP output of every row of a block."""
        residual = self.reader.rows("residual", self.layer, block, block + 1)
        apply_norm(residual, self.norm, out=residual)
        return residual, self.reader.rows("mlp_output", self.layer, block, block + 1)

    def block(self, block: int) -> tuple[Rows, Rows, Rows]:
        """Residual, MLP input and MLP output of every row of a block."""
        residual = self.reader.rows("residual", self.layer, block, block + 1)
        output = self.reader.rows("mlp_output", self.layer, block, block + 1)
        return residual, apply_norm(residual, self.norm), output

    def gradient(self, block: int) -> Rows | None:
        """∂L/∂y of every row of a block, L the summed loss of the row's sequence; None where a store has
        none.
        """
        if GRADIENT not in self.reader.sites:
            return None
        return self.reader.rows(GRADIENT, self.layer, block, block + 1)


def layer_source(reader: Reader, layer: int) -> LayerSource:
    """The source of one stored layer."""
    index = list(reader.layers).index(layer)
    facts = reader.attributes.norm

    def affine(name: str) -> np.ndarray | None:
        values = reader.affine(name)
        return None if values is None else np.ascontiguousarray(values[index], dtype=np.float32)

    norm, post_kind = norm_of(reader, layer), parse_kind(facts.post_kinds[index])
    post = Norm(
        post_kind, affine("post_norm_weight"), affine("post_norm_bias"), float(facts.post_epsilons[index])
    )
    if post_kind == "none":
        post = Norm("none")
    return LayerSource(reader, layer, norm, Contribution(post, float(facts.multipliers[index])))

"""Shares of the variance of ŷ = W x + b: what token, position and context each contribute to it.

In: parts of x, row by row. Out: sums per group of products of their images, and from these the shares with
intervals over groups. Each covariance is split equally between its two parts, so a part's share is its
covariance with ŷ over the variance of ŷ (traces over features): shares sum to 1, and a part that counteracts
the others has a negative one. Cost: four d × d products of 2 flops a row.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, Float64, Int

from .context_map import ContextMap
from .intervals import bounds, critical_value, ratios
from .parts import Parts

# The same output split twice: by where a part of x comes from, and with what the token foretells of the
# context counted as the token's.
SPLITS_BY: Final = {
    "raw": ("token", "position", "context"),
    "replaced": ("token_full", "position", "context_only"),
}


class OutputParts:
    """Parts of ŷ of scored rows, centred on their means."""

    def __init__(self, weight: np.ndarray, context_map: ContextMap, means: Mapping[str, np.ndarray]) -> None:
        self._means, self._weight = means, weight.T
        self._of_embedding = (weight @ context_map.weight).T  # W k̂ = W M e

    def split(self, parts: Parts) -> dict[str, list[Float32[np.ndarray, "token feature"]]]:
        """By either way to split, in the order of `SPLITS_BY` (without the position where there is none)."""
        position = [] if parts.p is None else [(parts.p - self._means["p"]) @ self._weight]
        token = (parts.t - self._means["t"]) @ self._weight
        context = (parts.k - self._means["k"]) @ self._weight
        moved = (parts.embedding - self._means["embedding"]) @ self._of_embedding
        return {
            "raw": [token, *position, context],
            "replaced": [token + moved, *position, context - moved],
        }


def add_products(
    sums: Float64[np.ndarray, "group part part"],
    outputs: list[Float32[np.ndarray, "token feature"]],
    group: Int[np.ndarray, "token"],
) -> None:
    """Σ of ⟨part, part⟩ per group, onto `sums`."""
    for i, left in enumerate(outputs):
        for j, right in enumerate(outputs[: i + 1]):
            found = np.bincount(group, np.einsum("tf,tf->t", left, right), len(sums))
            sums[:, i, j] += found
            if j < i:
                sums[:, j, i] += found


def share_rows(split_by: str, products: Float64[np.ndarray, "group part part"]) -> list[dict[str, Any]]:
    """Shares of tr Var(ŷ), with intervals over groups; variance and covariance in the same unit."""
    of_output = products.sum(axis=2)  # Σ⟨part, ŷ⟩
    output = of_output.sum(axis=1, keepdims=True)  # Σ‖ŷ‖², centred
    found = ratios(of_output, np.broadcast_to(output, of_output.shape))
    low, high = bounds(found, critical_value(found))
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = np.einsum("gpp->p", products) / output.sum()
    names = [name for name in SPLITS_BY[split_by] if name != "position" or products.shape[1] == 3]
    return [
        {
            "part": name,
            "share": float(found.estimate[index]),
            "share_lo": float(low[index]),
            "share_hi": float(high[index]),
            "variance": float(variance[index]),
            "covariance": float(found.estimate[index] - variance[index]),
        }
        for index, name in enumerate(names)
    ]

"""How far two tensors that should be equal are apart, measured so that massive activations hide nothing.

In: tensors of rows by features. Out: one error per row. Cost: a pass in float64 over a few hundred rows.

Two measures. `componentwise_error` divides each difference by the magnitudes of the very terms that formed
that feature, so that one feature of size 10,000 neither excuses nor drowns the others; rounding alone keeps
it below about one unit of the dtype. `row_error` compares whole rows after a different order of operations
(another batch shape), where rounding has travelled through the layers.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def componentwise_error(
    difference: Float[Tensor, "row feature"], *terms: Float[Tensor, "row feature"]
) -> Float[Tensor, "row"]:
    """Root mean square over features of |difference| / Σ|terms|; zero where all terms are zero."""
    scale = torch.zeros_like(difference, dtype=torch.float64)
    for term in terms:
        scale += term.double().abs()
    tiny = torch.finfo(torch.float64).tiny
    return (difference.double().abs() / scale.clamp_min(tiny)).square().mean(-1).sqrt()


def row_error(
    got: Float[Tensor, "row feature"], wanted: Float[Tensor, "row feature"]
) -> Float[Tensor, "row"]:
    """‖got − wanted‖ over ‖wanted‖, or over the median row's norm where the row itself is smaller."""
    size = wanted.double().norm(dim=-1)
    typical = size.median().clamp_min(torch.finfo(torch.float64).tiny)
    return (got.double() - wanted.double()).norm(dim=-1) / torch.maximum(size, typical)

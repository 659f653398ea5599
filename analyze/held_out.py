"""How well gates predict rows that they have not seen: solutions by fold in, log losses and logits out of
fold out. Cost: one pass over the rows.
"""

import numpy as np
from jaxtyping import Float32, Float64, Int

from .logistic import Solutions
from .logistic_rows import Design, Labels, logits


def held_out_loss(design: Design, labels: Labels, solutions: Solutions) -> Float64[np.ndarray, "label C"]:
    """Mean log loss over the known rows, each by the problem that left its fold out."""
    n_labels, n_parts, n_c = solutions.intercept.shape
    weight = solutions.weight[:, :-1].reshape(n_labels * (n_parts - 1) * n_c, -1).T
    total = np.zeros((n_labels, n_c))
    for start, stop, found in logits(design, weight, solutions.intercept[:, :-1].ravel()):
        values = found.reshape(stop - start, n_labels, n_parts - 1, n_c)
        own = values[np.arange(stop - start), :, labels.fold[start:stop]]
        signed = np.where(labels.positive[start:stop, :, None], -own, own).astype(np.float64)
        known = labels.known[start:stop].astype(np.float64)
        total += np.einsum("tlc,tl->lc", np.logaddexp(0.0, signed), known)
    with np.errstate(invalid="ignore"):
        return total / labels.known.sum(axis=0)[:, None]


def held_out_logits(
    design: Design, labels: Labels, solutions: Solutions, chosen: Int[np.ndarray, "label"]
) -> Float32[np.ndarray, "token label"]:
    """w·z + b of every row by the problem that left its fold out, at the chosen C of each label."""
    n_labels, pick = chosen.size, np.arange(chosen.size)
    weight = solutions.weight[pick, :-1, chosen].reshape(n_labels * labels.n_folds, -1).T
    out = np.empty((design.n_rows, n_labels), np.float32)
    for start, stop, found in logits(design, weight, solutions.intercept[pick, :-1, chosen].ravel()):
        values = found.reshape(stop - start, n_labels, labels.n_folds)
        out[start:stop] = values[np.arange(stop - start), :, labels.fold[start:stop]]
    return out

"""Needs whose cause is known, at the level of features, put through the functions that `gates` runs.

In: what the need is made of. Out: a family of one layer for each feature set, scored on held-out groups. The
context carries the token, linearly and, if asked, by a code of its own that no linear map of the embedding
finds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from nearline.analyze.gate_features import type_means
from nearline.analyze.gate_fit import Gate, GateRows, Rules, fit_gates
from nearline.analyze.gate_rows import InMemory, standardise
from nearline.analyze.gate_scores import Scored, worth
from nearline.analyze.gate_tables import Family
from nearline.analyze.labels import easy_cut
from nearline.analyze.moments import from_rows
from nearline.analyze.ridge import solve, spectrum
from scipy.special import expit

NESTED = ("token_all", "context_only", "token_all+context_only")
NEED, N_FOLDS, D, N_TYPES = "error", 3, 6, 50
FIT, GATE, TEST = range(3)
RULES = Rules((1e-3, 1e-1, 1.0))


@dataclass(frozen=True)
class Rows:
    """Rows of all splits: pieces, and what belongs to each."""

    pieces: Mapping[str, np.ndarray]
    need: np.ndarray
    split: np.ndarray
    group: np.ndarray
    types: np.ndarray


def simulate(
    seed: int,
    token: float,
    context: float,
    *,
    groups: int = 35,
    coded: float = 0.0,
    shuffled: bool = False,
    n_types: int = N_TYPES,
    by_code: bool = False,
) -> Rows:
    """A need with these shares of variance from the type and from the context; the rest is noise. `groups`:
    of each split. Contexts and noise are alike within a group, so that rows are not independent.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(10, 50, 3 * groups)
    group = np.repeat(np.arange(sizes.size), sizes)
    split = group % 3
    often = 1 / np.arange(1, n_types + 1)
    types = rng.choice(n_types, group.size, p=often / often.sum())
    table, code = rng.standard_normal((2, n_types, D))
    embedding = table[types]

    def within(n: int) -> np.ndarray:
        return 0.5 * rng.standard_normal((sizes.size, n))[group] + rng.standard_normal((group.size, n))

    own = within(D)
    k = own + embedding @ rng.standard_normal((D, D)) / np.sqrt(D) + coded * code[types]
    level = code @ rng.standard_normal(D) if by_code else rng.standard_normal(n_types)
    parts = (level[types], own @ rng.standard_normal(D), within(1)[:, 0])
    shares = (token, context, 1.0 - token - context)
    need = np.zeros(group.size)
    for share, part in zip(shares, parts, strict=True):
        need += np.sqrt(share) * (part - part.mean()) / part.std()
    if shuffled:
        need = rng.permutation(need)
    fitted = split == FIT
    found = solve(
        spectrum(from_rows(embedding[fitted].astype(np.float32), k[fitted].astype(np.float32))), 1e-3
    )
    predicted = found.predict(embedding.astype(np.float32))
    means = type_means(types[fitted], need[fitted].astype(np.float32))
    pieces = {
        "x": embedding + k,
        "token_full": embedding + predicted,
        "context_only": k - predicted,
        f"token_type@{NEED}": means.of(types)[:, None],
        "random": rng.random((group.size, 1)),
    }
    return Rows(
        {n: v.astype(np.float32) for n, v in pieces.items()}, need.astype(np.float32), split, group, types
    )


def gates_of(rows: Rows, features: Sequence[str], rules: Rules = RULES) -> list[Gate]:
    """Gates fitted on the gate rows."""
    at = rows.split == GATE
    matrices = {name: InMemory(values[at].copy()) for name, values in rows.pieces.items()}
    scalings = {name: standardise(int(at.sum()), matrix) for name, matrix in matrices.items()}
    need, fold = rows.need[at], (np.unique(rows.group[at], return_inverse=True)[1] % N_FOLDS).astype(np.int32)
    positive = {NEED: need <= easy_cut(need, 0.5)}
    return list(
        fit_gates(GateRows(matrices, scalings, {NEED: need}, positive, fold, N_FOLDS), features, rules)
    )


def families(rows: Rows, features: Sequence[str], rules: Rules = RULES) -> dict[str, Family]:
    """What the gates are worth on the test rows, by their names."""
    at = rows.split == TEST
    cut = easy_cut(rows.need[rows.split == GATE], 0.5)
    scored = Scored(rows.need[at], rows.need[at] <= cut, rows.group[at], rows.types[at], 0.5)
    found = {}
    for gate in gates_of(rows, features, rules):
        keys = [f"{piece}@{NEED}" if piece == "token_type" else piece for piece in gate.pieces]
        raw = np.concatenate([rows.pieces[key][at] for key in keys], axis=1)
        p = expit((raw @ gate.weight + np.float32(gate.bias)).astype(np.float32))
        found[gate.name] = Family(
            "s", NEED, gate.features, gate.size, [0], [worth(gate, p, scored)], [{"fit_on": "s"}]
        )
    return found

"""Synthetic tables of the analyses (and the optional ones of the fit): plausible values, any size."""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import numpy as np

Row = dict[str, Any]
Rows = dict[str, list[Row]]

# Feature set, AUC above chance at the best layer, available at routing time.
FEATURES = (
    ("input", 0.24, True),
    ("token", 0.10, True),
    ("token_scaled", 0.11, True),
    ("token_full", 0.13, True),
    ("token_type", 0.16, True),
    ("token_all", 0.17, True),
    ("context", 0.20, True),
    ("context_only", 0.12, True),
    ("token_all+context_only", 0.25, True),
    ("position_part", 0.02, True),
    ("position", 0.01, True),
    ("norm", 0.06, True),
    ("target_type", 0.09, False),
    ("output_norm", 0.28, False),
    ("random", 0.0, True),
    ("oracle", 0.5, False),
)
SIZES = ("linear", "pca2", "pca6", "pca12", "paper")
CLAIMS = (
    ("context adds", "token_all+context_only", "token_all"),
    ("token adds", "token_all+context_only", "context_only"),
    ("input beats token_type", "input", "token_type"),
    ("input beats norm", "input", "norm"),
)
TERMS = ("length", "function_word", "capital", "digit", "punctuation", "log_frequency", "log_position")
WORDS = (" returns", " def", "\n", " ndarray", " the", "__", "(self", "，", " x < y", "\t")
NOTHING = float("nan")


def verdict_above(low: float, high: float, null: float = 0.0, margin: float = 0.01) -> str:
    return "supported" if low > null else "not supported" if high < null + margin else "cannot tell"


def ends(value: float, width: float, prefix: str) -> Row:
    return {
        f"{prefix}_lo": value - width,
        f"{prefix}_hi": value + width,
        f"{prefix}_sim_lo": value - 1.6 * width,
        f"{prefix}_sim_hi": value + 1.6 * width,
    }


def shape(layer: int, n_layers: int) -> float:
    """0 at both ends of the model, 1 in the middle."""
    return 4 * (layer + 0.5) / n_layers * (1 - (layer + 0.5) / n_layers)


def fit_rows(store: str, layer: int, place: float) -> Iterator[tuple[str, Row]]:
    key = {"store": store, "layer": layer}
    top = 0.55 + 0.4 * place
    for fraction, loss in ((0.2, 0.12), (0.4, 0.05), (0.8, 0.01), (1.0, 0.0)):
        yield (
            "learning_curve",
            key
            | {
                "fraction": fraction,
                "n_tokens": int(16_000 * fraction),
                "n_groups": int(256 * fraction),
                "alpha": 0.01,
                "r2_fit": top + 0.1 * (1.2 - fraction),
                "r2_test": top - loss,
            },
        )
    for power in range(8):
        rank = min(2**power, 192)
        yield "ranks", key | {"rank": rank, "r2_test": top * (1 - 0.5 ** (power + 1))}
    for variant, change in (("default", 0.0), ("paper", -0.03), ("with_sinks", -0.005)):
        yield (
            "variants",
            key
            | {
                "variant": variant,
                "n_tokens": 16_000,
                "alpha": 0.01,
                "penalty": 0.01 if variant == "paper" else 160.0,
                "condition": 3.1e5,
                "r2_body": top + change,
                "r2_sink": 0.9 if variant == "with_sinks" else -3.0,
                "r2_all": top + change / 2,
            },
        )


def decomposition_rows(store: str, layer: int, place: float) -> Iterator[tuple[str, Row]]:
    size = {"store": store, "layer": layer, "n_tokens": 15_800, "n_groups": 255}
    share = 0.2 + 0.5 * place
    yield (
        "decomposition",
        size
        | {"fit_on": store, "identity_error": 2.4e-7, "alpha": 0.1, "token_in_context": share}
        | {"token_in_context_lo": share - 0.02, "token_in_context_hi": share + 0.02},
    )
    parts = {
        "raw": {"token": 0.6 - 0.5 * place, "position": 0.02, "context": 0.38 + 0.5 * place},
        "replaced": {"token_full": 0.7 - 0.2 * place, "position": 0.02, "context_only": 0.28 + 0.2 * place},
    }
    for split_by, found in parts.items():
        for part, share in found.items():
            yield (
                "output_shares",
                size
                | {"split_by": split_by, "part": part, "share": share}
                | {"share_lo": share - 0.02, "share_hi": share + 0.02}
                | {"variance": share - 0.05, "covariance": 0.05},
            )


def variance_rows(store: str, layer: int, place: float, need: str) -> Iterator[tuple[str, Row]]:
    for key, share in (("input", 0.2 + 0.6 * place), ("target", 0.25 * place)):
        found = ends(share, 0.04, "share")
        low, high = found["share_sim_lo"], found["share_sim_hi"]
        told = "supported" if low >= 0.5 else "not supported" if low > 0 and high < 0.5 else "cannot tell"
        yield (
            "variance",
            {"store": store, "layer": layer, "need": need, "key": key, "n_tokens": 15_800, "n_types": 900}
            | {"n_groups": 255, "coverage": 0.91, "share": share, **found, "epsilon_squared": share + 0.05}
            | {"type_weighted_share": share - 0.03, "verdict": told},
        )


def gate_row(store: str, layer: int, need: str, features: str, size: str, auc: float) -> Row:
    found = ends(auc, 0.012, "auc")
    available = dict((name, there) for name, _, there in FEATURES)[features]
    return {
        "store": store,
        "fit_on": store,
        "layer": layer,
        "need": need,
        "features": features,
        "size": size,
        "available_at_routing": available,
        "n_parameters": 193,
        "n_tokens": 15_800,
        "n_groups": 255,
        "n_gate_tokens": 8_000,
        "n_gate_groups": 128,
        "base_rate": 0.51,
        "auc": auc,
        **found,
        "p_holm": 0.0002 if auc > 0.53 else 0.6,
        "ap": auc - 0.02,
        "brier": 0.25 - 0.2 * (auc - 0.5) ** 2,
        "brier_base": 0.25,
        "calibration_slope": 0.93,
        "calibration_intercept": 0.01,
        "share": 0.48,
        "need_share": 0.48 - 0.4 * (auc - 0.5),
        "threshold": 0.5,
        "C": 0.01,
        "verdict": verdict_above(found["auc_sim_lo"], found["auc_sim_hi"], 0.5),
    }


def gate_rows(store: str, layer: int, place: float, need: str) -> Iterator[tuple[str, Row]]:
    key = {"store": store, "layer": layer, "need": need}
    aucs = {name: 0.5 + strength * (0.15 + 0.85 * place) for name, strength, _ in FEATURES} | {"oracle": 1.0}
    for name, auc in aucs.items():
        for size in SIZES if name == "input" else ("linear",):
            shift = {"linear": 0.0, "paper": -0.004}.get(size, -0.4 * (auc - 0.5))
            yield "gates", gate_row(store, layer, need, name, size, auc + shift)
        for step in range(21):
            share = step / 20
            carried = share ** (1 + 4 * (auc - 0.5))
            facts = {"features": name, "size": "linear", "share": share, "need_share": carried}
            yield "gate_curves", key | facts
    for number in range(10):
        predicted = (number + 0.5) / 10
        observed = min(1.0, 0.02 + 0.95 * predicted)
        yield (
            "gate_calibration",
            key
            | {"features": "input", "size": "linear", "bin": number, "n_tokens": 1_580}
            | {"predicted": predicted, "observed": observed}
            | {"observed_lo": observed - 0.03, "observed_hi": min(1.0, observed + 0.03)},
        )
    yield (
        "gate_labels",
        key
        | {"rule": "0.5", "cut": 0.31, "share_gate": 0.5, "share_test": 0.51}
        | {"share_below_half": 0.8, "share_below_one": 0.97},
    )
    for claim, larger, smaller in CLAIMS:
        gain = aucs[larger] - aucs[smaller] - 0.02
        yield (
            "gate_differences",
            key
            | {"claim": claim, "larger": f"{larger}@linear", "smaller": f"{smaller}@linear"}
            | {"n_tokens": 15_800, "n_groups": 255, "auc_larger": aucs[larger]}
            | {"auc_smaller": aucs[smaller], "difference": gain, "lo": gain - 0.01, "hi": gain + 0.01}
            | {"sim_lo": gain - 0.016, "sim_hi": gain + 0.016, "p_holm": 0.001 if gain > 0.02 else 0.5}
            | {"within": 0.8 * gain, "within_sim_lo": gain - 0.03, "within_sim_hi": gain + 0.03}
            | {"verdict": verdict_above(gain - 0.016, gain + 0.016)},
        )


def which_rows(store: str, layer: int, place: float, need: str) -> Iterator[tuple[str, Row]]:
    key = {"store": store, "layer": layer, "need": need}
    r2 = 0.02 + 0.2 * place
    found = ends(r2, 0.02, "r2")
    told = "supported" if r2 - 0.032 >= 0.1 else "not supported" if r2 + 0.032 < 0.1 else "cannot tell"
    yield (
        "regression",
        key
        | {"n_tokens": 15_800, "n_groups": 255, "r2_fit": r2 + 0.01, "r2_test": r2, **found}
        | {"verdict": told},
    )
    for number, term in enumerate(TERMS):
        size = 0.05 * place * (-1) ** number / (1 + number)
        yield (
            "regression_terms",
            key
            | {"term": term, "coefficient": size, "lo": size - 0.01, "hi": size + 0.01, "r": 3 * size}
            | ({"coefficient": NOTHING, "lo": NOTHING, "hi": NOTHING} if term == "digit" else {}),
        )
    auc = 0.5 + 0.12 * place
    spread = ends(auc, 0.015, "auc")
    yield (
        "clusters",
        key
        | {"fit_on": store, "n_clusters": 20, "n_components": 50, "n_tokens": 15_800, "n_groups": 255}
        | {"clean_clusters": layer % 3, "variance_explained": 0.61, "auc": auc, **spread, "p_holm": 0.01}
        | {"verdict": verdict_above(auc - 0.024, auc + 0.024, 0.5)},
    )


def nofly_rows(
    pair: tuple[str, str], layer: int, place: float, need: str, surrogate: str
) -> Iterator[tuple[str, Row]]:
    for key, weight in (("input", 1.0), ("target", 0.3)):
        r = 0.5 * weight * place
        place_of = {"store_a": pair[0], "store_b": pair[1], "surrogate": surrogate, "layer": layer}
        place_of |= {"need": need, "key": key}
        ceiling = 0.3 + 0.4 * place
        free = r / ceiling
        told = "supported" if free > 0.25 else "cannot tell"
        yield (
            "nofly",
            place_of
            | {"n_types": 412, "n_tokens_a": 14_000, "n_tokens_b": 21_000, "n_groups_a": 240}
            | {"n_groups_b": 251, "r": r, "r_lo": r - 0.08, "r_hi": r + 0.08, "spearman": r + 0.02}
            | {"reliability_a": ceiling - 0.05, "reliability_b": ceiling + 0.05, "ceiling": ceiling}
            | {"r_disattenuated": free, **ends(free, 0.15, "r_disattenuated")}
            | {"p_permutation": 0.005, "p_holm": 0.06, "threshold": 0.4, "list_size": 40, "found": 31}
            | {"persisted": 12, "flipped": 7, "list_mean_a": 0.5 + 0.1 * place}
            | {"half_list_size": 44, "found_heldout": 36, "persisted_heldout": 20, "flipped_heldout": 3}
            | {"half_list_mean": 0.51 + 0.1 * place, "half_list_mean_b": 0.39 + 0.1 * place}
            | {"list_mean_a_heldout": 0.42 + 0.1 * place, "list_mean_b": 0.38 + 0.1 * place}
            | {"paper_r": r, "paper_r_heldout": r - 0.02, "verdict": told},
        )
        for rank in range(1, 21):
            yield (
                "nofly_tokens",
                place_of
                | {"rank": rank, "token_id": 100 + rank, "text": WORDS[(rank + layer) % len(WORDS)]}
                | {"mean_a": 0.7 - 0.01 * rank, "mean_b": 0.5 - 0.01 * rank, "n_a": 30, "n_b": 22},
            )


def make_analysis_tables(
    stores: tuple[str, ...] = ("gpt2-python", "gpt2-scientific"),
    *,
    n_layers: int = 12,
    needs: tuple[str, ...] = ("error",),
    seed: int = 0,
) -> Rows:
    """Rows of every optional table, by name."""
    rng = np.random.default_rng(seed)
    rows: Rows = {}
    found: list[tuple[str, Row]] = []
    for at, store in enumerate(stores):
        for layer in range(n_layers):
            place = float(np.clip(shape(layer, n_layers) - 0.06 * at + 0.03 * rng.normal(), 0.0, 1.0))
            found += [*fit_rows(store, layer, place), *decomposition_rows(store, layer, place)]
            for need in needs:
                for make in (variance_rows, gate_rows, which_rows):
                    found += make(store, layer, place, need)
    for pair in [pair for pair in permutations(stores, 2) if pair[0] < pair[1]]:
        for layer in range(n_layers):
            for surrogate in ("pooled", *pair):
                for need in needs:
                    found += nofly_rows(pair, layer, shape(layer, n_layers), need, surrogate)
    for name in ("nofly", "nofly_tokens"):
        rows[name] = []
    for name, row in found:
        rows.setdefault(name, []).append(row)
    return rows


ANALYSIS_SETTINGS = {"need": ["error"], "seed": 0, "layers": [0], "fit_on": "gpt2-python"}

"""Synthetic tables of a measurement: plausible values for any stores and layers, built as `measure` writes
them."""

from collections.abc import Iterator
from math import expm1
from typing import Any

import numpy as np
from nearline.analyze.budget_tables import BUDGET_SCHEMAS
from nearline.analyze.cost_tables import COST_SCHEMAS
from nearline.analyze.estimate_checks import ESTIMATE_SCHEMAS

Row = dict[str, Any]
Rows = dict[str, list[Row]]
Found = Iterator[tuple[str, Row]]

MEASURE_SCHEMAS = COST_SCHEMAS | ESTIMATE_SCHEMAS | BUDGET_SCHEMAS
MEASURE_SETTINGS = {"need": "error", "seed": 0, "shares": [0.5], "dtype": "float32"}
COUNTS = {"n_tokens": 15_800, "n_groups": 255}
LENGTH = 256  # that of `helpers_reports.harvest_row`
SAVED = 0.875  # of an MLP's multiplications, where a token goes linear
MLPS = 0.4  # of all FLOPs
# Name, kind, share of tokens that go linear, cost as a share of that of the linear map, available in time.
ROUTED = (
    ("gated@input", "gated", 0.45, 0.22, True),
    ("gated@input:0.5", "gated", 0.51, 0.27, True),
    ("gated@token_type:0.5", "gated", 0.50, 0.38, True),
    ("gated@norm:0.5", "gated", 0.49, 0.44, True),
    ("token_list@0.5", "token_list", 0.52, 0.36, True),
    ("random@0.5", "random", 0.50, 0.48, True),
    ("oracle@error:0.5", "oracle", 0.50, 0.2, False),
)
WHOLE = (
    ("linear", "linear", 1.0),
    ("linear@all", "linear", 1.6),
    ("mean", "mean", 9.0),
    ("zero", "zero", 14.0),
)
NEEDS = ("error", "loss", "kl", "loss_estimate")


def verdict(low: float, high: float) -> str:
    return "supported" if low > 0 else "not supported" if high < 0 else "cannot tell"


def percent(nats: float) -> float:
    return 100 * expm1(min(nats, 50.0))


def ends(value: float, width: float, prefix: str = "", simultaneous: bool = True) -> Row:
    found = {f"{prefix}lo": value - width, f"{prefix}hi": value + width}
    wide = {f"{prefix}sim_lo": value - 1.6 * width, f"{prefix}sim_hi": value + 1.6 * width}
    return found | wide if simultaneous else found


def costs(delta: float, width: float, prefix: str = "delta_", simultaneous: bool = True) -> Row:
    """Bounds of Δ and, transformed, of perplexity."""
    found = ends(delta, width, prefix, simultaneous)
    return found | {name.replace(prefix, "ppl_"): percent(value) for name, value in found.items()}


def cost_of(layer: int, n_layers: int) -> float:
    """Nats a token of the linear map: small in the middle, larger at both ends, most at the first layer."""
    place = (layer + 0.5) / n_layers
    return 0.006 + 0.05 * (2 * place - 1) ** 2 + (0.6 if layer == 0 else 0.0)


def intervention(where: Row, name: str, kind: str, chosen: Row, delta: float, share: float) -> Row:
    width = 0.004 + 0.1 * abs(delta)
    found = costs(delta, width)
    saved = SAVED * share
    return {
        **where,
        "name": name,
        "kind": kind,
        **chosen,
        "fit_positions": "body",
        "replaced_positions": "all" if name.endswith("@all") else "body",
        **COUNTS,
        "n_draws": 5 if kind == "random" else 0,
        "base_ppl": 32.04,
        "ppl": 32.04 * (1 + percent(delta) / 100),
        "delta_nats": delta,
        **found,
        "ppl_pct": percent(delta),
        "p_holm": 0.0003 if delta > 2 * width else 0.4,
        "kl": abs(delta) * 1.1,
        "kl_lo": abs(delta),
        "kl_hi": abs(delta) * 1.2,
        "draw_sd": 0.0004 if kind == "random" else float("nan"),
        "linear_share": share,
        "mlp_flops_saved": saved / 12,
        "flops_saved": MLPS * saved / 12,
        "verdict": verdict(found["delta_sim_lo"], found["delta_sim_hi"]),
    }


def one(layer: int) -> Row:
    return {"layer": layer, "layers": str(layer), "n_layers": 1, "chosen": "one", "chosen_on": "advance"}


def layer_rows(where: Row, layer: int, linear: float) -> Found:
    chosen = one(layer)
    point = {key: value for key, value in chosen.items() if key != "chosen_on"}
    rows = [intervention(where, name, kind, chosen, linear * times, 1.0) for name, kind, times in WHOLE]
    rows += [
        intervention(where, name, kind, chosen, linear * part, share) for name, kind, share, part, _ in ROUTED
    ]
    available = {name: there for name, _, _, _, there in ROUTED}
    for row in rows:
        yield "interventions", row
        if row["name"] != "linear@all":
            kept = {key: row[key] for key in COST_SCHEMAS["pareto"].names if key in row}
            there = available.get(row["name"], True)
            yield (
                "pareto",
                kept | {"available_at_routing": there, "on_front": row["name"].startswith("gated@input")},
            )
    gain = {name: (0.97 * share - part) * linear for name, _, share, part, _ in ROUTED}
    pairs = [(name, "random") for name, kind, *_ in ROUTED if kind != "random"]
    others = ("gated@token_type:0.5", "gated@norm:0.5", "token_list@0.5")
    pairs += [("gated@input:0.5", other) for other in others] + [("oracle@error:0.5", "gated@input:0.5")]
    for name, other in pairs:
        yield "routers", router_row(where | point, name, other, gain, linear)
    yield (
        "sinks",
        where
        | {"layer": layer, "name": "linear", **COUNTS, "covered_nats": linear, "all_nats": 1.6 * linear}
        | {"covered_pct": percent(linear), "all_pct": percent(1.6 * linear), "difference": 0.6 * linear}
        | ends(0.6 * linear, 0.004)
        | {"p_holm": 0.001, "verdict": verdict(0.6 * linear - 0.0064, 1.0)},
    )
    yield "paper_selection", selection_row(where, layer, linear)


def router_row(where: Row, name: str, other: str, gain: dict[str, float], linear: float) -> Row:
    share = {name: share for name, _, share, _, _ in ROUTED}
    theirs = 0.0 if other == "random" else gain[other]
    difference = gain[name] - theirs
    bounds = ends(difference, 0.0006 + 0.06 * linear)
    cost = 0.97 * share[name] * linear - gain[name]
    return {
        **where,
        "router": name,
        "against": other,
        **COUNTS,
        "share": 0.5 if ":" in name else float("nan"),
        "share_router": share[name],
        "share_against": share.get(other, share[name]),
        "cost_router": cost,
        "cost_against": cost + difference,
        "difference": difference,
        **bounds,
        "p_holm": 0.004 if bounds["sim_lo"] > 0 else 0.7,
        "verdict": verdict(bounds["sim_lo"], bounds["sim_hi"]),
    }


def selection_row(where: Row, layer: int, linear: float) -> Row:
    picked, fixed = 0.22 * linear - 0.004, 0.22 * linear
    bounds = ends(fixed, 0.004, "fixed_")
    return {
        **where,
        "layer": layer,
        "n_candidates": 4,
        "picked": "gated@input.pca6",
        "fixed": "gated@input",
        **COUNTS,
        "picked_nats": picked,
        "picked_pct": percent(picked),
        "picked_below_base": picked < 0,
        "heldout_nats": fixed + 0.001,
        "heldout_lo": fixed - 0.004,
        "heldout_hi": fixed + 0.006,
        "bias": picked - fixed - 0.001,
        "fixed_nats": fixed,
        **bounds,
        "fixed_pct": percent(fixed),
        "p_holm": 0.5,
        "verdict": verdict(-bounds["fixed_sim_hi"], -bounds["fixed_sim_lo"]),
    }


def set_rows(where: Row, costs_of: list[float]) -> Found:
    order = [int(layer) for layer in np.argsort(costs_of, kind="stable")]
    sets = {"cheapest@5": order[:5], "paper@5": order[:5][::-1], "all": list(range(len(costs_of)))}
    for name, part, share in (("linear", 1.0, 1.0), ("gated@input", 0.22, 0.45)):
        for chosen, layers in sets.items():
            total = part * sum(costs_of[layer] for layer in layers)
            tested = chosen == "paper@5"
            spread = {"layer": None, "layers": ",".join(map(str, layers)), "n_layers": len(layers)}
            spread |= {
                "chosen": chosen,
                "chosen_on": {"all": "advance", "paper@5": "test"}.get(chosen, "gate"),
            }
            row = intervention(where, name, name.partition("@")[0], spread, 1.4 * total, share)
            yield "interventions", row | ({"verdict": "chosen on test"} if tested else {})
            excess = ends(0.4 * total, 0.1 * total + 0.003, "excess_")
            yield (
                "compound",
                where
                | {
                    "name": name,
                    **spread,
                    **COUNTS,
                    "delta_nats": 1.4 * total,
                    "ppl_pct": percent(1.4 * total),
                }
                | costs(1.4 * total, 0.2 * total, simultaneous=False)
                | {"sum_nats": total, "sum_lo": 0.9 * total, "sum_hi": 1.1 * total, "excess": 0.4 * total}
                | excess
                | {"linear_share": share}
                | {"verdict": "chosen on test" if tested else verdict(excess["excess_sim_lo"], 1.0)},
            )
    yield from progressive_rows(where, costs_of, order)


def progressive_rows(where: Row, costs_of: list[float], order: list[int]) -> Found:
    for chosen, growth in (("order", 0.08), ("greedy", 0.06)):
        before = 0.0
        for step in range(1, len(order) + 1):
            layers = order[:step]
            total = sum(costs_of[layer] for layer in layers)
            delta = total * (1 + growth * step)
            yield (
                "progressive",
                where
                | {"name": "linear", "chosen": chosen, "step": step, "layer": layers[-1]}
                | {
                    "layers": ",".join(map(str, layers)),
                    **COUNTS,
                    "delta_nats": delta,
                    "ppl_pct": percent(delta),
                }
                | costs(delta, 0.1 * delta, simultaneous=False)
                | {"delta_sim_lo": 0.8 * delta, "delta_sim_hi": 1.2 * delta, "added": delta - before}
                | ends(delta - before, 0.004, "added_", simultaneous=False)
                | {"sum_nats": total, "excess": delta - total}
                | ends(delta - total, 0.01, "excess_", simultaneous=False)
                | {"linear_share": 1.0, "mlp_flops_saved": SAVED * step / len(order)}
                | {"flops_saved": MLPS * SAVED * step / len(order)},
            )
            before = delta


def loss_rows(store: str, layer: int, linear: float) -> Found:
    where = {"store": store, "layer": layer}
    for need, low in (("loss", -1.0), ("kl", 0.0)):
        sd = 0.25 if need == "loss" else 0.08
        quantiles = {"q01": -2.3, "q05": -1.2, "q10": -0.7, "q25": -0.2, "q50": 0.0, "q75": 0.25}
        quantiles |= {"q90": 0.8, "q95": 1.4, "q99": 2.9, "max": 12.0}
        shown = {
            name: max(linear * 0.2 + sd * z, low if need == "kl" else -9.0) for name, z in quantiles.items()
        }
        yield (
            "losses",
            where
            | {"need": need, **COUNTS, "mean": linear}
            | {"mean_lo": linear - 0.004, "mean_hi": linear + 0.004, "sd": sd, **shown, "median_abs": 0.04}
            | {"share_negative": 0.44 if need == "loss" else 0.0, "share_negative_lo": 0.43}
            | {"share_negative_hi": 0.45, "share_small": 0.62, "top5_share": 0.55},
        )
        edges = np.linspace(low, 1.0, 41)
        count = 16_000 * np.exp(-np.abs(edges[:-1] - linear) / sd)
        for at, n in enumerate(count):
            bins = {"bin_lo": float(edges[at]), "bin_hi": float(edges[at + 1]), "count": int(n)}
            yield "loss_histogram", where | {"need": need, **bins}
    gap = 0.004 * (1 if layer % 3 else -1)
    yield (
        "kl_loss",
        where
        | {**COUNTS, "mean_loss": linear, "mean_kl": linear - gap, "difference": gap}
        | ends(gap, 0.002, "difference_")
        | {"p_holm": 0.01, "slope": 0.9, "slope_lo": 0.7, "slope_hi": 1.1, "r2": 0.18, "r2_lo": 0.12}
        | {"r2_hi": 0.25, "spearman": 0.12, "spearman_lo": 0.1, "spearman_hi": 0.14}
        | {"verdict": verdict(gap - 0.0032, gap + 0.0032)},
    )
    for at, a in enumerate(NEEDS):
        for b in NEEDS[at + 1 :]:
            rho = 0.75 if {a, b} == {"loss", "loss_estimate"} else 0.3 if "error" in (a, b) else 0.12
            rho -= 0.02 * layer
            yield (
                "need_agreement",
                where
                | {"need_a": a, "need_b": b, **COUNTS, "spearman": rho}
                | ends(rho, 0.02)
                | {"p_holm": 0.001, "verdict": verdict(rho - 0.032, rho + 0.032)},
            )
    yield (
        "noise_floor",
        where
        | {"dtype": "bfloat16", "finer_dtype": "float32", **COUNTS, "median_abs_loss": 0.04}
        | {"floor": 0.011, "floor_q95": 0.04, "base_floor": 0.009, "mean_difference": 0.0001}
        | {"mean_lo": -0.0004, "mean_hi": 0.0006, "spearman": 0.97, "labels_changed": 0.06}
        | {"labels_usable": layer != 1},
    )
    rho = 0.9 - 0.03 * layer
    yield (
        "estimate",
        where
        | {"n_patches": 200, "n_groups": 61, "spearman": rho}
        | ends(rho, 0.05, "spearman_")
        | {"mean_estimate": 0.8 * linear, "mean_loss_single": linear, "bias": -0.2 * linear}
        | {"bias_lo": -0.3 * linear, "bias_hi": -0.1 * linear, "slope": 1.1, "slope_lo": 0.9, "slope_hi": 1.3}
        | {"within_position": rho - 0.08, "within_position_lo": rho - 0.16, "within_position_hi": rho}
        | {"n_sequences": 80, "sequence_spearman": 0.6, "sequence_spearman_lo": 0.4}
        | {"sequence_spearman_hi": 0.8, "sequence_bias": -0.4, "sequence_slope": 0.8}
        | {"verdict": "supported"},
    )


def budget_rows(stores: tuple[str, ...], n_layers: int) -> Found:
    whole = ",".join(map(str, range(n_layers)))
    five = ",".join(map(str, range(min(5, n_layers))))
    for phase in ("prefill", "decode"):
        for name, layers, store, share in (
            ("original", "", None, 0.0),
            ("linear", five, None, 1.0),
            ("linear", whole, None, 1.0),
            ("gated@input", five, stores[0], 0.45),
        ):
            part = share * (len(layers.split(",")) if layers else 0) / n_layers * SAVED
            where = {"name": name, "kind": name.partition("@")[0], "layers": layers}
            where |= {
                "n_layers": len(layers.split(",")) if layers else 0,
                "phase": phase,
                "sequence_length": LENGTH,
            }
            yield (
                "budget",
                where
                | {"store": store, "share": share, "mlp_flops": 4e7 * (1 - part), "attention_flops": 1.5e7}
                | {"surrogate_flops": 4e6 * share, "gate_flops": 1e4, "head_flops": 4e7, "other_flops": 5e6}
                | {"total_flops": 1e8 * (1 - MLPS * part), "original_flops": 1e8, "mlp_flops_saved": part}
                | {"flops_saved": MLPS * part, "parameters": 12_000_000, "parameters_saved": -int(3e6 * part)}
                | {"parameters_saved_at_most": int(3e6 * part)},
            )
            for size in (1, 8):
                ratio = 1 - 0.3 * part if name != "gated@input" else 1.04
                yield (
                    "timing",
                    where
                    | {"device": "cpu", "dtype": "float32", "threads": 2, "batch_size": size}
                    | {"n_steps": 1 if phase == "prefill" else 16, "n_runs": 9, "share": share}
                    | {"seconds": 0.1 * ratio * size, "seconds_q25": 0.098 * ratio * size}
                    | {"seconds_q75": 0.103 * ratio * size, "tokens_per_second": 2560 / ratio}
                    | {"original_seconds": 0.1 * size, "ratio": ratio, "ratio_q25": ratio - 0.02}
                    | {"ratio_q75": ratio + 0.02, "time_saved": 1 - ratio, "flops_saved": MLPS * part},
                )


def make_cost_tables(
    stores: tuple[str, ...] = ("gpt2-python", "gpt2-scientific"), *, n_layers: int = 12, seed: int = 0
) -> Rows:
    """Rows of every table of a measurement, by name."""
    rng = np.random.default_rng(seed)
    found: list[tuple[str, Row]] = list(budget_rows(stores, n_layers))
    for store in stores:
        where = {"store": store, "sequence_length": LENGTH}
        costs_of = [cost_of(layer, n_layers) * float(rng.uniform(0.8, 1.2)) for layer in range(n_layers)]
        for layer, linear in enumerate(costs_of):
            found += [*layer_rows(where, layer, linear), *loss_rows(store, layer, linear)]
            found.append(("context_lengths", length_row(store, layer, linear)))
        found += set_rows(where, costs_of)
    rows: Rows = {}
    for name, row in found:
        rows.setdefault(name, []).append({column: row[column] for column in MEASURE_SCHEMAS[name].names})
    return rows


def length_row(store: str, layer: int, linear: float) -> Row:
    more = 0.1 * linear
    return {
        "store": store,
        "layer": layer,
        "name": "linear",
        "shorter": LENGTH // 2,
        "longer": LENGTH,
        "n_tokens_shorter": 15_700,
        "n_tokens_longer": 15_800,
        "n_groups": 255,
        "cost_shorter": linear - more,
        "cost_longer": linear,
        "difference": more,
        **ends(more, 0.002),
        "p_holm": 0.2,
        "verdict": verdict(more - 0.0032, more + 0.0032),
    }

"""The tables of a measurement: their columns, types and order, one schema a table.

`measured` holds sums over groups, as the model gave them; every other table is computed from it, or from the
needs `loss` and `kl` of single rows, and can be computed again without the model. Costs are in nats a token;
`lo`, `hi` are 95 % bounds of one number by itself, `sim_lo`, `sim_hi` of a whole family at once.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

from .schemas import FLAG, INT, REAL, TEXT, reals, schema

# One row for each (store, split, window length, intervention, layers, draw, group). `layers`: numbers with
# commas, in the order of `chosen` where that is an order. `chosen`: "one" for a layer by itself, "given" for
# a set that was written down, "all", "cheapest@N", "paper@N", or "order" and "greedy" for the steps of a
# progressive curve. `name` is without a draw; `draw` is −1 where there are none. The last columns are sums
# over the scored rows of the group; where several layers are replaced, n_linear and n_covered count a row
# once for each of them.
_MEASURED: Final = schema(
    store=TEXT,
    split=TEXT,
    sequence_length=INT,
    **dict.fromkeys("name kind layers chosen".split(), TEXT),
    draw=INT,
    group=INT,
    n_tokens=INT,
    **reals("base_nll nll kl"),
    n_linear=INT,
    n_covered=INT,
)

# What names a result: `layer` is null for sets of layers, which `layers` writes out.
_WHERE: Final = {"store": TEXT, "sequence_length": INT}
_SET: Final = {"layer": INT, "layers": TEXT, "n_layers": INT, "chosen": TEXT}
_COUNTS: Final = {"n_tokens": INT, "n_groups": INT}

COST_SCHEMAS: Final = {
    "measured": _MEASURED,
    "interventions": schema(
        **_WHERE,
        name=TEXT,
        kind=TEXT,
        **_SET,
        **dict.fromkeys("chosen_on fit_positions replaced_positions".split(), TEXT),
        **_COUNTS,
        n_draws=INT,
        **reals("base_ppl ppl delta_nats delta_lo delta_hi delta_sim_lo delta_sim_hi"),
        **reals("ppl_pct ppl_lo ppl_hi ppl_sim_lo ppl_sim_hi p_holm kl kl_lo kl_hi draw_sd"),
        **reals("linear_share mlp_flops_saved flops_saved"),
        verdict=TEXT,
    ),
    "routers": schema(
        **_WHERE,
        **_SET,
        router=TEXT,
        against=TEXT,
        **_COUNTS,
        **reals("share share_router share_against cost_router cost_against"),
        **reals("difference lo hi sim_lo sim_hi p_holm"),
        verdict=TEXT,
    ),
    "pareto": schema(
        **_WHERE,
        **_SET,
        name=TEXT,
        kind=TEXT,
        **_COUNTS,
        **reals("linear_share mlp_flops_saved flops_saved delta_nats delta_lo delta_hi"),
        available_at_routing=FLAG,
        on_front=FLAG,
    ),
    "compound": schema(
        **_WHERE,
        name=TEXT,
        **_SET,
        chosen_on=TEXT,
        **_COUNTS,
        **reals("delta_nats delta_lo delta_hi ppl_pct ppl_lo ppl_hi sum_nats sum_lo sum_hi"),
        **reals("excess excess_lo excess_hi excess_sim_lo excess_sim_hi linear_share"),
        verdict=TEXT,
    ),
    "progressive": schema(
        **_WHERE,
        name=TEXT,
        chosen=TEXT,
        step=INT,
        layer=INT,  # the one that came last
        layers=TEXT,
        **_COUNTS,
        **reals("delta_nats delta_lo delta_hi delta_sim_lo delta_sim_hi ppl_pct ppl_lo ppl_hi"),
        **reals("added added_lo added_hi sum_nats excess excess_lo excess_hi"),
        **reals("linear_share mlp_flops_saved flops_saved"),
    ),
    "sinks": schema(
        **_WHERE,
        layer=INT,
        name=TEXT,
        **_COUNTS,
        **reals("covered_nats all_nats covered_pct all_pct difference lo hi sim_lo sim_hi p_holm"),
        verdict=TEXT,
    ),
    "context_lengths": schema(
        store=TEXT,
        layer=INT,
        name=TEXT,
        shorter=INT,
        longer=INT,
        n_tokens_shorter=INT,
        n_tokens_longer=INT,
        n_groups=INT,
        **reals("cost_shorter cost_longer difference lo hi sim_lo sim_hi p_holm"),
        verdict=TEXT,
    ),
    "paper_selection": schema(
        **_WHERE,
        layer=INT,
        n_candidates=INT,
        picked=TEXT,
        fixed=TEXT,
        **_COUNTS,
        **reals("picked_nats picked_pct"),
        picked_below_base=FLAG,
        **reals("heldout_nats heldout_lo heldout_hi bias"),
        **reals("fixed_nats fixed_lo fixed_hi fixed_sim_lo fixed_sim_hi fixed_pct p_holm"),
        verdict=TEXT,
    ),
    "losses": schema(
        store=TEXT,
        layer=INT,
        need=TEXT,
        **_COUNTS,
        **reals("mean mean_lo mean_hi sd q01 q05 q10 q25 q50 q75 q90 q95 q99 max median_abs"),
        **reals("share_negative share_negative_lo share_negative_hi share_small top5_share"),
    ),
    "loss_histogram": schema(store=TEXT, layer=INT, need=TEXT, bin_lo=REAL, bin_hi=REAL, count=INT),
    "kl_loss": schema(
        store=TEXT,
        layer=INT,
        **_COUNTS,
        **reals("mean_loss mean_kl difference difference_lo difference_hi"),
        **reals("difference_sim_lo difference_sim_hi p_holm"),
        **reals("slope slope_lo slope_hi r2 r2_lo r2_hi spearman spearman_lo spearman_hi"),
        verdict=TEXT,
    ),
    "need_agreement": schema(
        store=TEXT,
        layer=INT,
        need_a=TEXT,
        need_b=TEXT,
        **_COUNTS,
        **reals("spearman lo hi sim_lo sim_hi p_holm"),
        verdict=TEXT,
    ),
    "noise_floor": schema(
        store=TEXT,
        layer=INT,
        dtype=TEXT,
        finer_dtype=TEXT,
        **_COUNTS,
        **reals("median_abs_loss floor floor_q95 base_floor mean_difference mean_lo mean_hi"),
        **reals("spearman labels_changed"),
        labels_usable=FLAG,
    ),
}


def to_cost_table(name: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """The table `name` with these rows, in their order; a row that lacks a column or brings one more is
    refused.
    """
    columns: dict[str, list[Any]] = {column: [] for column in COST_SCHEMAS[name].names}
    for row in rows:
        if row.keys() != columns.keys():
            raise ValueError(f"table {name}: row and columns differ in {sorted(row.keys() ^ columns.keys())}")
        for column, value in row.items():
            columns[column].append(value)
    arrays = [pa.array(columns[field.name], field.type) for field in COST_SCHEMAS[name]]
    return pa.table(arrays, schema=COST_SCHEMAS[name])

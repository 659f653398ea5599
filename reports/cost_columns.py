"""Which tables and columns of a measurement a report reads: those that `nearline measure` writes.

Each is read where it is there; a column that is not named here may come or go without a word. Rows keep the
order in which they were written, store by store.
"""

from typing import Final

STEP: Final = "measure"

_COLUMNS = {
    "interventions": """
        store sequence_length name kind layer layers n_layers chosen chosen_on replaced_positions n_tokens
        n_groups n_draws base_ppl ppl delta_nats delta_lo delta_hi delta_sim_lo delta_sim_hi ppl_pct ppl_lo
        ppl_hi ppl_sim_lo ppl_sim_hi p_holm kl linear_share mlp_flops_saved flops_saved draw_sd verdict
    """,
    "routers": """
        store sequence_length layer layers n_layers chosen router against n_tokens n_groups share
        share_router share_against cost_router cost_against difference lo hi sim_lo sim_hi p_holm verdict
    """,
    "pareto": """
        store sequence_length layer layers n_layers chosen name kind linear_share delta_nats delta_lo
        delta_hi available_at_routing on_front
    """,
    "compound": """
        store sequence_length name layers n_layers chosen chosen_on n_tokens n_groups delta_nats delta_lo
        delta_hi ppl_pct ppl_lo ppl_hi sum_nats sum_lo sum_hi excess excess_lo excess_hi excess_sim_lo
        excess_sim_hi linear_share verdict
    """,
    "progressive": """
        store sequence_length name chosen step layer layers n_tokens n_groups delta_nats delta_lo delta_hi
        delta_sim_lo delta_sim_hi ppl_pct ppl_lo ppl_hi added added_lo added_hi sum_nats excess excess_lo
        excess_hi linear_share mlp_flops_saved flops_saved
    """,
    "sinks": """
        store sequence_length layer name n_tokens n_groups covered_nats all_nats covered_pct all_pct
        difference lo hi sim_lo sim_hi p_holm verdict
    """,
    "context_lengths": """
        store layer name shorter longer n_tokens_shorter n_tokens_longer n_groups cost_shorter cost_longer
        difference lo hi sim_lo sim_hi p_holm verdict
    """,
    "paper_selection": """
        store sequence_length layer n_candidates picked fixed n_tokens n_groups picked_nats picked_pct
        picked_below_base heldout_nats heldout_lo heldout_hi bias fixed_nats fixed_lo fixed_hi fixed_sim_lo
        fixed_sim_hi fixed_pct p_holm verdict
    """,
    "losses": """
        store layer need n_tokens n_groups mean mean_lo mean_hi sd q01 q05 q10 q25 q50 q75 q90 q95 q99 max
        median_abs share_negative share_negative_lo share_negative_hi share_small top5_share
    """,
    "loss_histogram": "store layer need bin_lo bin_hi count",
    "kl_loss": """
        store layer n_tokens n_groups mean_loss mean_kl difference difference_lo difference_hi
        difference_sim_lo difference_sim_hi p_holm slope slope_lo slope_hi r2 r2_lo r2_hi spearman
        spearman_lo spearman_hi verdict
    """,
    "need_agreement": """
        store layer need_a need_b n_tokens n_groups spearman lo hi sim_lo sim_hi p_holm verdict
    """,
    "noise_floor": """
        store layer dtype finer_dtype n_tokens n_groups median_abs_loss floor floor_q95 base_floor
        mean_difference mean_lo mean_hi spearman labels_changed labels_usable
    """,
    "estimate": """
        store layer n_patches n_groups spearman spearman_lo spearman_hi spearman_sim_lo spearman_sim_hi
        mean_estimate mean_loss_single bias bias_lo bias_hi slope slope_lo slope_hi within_position
        within_position_lo within_position_hi n_sequences sequence_spearman sequence_spearman_lo
        sequence_spearman_hi sequence_bias sequence_slope verdict
    """,
    "budget": """
        store name kind layers n_layers phase sequence_length share mlp_flops attention_flops other_flops
        surrogate_flops gate_flops head_flops total_flops original_flops mlp_flops_saved flops_saved
        parameters parameters_saved parameters_saved_at_most
    """,
    "timing": """
        name kind layers n_layers phase sequence_length device dtype threads batch_size n_steps n_runs share
        seconds seconds_q25 seconds_q75 tokens_per_second original_seconds ratio ratio_q25 ratio_q75
        time_saved flops_saved
    """,
}
COST_COLUMNS: dict[str, tuple[str, ...]] = {table: tuple(names.split()) for table, names in _COLUMNS.items()}
OF_THE_MODEL: Final = ("budget", "timing", "finetune_timing")
"""Tables that are about the model: a row may belong to no store."""

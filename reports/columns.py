"""Which tables and columns a report reads, in which order of rows, and which command writes each table.

The tables of the fit must be there; those of the analyses and of a measurement (`OPTIONAL`) are read where
these were run. A column that is not named here may come or go without a word.
"""

from collections.abc import Mapping

from .cost_columns import COST_COLUMNS
from .cost_columns import STEP as MEASURE
from .tuning_columns import STEP as FINETUNE
from .tuning_columns import TUNING_COLUMNS

QUANTILES = ("q01", "q05", "q10", "q25", "q50", "q75", "q90", "q95", "q99")

_COLUMNS = {
    "harvest": """
        store model model_type revision weights_hash corpus n_tokens n_fit n_gate n_test n_documents n_groups
        n_groups_fit n_groups_test n_layers d_model storage_dtype compute_dtype attention sequence_length
        bos passages n_targets ppl ppl_test ppl_test_lo ppl_test_hi sample digest proof
    """,
    "surrogates": """
        store layer fit_on alpha r2_fit r2_cv r2_test r2_lo r2_hi r2_sim_lo r2_sim_hi r2_contribution r2_sink
        largest_row condition tokens_per_feature n_test_tokens n_sink verdict
    """,
    "needs": f"""
        store layer need split population n_tokens n_groups mean mean_lo mean_hi sd skew max top5_share
        share_below_half share_below_half_lo share_below_half_hi
        share_below_one share_below_one_lo share_below_one_hi {" ".join(QUANTILES)}
    """,
    "need_histogram": "store layer need bin_lo bin_hi count",
    "examples": "store layer need kind rank value before token after document_key position",
}
_OPTIONAL = {
    "learning_curve": "store layer fraction n_tokens n_groups alpha r2_fit r2_test",
    "ranks": "store layer rank r2_test",
    "variants": "store layer variant n_tokens alpha penalty condition r2_body r2_sink r2_all",
    "decomposition": """
        store layer fit_on n_tokens n_groups identity_error alpha
        token_in_context token_in_context_lo token_in_context_hi
    """,
    "output_shares": """
        store layer split_by part n_tokens n_groups share share_lo share_hi variance covariance
    """,
    "variance": """
        store layer need key n_tokens n_types n_groups coverage share share_lo share_hi share_sim_lo
        share_sim_hi epsilon_squared type_weighted_share verdict
    """,
    "gates": """
        store fit_on layer need features size available_at_routing n_parameters n_tokens n_groups
        n_gate_tokens n_gate_groups base_rate auc auc_lo auc_hi auc_sim_lo auc_sim_hi p_holm ap brier
        brier_base calibration_slope calibration_intercept share need_share threshold C verdict
    """,
    "gate_labels": "store layer need rule cut share_gate share_test share_below_half share_below_one",
    "gate_curves": "store layer need features size share need_share",
    "gate_calibration": """
        store layer need features size bin n_tokens predicted observed observed_lo observed_hi
    """,
    "gate_differences": """
        store layer need claim larger smaller n_tokens n_groups auc_larger auc_smaller difference lo hi
        sim_lo sim_hi within within_sim_lo within_sim_hi p_holm verdict
    """,
    "nofly": """
        store_a store_b surrogate layer need key n_types n_tokens_a n_tokens_b n_groups_a n_groups_b r r_lo
        r_hi spearman reliability_a reliability_b ceiling r_disattenuated r_disattenuated_lo
        r_disattenuated_hi r_disattenuated_sim_lo r_disattenuated_sim_hi p_permutation p_holm threshold
        list_size found persisted flipped list_mean_a list_mean_b paper_r half_list_size found_heldout
        persisted_heldout flipped_heldout half_list_mean list_mean_a_heldout half_list_mean_b
        paper_r_heldout verdict
    """,
    "nofly_tokens": "store_a store_b surrogate layer need key rank token_id text mean_a mean_b n_a n_b",
    "clusters": """
        store fit_on layer need n_clusters n_components n_tokens n_groups clean_clusters variance_explained
        auc auc_lo auc_hi auc_sim_lo auc_sim_hi p_holm verdict
    """,
    "regression": "store layer need n_tokens n_groups r2_fit r2_test r2_lo r2_hi r2_sim_lo r2_sim_hi verdict",
    "regression_terms": "store layer need term coefficient lo hi r",
}
COLUMNS: Mapping[str, tuple[str, ...]] = {table: tuple(names.split()) for table, names in _COLUMNS.items()}
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    table: tuple(names.split()) for table, names in _OPTIONAL.items()
} | {**COST_COLUMNS, **TUNING_COLUMNS}

# Beside the store, which comes first. Where a table's own order says something (feature sets, terms, tokens
# of a list by rank), rows of a layer keep it: sorting is stable.
ORDER: Mapping[str, tuple[str, ...]] = {
    "harvest": (),
    "surrogates": ("layer",),
    "needs": ("layer", "need", "split", "population"),
    "need_histogram": ("layer", "need", "bin_lo"),
    "examples": ("layer", "need", "kind", "rank"),
    "learning_curve": ("layer", "fraction"),
    "ranks": ("layer", "rank"),
    "gate_curves": ("layer", "share"),
    "gate_calibration": ("layer", "bin"),
    "nofly_tokens": ("layer", "rank"),
} | dict.fromkeys((*COST_COLUMNS, *TUNING_COLUMNS), ())
MAY_BE_EMPTY = frozenset({"examples"})

# What writes the optional tables; one that is not named here comes with the fit.
ANALYSIS_TABLES: Mapping[str, tuple[str, ...]] = {
    "decomposition": ("decomposition", "output_shares"),
    "identity": ("variance",),
    "gates": ("gates", "gate_labels", "gate_curves", "gate_calibration", "gate_differences"),
    "nofly": ("nofly", "nofly_tokens"),
    "clusters": ("clusters",),
    "regression": ("regression", "regression_terms"),
}


def analysis_of(table: str) -> str | None:
    """The analysis that writes a table; None where the fit or a measurement does."""
    return next((name for name, tables in ANALYSIS_TABLES.items() if table in tables), None)


def step_of(table: str) -> str:
    """The step that writes a table."""
    return analysis_of(table) or (
        MEASURE if table in COST_COLUMNS else FINETUNE if table in TUNING_COLUMNS else "fit"
    )

"""Which tables and columns of a fine-tuning a report reads: those that `nearline finetune` writes.

Each is read where it is there; a column that is not named here may come or go without a word. Rows keep the
order in which they were written, store by store.
"""

from typing import Final

from .cost_columns import COST_COLUMNS

STEP: Final = "finetune"

_COLUMNS = {
    "finetune": "arm seed learning_rate chosen phase step tokens_seen store split n_tokens n_groups nll ppl",
    "finetune_gates": "arm seed chosen step store split layer mean_gate share_linear",
    "finetune_work": "arm seed store layers mean_gate share_linear mlp_flops_saved flops_saved",
    "finetune_summary": """
        arm against store seed step tokens_seen distinct_tokens last n_tokens n_groups excess lo hi excess_pct
        lo_pct hi_pct verdict
    """,
}
TUNING_COLUMNS: Final = {table: tuple(names.split()) for table, names in _COLUMNS.items()} | {
    "finetune_timing": COST_COLUMNS["timing"]
}

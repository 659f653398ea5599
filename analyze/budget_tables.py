"""The tables `budget` and `timing`: what replaced MLPs save on paper, and what they save on the clock.

`budget` counts floating-point operations of one token (a multiplication and an addition are two), at the
shares of tokens that went linear. `timing` holds seconds of the same configurations, measured side by side on
one device, with the saving of FLOPs that `budget` promises for them next to the time that was saved. Both
name configurations alike: `name` is that of an intervention, or `original`; `layers` are numbers with commas.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

from .schemas import INT, TEXT, reals, schema

ORIGINAL: Final = "original"
PREFILL, DECODE = "prefill", "decode"

# What names a configuration. `share`: of all tokens, sinks included, that went linear, the mean over the
# layers replaced; 0 for the original. `store`: where that share was measured; null where it follows from the
# name. `phase`: prefill is the mean over the positions of a window of `sequence_length` tokens; decode one
# more token behind so many.
_CONFIGURATION: Final = {
    **dict.fromkeys("name kind layers".split(), TEXT),
    "n_layers": INT,
    "phase": TEXT,
    "sequence_length": INT,
}

BUDGET_SCHEMAS: Final = {
    # FLOPs a token by module, of the whole model as it then runs. `mlp_flops_saved` is a share of the MLPs of
    # all layers (less what surrogates and gates cost), `flops_saved` of the whole model.
    # `parameters_saved`: those that are not needed any more, less those that came: negative wherever some
    # tokens keep the MLP, as sinks do. `parameters_saved_at_most`: were sinks replaced too.
    "budget": schema(
        store=TEXT,
        **_CONFIGURATION,
        **reals("share mlp_flops attention_flops other_flops surrogate_flops gate_flops head_flops"),
        **reals("total_flops original_flops mlp_flops_saved flops_saved"),
        parameters=INT,
        parameters_saved=INT,
        parameters_saved_at_most=INT,
    ),
    # Of `n_runs` interleaved runs each: seconds of one run (`seconds` is the median, q25 and q75 quartiles).
    # `ratio` is the median of seconds over those of the original's run in the same round; `time_saved` is
    # 1 − ratio. A prefill run is one forward pass; a decode run is `n_steps` tokens one after the other.
    "timing": schema(
        **_CONFIGURATION,
        **dict.fromkeys("device dtype".split(), TEXT),
        threads=INT,
        batch_size=INT,
        n_steps=INT,
        n_runs=INT,
        **reals("share seconds seconds_q25 seconds_q75 tokens_per_second"),
        **reals("original_seconds ratio ratio_q25 ratio_q75 time_saved flops_saved"),
    ),
}


def to_budget_table(name: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """The table `name` with these rows, in their order; a row that lacks a column or brings one more is
    refused.
    """
    columns: dict[str, list[Any]] = {column: [] for column in BUDGET_SCHEMAS[name].names}
    for row in rows:
        if row.keys() != columns.keys():
            raise ValueError(f"table {name}: row and columns differ in {sorted(row.keys() ^ columns.keys())}")
        for column, value in row.items():
            columns[column].append(value)
    arrays = [pa.array(columns[field.name], field.type) for field in BUDGET_SCHEMAS[name]]
    return pa.table(arrays, schema=BUDGET_SCHEMAS[name])

"""The figures of a fine-tuning: the excess of arms over their control, and losses of all arms, by tokens.

In: the tables `finetune` and `finetune_summary`. Out: HTML. Cost: two figures of small panels.
"""

import polars as pl

from . import text
from .axes import ends_of
from .figure import figure
from .multiples import Panel, curves, panel
from .results import Results

CONTROL = "control_matched"
_SHOWN = (
    *("control", CONTROL, "linear", "linear_trainable", "gated", "gated_hard", "restored", "scaled"),
    *("gate_only", "scale_only", "mean", "zero"),
)

_CURVES = (
    "Mean loss on test rows less that of the model before any step, in nats a token, by tokens trained on; "
    "the mean over seeds, bars from the lowest seed to the highest. Dashed: 0, the model as it was. Every "
    "arm of a seed saw the same windows in the same order (tokens are means over seeds), "
    "each at its own learning rate. An arm has shown something only where it lies below its control at equal "
    "tokens. "
    "<em>control</em> trains everything and replaces nothing; <em>control_matched</em> trains what "
    "<em>linear</em> may; <em>restored</em> has its MLPs back after <em>linear</em>; <em>scaled</em> has a "
    "gate on the MLP and no linear path; <em>gated_hard</em> sends each token down one path of "
    "<em>gated</em>. These four begin as <em>linear</em>: where they leave its curve, the MLPs are back or "
    "gates begin, and nothing else learns any more. What lies beyond the axis is drawn on its edge."
)
_EXCESS = (
    "Mean loss on test rows less that of <em>control_matched</em> after the same tokens of the same windows, "
    "by tokens trained on: the mean over seeds, bars from the lowest bound of a seed to the highest (95 %, "
    "over documents). Below the dashed line an arm is better than its control; above it training with the "
    "MLPs as they were would have given more."
)
_PAPER = (
    "The paper (2603.03459) reports −10.2 % for four linear layers of GPT-2 Medium after 512k tokens, and "
    "−17.3 % for gates after 1.28M, against the untuned model; its control run with nothing replaced reached "
    "−20.6 % after 512k. Compared at equal tokens, as here, its linear arm is 13 % worse than its control."
)


def _by_arm(rows: pl.DataFrame) -> list[Panel]:
    """A panel an arm, in the order of `_SHOWN`."""
    of = {arm: rows.filter(pl.col("arm") == arm).sort("series", "step") for arm in _SHOWN}
    return [
        panel(arm, frame, "mean", ("lo", "hi"), x="tokens")
        for arm, frame in of.items()
        if not frame.is_empty()
    ]


def _panels(results: Results) -> list[Panel]:
    frame = results.tables["finetune"].filter("chosen", pl.col("split") == "test")
    start = frame.filter(pl.col("arm") == "base").select("series", base="nll")
    change = frame.join(start, on="series").with_columns(change=pl.col("nll") - pl.col("base"))
    # Where a second phase begins, it speaks for the step.
    change = change.filter(pl.col("phase") == pl.col("phase").max().over("arm", "seed", "step"))
    by_seed = change.group_by("arm", "series", "step", maintain_order=True).agg(
        tokens=pl.col("tokens_seen").mean(),
        mean=pl.col("change").mean(),
        lo=pl.col("change").min(),
        hi=pl.col("change").max(),
    )
    return _by_arm(by_seed)


def _excess_panels(results: Results) -> list[Panel]:
    """Excess over the matched control at every point that both have."""
    rows = results.tables["finetune_summary"].filter(pl.col("against") == CONTROL)
    by_seed = rows.group_by("arm", "series", "step", maintain_order=True).agg(
        tokens=pl.col("tokens_seen").mean(),
        mean=pl.col("excess").mean(),
        lo=pl.col("lo").min(),
        hi=pl.col("hi").max(),
    )
    return _by_arm(by_seed)


def _drawn(
    results: Results, name: str, finding: str, how: str, panels: list[Panel], value: str, note: str
) -> str:
    if not panels:
        return ""
    domain = ends_of(panels)
    axes = ("tokens trained on", f"{value} [nats a token]")
    return figure(
        name,
        results,
        finding,
        how,
        lambda size: curves(panels, axes=axes, domain=domain, rule=0.0, size=size),
        note,
    )


def figures(results: Results, claim: str) -> list[str]:
    """Both; without a matched control the losses alone, under `claim`."""
    most = max(results.tables["finetune"]["tokens_seen"].to_list())
    note = f"{_PAPER} This run: {text.count(most)} tokens at most."
    excess, losses = _excess_panels(results), _panels(results)
    lead = f"Losses of every arm along {text.count(most)} tokens"
    return [
        _drawn(results, "excess", claim, _EXCESS, excess, "excess over the control", note),
        _drawn(results, "tuning", lead if excess else claim, _CURVES, losses, "change of loss", ""),
    ]

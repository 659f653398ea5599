"""Section "Does training with linear MLPs gain anything?": arms of a fine-tuning against matched controls.

In: the tables `finetune` and `finetune_summary`, and `finetune_gates` where gates were trained. Out: HTML,
empty without them. Cost: one figure, three tables.
"""

from collections.abc import Sequence
from typing import Any

import polars as pl

from . import findings, text
from .budget_section import times_table
from .layout import numbers, section
from .results import Results
from .sections import grouping
from .tables import Column, Row, between, house, value
from .tuning_figures import CONTROL, figures

KEY, HEADING = "tuning", "Does training with linear MLPs gain anything?"


def _last(results: Results) -> pl.DataFrame:
    return results.tables["finetune_summary"].filter("last")


def claim(results: Results) -> str:
    """What the linear arm, or the first one there is, gained over its control on each corpus."""
    rows = _last(results)
    pairs = [
        (arm, other)
        for arm, other in rows.select("arm", "against").unique(maintain_order=True).rows()
        if other != "base"
    ]
    if not pairs:
        return "No arm was compared with a control"
    chosen = ("linear", CONTROL) if ("linear", CONTROL) in pairs else pairs[0]
    mine = rows.filter(pl.col("arm") == chosen[0], pl.col("against") == chosen[1])
    found = []
    for (series,), frame in mine.group_by("series", maintain_order=True):
        where = f" on {findings.label(results, int(str(series)), 40)}" if len(results.stores) > 1 else ""
        change = text.change(_mean(frame["excess_pct"].to_list()))
        low, high = frame["lo_pct"].drop_nulls().to_list(), frame["hi_pct"].drop_nulls().to_list()
        ends = text.change_interval(min(low, default=None), max(high, default=None))
        found.append(f"{change} {ends} of perplexity{where} ({text.name(frame['verdict'][0], 24)})")
    arm, other = (text.name(one, 24) for one in chosen)
    seeds = mine["seed"].n_unique()
    return (
        f"After the same {_seen(mine['tokens_seen'].to_list())}, {arm} against {other}: "
        f"{text.listing(found)}, over {seeds} {'seed' if seeds == 1 else 'seeds'}"
        f"{_unfinished(results, chosen[0])}{_at_an_end(results, chosen)}"
    )


def _seen(tokens: Sequence[int]) -> str:
    """What both arms of a pair saw: windows are drawn by seed, so that their tokens differ between seeds."""
    low, high = min(tokens), max(tokens)
    if low == high:
        return f"{text.count(low)} tokens"
    average = text.count(round(sum(tokens) / len(tokens)))
    return f"windows of each seed ({average} tokens on average, {text.count(low)} to {text.count(high)})"


def _unfinished(results: Results, arm: str) -> str:
    """Says so where an arm was still learning when it stopped: its last test loss on a corpus lies below the
    one before in every seed.
    """
    rows = results.tables["finetune"].filter("chosen", pl.col("split") == "test", pl.col("arm") == arm)
    # Where a second phase begins, it speaks for the step.
    rows = rows.sort("step", "phase", maintain_order=True).unique(
        ["series", "seed", "step"], keep="last", maintain_order=True
    )
    last = rows.group_by("series", "seed", maintain_order=True).agg(fell=pl.col("nll").diff().last())
    falls = last.group_by("series", maintain_order=True).agg((pl.col("fell") < 0).fill_null(False).all())
    there = falls.filter("fell")["series"].to_list()
    if not there:
        return ""
    where = [findings.label(results, at, 40) for at in sorted(there)]
    on = f" on {text.listing(where)}" if len(results.stores) > 1 else ""
    return (
        f"; the test loss of {text.name(arm, 24)} was still falling at its last points{on}, so that more "
        "tokens may change this"
    )


def _at_an_end(results: Results, arms: Sequence[str]) -> str:
    """Says so where the best learning rate of an arm is the largest or smallest of several: another one may
    be better yet, and a control that is not at its best flatters what is compared with it.
    """
    rows = results.tables["finetune"].filter(pl.col("phase") == 1, pl.col("arm") != "base")
    ends: dict[tuple[str, float], list[str]] = {}
    for arm in arms:
        of = rows.filter(pl.col("arm") == arm)
        tried, best = of["learning_rate"].unique().sort(), of.filter("chosen")["learning_rate"].unique()
        if len(tried) > 1 and len(best) == 1 and best[0] in (tried[0], tried[-1]):
            end = "larg" if best[0] == tried[-1] else "small"
            ends.setdefault((end, best[0]), []).append(text.name(arm, 24))
    return "".join(
        f"; {text.listing(names)} {'was' if len(names) == 1 else 'were'} best at the {end}est learning rate "
        f"tried ({rate:g}), and a {end}er one may be better"
        for (end, rate), names in ends.items()
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """None where a seed has no number: its training diverged."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def excess_table(results: Results) -> str:
    """Every arm against everything it is compared with, at the last point, seed by seed."""
    columns = [
        Column("arm", value("arm", lambda name: text.name(name, 24)), number=False),
        Column("against", value("against", lambda name: text.name(name, 24)), number=False),
        Column("verdict", value("verdict", lambda word: text.name(word, 24)), number=False),
        Column("seed", value("seed", str)),
        Column("tokens", value("tokens_seen", text.count)),
        Column("distinct", value("distinct_tokens", text.count)),
        Column("excess [nats a token]", value("excess", text.nats)),
        Column("95 % interval", between("lo", "hi", text.nats_interval)),
        Column("perplexity", value("excess_pct", text.change)),
        Column("95 % interval", between("lo_pct", "hi_pct", text.change_interval)),
        Column("groups", value("n_groups", text.count)),
    ]
    rows = _last(results).sort("series", maintain_order=True).to_dicts()
    return house(rows, columns, key="table-excess", caption=claim(results), group=grouping(results))


def curves_table(results: Results) -> str:
    """Every arm at every point, seed by seed, other learning rates too."""

    def rate(row: Row) -> str:
        return f"{row['learning_rate']:g}{'' if row['chosen'] else ' (not chosen)'}"

    columns = [
        Column("arm", value("arm", lambda name: text.name(name, 24)), number=False),
        Column("seed", value("seed", str)),
        Column("learning rate", rate, number=False),
        Column("step", value("step", text.count)),
        Column("tokens", value("tokens_seen", text.count)),
        Column("rows", value("split", lambda name: text.name(name, 8)), number=False),
        Column("loss [nats a token]", value("nll", lambda nats: text.number(nats, 4))),
        Column("perplexity", value("ppl", lambda ppl: text.number(ppl, 2))),
    ]
    rows = results.tables["finetune"].sort("series", maintain_order=True).to_dicts()
    return house(
        rows, columns, key="table-finetune", caption="Every point of every arm", group=grouping(results)
    )


def _starts(results: Results) -> str:
    """What a gate is before it learns."""
    start = results.analyses.get("finetune", {}).get("gate_start")
    if not isinstance(start, float):
        return "An untrained gate is the same for every token"
    low, high = text.number(start, 3), text.number(1 - start, 3)
    return f"Untrained gates stand at {low}, those of scaled and scale_only at {high}"


def gates_table(results: Results) -> str:
    """How far gates went linear at the end, by layer."""
    frame = results.tables["finetune_gates"].filter("chosen", pl.col("split") == "test")
    last = frame.filter(pl.col("step") == pl.col("step").max().over("arm"))
    columns = [
        Column("layer", value("layer", str)),
        Column("arm", value("arm", lambda name: text.name(name, 24)), number=False),
        Column("seed", value("seed", str)),
        Column("mean gate", value("mean_gate", lambda gate: text.number(gate, 3))),
        Column("rows with g below 0.5", value("share_linear", text.percent)),
    ]
    rows: list[dict[str, Any]] = last.sort("series", maintain_order=True).to_dicts()
    caption = (
        "Gates at the end, layer by layer: output = g · MLP + (1 − g) · surrogate, for scaled and scale_only "
        f"g · MLP. {_starts(results)}"
    )
    return house(rows, columns, key="table-tuned-gates", caption=caption, group=grouping(results))


def work_table(results: Results) -> str:
    """What every arm computes at its end: the mean over seeds."""
    frame = results.tables["finetune_work"].filter(pl.col("layers") != "")
    means = [pl.col(name).mean() for name in ("mean_gate", "share_linear", "mlp_flops_saved", "flops_saved")]
    rows = frame.group_by("series", "arm", "layers", maintain_order=True).agg(*means, seeds=pl.len())
    columns = [
        Column("arm", value("arm", lambda name: text.name(name, 24)), number=False),
        Column("layers", value("layers", lambda layers: text.name(layers, 40)), number=False),
        Column("mean gate", value("mean_gate", lambda gate: text.number(gate, 3))),
        Column("tokens that need no MLP", value("share_linear", text.percent)),
        Column("of the MLPs", value("mlp_flops_saved", text.percent), spanner="FLOPs saved"),
        Column("of the model", value("flops_saved", text.percent), spanner="FLOPs saved"),
        Column("seeds", value("seeds", text.count)),
    ]
    caption = (
        "What each arm computes: a soft gate needs MLP and surrogate for every token, and so costs more than "
        "the model; a hard one (gated_hard) needs one of them"
    )
    return house(
        rows.sort("series", maintain_order=True).to_dicts(),
        columns,
        key="table-work",
        caption=caption,
        group=grouping(results),
    )


def is_there(results: Results) -> bool:
    """Whether there is anything to show."""
    return results.has("finetune", "finetune_summary")


def answers(results: Results) -> list[str]:
    """What the linear arm gained over its control."""
    return [claim(results)] if is_there(results) else []


def render(results: Results) -> str:
    """The section; nothing where nothing was fine-tuned."""
    if not is_there(results):
        return ""
    parts = [
        *figures(results, claim(results)),
        numbers("Every arm against its controls", excess_table(results)),
    ]
    if results.has("finetune_gates"):
        parts.append(numbers("Gates", gates_table(results)))
    if results.has("finetune_work"):
        parts.append(numbers("What each arm computes", work_table(results)))
    if results.has("finetune_timing"):
        table = times_table(results, "finetune_timing", "table-tuned-times")
        parts.append(numbers("Seconds", table))
    parts.append(numbers("Every point", curves_table(results)))
    return section(KEY, HEADING, *parts)

"""Sections of a measurement: there where the model was visited again, words as strong as verdicts, numbers in
tables, figures that keep their baselines."""

import html
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from helpers_reports import make_results, make_tables, write_study
from helpers_reports_analyses import make_analysis_tables
from helpers_reports_costs import LENGTH, MEASURE_SCHEMAS, Rows, make_cost_tables
from helpers_reports_pages import (
    HOSTILE,
    Structure,
    draw_nothing,
    draw_values,
    figures,
    plain,
    table,
    write_plain_tables,
)
from nearline.reports import (
    analyses,
    axes,
    budget_section,
    costs_findings,
    costs_section,
    dots,
    losses_findings,
    losses_section,
    losses_tables,
    page,
    pareto,
    progressive_curve,
    published,
    report,
    sets_section,
    svg,
    text,
    verdicts,
)
from nearline.reports.chart_style import NARROW, WIDE
from nearline.reports.cost_columns import COST_COLUMNS
from nearline.reports.multiples import Panel, curves, panel
from nearline.reports.results import Results, read
from nearline.store import DamageError, Study

STORES = ("gpt2-python", "gpt2-scientific")
FIGURES = {
    "costs": {"costs", "routers", "pareto"},
    "sets": {"sets", "progressive"},
    "budget": {"times"},
    "losses": {"losses", "kl", "agreement", "estimate"},
}
ALWAYS = {"r2", "need", "shares", "skew", "histograms"}
NOT_MEASURED = "Not measured: what replacing an MLP costs the model itself."


def everything(stores: tuple[str, ...] = STORES, n_layers: int = 4) -> Rows:
    return {**make_tables(stores, n_layers=n_layers), **make_cost_tables(stores, n_layers=n_layers)}


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)


@pytest.fixture
def bare(undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither drawings nor dressed tables."""
    write_plain_tables(monkeypatch)


@pytest.fixture
def charts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    write_plain_tables(monkeypatch)
    return draw_values(monkeypatch)


@pytest.fixture(scope="module")
def results() -> Results:
    return make_results(everything())


@pytest.fixture(scope="module")
def document(results: Results) -> str:
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        return page.render(results)


def test_every_section_stands_and_every_figure_has_its_sentence(document: str) -> None:
    assert figures(document) == ALWAYS.union(*FIGURES.values())
    Structure(document)
    found = set(re.findall(r'<section id="([a-z]+)"', document))
    assert set(FIGURES) <= found
    assert set(re.findall(r'href="#([^"]+)"', document)) <= set(re.findall(r' id="([^"]+)"', document))
    for figure in re.findall(r"<figure.*?</figure>", document, re.DOTALL):
        sentence = re.search(r"<strong>(.*?)\.</strong>", figure)
        assert sentence is not None
        assert figure.count(f'aria-label="{sentence[1]}"') == 2
    assert NOT_MEASURED not in document


@pytest.mark.usefixtures("undrawn")
def test_a_study_that_was_not_measured_says_what_does_it(tmp_path: Path) -> None:
    rows = make_tables(("only",), n_layers=2)
    shown = report(write_study(tmp_path / "demo", rows)).read_text("utf-8")
    assert figures(shown) == ALWAYS
    assert f"{NOT_MEASURED} <code>nearline measure STUDY</code> visits it again." in shown
    whole = make_results(rows | make_analysis_tables(("only",), n_layers=2))
    assert f'<p class="note">{NOT_MEASURED}' in analyses.not_run(whole)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("missing", COST_COLUMNS)
def test_a_table_that_is_not_there_leaves_its_part_out(missing: str) -> None:
    gone = {
        "interventions": FIGURES["costs"],
        "routers": {"routers"},
        "pareto": {"pareto"},
        "compound": {"sets"},
        "progressive": {"progressive"},
        "losses": {"losses"},
        "loss_histogram": {"losses"},
        "kl_loss": {"kl"},
        "need_agreement": {"agreement"},
        "estimate": {"estimate"},
        "timing": {"times"},
    }
    rows = everything(("only",), 1)
    del rows[missing]
    found = make_results(rows)
    left = set().union(*FIGURES.values()) - gone.get(missing, set())
    assert figures("".join(analyses.render(found))) == left
    linked = set(re.findall('href="#([^"]+)"', analyses.contents(found) + analyses.answers(found)))
    there = {key for key, drawn in FIGURES.items() if drawn & left}
    assert set(FIGURES) & linked == there | {"budget"}  # FLOPs or seconds: either makes that section


@pytest.mark.usefixtures("bare")
def test_empty_tables_are_no_results() -> None:
    found = make_results(everything(("only",), 1) | {name: [] for name in COST_COLUMNS})
    assert not figures("".join(analyses.render(found)))
    assert "costs" not in analyses.contents(found) + analyses.answers(found)


def test_what_is_read_is_what_is_written() -> None:
    for name, columns in COST_COLUMNS.items():
        assert set(columns) <= set(MEASURE_SCHEMAS[name].names), name
    assert set(MEASURE_SCHEMAS) - set(COST_COLUMNS) == {
        "measured"
    }  # sums over groups: for whoever counts again


def test_a_table_that_was_changed_is_damage(tmp_path: Path) -> None:
    path = write_study(tmp_path / "demo", everything(("only",), 2))
    assert read(path).analyses["measure"]["need"] == "error"
    Study.open(path).write_table("sinks", Study.open(path).table("sinks").slice(1))
    with pytest.raises(DamageError, match=r"last finished measure wrote .*`nearline measure \S*demo` again"):
        read(path)


# Words

SAID = {
    "interventions": costs_findings.cost,
    "routers": costs_findings.beats,
    "sinks": costs_findings.sinks,
    "context_lengths": costs_findings.lengths,
    "paper_selection": costs_findings.selection,
    "kl_loss": losses_findings.kl_finding,
    "need_agreement": losses_findings.agreement_finding,
    "estimate": losses_findings.estimate_finding,
}


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("supported", "in all 3 layers"),
        ("not supported", "in none of 3 layers (not supported in 3)"),
        ("cannot tell", "in none of 3 layers for sure (cannot tell in 3)"),
        ("too few documents", "in an unknown number of 3 layers (too few documents in 3)"),
        ("shares differ", "in none of 3 layers (shares differ in 3)"),
        ("below the noise floor", "in none of 3 layers (below the noise floor in 3)"),
    ],
)
def test_a_sentence_claims_what_its_verdicts_allow(name: str, verdict: str, words: str) -> None:
    rows = everything(("only",), 3)
    rows[name] = [row | {"verdict": verdict} for row in rows[name]]
    assert words in SAID[name](make_results(rows))


def test_cheap_is_said_only_where_the_whole_interval_is() -> None:
    rows = everything(("only",), 3)
    for row, high in zip(
        [row for row in rows["interventions"] if row["name"] == "gated@input" and row["chosen"] == "one"],
        (0.99, 1.01, float("inf")),
        strict=True,
    ):
        row |= {"ppl_pct": 0.2, "ppl_sim_hi": high, "verdict": "cannot tell"}
    assert "for sure in 1 of 3" in costs_findings.gate_cost(make_results(rows))
    for row in rows["interventions"]:
        row["verdict"] = "too few documents"
    assert "for sure" not in costs_findings.gate_cost(make_results(rows))


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("supported", "that is more than the sum of what each costs alone"),
        ("not supported", "that is less than the sum of what each costs alone"),
        ("cannot tell", "whether that is more than the sum of each alone: cannot tell"),
        ("too few documents", "whether that is more than the sum of each alone: too few documents"),
    ],
)
def test_what_a_set_costs_beyond_its_layers_is_a_verdict_too(verdict: str, words: str) -> None:
    rows = everything(("only",), 6)
    rows["compound"] = [row | {"verdict": verdict} for row in rows["compound"]]
    assert words in sets_section.compound_finding(make_results(rows))


@pytest.mark.parametrize(
    ("n_layers", "words"), [(3, "All 3 layers measured"), (5, "All 5 layers"), (6, "The 5 cheapest layers")]
)
def test_a_set_is_as_large_as_what_was_taken(n_layers: int, words: str) -> None:
    """`cheapest@5` was asked for, whatever there was to take from."""
    results = make_results(everything(("only",), n_layers))
    assert sets_section.compound_finding(results).startswith(words)
    cells = table(sets_section.render(results), "table-sets")
    assert (f"the {n_layers} cheapest" in cells) is False
    assert (f"all {n_layers} layers measured: layers" in cells) == (n_layers < 6)
    assert ("the 5 cheapest layers: layers" in cells) == (n_layers == 6)


def test_the_largest_saving_names_its_price() -> None:
    rows = everything(("only",), 3)
    for row in rows["budget"]:
        row |= {"flops_saved": 0.1, "mlp_flops_saved": 0.2}
    best = next(row for row in rows["budget"] if row["name"] == "linear" and row["n_layers"] > 1)
    best |= {"flops_saved": 0.43, "mlp_flops_saved": 0.9, "layers": ",".join(best["layers"].split(",")[::-1])}
    for row in rows["interventions"]:
        if row["name"] == "linear" and row["chosen"] != "one":
            row |= {"ppl_pct": 7.0, "ppl_lo": 6.0, "ppl_hi": 8.0}
    said = budget_section.flops_finding(make_results(rows))
    assert (
        "by their linear maps saves most: 43.0\xa0% of those of the whole model, 90.0\xa0% of those" in said
    )
    assert said.endswith("; it costs +7.00 [6.00, 8.00]\xa0% of perplexity")
    unpriced = {key: found for key, found in rows.items() if key not in ("interventions", "timing")}
    said = budget_section.flops_finding(make_results(unpriced))
    assert said.startswith("No time was measured. Counted in FLOPs, replacing the MLPs of layers")
    assert said.endswith("; its cost in perplexity was not measured")


def test_a_kl_has_no_share_below_nothing() -> None:
    rows = everything(("only",), 2)
    kept = [row for row in rows["losses"] if row["need"] == "kl"]
    assert kept
    for row in kept:
        row |= {"share_negative": 0.0, "share_negative_lo": 0.0, "share_negative_hi": 0.1847}
    shown = losses_tables.losses(make_results(rows))
    assert "18.5" not in shown


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([(0.001, 0.010), (0.002, 0.020), (0.000, 0.928)],
         "R² of δ on KL is 0.003 [0.001, 0.010] (layer\xa00) to 0.006 [0.002, 0.020] (layer\xa01); cannot "
         "tell in 1 of 3 layers (layer\xa02: [0.000, 0.928])"),
        ([(0.001, 0.600), (0.001, 0.500), (0.000, 0.928)],
         "R² of δ on KL: cannot tell in all 3 layers (widest in layer\xa02: [0.000, 0.928])"),
        ([(0.001, 0.010), (0.002, 0.020), (0.001, 0.030)],
         "R² of δ on KL is 0.003 [0.001, 0.010] (layer\xa00) to 0.009 [0.001, 0.030] (layer\xa02)"),
        ([(0.001, 0.010), (None, None), (None, None)], "R² of δ on KL is 0.003 [0.001, 0.010] in layer 0"),
    ],
)  # fmt: skip
def test_an_r2_whose_interval_holds_a_half_says_nothing_of_luck(ends: list[Any], words: str) -> None:
    rows = everything(("only",), 3)
    for row, (low, high) in zip(rows["kl_loss"], ends, strict=True):
        row |= {"r2": 0.003 * (1 + row["layer"]), "r2_lo": low, "r2_hi": high}
    found = make_results(rows)
    assert losses_findings.kl_finding(found).endswith(f"; {words}")


def test_shares_that_went_linear_say_of_which_tokens(results: Results, document: str) -> None:
    assert costs_findings.WENT_LINEAR in table(document, "table-linear-cost")
    assert "went linear, of all tokens" in table(document, "table-flops")
    assert costs_findings.WENT_LINEAR not in table(document, "table-flops")


def test_steps_are_counted_up_to_the_first_that_is_not_cheap() -> None:
    rows = everything(("only",), 4)
    for row in rows["progressive"]:
        row["ppl_hi"] = {1: 2.0, 2: 12.0, 3: 3.0, 4: 400.0}[row["step"]]
    assert "linear, greedy: 1 of 4" in progressive_curve.progressive_finding(make_results(rows))


def test_a_time_is_called_faster_only_where_most_runs_were() -> None:
    rows = everything(("only",), 4)
    for row in rows["timing"]:
        row |= {"ratio": 0.9, "ratio_q25": 0.8, "ratio_q75": 1.0}
    assert "0 of 12 configurations are faster than the original and 0 slower" in budget_section.time_finding(
        make_results(rows)
    )


def test_numbers_of_the_sentences_stand_in_their_tables(results: Results, document: str) -> None:
    gate = costs_findings.claim(results, "gated@input")
    assert html.escape(gate) in document
    cited = {
        "table-linear-cost": costs_findings.cost(results),
        "table-gate-cost": costs_findings.gate_cost(results).replace("+1\N{NO-BREAK SPACE}%", ""),
        "table-sets": sets_section.compound_finding(results),
        "table-times": budget_section.time_finding(results),
        "table-flops": budget_section.flops_finding(results),
        "table-cost-sinks": costs_findings.sinks(results),
        "table-losses": losses_findings.loss_finding(results),
        "table-kl": losses_findings.kl_finding(results),
        "table-agreement": losses_findings.agreement_finding(results),
        "table-estimate": losses_findings.estimate_finding(results),
    }
    for key, sentence in cited.items():
        cells = table(document, key)
        numbers = re.findall(r"[+−]?\d+\.\d+", sentence)
        assert numbers, key
        # FLOPs that are left are one less those that are saved, which the table holds.
        left = {text.percent(1 - row["flops_saved"])[:-2] for row in results.tables["timing"].to_dicts()}
        assert all(number in cells for number in numbers if number not in left), (key, sentence)


def test_the_opening_says_what_was_measured(results: Results) -> None:
    said = plain(analyses.answers(results))
    for sentence in (
        *costs_section.answers(results),
        *sets_section.answers(results),
        *budget_section.answers(results),
        *losses_section.answers(results),
    ):
        assert sentence in said
    assert "random routing" in said


def test_verdict_words_that_are_none_have_their_own_signs() -> None:
    signs = [verdicts.symbol(word) for word in (*verdicts.SYMBOLS, *verdicts.NONE_GIVEN)]
    assert len(set(signs)) == len(signs)
    assert "?" not in signs


# Which rows


def test_windows_as_they_were_harvested_are_shown() -> None:
    rows = everything(("only",), 2)
    short = [row | {"sequence_length": LENGTH // 2, "ppl_pct": 77.0} for row in rows["interventions"]]
    both = make_results(rows | {"interventions": short + rows["interventions"]})
    assert set(costs_findings.singles(both)["sequence_length"]) == {LENGTH}
    alone = make_results(rows | {"interventions": short})
    assert set(costs_findings.singles(alone)["sequence_length"]) == {LENGTH // 2}


def test_routers_are_compared_at_the_share_next_to_a_half() -> None:
    rows = everything(("only",), 2)
    others = [
        row | {"router": "gated@input:0.9", "share": 0.9}
        for row in rows["routers"]
        if row["router"] == "gated@input:0.5"
    ]
    found = make_results(rows | {"routers": others + rows["routers"]})
    assert set(costs_findings.routed(found)["router"]) == {"gated@input:0.5"}
    against = [name for name, _ in costs_findings.comparisons(found)]
    assert against[:2] == ["random", "token_list@0.5"]
    assert not {"oracle@error:0.5"} & set(against)


@pytest.mark.parametrize(
    ("name", "family", "share"),
    [
        ("gated@input:0.5", "gated@input", 0.5),
        ("gated@input", "gated@input", None),
        ("gated@input.loss.pca6:0.25", "gated@input.loss.pca6", 0.25),
        ("random@0.5", "random", 0.5),
        ("random", "random", None),
        ("token_list@loss:0.5", "token_list@loss", 0.5),
        ("oracle@error:1", "oracle@error", 1.0),
        ("random@often", "random@often", None),
        ("low_rank@16", "low_rank@16", None),
    ],
)
def test_names_of_routers(name: str, family: str, share: float | None) -> None:
    assert costs_findings.router(name) == costs_findings.Router(family, share)


def test_curves_of_routers_begin_at_the_model_and_end_at_the_map(results: Results) -> None:
    families, points = pareto.drawn_curves(results, 0)
    assert families[:2] == ["gated@input", "random"]
    assert families[-1] == "oracle@error"
    linear = costs_findings.of_name(results, "linear").filter(pl.col("series") == 0)
    for layer, cost in linear.select("layer", "delta_nats").rows():
        for number in range(len(families)):
            curve = points.filter((pl.col("layer") == layer) & (pl.col("series") == number))
            assert curve.row(0, named=True)["y"] == curve.row(0, named=True)["x"] == 0.0
            assert (curve["x"].to_list()[-1], curve["y"].to_list()[-1]) == (1.0, cost)


# The paper's numbers


@pytest.mark.parametrize(
    ("name", "n_layers", "median"),
    # Medians without layer 0, as they were computed from the same files by themselves.
    [
        ("gpt2-medium", 24, 2.4),
        ("openai-community/gpt2-large", 36, 1.3),
        ("EleutherAI/pythia-160m", 12, 14.6),
        ("EleutherAI/pythia-410m", 24, 5.9),
        ("EleutherAI/pythia-1b", 16, 11.9),
        ("EleutherAI/pythia-2.8b", 32, 5.1),
    ],
)
def test_published_numbers(name: str, n_layers: int, median: float) -> None:
    found = published.of_model(name, n_layers)
    assert found is not None
    known = sorted(cost for cost in found.linear[1:] if cost is not None)
    assert known[len(known) // 2] == pytest.approx(median, abs=0.1)
    assert all(len(column) in (0, n_layers) for column in (found.gated, found.share))
    assert published.of_model(name, n_layers - 1) is None
    assert published.of_model(f"{name}-deduped", n_layers) is None


@pytest.mark.usefixtures("bare")
def test_the_papers_numbers_stand_beside_ours_where_the_model_is_one_of_its() -> None:
    rows = everything(("only",), 24)
    for row in rows["harvest"]:
        row["model"] = "openai-community/gpt2-medium"
    shown = costs_section.render(make_results(rows))
    cells = table(shown, "table-published")
    assert "GPT-2 Medium" in cells
    assert "+22,780\N{NO-BREAK SPACE}%" in cells  # the layer that the paper leaves out
    assert "58.0\N{NO-BREAK SPACE}%" in cells
    first = make_results(rows)
    ours = costs_findings.of_name(first, "linear@all")["ppl_pct"].to_list()[5]
    assert text.change(ours) in cells
    assert "table-published" not in costs_section.render(make_results(everything(("only",), 24)))


# Charts


def test_charts_have_their_baselines_and_units(results: Results, charts: list[dict[str, Any]]) -> None:
    analyses.render(results)
    assert len(charts) == 10
    for spec in charts:
        drawn = str(spec)
        assert "[" in drawn
        assert "strokeDash" in drawn or "area" in drawn  # a rule, or a histogram that stands on its zero


def test_one_layer_beyond_all_others_does_not_flatten_them() -> None:
    frame = pl.DataFrame(
        {"series": [0] * 6, "layer": list(range(6)), "v": [22_780.0, 3.6, 2.2, 2.1, 1.6, 12.6]}
    )
    panels = [panel("cost", frame, "v")]
    low, high = axes.ends_of(panels)
    assert low <= 0.0
    assert 12.6 < high < 100
    said = axes.beyond(panels, (low, high), text.change)
    assert said == "Beyond the axis and drawn on its edge: layer 0 (+22,780\N{NO-BREAK SPACE}%)."


@pytest.mark.parametrize(
    "values",
    [[], [None], [0.0], [float("inf"), 1.0], [float("nan"), -2.0], [1e-9, 2e-9], [1e300, 1.0], [-5.0, -4.0]],
)
def test_ends_of_any_values_are_finite_and_hold_zero(values: list[float | None]) -> None:
    nothing = pl.Series([None] * len(values), dtype=pl.Float64)
    frame = pl.DataFrame(
        {"series": pl.Series([0] * len(values), dtype=pl.Int64), "value": pl.Series(values, dtype=pl.Float64)}
    ).with_columns(lo=nothing, hi=nothing)
    low, high = axes.ends_of([Panel("", frame)])
    assert low < high
    assert low <= 0.0 <= high
    assert abs(low) + abs(high) < float("inf")


def test_panels_with_axes_of_their_own_show_all_that_is_finite() -> None:
    frame = pl.DataFrame(
        {
            "series": [0, 0],
            "x": [0.0, 1.0],
            "v": [0.0, 900.0],
            "lo": [None, float("-inf")],
            "hi": [None, 950.0],
        }
    )
    for domain in (None, (0.0, 1.0)):
        chart = curves(
            [panel("p", frame, "v", ("lo", "hi"), x="x")], axes=("x [1]", "v [1]"), domain=domain, rule=0.0
        )
        spec = chart.to_dict(validate=False)
        shown = [row["value"] for rows in spec["datasets"].values() for row in rows if "value" in row]
        assert max(shown) == (900.0 if domain is None else 1.0)
        assert "Infinity" not in str(spec)
    assert "svg" in svg.render(chart, "x")


def test_small_numbers_on_an_axis_keep_their_digits() -> None:
    frame = pl.DataFrame({"series": [0, 0], "x": [0.0, 1.0], "v": [0.001, 0.004]})
    chart = curves([panel("p", frame, "v", x="x")], axes=("x [1]", "v [nats]"), domain=(0.0, 0.004))
    shown = re.findall(r">([^<]+)</text>", svg.render(chart, "x"))
    assert {"0.001", "0.002"} <= set(shown)


def test_names_stand_above_their_dots_in_both_widths() -> None:
    rows = [
        {"row": at, "name": f"set {at} <b>", "series": series, "value": 0.1 * at, "lo": 0.0, "hi": None}
        for at in range(3)
        for series in range(2)
    ]
    frame = pl.DataFrame(rows, schema_overrides={"lo": pl.Float64, "hi": pl.Float64})
    for size in (WIDE, NARROW):
        drawn = svg.render(dots.by_name(frame, axis="cost [1]", domain=(0.0, 0.15), rule=0.0, size=size), "x")
        assert drawn.count("set 2 &lt;b&gt;") == 2  # once as a halo, so that no line crosses it


# Whatever a study may hold


@pytest.mark.usefixtures("bare")
def test_values_that_are_not_there_leave_no_trace() -> None:
    rows = everything(STORES, 2)
    for name in COST_COLUMNS:
        reals = [field.name for field in MEASURE_SCHEMAS[name] if str(field.type) == "double"]
        rows[name] = [row | dict.fromkeys(reals, float("nan")) for row in rows[name]]
        if "verdict" in MEASURE_SCHEMAS[name].names:
            rows[name] = [row | {"verdict": "too few documents"} for row in rows[name]]
    found = make_results(rows)
    shown = plain(" ".join([analyses.answers(found), *analyses.render(found)]))
    assert not re.search(r"\b(?:nan|NaN|None(?! is accepted)|null|inf)\b", shown)
    assert "too few documents" in shown


@pytest.mark.usefixtures("bare")
def test_costs_without_bound_are_drawn_on_the_edge() -> None:
    rows = everything(("only",), 1)
    for row in rows["interventions"]:
        row |= {
            "ppl_pct": float("inf"),
            "ppl_sim_hi": float("inf"),
            "ppl_hi": float("inf"),
            "ppl": float("inf"),
        }
    Structure("".join(analyses.render(make_results(rows))))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("hostile", HOSTILE)
def test_stored_strings_stay_text(hostile: str) -> None:
    rows = everything(("first", "second"), 1)
    words = {"name", "router", "against", "need", "need_a", "need_b", "chosen", "picked", "fixed", "verdict"}
    words |= {"dtype", "finer_dtype", "device", "phase", "kind", "layers", "store"}
    for name in COST_COLUMNS:
        kept = {"store", "chosen"} if name not in ("budget", "timing") else set[str]()
        for row in rows[name]:
            row |= {column: f"{hostile}{row[column]}" for column in (words - kept) & row.keys()}
        if name in ("compound", "progressive"):
            rows[name] = [row | {"chosen": f"{hostile}@5"} for row in rows[name]]
    found = make_results(rows)
    shown = "".join([analyses.answers(found), *analyses.render(found)])
    tags = {tag for tag, _ in Structure(shown).tags}
    assert not {"script", "img", "iframe", "link", "form"} & tags
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]", shown)
    assert "X" * 301 not in shown


def test_what_svg_cannot_hold_is_written_out_in_charts(charts: list[dict[str, Any]]) -> None:
    rows = everything(("only",), 2)
    for name in ("interventions", "routers", "pareto", "compound", "progressive", "timing", "need_agreement"):
        for row in rows[name]:
            for column in {"name", "router", "against", "device", "need_a", "need_b"} & row.keys():
                row[column] = f"nul\x00{row[column]}"
    analyses.render(make_results(rows))
    assert "␀" in str(charts)


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_a_large_study_is_one_page() -> None:
    shown = page.render(make_results(everything(("a", "b"), 30)))
    Structure(shown)
    print(f"{len(shown.encode()):,} bytes")
    assert len(shown.encode()) < 3_000_000


def test_tables_of_a_section_are_named_once(document: str) -> None:
    ids = re.findall(r' id="(table-[a-z-]+)"', document)
    assert len(ids) == len(set(ids))

"""Sections of the analyses: there where these were run, words as strong as verdicts, numbers in tables."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from helpers_reports import make_results, make_tables, write_study
from helpers_reports_analyses import ANALYSIS_SETTINGS, Rows, make_analysis_tables
from helpers_reports_costs import make_cost_tables
from helpers_reports_pages import (
    HOSTILE,
    Structure,
    draw_nothing,
    draw_once,
    draw_values,
    figures,
    page_and_charts,
    plain,
    table,
)
from nearline.analyze.analysis_tables import ANALYSIS_SCHEMAS
from nearline.analyze.analyze_settings import ANALYSES
from nearline.analyze.results import SCHEMAS
from nearline.reports import (
    analyses,
    context_findings,
    findings,
    fit_section,
    gates_findings,
    nofly_findings,
    page,
    report,
    verdicts,
    which_section,
)
from nearline.reports.columns import ANALYSIS_TABLES
from nearline.reports.columns import OPTIONAL as ALL_OPTIONAL
from nearline.reports.cost_columns import COST_COLUMNS
from nearline.reports.results import Results, read
from nearline.reports.tuning_columns import TUNING_COLUMNS
from nearline.store import DamageError, Study, UsageError

STORES = ("gpt2-python", "gpt2-scientific")
# Sections with their figures, and the tables of an analysis that each needs.
FIGURES = {
    "capacity": {"learning", "ranks"},
    "gates": {"auc", "beats", "curves", "calibration"},
    "context": {"differences", "foretold", "parts", "identity"},
    "nofly": {"nofly", "list"},
    "which": {"regression", "clusters"},
}
BEFORE = {"r2", "need", "shares", "skew", "histograms"}
LINE = "Not run on this study"
# Those of a measurement have tests of their own.
OPTIONAL = {
    name: columns for name, columns in ALL_OPTIONAL.items() if name not in {**COST_COLUMNS, **TUNING_COLUMNS}
}


def everything(stores: tuple[str, ...] = STORES, n_layers: int = 4, **more: Any) -> Rows:
    return {
        **make_tables(stores, n_layers=n_layers),
        **make_analysis_tables(stores, n_layers=n_layers, **more),
    }


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)


@pytest.fixture
def charts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    return draw_values(monkeypatch)


@pytest.fixture(scope="module")
def results() -> Results:
    return make_results(everything())


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("analysed") / "demo", everything(n_layers=3))


@pytest.fixture(scope="module")
def document(study: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        draw_once(patch)
        return report(study).read_text(encoding="utf-8")


def test_every_section_stands_and_every_figure_has_its_sentence(document: str) -> None:
    assert figures(document) == BEFORE.union(*FIGURES.values())
    for figure in re.findall(r"<figure.*?</figure>", document, re.DOTALL):
        sentence = re.search(r"<strong>(.*?)\.</strong>", figure)
        assert sentence is not None
        assert figure.count(f'aria-label="{sentence[1]}"') == 2
        assert "NaN" not in figure
    assert LINE not in document


def test_nothing_comes_from_outside_and_every_link_has_its_target(document: str) -> None:
    found = Structure(document)
    assert not re.search(r"(?:src|href)\s*=(?!\"#)|url\(|@import|https?:", document)
    assert "script" not in {tag for tag, _ in found.tags}
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', document)) <= set(ids)
    assert set(FIGURES) <= set(ids)


def test_the_page_is_the_same_in_another_process(study: Path, tmp_path: Path) -> None:
    """Under another order of hashes; the drawing of a whole page twice is with the pages of a fit."""
    code = (
        f"from helpers_reports_pages import page_and_charts; print(page_and_charts({str(study)!r}), end='')"
    )
    again = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
    )
    assert again.stdout.decode() == page_and_charts(str(study))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("analysis", ANALYSIS_TABLES)
def test_an_analysis_that_was_not_run_leaves_its_part_out(analysis: str) -> None:
    rows = everything(("only",), 2)
    for name in ANALYSIS_TABLES[analysis]:
        del rows[name]
    document = page.render(make_results(rows))
    gone = {
        "decomposition": {"foretold", "parts"},
        "identity": {"identity"},
        "gates": FIGURES["gates"] | {"differences"},
        "nofly": set(),  # one store: nothing is drawn anyhow
        "clusters": {"clusters"},
        "regression": {"regression"},
    }
    whole = BEFORE.union(*FIGURES.values()) - FIGURES["nofly"]
    assert figures(document) == whole - gone[analysis]
    command = f"nearline analyze STUDY --only {analysis}</code> runs it."
    assert f"{LINE}: {analysis}. <code>{command}" in document
    assert ('id="nofly"' in document) is (analysis != "nofly")
    Structure(document)


@pytest.mark.usefixtures("undrawn")
def test_a_study_without_analyses_says_what_runs_them(tmp_path: Path) -> None:
    document = report(write_study(tmp_path / "demo", make_tables(("only",), n_layers=2))).read_text("utf-8")
    assert figures(document) == BEFORE
    assert f"{LINE}: decomposition, identity, gates, nofly, clusters and regression." in document
    assert f"<code>nearline analyze STUDY --only {','.join(ANALYSES)}</code> runs them." in document
    assert "<dt>Gate</dt>" not in document


def test_what_is_read_is_what_is_written() -> None:
    written = SCHEMAS | ANALYSIS_SCHEMAS
    assert {name: set(columns) - set(written[name].names) for name, columns in OPTIONAL.items()} == {
        name: set() for name in OPTIONAL
    }
    assert set(ANALYSIS_TABLES) == set(ANALYSES)


def test_thresholds_are_those_of_the_analyses() -> None:
    from nearline.analyze import gate_tables, identity, regression

    assert which_section.EXPLAINED == regression.EXPLAINED
    assert identity.HALF == 0.5
    assert set(context_findings.NESTED) <= {claim for claim, _, _ in gate_tables.CLAIMS}


# Words

SAID = {
    "gates": gates_findings.auc,
    "gate_differences": context_findings.differences,
    "variance": context_findings.identity,
    "nofly": nofly_findings.correlation,
    "regression": which_section.regression_finding,
    "clusters": which_section.clusters_finding,
}


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("supported", "in all 3 layers"),
        ("not supported", "in none of 3 layers (not supported in 3)"),
        ("cannot tell", "in none of 3 layers for sure (cannot tell in 3)"),
        ("too few documents", "in an unknown number of 3 layers (too few documents in 3)"),
    ],
)
def test_a_sentence_claims_what_its_verdicts_allow(name: str, verdict: str, words: str) -> None:
    stores = STORES if name == "nofly" else ("only",)
    rows = everything(stores, 3)
    rows[name] = [row | {"verdict": verdict} for row in rows[name]]
    results = make_results(rows)
    assert words in SAID[name](results)
    opening = plain(analyses.answers(results))
    assert words in opening


def test_counts_in_words_are_those_of_the_tables(results: Results) -> None:
    gate = gates_findings.main_rows(results)
    for at, label in enumerate(("docs:python", "docs:scientific")):
        found = gate.filter(gate["series"] == at)["verdict"].to_list()
        n = found.count("supported")
        many = f"{'all' if n == len(found) else f'{n} of'} {len(found)}"
        assert re.search(rf"{many}(?: layers)? on {label}", gates_findings.claim(results))


@pytest.mark.usefixtures("undrawn")
def test_what_fitting_the_sinks_does_is_said_with_its_size() -> None:
    rows = make_tables(("only",), n_layers=3) | make_analysis_tables(("only",), n_layers=3)
    drops = iter((0.0001, -0.02, 0.004))
    for row in rows["variants"]:
        if row["variant"] == "default":
            row["r2_body"] = 0.8
        if row["variant"] == "with_sinks":
            row["r2_body"] = 0.8 - next(drops)
    said = fit_section.variants_finding(make_results(rows))
    assert said == (
        "By point estimate, fitting the sinks too lowers R² of the other tokens in 2 of 3 layers: by 0.004 "
        "at most (layer\xa02), by 0.002 in the median"
    )


def test_numbers_of_the_sentences_stand_in_their_tables(results: Results) -> None:
    document = page.render(results)
    cited = {
        "table-auc": [gates_findings.auc(results)],
        "table-gate": [gates_findings.calibration(results)],
        "table-curves": [gates_findings.curves(results)],
        "table-foretold": [context_findings.in_context(results)],
        "table-parts": [context_findings.output_shares(results)],
        "table-identity": [context_findings.identity(results)],
        "table-nofly": [nofly_findings.correlation(results)],
        "table-regression": [which_section.regression_finding(results)],
        "table-clusters": [which_section.clusters_finding(results)],
        "table-learning": [fit_section.learning_finding(results)],
    }
    for key, sentences in cited.items():
        cells = table(document, key)
        for sentence in sentences:
            assert html.escape(sentence) in document
            numbers = re.findall(r"−?\d+\.\d+", sentence)
            assert numbers
            assert all(number in cells for number in numbers), (key, sentence)


def test_a_sentence_that_claims_more_than_nothing_says_how_much(results: Results) -> None:
    """Above 0 for sure may be nearly 0: the opening has the size, and the interval of either end."""
    opening = plain(analyses.answers(results))
    assert "carries over (r above 0) in " in opening
    for words in ("; freed from noise, r is ", "; its AUC is ", "; the AUC is "):
        ends = r"−?\d\.\d{3} \[−?\d\.\d{3}, −?\d\.\d{3}\]"
        assert re.search(rf"{words}{ends} \(layer\xa0\d\) to {ends} \(layer\xa0\d\)", opening), words


def test_what_is_said_of_many_corpora_stands_behind_all_that_belongs_to_the_values() -> None:
    """`carry 36 % to 42 %, over 3 corpora of all error` reads as if the corpora were those of the error."""
    stores = ("a", "b", "c")
    found = make_results(everything(stores, 3) | make_cost_tables(stores, n_layers=3))
    whole = "\n".join([page.answers(found), analyses.answers(found), *page.body(found)])
    shown = plain(re.sub(r"<table.*?</table>|<svg.*?</svg>", "", whole, flags=re.DOTALL))
    assert shown.count("over 3 corpora") > 10
    assert set(re.findall(r"over 3 corpora(.)", shown, re.DOTALL)) <= set(".;")


def test_holm_counts_only_what_lies_on_the_side_of_the_claim() -> None:
    rows = pl.DataFrame(
        {
            "p_holm": [0.01, 0.01, 0.2, None, 0.01],
            "auc": [0.6, 0.4, 0.6, 0.6, 0.6],
            "verdict": ["supported", "cannot tell", "cannot tell", "cannot tell", "too few documents"],
        }
    )
    assert verdicts.by_holm(rows, lambda row: row["auc"] > 0.5) == 1


def test_the_need_that_is_drawn_is_the_first_one_asked_for() -> None:
    rows = everything(("only",), 2, needs=("error", "loss"))
    asked = make_results(rows, analyses={"need": ["loss", "error"]})
    assert asked.first("gates")[0] == "loss"
    assert "tokens of low loss" in gates_findings.claim(asked)
    # A study's own words may be anything.
    for odd in ({}, {"need": "loss"}, {"need": [3, None]}):
        assert make_results(rows, analyses=odd).first("gates")[0] in ("error", "loss")


@pytest.mark.usefixtures("undrawn")
def test_other_needs_are_in_the_tables() -> None:
    document = page.render(make_results(everything(STORES, 2, needs=("error", "loss"))))
    assert "loss" in table(document, "table-gate-needs")
    for key in ("table-differences", "table-identity", "table-regression", "table-clusters"):
        assert re.search(r"\bloss\b", table(document, key))
    assert "loss, surrogate pooled" in table(document, "table-nofly-others")


def test_feature_sets_that_come_too_late_are_marked(document: str) -> None:
    assert "output_norm †" in table(document, "table-auc")
    assert "input †" not in table(document, "table-auc")
    figure = re.search(r'<figure id="figure-auc".*?</figure>', document, re.DOTALL)
    assert figure is not None
    assert "target_type †" in plain(figure[0])
    assert ">oracle" not in figure[0]


# Whatever a study may hold


@pytest.mark.usefixtures("undrawn")
def test_values_that_are_not_there_leave_no_trace() -> None:
    rows = everything(STORES, 2)
    for name in OPTIONAL:
        schema = SCHEMAS[name] if name in SCHEMAS else ANALYSIS_SCHEMAS[name]
        reals = [field.name for field in schema if str(field.type) == "double"]
        kept = {"share", "fraction", "predicted"} if name in ("gate_curves", "learning_curve") else set()
        rows[name] = [row | dict.fromkeys(set(reals) - kept, float("nan")) for row in rows[name]]
        if "verdict" in schema.names:
            rows[name] = [row | {"verdict": "too few documents"} for row in rows[name]]
    document = page.render(make_results(rows))
    shown = plain(document.partition("</style>")[2])
    assert not re.search(r"\b(?:nan|NaN|None(?! is accepted)|null|inf)\b", shown)
    assert "too few documents" in shown
    Structure(document)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("stores", [("only",), STORES])
def test_infinite_bounds_and_one_layer_are_drawn(stores: tuple[str, ...]) -> None:
    rows = everything(stores, 1)
    for row in rows["gates"]:
        row |= {"auc_sim_lo": float("-inf"), "auc_sim_hi": float("inf"), "threshold": float("inf")}
    for row in rows["regression"]:
        row |= {"r2_test": -300.0, "r2_sim_lo": float("-inf")}
    document = page.render(make_results(rows))
    Structure(document)
    assert "Values beyond the axis are drawn on its edge." in document


@pytest.mark.usefixtures("undrawn")
def test_empty_tables_are_no_results() -> None:
    rows = everything(("only",), 2)
    for name in OPTIONAL:
        if name not in ("nofly", "nofly_tokens"):
            rows[name] = []
    document = page.render(make_results(rows))
    assert figures(document) == BEFORE
    assert "The study has one store: there is no other corpus to compare with." in document


def hostile_results(hostile: str) -> Results:
    """Every string of every optional table begins with something hostile."""
    rows = everything(("first", "second"), 2, needs=("error", "loss"))
    texts = {"features", "size", "claim", "larger", "smaller", "surrogate", "key", "text", "term", "part"}
    texts |= {"variant", "split_by", "rule", "fit_on", "need", "verdict"}
    for name in OPTIONAL:
        for row in rows[name]:
            row |= {column: f"{hostile}{row[column]}" for column in texts & row.keys()}
    return make_results(rows, analyses=ANALYSIS_SETTINGS | {"need": [hostile], hostile: hostile})


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("hostile", HOSTILE)
def test_stored_strings_stay_text(hostile: str) -> None:
    document = page.render(hostile_results(hostile))
    tags = {tag for tag, _ in Structure(document).tags}
    assert not {"script", "img", "iframe", "link", "form"} & tags
    assert document.count("<style>") == 1
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]", document)
    assert "X" * 301 not in document


def test_what_svg_cannot_hold_is_written_out_in_charts(charts: list[dict[str, Any]]) -> None:
    analyses.render(hostile_results("nul\x00and\x1bescape\ufffe"))  # the charts are checked as they are made
    assert len(charts) > 6
    assert "␀" in json.dumps(charts, ensure_ascii=False)


def test_titles_of_panels_are_no_expressions() -> None:
    """Names of features enter an expression of the renderer: they must come out as they went in."""
    from nearline.reports import svg
    from nearline.reports.multiples import by_layer, panel

    frame = pl.DataFrame({"series": [0, 0], "layer": [0, 1], "v": [0.5, 0.6]})
    names = ("'] + 1 + ['", '"quoted" \\n \\', "<b>&amp;</b>", "⟨U+0000⟩ ${x} {y}", "datum.value")
    panels = [panel(name, frame, "v") for name in names]
    drawn = svg.render(by_layer(panels, axis="v [1]", domain=(0.0, 1.0)), "x")
    shown = re.sub(r"\s", "", html.unescape("".join(re.findall(r">([^<]*)<", drawn))))
    for name in names:
        assert re.sub(r"\s", "", name) in shown


@pytest.mark.usefixtures("undrawn")
def test_a_large_study_is_one_page() -> None:
    document = page.render(make_results(everything(("a", "b"), 30)))
    Structure(document)
    assert len(document.encode()) < 3_000_000


# What is read


def test_a_table_that_was_changed_is_damage(study: Path, tmp_path: Path) -> None:
    other = write_study(tmp_path / "demo", everything(("only",), 2))
    Study.open(other).write_table("variance", Study.open(study).table("variance"))
    words = r"tables/variance\.parquet is not what the last finished identity wrote .*--only identity` again"
    with pytest.raises(DamageError, match=words):
        read(other)
    (other / "tables" / "variance.parquet").unlink()
    with pytest.raises(DamageError, match=r"was written and is there no longer: run `nearline analyze .*"):
        read(other)


def test_a_table_that_no_step_recorded_is_not_shown(tmp_path: Path) -> None:
    path = write_study(tmp_path / "demo", make_tables(("only",), n_layers=2))
    shown = read(path)
    unfinished = make_results(everything(("only",), 2)).tables["gates"].drop("series")
    Study.open(path).write_table("gates", unfinished.to_arrow())
    assert read(path).missing == shown.missing == list(ANALYSIS_TABLES)


def test_a_table_of_another_version_is_named(tmp_path: Path) -> None:
    rows = everything(("only",), 1)
    for row in rows["gates"]:
        del row["auc_sim_lo"]
    path = write_study(tmp_path / "old", rows)
    with pytest.raises(UsageError, match=r"table `gates` lacks auc_sim_lo; .*--only gates` again"):
        read(path)


def test_settings_of_the_analyses_are_in_the_footer(document: str) -> None:
    cells = table(document, "table-analyses")
    assert all(name in cells for name in ANALYSES)
    assert "gpt2-python" in cells


def test_layers_to_look_at_are_the_extremes_and_the_middle() -> None:
    frame = pl.DataFrame({"series": [0] * 5, "layer": [0, 1, 2, 3, 4], "auc": [0.6, 0.9, None, 0.7, 0.5]})
    assert findings.representatives(frame, "auc") == [1, 3, 4]
    assert findings.representatives(frame.filter(pl.col("layer") == 2), "auc") == []

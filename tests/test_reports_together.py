"""Several studies on one page, and many stores in one sentence: who is who, and nothing lost on the way."""

import dataclasses
import html
import re
from pathlib import Path

import polars as pl
import pytest
from helpers_reports import make_results, make_tables, surrogate_row, write_study
from helpers_reports_analyses import make_analysis_tables
from helpers_reports_costs import make_cost_tables
from helpers_reports_pages import HOSTILE, Structure, draw_nothing, figures, plain, table
from nearline.reports import (
    axes,
    examples,
    findings,
    models_section,
    multiples,
    overview,
    page,
    report,
    text,
    together,
    verdicts,
)
from nearline.reports.results import Results
from nearline.store import UsageError

FIVE = ("a", "b", "c", "d", "e")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)


def results_of(model: str, n_layers: int, stores: tuple[str, ...] = ("a", "b"), **measured: bool) -> Results:
    rows = make_tables(stores, n_layers=n_layers, seed=n_layers)
    if measured:
        rows |= make_analysis_tables(stores, n_layers=n_layers) | make_cost_tables(stores, n_layers=n_layers)
    rows["harvest"] = [row | {"model": model} for row in rows["harvest"]]
    return make_results(rows)


def test_each_question_stands_once_and_each_model_below_it() -> None:
    studies = [results_of("tiny-gpt2", 4, measured=True), results_of("tiny-pythia", 3)]
    document, kept = together.render(studies)
    Structure(document)
    ids = re.findall(r' id="([^"]+)"', document)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', document)) <= set(ids)
    headings = re.findall(r"<h2>(.*?)</h2>", document)
    assert len(headings) == len(set(headings))
    assert headings[0] == models_section.HEADING
    linear = document.partition('<section id="linear">')[2].partition("</section>")[0]
    assert re.findall(r'<h3 class="model">(.*?)</h3>', linear) == ["tiny-gpt2", "tiny-pythia"]
    gates = document.partition('<section id="gates">')[2].partition("</section>")[0]
    assert re.findall(r'<h3 class="model">(.*?)</h3>', gates) == ["tiny-gpt2"]
    assert "<h2>What was not run</h2>" in document
    assert [one.model for one in kept] == ["", "tiny-gpt2", "tiny-pythia"]


def test_every_caption_names_its_model_and_nothing_of_the_single_pages_is_lost() -> None:
    studies = [results_of("tiny-gpt2", 3), results_of("tiny-pythia", 4)]
    document, kept = together.render(studies)
    for results, one in zip(studies, kept[1:], strict=True):
        alone = page.render(results)
        model = findings.model(results)
        for key in figures(alone):
            assert f'<figure id="{one.tag}-figure-{key}"><figcaption><strong>{model}: ' in document
        for key in re.findall(r'<div id="(table-[^"]+)"', alone):
            if key != "table-verdicts":  # one table for all models stands for it
                assert table(document, f"{one.tag}-{key}").split() == f"{model}: {table(alone, key)}".split()
    captions = re.findall(r"<caption[^>]*>(.*?)</caption>", document)
    assert all(one.startswith(("tiny-gpt2: ", "tiny-pythia: ", "All models")) for one in captions)


def test_the_models_stand_side_by_side() -> None:
    studies = [results_of("one", 3, measured=True), results_of("two", 5)]
    found = models_section.rows(studies, ["one", "two"])
    assert [(row["model"], row["corpus"]) for row in found] == [
        ("one", "docs:python"), ("one", "docs:scientific"), ("two", "docs:python"), ("two", "docs:scientific")
    ]  # fmt: skip
    for row, (results, series) in zip(
        found, [(studies[0], 0), (studies[0], 1), (studies[1], 0)], strict=False
    ):
        mine = sorted(results.surrogates.filter(results.surrogates["series"] == series)["r2_test"].to_list())
        assert row["r2"] == mine[len(mine) // 2]
        assert (row["r2_low"], row["r2_high"]) == (mine[0], mine[-1])
        counts = results.surrogates.filter(results.surrogates["series"] == series)["verdict"].to_list()
        assert [row[one] for one in findings.VERDICTS] == [counts.count(one) for one in findings.VERDICTS]
    assert found[2]["auc"] is None  # not analysed, not zero
    shown = table(models_section.render(studies, ["one", "two"]), "table-models")
    assert all(text.number(row["r2"]) in shown for row in found)
    panel = models_section._panel(studies, "docs:python")
    assert panel.filter(panel["series"] == 1)["x"].to_list() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_studies_of_one_model_and_of_one_name_are_told_apart() -> None:
    studies = [results_of("same", 2), results_of("same", 3), results_of("other", 2)]
    assert together.labels(studies) == ["same (demo)", "same (demo)", "other"]
    assert together.tags(studies) == ["demo", "demo-2", "demo-3"]


def test_what_nearly_linear_means_is_said_once() -> None:
    """The claim of a study of one corpus is the beginning of that of a study whose maps moved."""
    document, _ = together.render([results_of("one", 2, ("a",)), results_of("two", 2)])
    assert document.count("An MLP counts as nearly linear when") == 1
    assert "says whether they transfer" in document


def test_models_without_a_corpus_in_common_are_drawn_in_one_panel() -> None:
    first, second = results_of("one", 2, ("a",)), results_of("two", 2, ("a",))
    moved = second.harvest.with_columns(corpus=pl.lit("text:mine"))
    studies = [first, dataclasses.replace(second, harvest=moved)]
    assert models_section._shared(studies) == []
    assert models_section.finding(studies, ["one", "two"]) == (
        "The models' medians over layers do not compare: each was fitted on a corpus of its own"
    )


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_models_and_studies_stay_text(hostile: str) -> None:
    harmless = {
        tag for tag, _ in Structure(together.render([results_of("a", 2), results_of("b", 2)])[0]).tags
    }
    studies = [dataclasses.replace(results_of(f"{hostile}{n}", 2), study=hostile) for n in range(2)]
    document, kept = together.render(studies)
    assert {tag for tag, _ in Structure(document).tags} <= harmless
    assert all(re.fullmatch(r"[a-z0-9-]*", one.tag) for one in kept)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]", document)


def test_a_page_of_two_studies_is_a_file_and_its_tables_stand_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for name, n_layers in (("one", 2), ("two", 3)):
        rows = make_tables(("a",), n_layers=n_layers)
        rows["harvest"] = [row | {"model": name} for row in rows["harvest"]]
        paths.append(write_study(tmp_path / name, rows))
    monkeypatch.chdir(tmp_path)
    assert report(paths, tables=tmp_path / "t") == Path("report.html")
    first = Path("report.html").read_bytes()
    assert report(paths, tmp_path / "again.html").read_bytes() == first
    assert not (tmp_path / "one" / "report.html").exists()
    assert (tmp_path / "t" / "models.csv").exists()
    assert (tmp_path / "t" / "one" / "surrogates.csv").read_text().count("\n") == 3
    assert (tmp_path / "t" / "two" / "surrogates.csv").read_text().count("\n") == 4
    with pytest.raises(
        UsageError, match=r"the study .*one is named twice; each study has one place on a page"
    ):
        report([paths[0], tmp_path / "two" / ".." / "one"])


# Many stores in one sentence


def five(**verdict_of: str) -> Results:
    rows = make_tables(FIVE, n_layers=3)
    rows["surrogates"] = [
        surrogate_row(
            store,
            layer,
            0.5 + 0.1 * layer + 0.01 * at,
            0.01,
            fit_on="a",
            verdict=verdict_of.get(f"{store}{layer}", "not supported"),
        )
        for at, store in enumerate(FIVE)
        for layer in range(3)
    ]
    return make_results(rows)


def test_the_answer_on_many_corpora_is_two_short_paragraphs() -> None:
    found = five(a2="supported", b1="supported", b2="supported", c2="supported", e2="supported",
                 d0="too few documents", d1="too few documents", d2="too few documents")  # fmt: skip
    home, away = overview.paragraphs(found)
    assert home[0] == "On docs:python (a), where the maps were fitted,"
    assert home[1].startswith("1 of 3 MLPs is nearly linear. Layer 2 is the most linear: R²\xa00.700 [")
    assert "layer 0 is the least linear: R²\xa00.500 [" in home[1]
    assert away[0] == "Moved to 4 other corpora,"
    assert away[1].startswith(
        "the same maps of docs:python (a) are scored again: R² ≥ 0.9 is kept in 1 of 3 layers on "
        "docs:stdlib to 2 of 3 on docs:scientific (b) (of 9 cases, not supported in 5; too few documents "
        "on 1 of 4 corpora); layer 2 keeps it on every one with enough documents. By point estimate "
        "R²\xa0goes from 0.510 ["
    )
    assert len(away[1]) < 500
    assert plain(page.answers(found)).split() == " ".join([*home, *away]).split()
    assert page.render(found).count('<p class="answer">') == 2


def test_corpora_with_too_few_documents_are_named_behind_the_others() -> None:
    def of(verdicts_: str) -> pl.DataFrame:
        words = {"s": "supported", "n": "not supported", "f": "too few documents"}
        return pl.DataFrame({"verdict": [words[letter] for letter in verdicts_]})

    found = verdicts.families([(" on a", of("ssn")), (" on b", of("fff")), (" on c", of("sss"))])
    assert found == "in 2 of 3 layers on a (not supported in 1) and all 3 on c, too few documents on b"
    found = verdicts.families([(" on a", of("ff")), (" on b", of("ff")), (" on c", of("sn"))])
    assert found == "in 1 of 2 layers on c (not supported in 1), too few documents on a and on b"
    found = verdicts.families([(" on a", of("ff")), (" on b", of("ff"))])
    assert found.startswith("in an unknown number of 2 layers on a (too few documents in 2) and an unknown")


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("supported", "kept in all 3 layers on each of 4 corpora; layers 0–2 keep it on every one"),
        ("not supported", "kept in none of 3 layers on any of 4 corpora (of 12 cases, not supported in 12)."),
        ("cannot tell", "kept in none of 3 layers for sure on any of 4 corpora"),
        ("too few documents", "kept in an unknown number of layers on 4 corpora (too few documents)."),
    ],
)
def test_each_verdict_is_worded_on_many_corpora(verdict: str, words: str) -> None:
    every = {f"{store}{layer}": verdict for store in FIVE for layer in range(3)}
    assert words in overview.transfer(five(**every))


def test_a_corpus_that_the_maps_moved_to_is_not_where_models_are_compared() -> None:
    """Both studies have both corpora; the first of them is not the one that was fitted."""
    studies = [results_of("one", 2), results_of("two", 3)]
    swapped = [
        dataclasses.replace(one, surrogates=one.surrogates.with_columns(fit_on=pl.lit("b")))
        for one in studies
    ]
    assert models_section._shared(swapped)[0] == "docs:scientific"
    assert "on docs:scientific, where the maps were fitted" in models_section.finding(swapped, ["one", "two"])
    mixed = [swapped[0], studies[1]]
    assert models_section.finding(mixed, ["one", "two"]) == (
        "The models' medians over layers do not compare: the maps of one were not fitted on docs:python"
    )
    shown = table(models_section.render(swapped, ["one", "two"]), "table-models")
    assert shown.count("fitted here") == shown.count("moved here") == 2


def test_medians_over_a_selection_of_layers_do_not_compare_and_say_over_how_many_they_are() -> None:
    whole, part = results_of("one", 4, ("a",), measured=True), results_of("two", 6, ("a",), measured=True)
    costs = part.tables["interventions"].filter(pl.col("layer").is_in([0, 3]))
    few = part.surrogates.filter(pl.col("layer").is_in([0, 1, 3]))
    part = dataclasses.replace(part, surrogates=few, tables={**part.tables, "interventions": costs})
    assert models_section.finding([whole, part], ["one", "two"]) == (
        "The models' medians over layers do not compare: 3 of 6 layers were looked at in two"
    )
    rows = models_section.rows([whole, part], ["one", "two"])
    assert [(row["layers"], row["n_layers"]) for row in rows] == [(4, 4), (3, 6)]
    assert [(row["auc_layers"], row["cost_layers"]) for row in rows] == [(4, 4), (6, 2)]
    said = models_section.finding([whole, results_of("two", 6, ("a",))], ["one", "two"])
    assert re.fullmatch(
        r"The median of all layers has an R² of 0\.\d{3} in one and 0\.\d{3} in two, on docs:python, where "
        r"the maps were fitted",
        said,
    )


def test_up_to_three_corpora_have_a_clause_each() -> None:
    found = five(a0="supported", b0="supported", b1="supported", b2="cannot tell")
    three = found.surrogates.filter(pl.col("series") < 3)
    assert verdicts.by_store(found, three) == (
        "in 1 of 3 layers on docs:python (a) (not supported in 2), 2 of 3 on docs:scientific (b) (cannot "
        "tell in 1) and none of 3 on docs:stdlib (not supported in 3)"
    )


def test_values_that_read_the_same_are_said_once() -> None:
    found = five()
    assert verdicts.by_store(found, found.surrogates.filter(pl.col("series") < 3)) == (
        "in none of 3 layers on each of 3 corpora (not supported in 3)"
    )
    same = [(0.5, "3 of 6", "a"), (0.5, "3 of 6", "b"), (0.5, "3 of 6", "c")]
    assert findings.over_stores(same) == "3 of 6 on each of 3 corpora"
    assert findings.over_stores([*same[:2], (1.0, "all 6", "c")]) == "3 of 6 on a, 3 of 6 on b and all 6 on c"
    flat = found.surrogates.with_columns(r2_test=0.0821 + 0.0001 * pl.col("layer"))
    ends = ("r2_sim_lo", "r2_sim_hi")
    two = flat.filter((pl.col("series") == 0) & (pl.col("layer") < 2))
    assert findings.from_to(two, "r2_test", text.number) == "0.082 in both layers"
    assert findings.from_to(two, "r2_test", text.number, ends) == "0.082 [0.485, 0.614] in both layers"
    assert findings.ranges(found, flat, "r2_test", text.number) == "0.082 in all 15 cases, over 5 corpora"
    assert findings.ranges(found, flat.filter(pl.col("series") == 1), "r2_test", text.number) == (
        "0.082 in all 3 layers on docs:scientific (b)"
    )


def test_counts_over_many_corpora_give_the_ends_and_what_is_open() -> None:
    found = five(a0="supported", b0="supported", b1="supported", b2="cannot tell", c0="supported",
                 d0="too few documents", d1="too few documents", d2="too few documents")  # fmt: skip
    said = verdicts.by_store(found, found.surrogates)
    assert said == (
        "in none of 3 layers on docs:scientific (e) to 2 of 3 on docs:scientific (b) (of 12 cases, not "
        "supported in 7, cannot tell in 1; too few documents on 1 of 5 corpora)"
    )
    everything = five(**{f"{store}{layer}": "supported" for store in FIVE for layer in range(3)})
    assert verdicts.by_store(everything, everything.surrogates) == "in all 3 layers on each of 5 corpora"
    open_ones = five(**{f"{store}{layer}": "cannot tell" for store in FIVE for layer in range(3)})
    assert verdicts.by_store(open_ones, open_ones.surrogates) == (
        "in none of 3 layers for sure on any of 5 corpora (of 15 cases, cannot tell in 15)"
    )


def test_ranges_over_many_corpora_name_both_ends() -> None:
    found = five()
    assert findings.ranges(found, found.surrogates, "r2_test", text.number) == (
        "0.500 (layer\xa00 on docs:python (a)) to 0.740 (layer\xa02 on docs:scientific (e)), over 5 corpora"
    )


def test_what_is_cut_off_is_named_up_to_a_few_the_farthest_first() -> None:
    frame = pl.DataFrame({"series": [0] * 9, "layer": list(range(9)), "value": [float(n) for n in range(9)],
                          "lo": [None] * 9, "hi": [None] * 9})  # fmt: skip
    said = axes.beyond([multiples.Panel("x", frame)], (0.0, 1.0), text.number)
    assert said.startswith("Beyond the axis and drawn on its edge: layer 8 (8.000), layer 7 (7.000)")
    assert said.endswith("layer 4 (4.000) and 2 more.")


def test_lists_of_tokens_are_cut_where_there_are_many_and_said_to_be() -> None:
    many = make_results(make_tables(FIVE, n_layers=30))
    most = examples.each(many.examples)
    assert most == examples.MOST // (5 * 30 * 2) == 4
    document = page.render(many)
    assert document.count("<mark>") == 4 * 5 * 30 * 2
    assert "Of each list the first 4 are shown." in document
    few = page.render(make_results(make_tables(("a",), n_layers=2)))
    assert few.count("<mark>") == 8 * 2 * 2
    assert "Of each list" not in html.unescape(few)

"""The page: the same bytes everywhere, nothing from outside, strings stay text, words and tables agree."""

import base64
import hashlib
import html
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_reports import SETTINGS, make_results, make_tables, surrogate_row, write_study
from helpers_reports_pages import HOSTILE, SCRIPT, Structure, draw_nothing, plain, table
from helpers_store import make_store
from nearline.analyze.fit import fit
from nearline.analyze.settings import FitSettings
from nearline.reports import (
    findings,
    harvested,
    overview,
    page,
    provenance,
    report,
    sinks_findings,
    verdicts,
)
from nearline.reports.columns import COLUMNS
from nearline.reports.results import read
from nearline.store import IncompleteError, Study, UsageError
from nearline.workflows import show_studies

LIMIT_BYTES = 1_500_000


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("reports") / "demo", make_tables())


@pytest.fixture(scope="module")
def document(study: Path) -> str:
    return report(study).read_text(encoding="utf-8")


def test_the_page_stands_in_the_study_and_is_the_same_in_another_process(
    study: Path, document: str, tmp_path: Path
) -> None:
    assert (study / "report.html").read_text(encoding="utf-8") == document
    code = f"from nearline.reports import report; report({str(study)!r}, {str(tmp_path / 'again.html')!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert (tmp_path / "again.html").read_bytes() == (study / "report.html").read_bytes()


def test_out_may_be_a_folder(study: Path, document: str, tmp_path: Path) -> None:
    assert report(study, tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == document


def test_nothing_comes_from_outside_and_one_script_may_run(document: str) -> None:
    assert not re.search(r"(?:src|href)\s*=(?!\"#)", document)
    assert not re.search(r"url\(|@import|http:|https:|(?<![:\w])//\w", document)
    found = Structure(document)
    assert not {tag for tag, _ in found.tags} & {
        "script",
        "img",
        "iframe",
        "link",
        "object",
        "embed",
        "base",
        "form",
    }
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    scripts = re.findall(r"<script>(.*?)</script>", document, re.DOTALL)
    assert document.count("<script") == len(scripts) == document.count(SCRIPT) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = next(
        tag["content"] for _, tag in found.tags if tag.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_the_page_is_small_and_every_id_is_unique(document: str) -> None:
    assert len(document.encode()) < LIMIT_BYTES
    ids = [attributes["id"] for _, attributes in Structure(document).tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = re.findall(r'href="#([^"]+)"', document)
    assert targets
    assert set(targets) <= set(ids)


def test_no_path_of_this_machine_is_on_the_page(study: Path, document: str) -> None:
    assert str(study.parent) not in document
    assert str(Path.home()) not in document


def test_every_figure_has_a_sentence_for_those_who_cannot_see_it(document: str) -> None:
    figures = re.findall(r"<figure.*?</figure>", document, re.DOTALL)
    assert len(figures) == 5
    for figure in figures:
        visible = re.search(r"<strong>(.*?)\.</strong>", figure)
        assert visible is not None
        assert figure.count('role="img"') == 2
        assert figure.count(f'aria-label="{visible[1]}"') == 2
        assert figure.count(f"<title>{visible[1]}</title>") == 2


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("stores", [("a", "b"), ("only",)])
def test_numbers_of_the_summary_stand_in_the_table(stores: tuple[str, ...]) -> None:
    results = make_results(make_tables(stores, n_layers=6))
    document = page.render(results)
    cells = table(document, "table-surrogates")
    home, away = overview.summary(results, 0), overview.transfer(results) if len(stores) > 1 else ""
    assert len(re.findall(r"−?\d+\.\d+", home)) == 6
    assert len(re.findall(r"[Ll]ayer (\d+) is", home)) == 2
    for sentence in (home, away.partition("kept")[2]):
        assert html.escape(sentence) in document
        assert all(number in cells for number in re.findall(r"−?\d+\.\d+", sentence))
        assert all(interval in cells for interval in re.findall(r"\[[^\]]+\]", sentence))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("stores", [("a", "b"), ("a", "b", "c"), ("only",)])
def test_only_the_corpus_that_was_fitted_says_how_linear_an_mlp_is(stores: tuple[str, ...]) -> None:
    """Moved maps do worse everywhere here, and rank the layers the other way round."""
    rows = make_tables(stores, n_layers=3)
    rows["surrogates"] = [
        surrogate_row(
            store,
            layer,
            0.95 - 0.2 * layer if store == stores[0] else 0.1 + 0.2 * layer,
            0.01,
            fit_on=stores[0],
        )
        for store in stores
        for layer in range(3)
    ]
    results = make_results(rows)
    document = page.render(results)
    answers = plain(page.answers(results))
    home, _, away = answers.partition("Moved to")
    assert "1 of 3 MLPs is nearly linear. Layer 0 is the most linear: R²\xa00.950" in home
    assert "layer 2 is the least linear: R²\xa00.550" in home
    assert "linear" not in away.replace("not how linear the MLP is there", "")
    assert bool(away) == (len(stores) > 1) == ("whether they transfer" in table(document, "table-verdicts"))
    assert ("says whether they transfer" in findings.claim(results)) == (len(stores) > 1)
    assert ("error</em> is that of the move as well" in document) == (len(stores) > 1)
    assert (" moved " in table(document, "table-surrogates")) == (len(stores) > 1)
    if away:
        assert "R²\xa0goes from 0.100 [" in away
        assert away.endswith("This asks whether a map transfers, not how linear the MLP is there.")
        assert findings.r2(results).startswith(
            "Where it was fitted, one linear map explains held-out MLP output with an R² of 0.550 [0.535, "
            "0.564] (layer\xa02) to 0.950 [0.935, 0.964] (layer\xa00) on docs:python; moved to a corpus that "
            "it was not fitted on, of 0.100 ["
        )


def test_the_command_line_tells_moved_maps_from_fitted_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stores in (("a", "b"), ("only",)):
        show_studies.study(write_study(tmp_path / stores[0], make_tables(stores, n_layers=2)), as_json=False)
        said = capsys.readouterr().out
        assert said.count("fitted here") == said.count("moved here") == (2 if len(stores) > 1 else 0)


@pytest.mark.parametrize(("width", "words"), [(0.01, ""), (0.2, " by point estimate")])
def test_an_extreme_that_may_be_chance_says_so(width: float, words: str) -> None:
    rows = make_tables(("only",), n_layers=3)
    rows["surrogates"] = [
        surrogate_row("only", layer, 0.4 + 0.1 * layer, width, fit_on="only") for layer in range(3)
    ]
    said = overview.summary(make_results(rows), 0)
    assert f"Layer 2 is the most linear{words}: R²" in said
    assert f"layer 0 is the least linear{words}: R²" in said


def test_counts_of_the_summary_are_those_of_the_verdicts(document: str, study: Path) -> None:
    results = read(study)
    for series, label in enumerate(("docs:python", "docs:scientific")):
        rows = results.surrogates.filter(results.surrogates["series"] == series)
        supported = rows.filter(rows["verdict"] == "supported").height
        if series == 0:
            assert overview.summary(results, 0).startswith(f"{supported} of 12 MLPs are nearly linear")
        else:
            assert f"kept in {supported} of 12 layers" in overview.transfer(results)
        row = re.search(rf"{label}((?:\s+\d+)+)", table(document, "table-verdicts"))
        assert row is not None
        assert int(row[1].split()[0]) == supported


@pytest.mark.parametrize(
    ("found", "words"),
    [
        # Nothing is denied that an interval leaves open, and layers that nobody looked at are not counted.
        (
            "nnc",
            "none of the 3 MLPs looked at (of 30) is nearly linear for sure; layer 9 may be: R²\xa00.920 [",
        ),
        (
            "ncc",
            "none of the 3 MLPs looked at (of 30) is nearly linear for sure; layers 5 and 9 may be. Layer 9 ",
        ),
        (
            "cnn",
            "none of the 3 MLPs looked at (of 30) is nearly linear for sure; layer 0 may be. Layer 9 is the ",
        ),
        (
            "nnt",
            "none of the 3 MLPs looked at (of 30) is nearly linear for sure; layer 9 may be: R²\xa00.920 [",
        ),
        ("nnn", "none of the 3 MLPs looked at (of 30) is nearly linear. Layer 9 is the most linear"),
        ("ncs", "1 of 3 MLPs looked at (of 30) is nearly linear, and of 1 it cannot be told. Layer 9"),
        ("nss", "2 of 3 MLPs looked at (of 30) are nearly linear. Layer 9"),
        ("sss", "all 3 MLPs looked at (of 30) are nearly linear. Layer 9"),
        ("ss", "both MLPs looked at (of 30) are nearly linear. Layer 5"),
        ("s", "the one MLP looked at (of 30) is nearly linear: layer 0 has R²\xa0"),
        ("n", "the one MLP looked at (of 30) is not nearly linear: layer 0 has R²\xa0"),
        ("c", "whether the one MLP looked at (of 30) is nearly linear cannot be told: layer 0 has R²\xa0"),
        (
            "ttt",
            "there are too few documents to say which of 3 MLPs looked at (of 30) are nearly linear. Layer",
        ),
    ],
)
def test_the_headline_claims_what_the_verdicts_do_and_says_how_many_mlps_were_looked_at(
    found: str, words: str
) -> None:
    initials = {verdict[0]: verdict for verdict in reversed(findings.VERDICTS)}
    rows = make_tables(("only",), n_layers=1)
    rows["harvest"][0]["n_layers"] = 30
    rows["surrogates"] = [
        surrogate_row("only", layer, 0.8 + 0.06 * at, 0.01, fit_on="only", verdict=initials[letter])
        for at, (layer, letter) in enumerate(zip((0, 5, 9), found, strict=False))
    ]
    assert overview.summary(make_results(rows), 0).startswith(words)
    rows["harvest"][0]["n_layers"] = len(found)
    assert overview.summary(make_results(rows), 0).startswith(words.replace(" looked at (of 30)", ""))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("verdict", findings.VERDICTS)
def test_each_verdict_is_worded_where_it_is_given(verdict: str) -> None:
    rows = make_tables(("only",), n_layers=3)
    rows["surrogates"] = [
        surrogate_row("only", layer, 0.5, 0.01, fit_on="only", verdict=verdict) for layer in range(3)
    ]
    results = make_results(rows)
    summary = overview.summary(results, 0)
    assert f"Verdicts: {verdict} for layers 0–2." in summary
    # Zero of three would be an answer; too few documents give none.
    assert summary.startswith("there are too few") == (verdict == "too few documents")
    document = page.render(results)
    assert table(document, "table-surrogates").count(f"{verdicts.SYMBOLS[verdict]} {verdict}") == 3
    assert findings.MEANING[verdict] in html.unescape(document)


@pytest.mark.usefixtures("undrawn")
def test_each_verdict_is_on_the_page_of_a_fit_that_calls_for_it(tmp_path: Path) -> None:
    """From rows to the page: a linear MLP, one at the threshold, and one that is not."""
    store = make_store(tmp_path / "store", n_layers=3, n_tokens=6000, linear=[1.0, 0.9, 0.5])
    first = fit(tmp_path / "first", [store], FitSettings(examples=0)).table("surrogates").to_pylist()
    settings = FitSettings(examples=0, linear_at=first[1]["r2_test"])
    rows = fit(tmp_path / "study", [store], settings).table("surrogates").to_pylist()
    planted = ["supported", "cannot tell", "not supported"]
    assert [row["verdict"] for row in rows] == planted
    document = report(tmp_path / "study").read_text(encoding="utf-8")
    cells = table(document, "table-surrogates").split()
    for layer, verdict in enumerate(planted):
        at = cells.index(verdicts.SYMBOLS[verdict])
        assert " ".join(cells[at - 1 : at + 1 + len(verdict.split())]) == (
            f"{layer} {verdicts.SYMBOLS[verdict]} {verdict}"
        )
    lead = html.unescape(document.partition('<p class="answer">')[2].partition("</p>")[0])
    assert "1 of 3 MLPs is nearly linear, and of 1 it cannot be told. Layer 0 is the most linear" in lead
    assert lead.endswith(
        "Verdicts: supported for layer 0, not supported for layer 2, cannot tell for layer 1."
    )
    words = re.search(r"((?:\s+\d+){5})\s*$", table(document, "table-verdicts"))
    assert words is not None
    assert words[1].split() == ["1", "1", "1", "0", "3"]


@pytest.mark.usefixtures("undrawn")
def test_a_layer_that_is_about_one_token_is_named() -> None:
    rows = make_tables(("a", "b"), n_layers=3)
    for row in rows["surrogates"]:
        row["largest_row"] = {("a", 1): 0.974, ("a", 2): 0.5, ("b", 0): None}.get(
            (str(row["store"]), int(str(row["layer"])))
        )
    document = html.unescape(page.render(make_results(rows)))
    assert document.count("One test token carries more than half") == 1
    assert "in layer 1 (97.4\N{NO-BREAK SPACE}%): there R² and error speak of that token" in document
    assert "97.4" in table(document, "table-surrogates")


def test_constants_are_those_of_the_statistics() -> None:
    from nearline.analyze.intervals import LEVEL, MIN_GROUPS

    assert (findings.LEVEL, findings.MIN_GROUPS) == (100 * LEVEL, MIN_GROUPS)


def test_the_threshold_is_that_of_the_settings(tmp_path: Path) -> None:
    study = write_study(tmp_path / "s", make_tables(("only",), n_layers=2), {**SETTINGS, "linear_at": 0.75})
    document = report(study).read_text(encoding="utf-8")
    assert "R² ≥ 0.75" in document
    assert "nearly linear from 0.75" in document


@pytest.fixture(scope="module")
def harmless(document: str) -> set[str]:
    """The tags of a page whose strings ask for nothing."""
    return {tag for tag, _ in Structure(document).tags}


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the drawing, which takes most of the time and meets no stored string."""
    draw_nothing(monkeypatch)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("hostile", HOSTILE)
def test_stored_strings_stay_text(hostile: str, harmless: set[str]) -> None:
    rows = make_tables(("first", "second"), n_layers=2)
    for row in rows["harvest"]:
        row |= {
            "model": hostile,
            "corpus": hostile,
            "sample": hostile,
            "revision": hostile,
            "attention": hostile,
            "proof": hostile,
            "bos": hostile,
            "model_type": hostile,
            "weights_hash": hostile,
        }
    for name in rows:
        for row in rows[name]:
            row["store"] = f"{hostile} {row['store']}"
    for row in rows["examples"]:
        row |= {"token": hostile, "before": hostile, "after": hostile, "document_key": hostile}
    for row in rows["needs"]:
        row["need"] = row["need"] if row["need"] == "error" else hostile + str(row["need"])
    results = make_results(rows, SETTINGS | {"note": hostile, hostile: [hostile]})
    document = page.render(results)
    kinds = {tag for tag, _ in Structure(document).tags}
    assert kinds <= harmless | {"wbr"}
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]", document)
    assert "&amp;lt;" not in document  # escaped, and once
    assert not re.search(r"\u0334{4}", document)
    assert "X" * 301 not in document


def test_paths_in_settings_lose_their_folders() -> None:
    found = provenance.without_folders(
        {"a": "/srv/data/store", "b": ["~/x/y", "C:\\u\\z"], "c": "0-5", "d": 0.1}
    )
    assert found == {"a": "store", "b": ["y", "z"], "c": "0-5", "d": 0.1}


@pytest.mark.usefixtures("undrawn")
def test_sinks_and_examples_may_be_missing() -> None:
    rows = make_tables(("only",), n_layers=2)
    rows["surrogates"] = [row | {"r2_sink": None, "n_sink": 0} for row in rows["surrogates"]]
    rows["needs"] = [row for row in rows["needs"] if row["population"] == "body"]
    rows["examples"] = []
    document = page.render(make_results(rows))
    assert "No sinks were harvested" in document
    assert "fitted without examples" in document


@pytest.mark.usefixtures("undrawn")
def test_a_sink_that_is_one_vector_counts_once_and_has_no_interval() -> None:
    """A BOS token at position 0 gives the same vector in every window of every store."""
    rows = make_tables(("a", "b", "c"), n_layers=2)
    for row in rows["needs"]:
        if row["population"] == "sink":
            row |= dict.fromkeys(("mean", "mean_lo", "mean_hi"), 0.37 + 0.1 * int(str(row["layer"]))) | {
                "sd": 0.0
            }
    for row in rows["surrogates"]:
        row["r2_sink"] = 0.2 if row["layer"] == 0 else 0.99
    results = make_results(rows)
    assert sinks_findings.finding(results) == (
        "All sinks are one and the same vector, and count once: by point estimates of R², the linear map, "
        "fitted without it, explains it worse than the other tokens in 1 of 2 layers; those of the mean "
        "error say otherwise in layer 0 on docs:python"
    )
    page_of_it = page.render(results)
    assert "[0.370, 0.370]" not in table(page_of_it, "table-sinks")
    assert "0.370" in table(page_of_it, "table-sinks")
    for row in rows["needs"]:  # a store without BOS: its sinks differ from one another
        row["sd"] = 0.1 if row["store"] == "b" else row["sd"]
    assert sinks_findings.finding(make_results(rows)).startswith(
        "By point estimates of R², the linear map, fitted without the sinks, explains them worse than the "
        "other tokens in 2 of 4 pairs of layer and store (where all are one and the same vector, they count "
        "once)"
    )


@pytest.mark.parametrize(
    ("r2", "sink", "words"),
    [
        ((-5.0, -3.0), (0.9, 0.8), "in both layers"),
        ((-5.0, -3.0), (0.9, 0.2), "in both layers; those of the mean error say otherwise in layer 1"),
        ((0.99, 0.99), (0.9, 0.2), "in none of 2 layers; those of the mean error say otherwise in layer 0"),
        ((-5.0, -3.0), (0.2, 0.2), "in both layers; those of the mean error say otherwise in layers 0 and 1"),
        ((-5.0, -3.0), (None, None), "in both layers"),
    ],
)
def test_where_r2_and_the_mean_error_of_sinks_disagree_is_said(
    r2: tuple[float, ...], sink: tuple[float | None, ...], words: str
) -> None:
    rows = make_tables(("only",), n_layers=2)
    for row in rows["needs"]:
        row["mean"] = sink[int(str(row["layer"]))] if row["population"] == "sink" else 0.5
    for row in rows["surrogates"]:
        row["r2_sink"] = r2[int(str(row["layer"]))]
    said = sinks_findings.finding(make_results(rows))
    assert said.startswith(
        "By point estimates of R², the linear map, fitted without the sinks, explains them"
    )
    assert said.endswith(f" worse than the other tokens {words}")


@pytest.mark.usefixtures("undrawn")
def test_too_few_groups_leave_no_interval_but_a_page() -> None:
    rows = make_tables(("only",), n_layers=2)
    ends = dict.fromkeys(("r2_lo", "r2_hi", "r2_sim_lo", "r2_sim_hi"), float("nan"))
    rows["surrogates"] = [row | ends | {"verdict": "too few documents"} for row in rows["surrogates"]]
    results = make_results(rows)
    assert "[" not in overview.summary(results, 0)
    assert not re.search(r"\bnan\b", page.render(results), re.IGNORECASE)


def test_two_stores_of_one_corpus_are_told_apart() -> None:
    rows = make_tables(("first", "second"), n_layers=2)
    rows["harvest"] = [row | {"corpus": "docs:python"} for row in rows["harvest"]]
    results = make_results(rows)
    assert findings.label(results, 0) == "docs:python (first)"
    assert findings.label(results, 1) == "docs:python (second)"


@pytest.mark.parametrize("missing", ["harvest", "surrogates", "needs", "need_histogram", "examples"])
def test_an_unfitted_study_names_the_command(missing: str, tmp_path: Path) -> None:
    rows = make_tables(("only",), n_layers=1)
    del rows[missing]
    study = write_study(tmp_path / "half", rows)
    with pytest.raises(IncompleteError, match=rf"no table `{missing}` .*`nearline fit .*/half STORE…`"):
        report(study)
    assert not (study / "report.html").exists()


def test_a_study_that_was_never_fitted_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Study.create("studies/new one")
    words = r"study new one has not been fitted .*: run `nearline fit 'studies/new one' STORE…` first"
    with pytest.raises(IncompleteError, match=words):
        report("studies/new one")


def test_an_empty_table_names_the_command(tmp_path: Path) -> None:
    study = write_study(tmp_path / "hollow", make_tables(("only",), n_layers=0))
    with pytest.raises(
        IncompleteError, match=r"table `surrogates` is empty: run `nearline fit .*/hollow STORE…`"
    ):
        report(study)


def test_a_table_of_another_version_is_named(tmp_path: Path) -> None:
    rows = make_tables(("only",), n_layers=1)
    for row in rows["surrogates"]:
        del row["r2_sim_lo"]
    study = write_study(tmp_path / "old", rows)
    with pytest.raises(
        UsageError, match=r"table `surrogates` lacks r2_sim_lo; it has .*fit .*/old STORE…` again"
    ):
        report(study)


def test_a_folder_that_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises((UsageError, IncompleteError)):
        report(tmp_path / "nothing")


def test_the_columns_read_are_those_that_fit_writes() -> None:
    from nearline.analyze.results import SCHEMAS

    for name, columns in COLUMNS.items():
        assert set(columns) <= set(SCHEMAS[name].names)


def test_documents_of_the_corpus_and_those_that_rows_were_taken_from_are_told_apart(document: str) -> None:
    assert "912 documents in 640 groups of near-duplicates; rows from 256 fit and 255 test groups" in table(
        document, "table-harvest"
    )
    assert "counts by the two may differ" in document


def test_the_proof_is_told_in_words_with_its_limits() -> None:
    told = harvested.proof(
        '{"norm_error": 2.4e-7, "norm_tolerance": 1e-05, "n_sequences": 3.0, "new_check": 0.5}'
    )
    assert told.splitlines() == [
        "norm(residual) against what the MLP received: 2.4×10⁻⁷ (tolerated 10⁻⁵)",
        "sequences checked: 3",
        "new_check: 5.0×10⁻¹",
    ]


@pytest.mark.usefixtures("undrawn")
def test_what_the_axis_cuts_off_is_said() -> None:
    rows = make_tables(("only",), n_layers=3)
    rows["surrogates"][1] |= {"r2_test": -300.0, "r2_sim_lo": -900.0, "r2_sim_hi": -100.0}
    document = page.render(make_results(rows))
    assert "Cut at the lower edge of the axis: layer 1 (R²\xa0−300.0 [−900.0, −100.0])." in document
    assert "Cut at" not in page.render(make_results(make_tables(("only",), n_layers=3)))

"""Charts for notebooks: title, legend and plain colours beside what the page draws; names stay text."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import nearline
import pytest
from helpers_reports import make_tables, write_study
from helpers_reports_analyses import make_analysis_tables
from helpers_reports_costs import make_cost_tables
from nearline.reports import notebook, results, svg
from nearline.store import IncompleteError, UsageError
from nearline.workflows.opened import OpenStudy

CHARTS: dict[str, Callable[[Any], alt.TopLevelMixin]] = {
    name: getattr(notebook, name)
    for name in ("held_out_r2", "need_quantiles", "shares_below", "need_histograms", "gate_auc", "costs")
}
RENDERED = ("need_histograms", "costs")  # of each kind one: with panels side by side, and facets
EVIL = '</script><b onclick="x">\'; alert(1) //'


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = make_tables(n_layers=4) | make_analysis_tables(n_layers=4) | make_cost_tables(n_layers=4)
    return write_study(tmp_path_factory.mktemp("studies") / "study", tables)


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_whole_without_a_page(name: str, study: Path) -> None:
    chart = CHARTS[name](study)
    spec = chart.to_dict()  # validated
    text = json.dumps(spec)
    assert "var(--" not in text
    assert "http" not in text.replace(spec["$schema"], "")
    assert " ".join(spec["title"]["text"])[0].isupper()
    assert spec["config"]["background"] == "#ffffff"
    assert max(map(len, spec["title"]["text"])) <= notebook.LINE
    labels = [results.read(study).harvest["corpus"].to_list()]
    names = set(re.findall(r'"labelExpr": "(\[.*?\])\[datum.value\]"', text))
    assert names == {json.dumps(json.dumps(one))[1:-1] for one in labels}
    if name in RENDERED:
        assert svg.render(chart, "a chart").startswith("<svg")  # Vega draws it, legend included
        assert json.dumps(CHARTS[name](study).to_dict()) == text


def test_an_opened_study_and_its_folder_give_the_same_chart(study: Path) -> None:
    opened = nearline.open(study)
    assert isinstance(opened, OpenStudy)
    assert notebook.held_out_r2(opened).to_dict() == notebook.held_out_r2(str(study)).to_dict()


def test_what_is_drawn_is_what_the_table_says(study: Path) -> None:
    spec = notebook.held_out_r2(study).to_dict()
    drawn = {
        (row["series"], row["layer"]): row["r2_test"]
        for rows in spec["datasets"].values()
        for row in rows
        if "r2_test" in row
    }
    table = results.read(study).surrogates.to_dicts()
    assert len(drawn) == len(table)
    for row in table:
        assert drawn[row["series"], row["layer"]] == pytest.approx(row["r2_test"])


def test_one_store_needs_no_legend(tmp_path: Path) -> None:
    path = write_study(tmp_path / "study", make_tables(("one",), n_layers=3))
    assert "labelExpr" not in json.dumps(notebook.held_out_r2(path).to_dict())


def test_names_of_a_study_stay_text(tmp_path: Path) -> None:
    """A name in a legend is a string inside an expression: it must not end it."""
    tables = make_tables(n_layers=3)
    for at, row in enumerate(tables["harvest"]):
        row["corpus"] = f"{EVIL}{at}\"]+warn('x')+[\""
    path = write_study(tmp_path / "study", tables)
    spec = notebook.held_out_r2(path).to_dict()
    (expression,) = set(re.findall(r'"labelExpr": "((?:[^"\\]|\\.)*)"', json.dumps(spec)))
    shown = json.loads(f'"{expression}"').removesuffix("[datum.value]")
    assert len(json.loads(shown)) == len(tables["harvest"])
    drawn = svg.render(notebook.held_out_r2(path), "names")
    assert "<b onclick" not in drawn
    assert "<script" not in drawn


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda path: notebook.need_histograms(path, [99]), UsageError, "layer 99 is not in study study"),
        (
            lambda path: notebook.gate_auc(path, ["inputs"]),
            UsageError,
            "no gate on 'inputs'; it has gates on",
        ),
        (lambda path: notebook.costs(path, ["melt"]), UsageError, "has not measured 'melt'; it has linear"),
    ],
)
def test_what_is_not_there_is_named(
    ask: Callable[[Path], Any], kind: type[Exception], message: str, study: Path
) -> None:
    with pytest.raises(kind, match=message):
        ask(study)


def test_a_step_that_was_not_run_is_named(tmp_path: Path) -> None:
    path = write_study(tmp_path / "study", make_tables(n_layers=3))
    with pytest.raises(IncompleteError, match=r"no table `gates`: run `nearline analyze .* --only gates`"):
        notebook.gate_auc(path)
    with pytest.raises(IncompleteError, match=r"no table `interventions`: run `nearline measure .*study`"):
        notebook.costs(path)

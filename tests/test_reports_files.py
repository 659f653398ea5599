"""Tables and figures of a page as files: whole, with every digit, readable alone, the same twice."""

import csv
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import polars as pl
import pytest
from helpers_reports import make_results, make_tables, write_study
from helpers_reports_analyses import make_analysis_tables
from helpers_reports_costs import make_cost_tables
from helpers_reports_pages import HOSTILE, draw_nothing
from nearline.reports import figure_files, gathered, page, report, table_files, tables
from nearline.reports.report import write
from nearline.reports.results import read
from nearline.reports.tables import Column, between, house, value
from nearline.store import UsageError, durable

STORES = ("a", "b")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = make_tables(STORES, n_layers=3)
    further = make_analysis_tables(STORES, n_layers=3) | make_cost_tables(STORES, n_layers=3)
    return write_study(tmp_path_factory.mktemp("files") / "demo", rows | further)


@pytest.fixture(scope="module")
def document(study: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        return report(study, tmp_path_factory.mktemp("page")).read_text(encoding="utf-8")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("form", "suffix"), [("csv", "csv"), ("parquet", "parquet"), ("latex", "tex")])
def test_every_table_of_the_page_is_a_file(
    study: Path, document: str, tmp_path: Path, form: str, suffix: str
) -> None:
    on_page = re.findall(r'<div id="table-([^"]+)"', document)
    assert len(on_page) > 40
    first, again = (
        write(study, tmp_path / "page.html", tables=tmp_path / name, format=form) for name in ("one", "two")
    )
    assert {path.name for path in first.tables} == {f"{key}.{suffix}" for key in on_page} | {"captions.txt"}
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert len(again.tables) == len(first.tables)
    captions = (tmp_path / "one" / "captions.txt").read_text(encoding="utf-8").splitlines()
    assert [line.partition(":")[0] for line in captions] == on_page


@pytest.mark.usefixtures("undrawn")
def test_csv_and_parquet_hold_the_values_of_the_study(study: Path, tmp_path: Path) -> None:
    surrogates = read(study).surrogates
    for form in ("csv", "parquet"):
        write(study, tmp_path / "page.html", tables=tmp_path / form, format=form)
    sheet = pl.read_csv(tmp_path / "csv" / "surrogates.csv")
    frame = pl.read_parquet(tmp_path / "parquet" / "surrogates.parquet")
    for found in (sheet, frame):
        assert found["R²: test"].to_list() == surrogates["r2_test"].to_list()
        assert found["R²: simultaneous low"].to_list() == surrogates["r2_sim_lo"].to_list()
        assert found["verdict"].to_list() == surrogates["verdict"].to_list()
        assert found["part"].to_list() == ["docs:python"] * 3 + ["docs:scientific"] * 3
    assert frame.schema["layer"] == pl.Int64
    assert frame["R²: folds"].to_list() == surrogates["r2_cv"].to_list()  # nothing where there is nothing


@pytest.mark.usefixtures("undrawn")
def test_a_pivoted_cell_keeps_its_interval_and_its_verdict(study: Path, tmp_path: Path) -> None:
    write(study, tmp_path / "page.html", tables=tmp_path / "t", format="parquet")
    frame = pl.read_parquet(tmp_path / "t" / "auc.parquet")
    rows = (
        read(study)
        .tables["gates"]
        .filter((pl.col("features") == "input") & (pl.col("size") == "linear") & (pl.col("need") == "error"))
    )
    name = "available when routing: input"
    assert frame[name].to_list() == rows["auc"].to_list()
    assert frame[f"{name} low"].to_list() == rows["auc_sim_lo"].to_list()
    assert frame[f"{name} verdict"].to_list() == rows["verdict"].to_list()


def shown(rows: list[dict[str, Any]], columns: list[Column], **settings: Any) -> tuple[str, gathered.Shown]:
    with gathered.gathering() as kept:
        drawn = house(rows, columns, key="table-x", caption="A caption", **settings)
    return drawn, kept.tables[0]


def test_a_long_table_is_cut_on_the_page_and_whole_in_its_file() -> None:
    rows = [{"n": n, "of": "ab"[n % 2]} for n in range(2 * tables.MOST_ROWS)]
    drawn, kept = shown(rows, [Column("n", value("n", str))], group=lambda row: row["of"])
    assert drawn.count("<td>") == tables.MOST_ROWS
    assert "Shown: 600 of 1,200 rows (as many under each heading). All of them:" in drawn
    assert len(table_files.stored(kept)["n"]) == 2 * tables.MOST_ROWS
    short, _ = shown(rows[: tables.MOST_ROWS], [Column("n", value("n", str))])
    assert "Shown:" not in short


def test_only_tables_of_several_rows_with_numbers_are_sorted() -> None:
    number, words = Column("n", value("n", str)), Column("w", value("n", str), number=False)
    rows = [{"n": n} for n in range(tables.SORTED_FROM)]
    assert "sortable" in shown(rows, [words, number])[0]
    assert "sortable" not in shown(rows[1:], [words, number])[0]
    assert "sortable" not in shown(rows, [words, words])[0]
    parted, _ = shown(rows, [number], group=lambda row: str(row["n"] % 2))
    assert "sortable" not in parted  # two rows under each heading


def test_latex_escapes_what_latex_would_read(tmp_path: Path) -> None:
    rows = [{"name": r"50 % of a_b & {x} \input{y} ~^#$ ●", "low": -0.5, "high": 3.2e7, "value": 1e-5}]
    columns = [
        Column("name", value("name", str), number=False),
        Column("interval", between("low", "high"), spanner="R² &amp; more"),
        Column("value", value("value", lambda one: "3.2×10⁻⁷"), spanner="R² &amp; more"),
    ]
    _, kept = shown(rows, columns, group=lambda row: "docs:a_b")
    page_of = gathered.Gathered(tables=[kept])
    found = table_files.drawn([page_of], tmp_path, "latex")
    (body,) = [content.decode() for path, content in found.items() if path.suffix == ".tex"]
    assert (
        r"50 \% of a\_b \& \{x\} \textbackslash{}input\{y\} \textasciitilde{}\textasciicircum{}\#\$ $\bullet$"
        in body
    )
    assert r"[$-$0.500, 3.2$\times$10$^{7}$] & 3.2$\times$10$^{-7}$\\" in body
    assert r" & \multicolumn{2}{c}{R$^2$ \& more}\\" in body
    assert r"\multicolumn{3}{l}{docs:a\_b}" in body
    assert body.count(r"\begin{longtable}{lrr}") == body.count(r"\end{longtable}") == 1
    assert not re.search(r"[^\x00-\x7f]", body)


@pytest.mark.usefixtures("undrawn")
def test_all_cells_of_a_page_are_letters_that_pdftex_has(study: Path, tmp_path: Path) -> None:
    written = write(study, tmp_path / "page.html", tables=tmp_path / "t", format="latex").tables
    own = {"harvest.tex", "settings.tex", "stores.tex", "analyses.tex"}  # these hold texts of the study
    for path in written:
        if path.suffix == ".tex" and path.name not in own and not path.name.startswith("list-"):
            assert not re.findall(r"[^\x00-\x7f]", path.read_text(encoding="utf-8")), path.name


def test_stored_words_stay_one_cell_and_no_formula(tmp_path: Path) -> None:
    words = [*HOSTILE, '=HYPERLINK("http://evil.example")', 'a,b\n"c"', "@x", "\ud800"]
    _, kept = shown([{"name": one} for one in words], [Column("name", value("name", str), number=False)])
    for form in table_files.FORMATS:
        durable.write_files(
            (path, [content])
            for path, content in table_files.drawn([gathered.Gathered(tables=[kept])], tmp_path, form).items()
        )
    with (tmp_path / "x.csv").open(encoding="utf-8", newline="") as file:
        cells = [row[0] for row in csv.reader(file)]
    assert len(cells) == len(words) + 1
    assert not any(cell.startswith(("=", "@")) for cell in cells)
    assert pl.read_parquet(tmp_path / "x.parquet").height == len(words)


def test_every_figure_is_a_picture_of_its_own(tmp_path: Path) -> None:
    results = make_results(make_tables(STORES, n_layers=2))
    with pytest.MonkeyPatch.context() as patch, gathered.gathering() as kept:
        draw_nothing(patch)
        document = page.render(results)
    kept.figures[:] = kept.figures[:2]
    assert [one.key for one in kept.figures] == re.findall(r'<figure id="figure-(\w+)"', document)[:2]
    one, two = (figure_files.drawn([kept], tmp_path) for _ in range(2))
    assert one == two
    files = {path.name: content for path, content in one.items()}
    drawn = ElementTree.fromstring(files["r2.svg"])
    words = ["".join(part.itertext()) for part in drawn.iter() if part.tag.endswith("text")]
    assert {"docs:python", "docs:scientific", "R² on test rows [1]"} <= set(words)
    assert b"var(" not in files["r2.svg"]
    assert files["r2.png"].startswith(b"\x89PNG")
    assert files["r2.pdf"].startswith(b"%PDF")
    assert "r2: Where it was fitted, one linear map" in files["captions.txt"].decode()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"format": "xlsx", "tables": "t"}, r"format 'xlsx': tables are written as csv, parquet, latex"),
        ({"format": "latex"}, r"--format latex says how tables are written: name a folder .* --tables DIR"),
        ({"tables": "file"}, r"--tables .*file: this is a file; name a folder"),
        (
            {"tables": "t", "figures": "t"},
            r"--tables and --figures both name .*: give each a folder of its own",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(
    study: Path, tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    named = {key: str(tmp_path / one) if key != "format" else one for key, one in settings.items()}
    with pytest.raises(UsageError, match=words):
        write(study, tmp_path / "page.html", **named)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"kept"


FOREIGN = {"study.toml": b"[[models]]\n", "page.html": b"<!doctype html>\n<html><head></head></html>\n"}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", FOREIGN)
def test_a_page_replaces_no_file_of_somebody_else(study: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    target.write_bytes(FOREIGN[name])
    with pytest.raises(
        UsageError, match=rf"{name} is there already, and is no report of nearline: name anot"
    ):
        report(study, target)
    assert content(tmp_path) == {name: FOREIGN[name]}


@pytest.mark.usefixtures("undrawn")
def test_a_folder_gets_its_page_beside_what_is_there_and_not_over_it(study: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"report\.html is there already"):
        report(study, tmp_path)
    assert content(tmp_path) == {"report.html": b"mine"}


@pytest.mark.usefixtures("undrawn")
def test_a_page_replaces_one_of_ours(study: Path, tmp_path: Path, document: str) -> None:
    """An older one, which names no generator, and an empty file too."""
    mark = '<meta name="generator" content="nearline">\n'
    assert mark in document[:1024]
    older = document.replace(mark, "")
    for before in (document, older, ""):
        (tmp_path / "page.html").write_text(before, encoding="utf-8")
        assert report(study, tmp_path / "page.html").read_text(encoding="utf-8") == document


@pytest.mark.usefixtures("undrawn")
def test_several_studies_on_one_page_replace_one_of_ours_only(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_study(tmp_path / "other", make_tables(STORES, n_layers=3))
    monkeypatch.chdir(tmp_path)
    assert report([study, other]) == report([study, other])
    Path("report.html").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"report\.html is there already"):
        report([study, other])


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("captions", [None, b"Figure 1: a cat\n", b"cat: on a mat\n"])
@pytest.mark.parametrize("what", ["tables", "figures"])
def test_tables_and_figures_replace_no_file_of_somebody_else(
    study: Path, tmp_path: Path, what: str, captions: bytes | None
) -> None:
    folder = tmp_path / what
    folder.mkdir()
    mine = {"tables": "surrogates.csv", "figures": "r2.svg"}[what]
    before = {mine: b"mine"} | ({} if captions is None else {"captions.txt": captions})
    for name, text in before.items():
        (folder / name).write_bytes(text)
    places = {"tables": None, "figures": None, what: folder}
    with pytest.raises(UsageError, match=rf"--{what} .*{what}: holds .*{mine}, not written by a report"):
        write(study, tmp_path / "page.html", tables=places["tables"], figures=places["figures"])
    assert content(folder) == before
    assert not (tmp_path / "page.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_tables_are_not_written_over_those_of_the_study(study: Path, tmp_path: Path) -> None:
    before = content(study / "tables")
    with pytest.raises(UsageError, match="name a new or an empty folder"):
        write(study, tmp_path / "page.html", tables=study / "tables", format="parquet")
    assert content(study / "tables") == before


@pytest.mark.usefixtures("undrawn")
def test_tables_and_figures_replace_those_of_an_earlier_report(study: Path, tmp_path: Path) -> None:
    places = {"tables": tmp_path / "t", "figures": tmp_path / "f"}
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "notes.txt").write_bytes(b"stays")  # no name of ours
    write(study, tmp_path / "page.html", tables=places["tables"], figures=places["figures"])
    first = {name: content(place) for name, place in places.items()}
    (tmp_path / "t" / "surrogates.csv").write_bytes(b"edited")
    write(study, tmp_path / "page.html", tables=places["tables"], figures=places["figures"])
    assert {name: content(place) for name, place in places.items()} == first

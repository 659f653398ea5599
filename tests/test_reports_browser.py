"""The page in a browser: it opens without a network, draws every figure, sorts, prints, fits a phone, and is
dark where that is asked for. Long: Chromium takes a minute of one core; screenshots are left in screenshots/.
"""

import re
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from helpers_reports import make_results, make_tables
from helpers_reports_analyses import make_analysis_tables
from helpers_reports_costs import make_cost_tables
from helpers_reports_pages import HOSTILE, figures
from nearline.reports import page, text, together
from nearline.reports.layout import MOST_PRINTED_ROWS
from nearline.reports.results import Results

pytestmark = pytest.mark.long

STORES = ("first", "second", "third")
N_LAYERS = 6
DESKTOP, PHONE, A4 = (1200, 900), (390, 844), (688, 1000)  # pixels; A4 without its margins at 96 dpi
LEGIBLE, SEEN = 4.5, 3.0  # contrast of letters and of marks, as WCAG 2.2 asks for them
SHOTS = Path(__file__).parents[1] / "screenshots"
WANTED = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def chromium() -> Generator[Any]:
    from playwright.sync_api import sync_playwright

    path = next((found for name in WANTED if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail(
            "no Chromium on the path: install it (Debian: apt-get install chromium) and run this again"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def results() -> Results:
    rows = make_tables(STORES, n_layers=N_LAYERS)
    rows["surrogates"][1] |= {"r2_sink": None, "condition": float("inf"), "alpha": 1e-5}
    rows["surrogates"][4] |= {"r2_sink": None, "condition": 4.2e12}
    further = make_analysis_tables(STORES, n_layers=N_LAYERS) | make_cost_tables(STORES, n_layers=N_LAYERS)
    return make_results(rows | further)


@pytest.fixture(scope="module")
def written(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page.render(results), encoding="utf-8")
    return path


Opener = Callable[..., Any]


@pytest.fixture
def opened(chromium: Any) -> Generator[Opener]:
    """Opens a page without a network; afterwards nothing may have complained or asked for anything."""
    contexts, said, asked = [], list[str](), list[str]()

    def opens(path: Path, size: tuple[int, int] = DESKTOP, **settings: Any) -> Any:
        width, height = size
        context = chromium.new_context(viewport={"width": width, "height": height}, offline=True, **settings)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("dialog", lambda dialog: said.append(f"a dialog: {dialog.message}"))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(path.as_uri())
        return tab

    yield opens
    for context in contexts:
        context.close()
    assert not said
    assert all(url.startswith("file:") for url in asked)


def unfold(tab: Any) -> None:
    tab.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")


def shoot(tab: Any, name: str, selector: str | None = None) -> None:
    SHOTS.mkdir(exist_ok=True)
    if selector is not None:
        tab.evaluate("selector => document.querySelector(selector).scrollIntoView()", selector)
    tab.screenshot(path=SHOTS / f"{name}.png")


@pytest.mark.parametrize(("size", "width"), [(DESKTOP, "wide"), (PHONE, "narrow")], ids=["desktop", "phone"])
def test_every_figure_is_drawn_once_and_nothing_is_wider_than_the_screen(
    opened: Opener, written: Path, size: tuple[int, int], width: str
) -> None:
    tab = opened(written, size)
    unfold(tab)
    boxes = {
        figure: [box for box in tab.evaluate(BOXES, f"#figure-{figure} .chart svg") if box["width"] > 0]
        for figure in figures(written.read_text(encoding="utf-8"))
    }
    assert len(boxes) > 20
    for figure, seen in boxes.items():
        assert len(seen) == 1, figure
        assert seen[0]["height"] > 60, figure
        assert seen[0]["right"] <= size[0], figure
        assert seen[0]["of"] == width, figure
    assert tab.evaluate("document.documentElement.scrollWidth") <= size[0]
    outside = tab.evaluate("[...document.querySelectorAll('.table')].filter(one => "
                           "one.getBoundingClientRect().right > innerWidth).map(one => one.id)")  # fmt: skip
    assert outside == []
    counts = tab.evaluate("[...document.querySelectorAll('[id$=-verdicts]')].filter(one => "
                          "one.scrollWidth > one.clientWidth).map(one => one.id)")  # fmt: skip
    assert counts == []
    shoot(tab, f"page-{width}")
    shoot(tab, f"figure-r2-{width}", "#figure-r2")
    shoot(tab, f"table-surrogates-{width}", "#table-surrogates")


BOXES = """selector => [...document.querySelectorAll(selector)].map(one => {
  const box = one.getBoundingClientRect();
  return {width: box.width, height: box.height, right: box.right,
    of: one.parentElement.className.split(' ')[1]};
})"""


def test_the_first_column_stays_while_a_table_is_scrolled(opened: Opener, written: Path) -> None:
    tab = opened(written, PHONE)
    unfold(tab)
    left = """key => { const box = document.getElementById(key); box.scrollLeft = 10000;
      const cell = box.querySelector('tbody td').getBoundingClientRect();
      return [box.scrollLeft, cell.left - box.getBoundingClientRect().left, cell.width]; }"""
    scrolled, at, width = tab.evaluate(left, "table-surrogates")
    assert scrolled > 100
    assert abs(at) <= 1
    assert width >= 20
    shoot(tab, "table-scrolled", "#table-surrogates")


def number(words: str) -> float | None:
    """The first number of a cell: what the script must find, in the plainest way."""
    powers = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    if bare := re.fullmatch(r"10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", words):
        return 10.0 ** int(bare[1].translate(powers))
    found = re.search(r"−?(?:\d[\d,]*(?:\.\d+)?|∞)", words)
    if found is None:
        return None
    size = float(found[0].replace("−", "-").replace(",", "").replace("∞", "inf"))
    power = re.match(r"×10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", words[found.end() :])
    return size if power is None else size * 10.0 ** int(power[1].translate(powers))


READ = """key => [...document.querySelectorAll(`#${key} tbody tr`)].map(row =>
  [...row.cells].map(cell => cell.textContent.trim()))"""


def runs(rows: list[list[str]]) -> list[list[list[str]]]:
    """Rows below each heading."""
    found: list[list[list[str]]] = [[]]
    for row in rows:
        if len(row) == 1:
            found.append([])
        else:
            found[-1].append(row)
    return [run for run in found if run]


def test_every_column_of_numbers_sorts_as_numbers_with_nothing_last(opened: Opener, written: Path) -> None:
    tab = opened(written)
    unfold(tab)
    tables = tab.evaluate("[...document.querySelectorAll('.sortable')].map(one => one.id)")
    assert {"table-surrogates", "table-sinks", "table-costs", "table-agreement"} <= set(tables)
    checked = 0
    for key in tables:
        before = tab.evaluate(READ, key)
        heads = tab.locator(f"#{key} thead th button")
        width = max(map(len, before))
        assert heads.count() == width, key
        for at in range(0, width, 1 if key in ("table-surrogates", "table-sinks") else 5):
            order = tab.evaluate(CLICKED, [key, at])
            if not order["number"]:
                continue
            for sign, direction in ((1, "ascending"), (-1, "descending")):
                assert order[direction]["said"] == [direction], key
                for old, new in zip(runs(before), runs(order[direction]["rows"]), strict=True):
                    known = [row for row in old if number(row[at]) is not None and row[at] not in ("", "–")]
                    wanted = sorted(known, key=lambda row: sign * number(row[at]))  # type: ignore[operator]
                    missing = [row for row in old if row not in known]
                    assert new == wanted + missing, (key, at, direction)
            assert order["none"] == {"rows": before, "said": []}
            checked += 1
    assert checked > 60


# Presses a heading three times: what stands in the table after each, and which headings say so. Columns are
# counted as they stand, headings as they are written: those below others come last.
CLICKED = """([key, at]) => {
  const table = document.querySelector(`#${key} table`), found = {};
  const heads = [], below = table.tHead.rows[1] ? [...table.tHead.rows[1].cells] : [];
  for (const cell of table.tHead.rows[0].cells)
    if (cell.classList.contains('over')) heads.push(...below.splice(0, cell.colSpan)); else heads.push(cell);
  for (const direction of ['ascending', 'descending', 'none']) {
    heads[at].querySelector('button').click();
    const said = heads.map(one => one.getAttribute('aria-sort')).filter(one => one !== 'none');
    found[direction] = {said, rows: [...table.tBodies[0].rows].map(row =>
      [...row.cells].map(cell => cell.textContent.trim()))};
  }
  found.number = !heads[at].classList.contains('l');
  return found;
}"""


def test_sorting_agrees_with_the_study_and_works_with_a_keyboard(
    opened: Opener, written: Path, results: Results
) -> None:
    tab = opened(written)
    head = tab.get_by_role("button", name="test", exact=True).first
    head.focus()
    tab.keyboard.press("Enter")
    tab.keyboard.press("Enter")
    shown = runs(tab.evaluate(READ, "table-surrogates"))
    for series, run in enumerate(shown):
        mine = results.surrogates.filter(results.surrogates["series"] == series)
        ranked = mine.sort("r2_test", descending=True)["layer"].to_list()
        assert [int(row[0]) for row in run] == ranked
    assert tab.locator("#table-surrogates th[aria-sort=descending]").inner_text().startswith("test")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    shoot(tab, "table-sorted", "#table-surrogates")


def test_without_script_the_tables_are_plain(opened: Opener, written: Path, results: Results) -> None:
    tab = opened(written, java_script_enabled=False)
    assert tab.locator("th button").count() == 0
    words = tab.locator("#table-surrogates").inner_text()
    assert all(text.number(value) in words for value in results.surrogates["r2_test"].to_list())


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(…)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


PAINT = """() => {
  const paper = getComputedStyle(document.body).backgroundColor, letters = new Set(), marks = new Set();
  for (const one of document.querySelectorAll('p, td, th, figcaption span, small, summary, .value, a'))
    letters.add(getComputedStyle(one).color);
  for (const one of document.querySelectorAll('.chart.wide text'))
    if (getComputedStyle(one).stroke === 'none') letters.add(getComputedStyle(one).fill);
  for (const one of document.querySelectorAll('.key svg')) marks.add(getComputedStyle(one).fill);
  return {paper, letters: [...letters], marks: [...marks]};
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_letters_and_marks_stand_out_in_both_schemes(opened: Opener, written: Path, scheme: str) -> None:
    tab = opened(written, color_scheme=scheme)
    found = tab.evaluate(PAINT)
    assert (luminance(found["paper"]) < 0.1) is (scheme == "dark")
    assert len(found["letters"]) >= 3
    assert len(found["marks"]) >= 3
    assert {one: contrast(one, found["paper"]) for one in found["letters"]
            if contrast(one, found["paper"]) < LEGIBLE} == {}  # fmt: skip
    assert all(contrast(one, found["paper"]) >= SEEN for one in found["marks"])
    for name in ("r2", "auc", "sets", "histograms"):
        shoot(tab, f"figure-{name}-{scheme}", f"#figure-{name}")
    shoot(tab, f"page-{scheme}")


FOLDED = """() => [...document.querySelectorAll('details.numbers')].filter(one =>
  one.querySelector('table').offsetHeight === 0 || !one.querySelector('table').checkVisibility({
    contentVisibilityAuto: true })).map(one => one.querySelectorAll('tr').length)"""


def test_print_holds_every_short_table_and_whatever_is_open_whole(opened: Opener, written: Path) -> None:
    tab = opened(written, A4)
    tab.emulate_media(media="print")
    assert all(n_rows > MOST_PRINTED_ROWS for n_rows in tab.evaluate(FOLDED))
    folded = len(re.findall(rb"/Type\s*/Page\b", tab.pdf(format="A4", prefer_css_page_size=True)))
    tab.evaluate("document.querySelectorAll('details.numbers').forEach(one => { one.open = true; })")
    assert tab.evaluate(FOLDED) == []
    wide = tab.evaluate("[...document.querySelectorAll('table')].filter(one => "
                        "one.getBoundingClientRect().right > innerWidth + 1)"
                        ".map(one => [one.parentElement.id, one.offsetWidth])")  # fmt: skip
    assert wide == []
    printed = tab.pdf(path=SHOTS / "page.pdf", format="A4", prefer_css_page_size=True)
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= folded > 5


def test_two_models_share_a_page(opened: Opener, results: Results, tmp_path: Path) -> None:
    rows = make_tables(STORES, n_layers=4, seed=1)
    rows["harvest"] = [row | {"model": "tiny-pythia"} for row in rows["harvest"]]
    other = make_results(rows)
    document, _ = together.render([results, other])
    path = tmp_path / "both.html"
    path.write_text(document, encoding="utf-8")
    for size, name in ((DESKTOP, "wide"), (PHONE, "narrow")):
        tab = opened(path, size)
        unfold(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert len(tab.evaluate(BOXES, "#figure-models .chart svg")) == 2
        shoot(tab, f"models-{name}", "#models")
        shoot(tab, f"models-page-{name}")


def test_hostile_names_stay_text(opened: Opener, tmp_path: Path) -> None:
    rows = make_tables(("first",), n_layers=2)
    for row, hostile in zip([*rows["harvest"], *rows["examples"]], [*HOSTILE * 9], strict=False):
        row |= {
            key: hostile
            for key in ("model", "corpus", "sample", "token", "before", "document_key")
            if key in row
        }
    path = tmp_path / "hostile.html"
    path.write_text(page.render(make_results(rows)), encoding="utf-8")
    tab = opened(path)
    unfold(tab)
    assert "<img src=x onerror=alert(1)>" in tab.locator("h1").inner_text()
    assert tab.locator("img").count() == 0
    assert tab.evaluate("document.scripts.length") == 1
    assert tab.evaluate("document.documentElement.scrollWidth") <= DESKTOP[0]

"""`nearline report STUDY…`: fitted studies in, one offline HTML page out; on request its tables and figures.

Reads only the tables and the provenance of a study, so it runs a year later on a laptop, without model, store
or torch. Each file is written whole or not at all, and the same studies give the same bytes. Cost: two to ten
seconds a study; half a second more for each figure that becomes a file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..store import Study, UsageError, durable
from . import figure_files, gathered, page, replaced, results, table_files, together

PAGE = "report.html"
STEP = "report"


@dataclass(frozen=True, slots=True)
class Written:
    """What `report` wrote: the page, and the files of its tables and figures."""

    page: Path
    tables: list[Path]
    figures: list[Path]


def report(
    study_path: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    tables: str | Path | None = None,
    figures: str | Path | None = None,
    format: str = "csv",
) -> Path:
    """Write the page of a study, or of several, to `out`: a file, or a folder for `report.html`. By default
    that of one study stands in the study, that of several in the current folder. `tables` and `figures` are
    folders for what stands on it, tables in `format`: csv, parquet or latex. Only what a report wrote is
    replaced.
    """
    return write(study_path, out, tables=tables, figures=figures, format=format).page


def write(
    study_path: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    tables: str | Path | None = None,
    figures: str | Path | None = None,
    format: str = "csv",
) -> Written:
    """The same, and which files were written."""
    studies = [Path(study_path)] if isinstance(study_path, str | Path) else [Path(one) for one in study_path]
    folders = {"tables": tables, "figures": figures}
    places = {name: Path(folder) for name, folder in folders.items() if folder is not None}
    _check(studies, places, format)
    target = (studies[0] / PAGE if len(studies) == 1 else Path(PAGE)) if out is None else Path(out)
    if target.is_dir():
        target = target / PAGE
    replaced.check_page(target)
    found = [results.read(study) for study in studies]
    document, pages = _rendered(found)
    files = {
        "tables": table_files.drawn(pages, places["tables"], format) if "tables" in places else {},
        "figures": figure_files.drawn(pages, places["figures"]) if "figures" in places else {},
    }
    for name, written in files.items():
        replaced.check_files(written, name)
    durable.write_file(target, document.encode("utf-8"))
    for written in files.values():
        durable.write_files((path, [content]) for path, content in written.items())
    if out is None and len(studies) == 1:
        opened = Study.open(studies[0])
        opened.record_step(STEP, inputs=_inputs(opened), settings=_settings(), outputs=[PAGE], facts={})
    return Written(target, list(files["tables"]), list(files["figures"]))


def _check(studies: Sequence[Path], places: dict[str, Path], form: str) -> None:
    """UsageError before anything is read or written."""
    if not studies:
        raise UsageError("report: name a study, or several")
    resolved = [study.resolve() for study in studies]
    if twice := [str(one) for one, place in zip(studies, resolved, strict=True) if resolved.count(place) > 1]:
        raise UsageError(f"report: the study {twice[0]} is named twice; each study has one place on a page")
    for name, place in places.items():
        if place.exists() and not place.is_dir():
            raise UsageError(
                f"--{name} {place}: this is a file; name a folder, which is made where there is none"
            )
    if len({place.resolve() for place in places.values()}) < len(places):
        raise UsageError(
            f"--tables and --figures both name {places['tables']}: give each a folder of its own"
        )
    if form not in table_files.FORMATS:
        raise UsageError(f"format {form!r}: tables are written as {', '.join(table_files.FORMATS)}")
    if form != "csv" and "tables" not in places:
        raise UsageError(
            f"--format {form} says how tables are written: name a folder for them with --tables DIR"
        )


def _rendered(found: Sequence[results.Results]) -> tuple[str, list[gathered.Gathered]]:
    if len(found) > 1:
        return together.render(found)
    with gathered.gathering() as kept:
        return page.render(found[0]), [kept]


def report_is_current(study_path: str | Path) -> bool:
    """Whether the study's own page was drawn by this version from the tables that are there now."""
    study = Study.open(study_path)
    return study.step_is_current(STEP, _inputs(study), _settings())


def _inputs(study: Study) -> dict[str, str]:
    """The digests of the tables, as the steps that wrote them recorded them."""
    steps = study.provenance()
    return {
        output: digest
        for name in sorted(steps)
        if name != STEP
        for output, digest in steps[name]["outputs"].items()
        if output.startswith("tables/")
    }


def _settings() -> dict[str, str]:
    return {"nearline": __version__}

"""`nearline report STUDY`: a fitted study in, one offline HTML page out.

Reads only the tables and the provenance of the study, so it runs a year later on a laptop, without model,
store or torch. The page is written whole or not at all, and the same study gives the same bytes. Cost: two
to five seconds.
"""

from pathlib import Path

from .. import __version__
from ..store import Study, durable
from . import page, results

PAGE = "report.html"
STEP = "report"


def report(study_path: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a study to `out`: a file, or a folder for `report.html`; by default the study."""
    study = Path(study_path)
    found = results.read(study)
    target = study / PAGE if out is None else Path(out)
    if target.is_dir():
        target = target / PAGE
    durable.write_file(target, page.render(found).encode("utf-8"))
    if out is None:
        opened = Study.open(study)
        opened.record_step(STEP, inputs=_inputs(opened), settings=_settings(), outputs=[PAGE], facts={})
    return target


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

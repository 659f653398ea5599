"""Commands on studies: fit, analyze, report.

In: arguments. Out: one call of a library function each, and what it found on standard output. Cost: that of
the function.
"""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ..store.local import local_path
from . import show_studies as show
from .app import AnalyzeFlags, Config, FitFlags, Json, app
from .flags import parsed
from .interrupted import saying_what_is_kept
from .progress import progress_for


@app.command
def fit(
    study: str,
    /,
    *stores: Annotated[str, Parameter(required=True)],
    config: Config = None,
    flags: Annotated[FitFlags | None, Parameter(name="*")] = None,  # type: ignore[valid-type]
    as_json: Json = False,
) -> None:
    """Fit a linear surrogate to every MLP and measure each token's need for the nonlinearity.

    Parameters
    ----------
    study
        The folder of results; made when it does not exist.
    stores
        One or more sealed stores of one model, folders or URLs; NAME=STORE
        gives a store another name than the last part of its path.
    """
    from ..analyze.compute_settings import flatten_compute
    from ..analyze.fit import fit as run
    from ..analyze.settings import parse
    from ..analyze.stores import parse_stores

    settings = parsed(parse, config, flags, table=flatten_compute)
    folder = local_path(study, "study")
    with progress_for() as progress, saying_what_is_kept("fit"):
        run(folder, parse_stores(stores), settings, progress)
    show.study(folder, as_json)


@app.command
def analyze(
    study: str,
    /,
    *,
    config: Config = None,
    flags: Annotated[AnalyzeFlags | None, Parameter(name="*")] = None,  # type: ignore[valid-type]
    as_json: Json = False,
) -> None:
    """Ask a fitted study what predicts the need for the nonlinearity: token or context, here or anywhere.

    Parameters
    ----------
    study
        A study that has been fitted. What is already there and current is
        not done again.
    """
    from ..analyze.analyze import analyze_steps as run
    from ..analyze.analyze_settings import parse
    from ..analyze.compute_settings import flatten_compute

    settings = parsed(parse, config, flags, table=flatten_compute)
    with progress_for() as progress, saying_what_is_kept("analyze"):
        result = run(local_path(study, "study"), settings, progress)
    show.analyses(result, as_json)


@app.command
def report(
    *studies: Annotated[Path, Parameter(required=True)],
    out: Path | None = None,
    tables: Path | None = None,
    figures: Path | None = None,
    format: Literal["csv", "parquet", "latex"] = "csv",
    as_json: Json = False,
) -> None:
    """Write the report of a study, or of several side by side: one HTML page that opens without a network.

    Parameters
    ----------
    studies
        Studies that have been fitted. Several share one page, in this order.
    out
        Where to write the page; default: report.html inside the study, of several studies in the
        current folder. What is no report is not replaced, nor are files of others in the folders below.
    tables
        A folder for every table of the page as a file, with all rows and digits.
    figures
        A folder for every figure of the page as SVG, PNG and PDF.
    format
        How tables are written.
    """
    from ..reports.report import write

    show.report(write(studies, out, tables=tables, figures=figures, format=format), as_json)

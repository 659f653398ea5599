"""Commands that do a whole study: run, quickstart.

In: arguments. Out: one call of a library function each, and of every step whether it ran and why. Cost: that
of the steps.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from . import show_runs as show
from .app import Json, app
from .progress import progress_for


@app.command
def run(
    settings: Path,
    out: Path | None = None,
    /,
    *,
    only: str | None = None,
    model: str | None = None,
    corpus: str | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    as_json: Json = False,
) -> None:
    """Do a whole study: several models on several corpora, from one settings file to a report of each model.

    What is there and current is not done again, what was stopped goes on, and a store is never replaced.
    `python -m nearline.workflows.template` prints a file with every setting explained.

    Parameters
    ----------
    settings
        A TOML file; relative paths in it are counted from its folder.
    out
        The folder for stores, studies and reports [default: `out` of the file].
    only
        Steps to do, such as collect,fit: collect, fit, losses, analyze, measure, finetune, report.
    model
        Models to do, by the names in the file.
    corpus
        With --only collect: corpora to harvest, by the names in the file.
    dry_run
        Say what would run and why, and do nothing.
    """
    from .study import Part
    from .study import run as run_study

    part = Part(only=_parts(only), models=_parts(model), corpora=_parts(corpus), dry=dry_run)
    with progress_for() as progress:
        result = run_study(settings, out, progress, part)
    show.steps(result, as_json)


@app.command
def quickstart(
    out: Path = Path("nearline-quickstart"),
    /,
    *,
    tokens: int | None = None,
    full: Annotated[bool, Parameter(negative="")] = False,
    as_json: Json = False,
) -> None:
    """Collect, fit, analyse, measure and report both bundled models on built-in English, in minutes.

    Parameters
    ----------
    out
        The folder for stores and studies. What is already there and current is not done again.
    tokens
        Token rows per store [default: 30000].
    full
        Fine-tune the models too, linearised and gated beside controls.
    """
    from .quickstart import quickstart as run

    with progress_for() as progress:
        result = run(out, progress, tokens=tokens, full=full)
    show.steps(result, as_json)


def _parts(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(part.strip() for part in text.split(",") if part.strip())

"""The main job on what every installation has: both bundled models, built-in English, from nothing to a
report.

In: an output folder. Out: per model one store per corpus, one study with all analyses and a small measurement
on the live model (with `full` a small fine-tuning too), and one report: what `nearline run` makes of the
bundled settings file. Cost: two and a quarter minutes on two cores.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..collect.bundled_models import BUNDLED
from ..collect.settings import parse
from ..store import Progress, UsageError, silent
from .study import Part, Ran, run_whole
from .study_settings import Whole, read_study

SETTINGS: Final = Path(__file__).with_name("quickstart.toml")
# With fewer rows some store has too few groups of documents for the folds of a fit.
LEAST_TOKENS: Final = 6_000


def quickstart(
    out: Path,
    progress: Progress = silent,
    *,
    tokens: int | None = None,
    models: Sequence[str] = BUNDLED,
    full: bool = False,
) -> Ran:
    """Collect, fit, analyse, measure and report the bundled models.

    `out` holds `stores/`, `studies/` and a record per store; `tokens` are rows per store; `full`: fine-tune
    them too.
    """
    whole = quickstart_study(out, tokens)
    if not full:
        whole = replace(whole, models=tuple(replace(model, finetune=None) for model in whole.models))
    return run_whole(whole, progress, Part(models=models))


def quickstart_study(out: Path | None = None, tokens: int | None = None) -> Whole:
    """What the bundled settings file describes."""
    if tokens is not None:
        parse({"tokens": tokens})
    given = {} if tokens is None else {"tokens": tokens}
    whole = read_study(SETTINGS, out, given, name="quickstart")
    if tokens is not None and tokens < LEAST_TOKENS:
        usual = read_study(SETTINGS).models[0].stores[0].settings.tokens
        raise UsageError(
            f"tokens={tokens}: too few for a fit, whose rows must come from several documents; quickstart "
            f"takes {LEAST_TOKENS} or more, or {usual} where --tokens is left out"
        )
    return whole

"""Commands that visit the model again: measure, finetune, export.

In: arguments. Out: one call of a library function each, and what it found on standard output. Cost: that of
the function; torch is loaded when it begins.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..store import Study
from ..store.local import local_path
from ..store.settings import parse_layers
from . import show_costs as show
from .app import Config, FinetuneFlags, Json, MeasureFlags, app
from .flags import parsed
from .interrupted import saying_what_is_kept
from .progress import progress_for


@app.command
def measure(
    study: str,
    /,
    *,
    config: Config = None,
    flags: Annotated[MeasureFlags | None, Parameter(name="*")] = None,  # type: ignore[valid-type]
    as_json: Json = False,
) -> None:
    """Measure on the live model what replacing its MLPs costs: linear, gated, one layer or several.

    What was measured before and is current is not measured again; an interrupted run goes on where it was.

    Parameters
    ----------
    study
        A study that has been fitted; gates are measured where it has been analysed too.
    """
    from ..collect.measure_settings import parse

    settings = parsed(parse, config, flags)
    folder = local_path(study, "study")
    from ..collect.measuring import measure as run  # torch, once the settings are known to be good

    with progress_for() as progress, saying_what_is_kept("measure"):
        measured = run(folder, settings, progress)
    show.costs(measured, as_json)


@app.command
def finetune(
    study: str,
    /,
    *,
    config: Config = None,
    flags: Annotated[FinetuneFlags | None, Parameter(name="*")] = None,  # type: ignore[valid-type]
    as_json: Json = False,
) -> None:
    """Fine-tune the model with MLPs linearised or gated, and matched controls with them.

    Trained on the fit documents of the study, learning rates chosen on its gate documents, scored on its test
    documents. An interrupted run goes on where it was.

    Parameters
    ----------
    study
        A study that has been fitted; layers are chosen by what they cost where it has been measured too.
    """
    from ..collect.ranks import ranks_of
    from ..collect.settings import HarvestSettings
    from ..collect.tuning_settings import parse

    settings = parsed(parse, config, flags)
    folder = local_path(study, "study")
    from ..collect.tuning import finetune as run  # torch, once the settings are known to be good

    with progress_for() as progress, saying_what_is_kept("finetune"):
        tuned = run(folder, settings, progress)
    if ranks_of(HarvestSettings()).rank == 0:  # under torchrun all processes end here
        show.tuned(tuned, as_json)


@app.command
def export(
    study: str,
    out: str,
    /,
    *,
    layers: str,
    gated: str | None = None,
    need: str | None = None,
    as_json: Json = False,
) -> None:
    """Save surrogates, and gates if asked for, as safetensors, to be put into the model for good.

    Parameters
    ----------
    study
        A study that has been fitted.
    out
        A new or empty folder, or one that holds an export.
    layers
        Layers and ranges to replace, such as 5-8 or 2,5-7; all: all that were fitted.
    gated
        Replace only where the gate on these features says so, such as input or input:0.5 (a share of tokens);
        default: at every token but position 0 and special ones.
    need
        The need that the gate goes by, where the study has gates of several.
    """
    source, folder = local_path(study, "study"), local_path(out, "folder of an export")
    chosen = _fitted(source) if layers == "all" else parse_layers(layers)
    from ..collect.exporting import export as run  # torch, once the arguments are known to be good

    show.exported(run(source, folder, chosen, gated, need=need), as_json)


def _fitted(study: Path) -> list[int]:
    """The layers that a study has surrogates of."""
    return [int(layer) for layer in Study.open(study).surrogates()["layer"].values]

"""The command that says beforehand what a harvest, or a whole study, will take: plan.

In: arguments. Out: one call of a library function, and what it found on standard output. Cost: that of the
function; for a study torch is not loaded.
"""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..store import UsageError
from ..store.local import local_path
from . import show, show_runs
from .app import CollectFlags, Config, Json, app
from .flags import given, parsed
from .progress import progress_for


@app.command
def plan(
    model: str,
    corpus: str | None = None,
    store: str | None = None,
    /,
    *,
    config: Config = None,
    flags: Annotated[CollectFlags | None, Parameter(name="*")] = None,  # type: ignore[valid-type]
    probe: bool = True,
    as_json: Json = False,
) -> None:
    """Say what a harvest will take, bytes, memory and time, before it is begun; refuse what cannot fit.

    With SETTINGS.toml in the place of MODEL CORPUS STORE: what a whole study will take (see `run`), from the
    shapes written there, with neither model nor network at hand.

    Parameters
    ----------
    model
        A bundled model (tiny-gpt2, tiny-pythia), a local folder or a Hub id; or a study's settings file.
    corpus
        docs:python, docs:scientific, docs:stdlib, text:PATH,
        jsonl:PATH[:FIELD], parquet:PATH[:COLUMN], ids:PATH or
        hf:NAME[:CONFIG[:SPLIT[:COLUMN]]].
        A field holds text, token ids, or a chat (a list of
        {"role", "content"}). NAME is a folder or a Hub id;
        NAME@REVISION pins it. SPLIT may be SPLIT[FROM:TO].
    store
        The folder that `collect` is meant to write; nothing is left in it.
    probe
        Time a few batches and a short write; of a study, some products on this processor.
    """
    if corpus is None or store is None:
        return _plan_of_study(model, corpus, given(flags), config, probe, as_json)
    from ..collect.settings import parse

    folder = local_path(store, "store")
    settings = parsed(parse, config, flags, model=model, corpus=corpus)
    from ..collect.forecast import forecast

    with progress_for() as progress:
        found = forecast(settings, folder, probe=probe, progress=progress)
    show.forecast(found, as_json)
    return None


def _plan_of_study(
    settings: str, corpus: str | None, flags: dict[str, Any], config: Path | None, probe: bool, as_json: bool
) -> None:
    if corpus is not None:
        raise UsageError("plan takes MODEL CORPUS STORE: STORE is missing")
    if not settings.endswith(".toml"):
        raise UsageError(
            f"plan takes MODEL CORPUS STORE, or SETTINGS.toml of a study alone; {settings!r} is no such file"
        )
    if flags or config is not None:
        names = ", ".join([*flags, *(["config"] if config else [])])
        raise UsageError(f"{names} of a study stand in its settings file, {settings}: leave the flags out")
    from .study_checks import checked_study
    from .study_plan import plan_study

    show_runs.plan(plan_study(checked_study(Path(settings), corpora=True), probe=probe), as_json)

"""Commands on stores: sites, collect, seal, info, verify, repair, push, pull.

In: arguments. Out: one call of a library function each, and what it found on standard output; a check that
failed raises `Finished` with its exit code. Cost: that of the function; torch is loaded only by commands
that run a model.
"""

from typing import Annotated

from cyclopts import Parameter

from ..store import UsageError
from ..store.local import local_path
from . import show
from .app import CollectFlags, Config, Json, app
from .flags import parsed
from .progress import progress_for


class Finished(Exception):
    """The command did its work, and its answer is an exit code other than 0."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


@app.command
def sites(
    model: str, /, *, gguf_file: str | None = None, revision: str | None = None, as_json: Json = False
) -> None:
    """List the tensors that can be harvested from a model, and the modules they come from.

    Parameters
    ----------
    model
        A bundled model, a local folder or a Hub id; its weights are not loaded where the config suffices.
    gguf_file
        Name of a GGUF file inside the model's folder.
    revision
        Commit, branch or tag of a Hub model.
    """
    from ..collect.sites import sites as list_sites

    show.sites(list_sites(model, revision=revision, gguf_file=gguf_file), as_json)


@app.command
def collect(
    model: str,
    corpus: str,
    store: str,
    /,
    *,
    config: Config = None,
    flags: Annotated[CollectFlags | None, Parameter(name="*")] = None,  # type: ignore[valid-type]
    as_json: Json = False,
) -> None:
    """Harvest a model's MLP inputs and outputs on a corpus into a store; the same command continues it.

    Parameters
    ----------
    model
        A bundled model (tiny-gpt2, tiny-pythia), a local folder or a Hub id.
    corpus
        docs:python, docs:scientific, docs:stdlib, text:PATH,
        jsonl:PATH[:FIELD], parquet:PATH[:COLUMN], ids:PATH or
        hf:NAME[:CONFIG[:SPLIT[:COLUMN]]].
        A field holds text, token ids, or a chat (a list of
        {"role", "content"}). NAME is a folder or a Hub id;
        NAME@REVISION pins it. SPLIT may be SPLIT[FROM:TO].
    store
        The folder to write: new, empty, or an unfinished store of the same settings.
    """
    from ..collect.settings import parse

    folder = local_path(store, "store")
    settings = parsed(parse, config, flags, model=model, corpus=corpus)
    from ..collect.harvesting import collect as run
    from ..collect.stopping import stop_on_signals

    with progress_for() as progress, stop_on_signals() as stop:
        result = run(settings, folder, progress, stop)
    show.harvest(result, as_json)


@app.command
def seal(store: str, /, *, partial: bool = False, drop_blocks: bool = False, as_json: Json = False) -> None:
    """Seal a store whose blocks are all committed; `collect` does so itself when nothing stops it.

    Parameters
    ----------
    store
        An unsealed store.
    partial
        Shorten the store, for good, to the blocks before the first missing one, and seal that.
    drop_blocks
        With --partial: remove committed blocks that stand behind the first missing one.
    """
    from ..store import seal as run

    folder = local_path(store, "store")
    show.sealed(folder, run(folder, partial=partial, drop_blocks=drop_blocks), as_json)


@app.command
def info(store: str, /, *, as_json: Json = False) -> None:
    """Say what a store holds, and whether it is whole.

    Parameters
    ----------
    store
        A folder or a URL.
    """
    from ..store import info as facts_of

    show.info(facts_of(store), as_json)


@app.command
def verify(
    store: str,
    /,
    *,
    quick: Annotated[bool, Parameter(negative="")] = False,
    sample: str | None = None,
    full: Annotated[bool, Parameter(negative="")] = False,
    as_json: Json = False,
) -> None:
    """Prove that a store is whole and undamaged, or name what is not: file, array, layer, tokens.

    Parameters
    ----------
    store
        A folder or a URL.
    quick
        Seal, metadata, and presence and size of every chunk object; no content is read.
    sample
        As quick, and the content of all token columns (ids, positions, …), whatever the share, and of a
        share of the other chunk objects, such as 5%: of each block at least one.
    full
        Every byte and every value; what is done when nothing else is asked for.
    """
    from ..store import verify as run

    if quick + full + (sample is not None) > 1:
        raise UsageError("give one of --quick, --sample and --full")
    level = "quick" if quick else "full" if sample is None else "sample"
    with progress_for() as progress:
        found = run(store, level=level, sample=_share(sample), progress=progress)
    show.verified(found, as_json)
    if found.exit_code:
        raise Finished(found.exit_code)


@app.command
def repair(
    store: str, /, *, model: str | None = None, corpus: str | None = None, as_json: Json = False
) -> None:
    """Collect damaged blocks of a store again, where its model and corpus are at hand.

    Parameters
    ----------
    store
        A sealed store on this machine.
    model
        Where the model is now; default: the name that the store gives.
    corpus
        Where the corpus is now; default: the one that the store names.
    """
    from ..collect.repairing import repair as run

    with progress_for() as progress:
        result = run(local_path(store, "store"), model=model, corpus=corpus, progress=progress)
    show.repaired(result, as_json)


@app.command
def push(store: str, to: str, /, *, allow_unsafe_create: bool = False, as_json: Json = False) -> None:
    """Copy a sealed store to a folder or a URL; a push that was cut off continues when repeated.

    Parameters
    ----------
    store
        A sealed store on this machine.
    to
        A folder, file:, s3://BUCKET/PATH, gs://, az:// or hf://datasets/OWNER/NAME.
    allow_unsafe_create
        Push to a server that lets two writers create one file too; give it where nobody else
        pushes to this place at the same time.
    """
    from ..store import push as run

    with progress_for() as progress:
        moved = run(
            local_path(store, "store"), to, allow_unsafe_create=allow_unsafe_create, progress=progress
        )
    show.moved(moved, as_json)


@app.command
def pull(
    source: str,
    store: str,
    /,
    *,
    layers: str | None = None,
    sites: str | None = None,
    split: str | None = None,
    tokens: int | None = None,
    as_json: Json = False,
) -> None:
    """Copy a store, or a part of it, from a folder or a URL; a pull that was cut off continues when repeated.

    Parameters
    ----------
    source
        A folder, file:, s3://, gs://, az://, hf://datasets/OWNER/NAME or http(s)://.
    store
        The folder to write: new, empty, or an unfinished pull of the same store.
    layers
        Layers to take, such as 4-9,11.
    sites
        Sites to take, such as mlp_output,residual.
    split
        Take only blocks of this split: fit, gate or test.
    tokens
        Take the first blocks that hold this many token rows.
    """
    from ..store import pull as run
    from ..store.settings import parse_layers

    folder = local_path(store, "store")
    with progress_for() as progress:
        moved = run(
            source,
            folder,
            layers=None if layers is None else parse_layers(layers),
            sites=None if sites is None else [site.strip() for site in sites.split(",")],
            split=split,
            tokens=tokens,
            progress=progress,
        )
    show.moved(moved, as_json, facts_of=folder)


def _share(text: str | None) -> float:
    """`5%` or `0.05` as 0.05."""
    if text is None:
        return 1.0
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(f"sample={text}: give a share above 0 and at most 1, such as 5% or 0.05")
    return share

"""Run a model over a corpus once and keep what its MLPs saw and gave: the program's main job.

In: settings, or a live model with its tokenizer and documents; a new or empty folder, or a store that an
earlier run left unfinished. Out: a sealed store there, or this rank's share of it, and what the run was
like; with `moments_only` sums instead of rows. Everything that can be refused is refused before the first
forward pass; blocks are written and committed by another thread while the model runs. Cost: the forward
passes and a few percent; memory: the model, two block buffers, one batch. Whatever stops a run, its committed
blocks stay, and the same command continues to the same bytes; while there are none yet, what it created is
removed.
"""

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..store.attributes import Attributes
from ..store.beginning import begun_attributes
from ..store.errors import UsageError
from ..store.folder import GROUP
from ..store.local import local_path
from ..store.progress import Progress, silent
from ..store.writer import StoreWriter
from . import corpora, models, moments_only
from .anatomy import anatomy
from .batch_budget import batch_budget
from .claim import Claim, claimed
from .corpora import Corpus, CorpusOptions
from .describing import affine_of, attributes_of, documents_table, position_embedding_of, vocabulary_of
from .forward import evaluating
from .loading import load_both
from .loop import run_blocks
from .models import LoadedModel
from .outcome import Harvested, Run
from .preparing import Prepared, prepare
from .proving import Proved, first_batch, proved
from .ranks import ranks_of
from .settings import HarvestSettings, parse
from .stopping import Interrupted, StopRequest, TimeIsUp, Watch
from .token_files import is_stream
from .tokenise import tokenise_for

SAMPLE_ROWS = 60
SAMPLE_CHARS = 300

logger = logging.getLogger("nearline")


def collect(
    settings: HarvestSettings,
    path: str | Path,
    progress: Progress = silent,
    stop: StopRequest | None = None,
) -> Harvested:
    """Load the model and corpus that `settings` name and harvest them into `path`.

    The same call continues a store that was left unfinished. `stop` is what `stop_on_signals` gives."""
    watch = Watch(stop or StopRequest(), settings.max_time_s)
    with _claimed(path, settings) as claim:
        corpus, loaded = load_both(settings)
        return _run(loaded, corpus, claim, settings, progress, watch)


def harvest(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Corpus | Iterable[object],
    path: str | Path,
    *,
    settings: HarvestSettings | None = None,
    name: str | None = None,
    corpus: str | None = None,
    progress: Progress = silent,
    stop: StopRequest | None = None,
    **overrides: Any,
) -> Path:
    """Harvest a live model, a PEFT-wrapped one too, as it is: nothing in it is moved, cast or changed.

    `documents` are texts, lists or arrays of token ids (for which `tokenizer` may be None), chats (lists of
    messages), (key, any of these) pairs, Documents or a Corpus; `corpus` and `name` are what the store calls
    corpus and model; `overrides` are further settings, such as tokens=20_000. The same call continues a store
    that was left unfinished; `stop` is what `stop_on_signals` gives."""
    chosen = parse({**(settings.model_dump() if settings else {}), **overrides})
    watch = Watch(stop or StopRequest(), chosen.max_time_s)
    with _claimed(path, chosen) as claim:
        given = (
            documents
            if isinstance(documents, Corpus)
            else corpora.from_documents(documents, corpus or "documents")
        )
        if not is_stream(given):
            given = corpora.select(given, CorpusOptions.of(chosen))
        loaded = models.describe(model, tokenizer, name)
        return _run(loaded, given, claim, chosen, progress, watch, live=True).path


def _claimed(path: str | Path, settings: HarvestSettings) -> AbstractContextManager[Claim]:
    if settings.moments_only:
        return moments_only.claimed(local_path(path, "moments folder"), ranks_of(settings))
    return claimed(local_path(path, "store"), ranks_of(settings))


def _run(
    loaded: LoadedModel,
    corpus: Corpus,
    claim: Claim,
    settings: HarvestSettings,
    progress: Progress,
    watch: Watch,
    live: bool = False,
) -> Harvested:
    began = datetime.now(UTC)
    used = settings.model_dump(exclude_none=True, exclude={"model", "corpus"} if live else None)
    with evaluating(loaded.model, settings.threads, gradients=settings.differentiates):
        net = anatomy(loaded.model)
        tokens = tokenise_for(settings, corpus, loaded.tokenizer, net.vocab_size)
        budget = batch_budget(net, tokens, settings, claim.path)
        settings = budget.settings
        prepared = prepare(net, tokens.corpus, tokens, settings, claim.path, measured=budget.measured)
        sample = sample_of(prepared)
        notes = [note for note in (budget.note, *prepared.notes) if note]
        for note in notes:
            logger.warning(note)
        logger.info("first rows: %s", sample.replace("\n", "↵ "))
        proof = proved(prepared, begun_attributes(claim.path))
        if settings.moments_only:
            attributes = attributes_of(prepared, loaded, settings, proof.errors)
            summed = moments_only.run(claim.path, prepared, attributes, settings, progress, watch)
            return summed.done(sample, notes)
        writer = begin(claim, prepared, loaded, settings, proof)
        run = Run(prepared, writer, used, claim.ranks, watch.request, began)
        try:
            run.waits = run_blocks(
                prepared,
                writer,
                mask_nonfinite=settings.on_nonfinite == "mask",
                progress=progress,
                blocks=run.blocks,
                watch=watch,
            )
        except (TimeIsUp, Interrupted):
            run.keep_facts()
            raise
        run.keep_facts()
    done = run.finish(sample, notes)
    for note in done.notes[len(notes) :]:
        logger.info(note)
    return done


def begin(
    claim: Claim, prepared: Prepared, loaded: LoadedModel, settings: HarvestSettings, proof: Proved
) -> StoreWriter:
    """Everything of the store that is not a block; or the store as an earlier run left it."""
    attributes = attributes_of(prepared, loaded, settings, proof.errors, proof.exponents)
    empty = not (claim.path / GROUP).exists()
    try:
        writer = begin_with(claim.path, attributes, prepared)
    except BaseException as error:
        # A usage error means that somebody else began a store here after we claimed the folder.
        claim.begun = empty and not isinstance(error, UsageError)
        raise
    claim.begun = writer.begun_here
    return writer


def begin_with(path: Path, attributes: Attributes, prepared: Prepared) -> StoreWriter:
    """Begin or continue a store with these attributes."""
    return StoreWriter.begin(
        path,
        plan=prepared.planned.plan,
        attributes=attributes,
        layers=prepared.shape.layers,
        d_model=prepared.shape.d_model,
        storage_dtype=prepared.shape.storage_dtype,
        sites=attributes.storage.sites,
        documents=documents_table(prepared),
        vocabulary=vocabulary_of(prepared),
        affine=affine_of(prepared),
        position_embedding=position_embedding_of(prepared),
        compressor=attributes.storage.compressor,
    )


def sample_of(prepared: Prepared) -> str:
    """The first rows as text, decoded from the ids that will be stored: a wrong tokenizer shows here. Without
    a tokenizer the ids themselves."""
    ids, tokenizer = first_batch(prepared)[0][:SAMPLE_ROWS].tolist(), prepared.tokens.tokenizer
    return str(ids if tokenizer is None else tokenizer.decode(ids))[:SAMPLE_CHARS]

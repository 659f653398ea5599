"""A scratch store that holds damaged blocks of another one, collected again with the settings of that one.

In: the attributes of a store, and its model and corpus, by name or alive. Out: an unsealed store with all
metadata and the blocks asked for, or a refusal where model, tokenizer or corpus are not those of the store.
Cost: loading, tokenising, the start-up proof, and the forward passes of these blocks.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..store.attributes import Attributes
from ..store.durable import check_space
from ..store.errors import DamageError, UsageError
from ..store.folder import GROUP, PLAN, consolidated
from ..store.metadata import group_json
from ..store.plan import Plan
from ..store.progress import Progress
from . import corpora, models
from .anatomy import anatomy
from .corpora import Corpus, CorpusOptions
from .describing import attributes_of
from .earlier_runs import settings_of_runs
from .forward import evaluating
from .harvesting import begin_with
from .loop import run_blocks
from .models import LoadedModel
from .planning import Planned, per_document
from .preparing import Prepared, prepare
from .proving import proved
from .settings import HarvestSettings, parse
from .specs import portable
from .tokenise import TokenisedCorpus, tokenise_for

ANY_MEMORY = "1048576 TiB"  # the block is given, whatever the limit was
CORPUS_OPTIONS = tuple(part.name for part in dataclasses.fields(CorpusOptions))
SPREAD = ("device_map", "max_memory", "offload_folder")
PLACES = ("model", "corpus", "gguf_file", "adapter", *SPREAD)


@dataclass(frozen=True, slots=True, eq=False)
class Twin:
    """The scratch store; `attributes` are those of the store it stands in for; `routes_from`: the first of
    the model's layers that sends rows to experts."""

    path: Path
    attributes: Attributes
    plan: Plan
    routes_from: int | None

    def content(self, name: str) -> bytes | None:
        """A metadata file as the whole store would have it; None where this one has none."""
        if name == f"{GROUP}/zarr.json":
            parts = consolidated(self.path, self.attributes, self.plan)
            return group_json(self.attributes.to_dict(), parts)
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None


def make_twin(
    folder: Path,
    scratch: Path,
    attributes: Attributes | None,
    plan: Plan | None,
    blocks: Sequence[int],
    model: str | LoadedModel | None,
    corpus: str | Corpus | None,
    progress: Progress,
) -> Twin:
    """Collect `blocks` of the store in `folder` into `scratch`. `attributes`, `plan`: None where the file
    that holds them is damaged; they are made anew then, and the caller compares them with the seal."""
    settings = settings_of(attributes, folder) if attributes else _last_settings(folder, model, corpus)
    texts = _texts(corpus, settings, attributes)
    loaded = model if isinstance(model, LoadedModel) else _load(settings, model)
    with evaluating(loaded.model, settings.threads, gradients=settings.differentiates):
        net = anatomy(loaded.model)
        tokens = tokenise_for(settings, texts, loaded.tokenizer, net.vocab_size)
        if attributes is not None:
            _require_same(attributes, loaded, tokens, texts, folder)
        prepared = prepare(net, tokens.corpus, tokens, settings, folder)
        if plan is not None:
            prepared = _with_plan(prepared, plan)
        check_space(folder, prepared.store_bytes * len(blocks) // prepared.planned.plan.n_blocks)
        proof = proved(prepared, attributes)
        if attributes is None:
            attributes = attributes_of(prepared, loaded, settings, proof.errors, proof.exponents)
        elif prepared.planned.plan.digest != attributes.plan.digest:
            raise UsageError(f"{folder / PLAN} is damaged and cannot be made again; restore it from a copy")
        writer = begin_with(scratch, attributes, prepared)
        mask = settings.on_nonfinite == "mask"
        run_blocks(prepared, writer, mask_nonfinite=mask, progress=progress, blocks=blocks)
    return Twin(scratch, attributes, prepared.planned.plan, net.routes_from)


def settings_of(attributes: Attributes, folder: Path) -> HarvestSettings:
    """The settings that give this store; model and corpus by name, or where a run in this folder had them."""
    plan, compute, policies = attributes.plan, attributes.compute, attributes.policies
    device = "cuda" if compute.device_type == "cuda" and torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "model": attributes.model.name,
        "corpus": attributes.corpus.spec,
        "revision": attributes.model.revision,
        "tokens": plan.n_tokens,
        "layers": list(attributes.storage.layers),
        "sites": list(attributes.storage.sites),
        "dtype": compute.dtype,
        "storage_dtype": attributes.storage.dtype,
        "sequence_length": plan.sequence_length,
        "min_length": plan.min_length,
        "batch_tokens": plan.batch_tokens,
        "block": plan.block,
        "bos": policies["bos"],
        "device": device,
        "attention": None if compute.attention == "unknown" else compute.attention,
        "seed": plan.seed,
        "threads": compute.torch_threads,
        "memory_limit": ANY_MEMORY,
        "compressor": attributes.storage.compressor,
        "on_nonfinite": policies["nonfinite"],
        **{name: policies[name] for name in ("keep", "separator", "exclude_tokens") if name in policies},
    }
    places = _known_places(attributes, folder)
    if "device_map" in places:
        found["device"] = "auto"
    return parse(found | _corpus_options(folder) | places)


def _known_places(attributes: Attributes, folder: Path) -> dict[str, Any]:
    """Where the newest run in this folder found a model and a corpus of these names."""
    for used in settings_of_runs(folder):
        try:
            name = models.recorded_name(used["model"], used.get("gguf_file"), used.get("adapter"))
            corpus = portable(used["corpus"])
        except (KeyError, UsageError):
            continue
        if name == attributes.model.name and corpus == attributes.corpus.spec:
            return {key: used[key] for key in PLACES if used.get(key) is not None}
    return {}


def _corpus_options(folder: Path) -> dict[str, Any]:
    """How the newest run in this folder read its corpus: whatever the corpus, it was read so."""
    used = next(settings_of_runs(folder), {})
    return {key: used[key] for key in CORPUS_OPTIONS if key in used}


def _texts(corpus: str | Corpus | None, settings: HarvestSettings, attributes: Attributes | None) -> Corpus:
    """The documents that were harvested, of a corpus by name or alive."""
    options = CorpusOptions.of(settings)
    if not isinstance(corpus, Corpus):
        return corpora.load(corpus or settings.corpus, options=options)
    if attributes is not None and corpus.content_hash == attributes.corpus.content_hash:
        return corpus
    return corpora.select(corpus, options)


def _last_settings(
    folder: Path, model: str | LoadedModel | None, corpus: str | Corpus | None
) -> HarvestSettings:
    """The settings of the newest run in this folder: all that is left of them where the attributes are
    damaged."""
    given = {key: value for key, value in (("model", model), ("corpus", corpus)) if isinstance(value, str)}
    for used in settings_of_runs(folder):
        if (model is None and "model" not in used) or (corpus is None and "corpus" not in used):
            continue
        return parse({**used, **given, "memory_limit": ANY_MEMORY})
    raise DamageError(
        f"{folder / GROUP}/zarr.json is damaged, and nothing else here says from what the store was made; "
        "restore this file from a copy"
    )


def _load(settings: HarvestSettings, model: str | None) -> LoadedModel:
    return models.load(
        model or settings.model,
        # A folder has no revisions, and its weights are compared anyway.
        revision=settings.revision if model is None else None,
        dtype=settings.dtype,
        device=settings.device,
        gguf_file=settings.gguf_file if model is None else None,
        adapter=settings.adapter if model is None else None,
        attention=settings.attention,
        device_map=settings.device_map,
        max_memory=settings.max_memory_bytes,
        offload_folder=settings.offload_folder,
    )


def _require_same(
    attributes: Attributes, loaded: LoadedModel, tokens: TokenisedCorpus, corpus: Corpus, folder: Path
) -> None:
    pairs = {
        "weights of the model": (loaded.weights_hash, attributes.model.weights_hash),
        "configuration of the model": (loaded.config_hash, attributes.model.config_hash),
        "tokenizer": (tokens.fingerprint, attributes.tokenizer.fingerprint),
        "ids of a sentence": (str([*tokens.sentence_ids]), str([*attributes.tokenizer.ids])),
        "texts of the corpus": (corpus.content_hash, attributes.corpus.content_hash),
    }
    for name, (has, was) in pairs.items():
        if has != was:
            raise UsageError(
                f"{folder}: the {name} are not those that the store was made with (digest {has[:12]}, needed "
                f"is {was[:12]}); name the right model={attributes.model.name} and "
                f"corpus={attributes.corpus.spec}"
            )


def _with_plan(prepared: Prepared, plan: Plan) -> Prepared:
    """The plan of the store itself, in the place of the one made anew."""
    rows, stored = per_document(plan, len(prepared.tokens.ids))
    dropped = np.array([len(ids) for ids in prepared.tokens.ids], np.int64) - stored
    planned = Planned(plan, rows.astype(np.int32), dropped.astype(np.int32), None)
    return dataclasses.replace(prepared, planned=planned)

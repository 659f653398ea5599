"""A preview from a script or a notebook: how nearly linear the MLPs of a live model are on some text.

In: a live model, its tokenizer, text (or token ids), and a fitted study. Out: a frozen `Peek`: the error of
every token at every layer against the study's surrogates, by the study's own definition. The text passes the
model as a harvest would pass it, from the BOS policy on, but for that nothing is cut into blocks and nothing
is stored. Cost: the forward pass, 2·d² flops a token and layer, one reading of the weights to know which
model this is, and of each layer's surrogate; memory: one layer's rows. The model is left as it was.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..analyze.needs import row_needs
from ..analyze.norms import Contribution, Norm, apply_norm, squared_norms
from ..store import Study
from ..store.errors import UsageError
from . import models
from .anatomy import Anatomy, LayerAnatomy, anatomy
from .capture import Capture
from .forward import evaluating, final_hidden, inputs_of
from .norm_parameters import NormParameters, norm_parameters
from .peek_result import Peek, peek_of
from .peek_study import StudyFacts, study_facts
from .peek_text import PeekedText, Text, peeked_text
from .proof import prove
from .windows import batches

BATCH_TOKENS = 4096  # of one forward pass, where several texts are given
SITES = ("residual", "mlp_output")
# What is kept of each row: `error` itself, and the two norms that R² is made of.
COLUMNS = ("error", "error_norm", "y_centred_norm")


def peek(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    text: Text,
    study: str | Path | Study,
    *,
    layers: int | str | Collection[int] | None = None,
    store: str | None = None,
    allow_other_weights: bool = False,
) -> Peek:
    """Per-layer and per-token error of a live model on `text`, against the surrogates of `study`.

    `text` is one text, a list of texts, token ids, or a list of those; each passes the model by itself and is
    cut at the model's positions. `store` names one of the study's stores; default: the one that was fitted
    on. A model or tokenizer that is not the study's is refused;
    `allow_other_weights` lets another model of the same shape pass, and the result says so. What is
    previewed is not held out: a text of the fitted corpus looks better than it is.
    """
    facts = study_facts(study, store)
    chosen = facts.choose_layers(layers)
    found = anatomy(model)
    notes: list[str] = []
    loaded = models.describe(model, tokenizer)
    other = _check_model(found, loaded, facts, chosen, allow_other_weights)
    given = peeked_text(text, tokenizer, facts, found)
    with evaluating(model, None):
        if other:
            # The study's stores were proved with other weights; this model has to be, too.
            prove(found, given.ids)
            notes.append(other)
        columns = _scored(found, given, facts, chosen)
    return peek_of(
        facts, given, loaded.name if other else facts.model, chosen, columns, (*notes, *given.notes)
    )


def _check_model(
    found: Anatomy, loaded: models.LoadedModel, facts: StudyFacts, layers: Sequence[int], allowed: bool
) -> str | None:
    """Refuse a model that is not the study's; or the sentence that says it was let pass."""
    if loaded.weights_hash == facts.weights_hash:
        return None
    belongs = f"study {facts.study} is for {facts.model} (weights {facts.weights_hash[:12]}"
    here = f"this is {loaded.name} (weights {loaded.weights_hash[:12]}"
    if found.d_model != facts.d_model or layers[-1] >= found.n_layers:
        raise UsageError(
            f"{belongs}, {facts.n_layers} layers of width {facts.d_model}); {here}, {found.n_layers} layers "
            f"of width {found.d_model}). Give the model of the study, or fit a study for this one."
        )
    dtype = str(found.dtype).removeprefix("torch.")
    if dtype != facts.compute_dtype:
        belongs, here = f"{belongs}, {facts.compute_dtype}", f"{here}, {dtype}"
    if not allowed:
        raise UsageError(
            f"{belongs}); {here}). Give the model of the study, in its dtype and with its adapters, fit a "
            "study for this one, or compare them on purpose with allow_other_weights=True."
        )
    return f"other weights than the study's, on purpose: {belongs}); {here})"


def _scored(
    found: Anatomy, given: PeekedText, facts: StudyFacts, layers: Sequence[int]
) -> dict[str, np.ndarray]:
    """`COLUMNS` as (layer, token), tokens in the order in which they were given."""
    scorer = _Scorer(found, facts, tuple(layers), given.n_tokens)
    with Capture(found, scorer, sites=SITES, layers=layers) as capture:
        for rows, ids, mask in _batches(given):
            scorer.start(rows, None if mask.all() else torch.from_numpy(np.flatnonzero(mask)))
            final_hidden(found, inputs_of(ids, mask, found.device))
            capture.check_counts()
    return scorer.columns


def _batches(given: PeekedText) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Forward passes: the rows' places among all tokens, right-padded ids, and where the rows stand."""
    lengths = [len(ids) for ids in given.ids]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for members in batches(lengths, BATCH_TOKENS):
        rows = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in members])
        mask = np.arange(lengths[members[0]])[None, :] < np.array([lengths[i] for i in members])[:, None]
        ids = np.zeros(mask.shape, np.int64)
        ids[mask] = np.concatenate([given.ids[i] for i in members])
        yield rows, ids, mask


@dataclass(slots=True)
class _Scorer:
    """The hooks' callback. A layer's residual waits for its MLP's output; then both become three numbers a
    row, so that one layer's rows are held at a time."""

    found: Anatomy
    facts: StudyFacts
    layers: tuple[int, ...]
    n_tokens: int
    columns: dict[str, np.ndarray] = field(init=False)
    _residual: dict[int, np.ndarray] = field(init=False, default_factory=dict)
    _rows: np.ndarray = field(init=False)
    _places: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        shape = (len(self.layers), self.n_tokens)
        self.columns = {name: np.full(shape, np.nan, np.float32) for name in COLUMNS}

    def start(self, rows: np.ndarray, places: Tensor | None) -> None:
        self._rows, self._places = rows, places

    def __call__(self, site: str, layer: int, tensor: Tensor) -> None:
        values = tensor.detach().reshape(-1, self.found.d_model)
        if self._places is not None:
            values = values.index_select(0, self._places.to(values.device))
        # A copy: the model may overwrite the tensor in its next operation.
        rows = values.to(device="cpu", dtype=torch.float32, copy=True).numpy()
        if site == "residual":
            self._residual[layer] = rows
            return
        needs = layer_needs(self.found.layers[layer], self.facts, self._residual.pop(layer), rows)
        for name, column in self.columns.items():
            column[self.layers.index(layer), self._rows] = needs[name]


def layer_needs(
    layer: LayerAnatomy, facts: StudyFacts, residual: np.ndarray, y: np.ndarray
) -> dict[str, np.ndarray]:
    """`COLUMNS` of these rows of a live layer; NaN where the model gave a value that is not finite."""
    usable = np.flatnonzero(np.isfinite(residual).all(axis=1) & np.isfinite(y).all(axis=1))
    columns = {name: np.full(len(y), np.nan, np.float32) for name in COLUMNS}
    if not usable.size:
        return columns
    residual, y = residual[usable], y[usable]
    needs: dict[str, Any] = row_needs(
        apply_norm(residual, _norm(norm_parameters(layer.norm))),
        y,
        np.sqrt(squared_norms(residual)),
        facts.surrogate(layer.index),
        Contribution(_norm(norm_parameters(layer.post_norm)), float(layer.multiplier)),
    )
    for name, column in columns.items():
        column[usable] = needs[name]
    return columns


def _norm(found: NormParameters) -> Norm:
    return Norm(found.kind, found.weight, found.bias, found.eps)

"""Take a fine-tuned arm away: its weights, and what stands in for its MLPs, as folders that need no study.

In: the live model with the trained weights of an arm in it, and the layers that stand in. Out: `model/` (what
`save_pretrained` writes, and the tokenizer that the model came with) and, where MLPs are replaced or gated,
`linearised/`, which `load_linearised` puts into that model. A gate goes as a soft gate of the same g, or as a
hard one with its threshold there; one of d → 32 → 1 with its hidden units. Cost: one copy of the weights.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..store import in_place
from .anatomy import Anatomy
from .exported_folder import Exported, ExportedModel, write_exported
from .gate_routing import GateRouter
from .gate_routing import Piece as GatePiece
from .hashes import config_hash, weights_hash
from .hidden_units import HiddenUnits
from .interventions import parse_intervention
from .replacements import Constant, LinearMap
from .substitutes import Replacement, Substitute
from .tuned_layers import HALF, Gate, TunedLayer

_LOG = logging.getLogger("nearline")
TUNED: Final = "tuned"
MODEL: Final = "model"
LINEARISED: Final = "linearised"
_NAMES: Final[Mapping[str, str]] = {
    "linear": "linear",
    "trainable": "linear",
    "mean": "mean",
    "zero": "zero",
    "soft": "soft@input",
    "scaled": "soft@input",
    "hard": "gated@input",
}


def tuned_substitutes(layers: Mapping[int, TunedLayer]) -> dict[int, Substitute]:
    """What stands in for each MLP, as an export holds it; copies."""
    found: dict[int, Substitute] = {}
    for layer, one in layers.items():
        router = None if one.gate is None else _router(one.gate)
        intervention = parse_intervention(_NAMES[one.body])
        found[layer] = Substitute(intervention, layer, _replacement(one), router)
    return found


def export_tuned(
    folder: Path,
    net: Anatomy,
    substitutes: Mapping[int, Substitute],
    special_ids: tuple[int, ...],
    name: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write both folders; those of an earlier export give way when these are whole. Nothing stands in for an
    MLP of the live model meanwhile: its weights are saved as they are.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    model: Any = net.model
    model.save_pretrained(aside / MODEL)
    if tokenizer is not None:
        _save_tokenizer(tokenizer, aside / MODEL)
    if substitutes:
        facts = ExportedModel(
            name=name,
            revision=None,
            config_hash=config_hash(model.config),
            weights_hash=weights_hash(model),
            n_layers=net.n_layers,
            d_model=net.d_model,
        )
        write_exported(aside / LINEARISED, Exported(facts, special_ids, substitutes))
    in_place.replace_folder(aside, folder)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # of code that ships with a model, and trained weights are worth more
        _LOG.warning("finetune: the tokenizer cannot be saved beside the model (%s)", error)


def _replacement(one: TunedLayer) -> Replacement:
    weight, bias = (_plain(value) for value in (one.weight, one.bias))
    if one.body == "scaled":
        return Constant(torch.zeros_like(bias))
    return Constant(bias) if one.body in ("mean", "zero") else LinearMap(weight, bias)


def _router(gate: Gate) -> GateRouter:
    """p(linear) = 1 − g = σ(−w·x − b), or σ(−v·gelu(Ux + c) − b)."""
    none, out = torch.zeros(0), -_plain(gate.out.weight)[0]
    hidden = None
    if gate.hidden is not None:
        hidden = HiddenUnits(_plain(gate.hidden.weight), _plain(gate.hidden.bias), out)
    return GateRouter(
        pieces=(GatePiece("x", own=out),) if hidden is None else (),
        bias=-float(gate.out.bias.detach()),
        threshold=1.0 - HALF,
        centred=False,
        eps=None,
        positions=None,
        types=none.long(),
        type_means=none,
        grand_mean=0.0,
        hidden=hidden,
    )


def _plain(value: Tensor) -> Tensor:
    return value.detach().float().cpu().clone()

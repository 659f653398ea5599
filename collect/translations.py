"""What other libraries call the tensors at our sites: nnsight, nnterp, TransformerLens, interp-engine.

In: an `Anatomy`. Out: per site a `Names`; "-" where a library shows no tensor that equals ours, and a note
why. Cost: none. Every name follows from where the anatomy takes the tensor (parallel or not, a norm in front
or none, what is done to the MLP's output before it is added), so a model's table cannot disagree with its
hooks. A name here says which tensor it would be; whether a library knows the model's family is another
matter.
"""

# Read, in September 2026:
#   nnsight 0.7: paths are module paths; `.input` and `.output` are what enters and leaves a module.
#   nnterp 1.3: standardized_transformer.py (accessors over nnsight's modules). From pull request 55 on,
#     mlps_output of BLOOM and MPT is the last projection's output, before the residual.
#   TransformerLens 3.7, HookedTransformer: components/transformer_block.py (hook_mlp_out fires behind the
#     post-norm, parallel blocks have no hook_resid_mid), layer_norm.py (hook_normalized fires behind weight
#     and bias), rms_norm.py (in front of the weight). TransformerBridge: block.py, mlp.py, bloom_mlp.py and
#     symbolic.py in model_bridge/generalized_components (hooks at the edges of modules; hook_mlp_out is an
#     alias for what is added, issues 1639 and 1648), and supported_architectures/{bloom,mpt,opt}.py.
#   interp-engine: docs/ENGINE_HOOK_MAPPINGS.md, points.py, `mlp_boundary` in arch.py (mlp_out is raw, also
#     where the module adds the residual itself or where there is no MLP module).

from dataclasses import dataclass

from torch import nn

from ..store.dtypes import GRADIENT
from .anatomy import Anatomy

NONE = "-"
LIBRARIES = ("nnsight", "nnterp", "transformer_lens", "transformer_bridge", "interp_engine")


@dataclass(frozen=True, slots=True)
class Names:
    """One site elsewhere, `i` being the layer; `note`: what to know before comparing values."""

    nnsight: str
    nnterp: str
    transformer_lens: str  # HookedTransformer, loaded without processing of the weights
    transformer_bridge: str
    interp_engine: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Form:
    """What the names depend on."""

    parallel: bool
    in_front: str  # the norm in front of the MLP: layernorm, rmsnorm or none
    mlp: str  # module; inside: projections of a module that adds the residual itself; loose: of the block
    contribution: str  # what is done to y before it is added: "", or words


def translations(anatomy: Anatomy) -> dict[str, Names]:
    """Names for each site of `nearline sites`."""
    form = _form(anatomy)
    found = {
        "embedding": _embedding(anatomy),
        "residual": _residual(anatomy, form),
        "mlp_input": _mlp_input(anatomy, form),
        "mlp_output": _mlp_output(anatomy, form),
        GRADIENT: _gradient(anatomy, form),
    }
    if anatomy.positions is not None:
        table = attribute_path(anatomy.paths["positions"])
        found["position_embedding"] = Names(table, NONE, "pos_embed.W_pos", NONE, NONE)
    return found


def attribute_path(path: str) -> str:
    """A module path as Python writes it: `model.layers.{i}.mlp` is `model.layers[i].mlp`."""
    parts = path.split(".")
    return "".join(
        f"[{part.strip('{}')}]" if part == "{i}" or part.isdecimal() else f".{part}" for part in parts
    ).removeprefix(".")


def has_norm(anatomy: Anatomy) -> bool:
    """Whether there is a norm between the residual and the MLP."""
    return anatomy.layers[0].norm is not None


def residual_path(anatomy: Anatomy) -> str:
    """The module whose input the residual is."""
    return anatomy.paths["norm" if has_norm(anatomy) else "mlp_first"]


def _form(anatomy: Anatomy) -> _Form:
    layer, block = anatomy.layers[0], anatomy.paths["block"]
    first = anatomy.paths["mlp_first"].removeprefix(f"{block}.")
    last = anatomy.paths["mlp_last"].removeprefix(f"{block}.")
    mlp = "module" if first == last else "inside" if "." in first else "loose"
    done = []
    if layer.post_norm is not None:
        done.append("normalised by a post-norm")
    if layer.multiplier != 1.0:
        done.append(f"multiplied by {layer.multiplier:g}")
    return _Form(anatomy.parallel, _kind(layer.norm), mlp, " and ".join(done))


def _kind(norm: nn.Module | None) -> str:
    # By name, which is enough here: the modules may be on the meta device, where nothing can be computed.
    if norm is None:
        return "none"
    return "rmsnorm" if "rms" in type(norm).__name__.lower() else "layernorm"


def _embedding(anatomy: Anatomy) -> Names:
    return Names(
        nnsight=f"{attribute_path(anatomy.paths['block'].format(i=0))}.input",
        nnterp="layers_input[0]",
        transformer_lens="blocks.0.hook_resid_pre",
        transformer_bridge="blocks.0.hook_in",
        interp_engine="resid_pre.0",
        note="what enters block 0; their embedding hooks fire before positions and scaling",
    )


def _residual(anatomy: Anatomy, form: _Form) -> Names:
    path = f"{attribute_path(residual_path(anatomy))}.input"
    if form.parallel:
        note = "parallel block: the block's input; a residual between attention and MLP does not exist"
        return Names(
            path, "layers_input[i]", "blocks.i.hook_resid_pre", "blocks.i.hook_in", "resid_pre.i", note
        )
    if form.in_front == "none":
        names = _mlp_input(anatomy, form)
        note = "no norm in front of the MLP: the same tensor as mlp_input"
        return Names(
            path, names.nnterp, names.transformer_lens, names.transformer_bridge, names.interp_engine, note
        )
    return Names(
        path,
        NONE,
        "blocks.i.hook_resid_mid",
        "blocks.i.ln2.hook_in",
        "resid_mid.i",
        "nnterp has no accessor for it: take nnsight's path",
    )


def _mlp_input(anatomy: Anatomy, form: _Form) -> Names:
    lens, note = "blocks.i.ln2.hook_normalized", "hook_mlp_in of HookedTransformer is the norm's input"
    if form.in_front == "rmsnorm":
        lens, note = NONE, "HookedTransformer's ln2.hook_normalized fires before the norm's weight"
    elif form.in_front == "none":
        lens, note = NONE, "HookedTransformer knows no block without a norm in front of the MLP"
    loose = form.mlp == "loose"
    return Names(
        nnsight=f"{attribute_path(anatomy.paths['mlp_first'])}.input",
        nnterp=NONE if loose else "mlps_input[i]",
        transformer_lens=lens,
        transformer_bridge="blocks.i.mlp.in.hook_in" if loose else "blocks.i.mlp.hook_in",
        interp_engine="mlp_in.i",
        note=note + ("; nnterp knows no MLP where the block has no module for it" if loose else ""),
    )


def _mlp_output(anatomy: Anatomy, form: _Form) -> Names:
    notes = {
        "module": "",
        "inside": "the MLP module returns residual + y; nnterp gives y from its pull request 55 on",
        "loose": "nnterp knows no MLP where the block has no module for it",
    }
    changed = f"hook_mlp_out and mlp_out_post are what is added: y {form.contribution}"
    after_sum = anatomy.layers[0].sum_norm is not None
    known = not form.contribution and not after_sum and form.in_front != "none"
    return Names(
        nnsight=f"{attribute_path(anatomy.paths['mlp_last'])}.output",
        nnterp=NONE if form.mlp == "loose" else "mlps_output[i]",
        transformer_lens="blocks.i.hook_mlp_out" if known else NONE,
        transformer_bridge="blocks.i.mlp.hook_out" if form.mlp == "module" else "blocks.i.mlp.out.hook_out",
        interp_engine="mlp_out.i",
        note="; ".join(note for note in (notes[form.mlp], changed if form.contribution else "") if note),
    )


def _gradient(anatomy: Anatomy, form: _Form) -> Names:
    """The same places as the MLP's output, asked for their gradient."""
    names = _mlp_output(anatomy, form)
    return Names(
        nnsight=f"{names.nnsight}.grad",
        nnterp=names.nnterp if names.nnterp == NONE else f"{names.nnterp}.grad",
        transformer_lens=names.transformer_lens,
        transformer_bridge=names.transformer_bridge,
        interp_engine=NONE,
        note="TransformerLens: its backward hooks (dir='bwd'), after the sum of the losses, not their mean",
    )

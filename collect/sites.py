"""The sites of a model, as a table: what each stored tensor is and where in the modules it is taken.

In: an `Anatomy`, or the name of a model, of which only the config is read. Out: rows for `nearline sites`,
with the names that other libraries have for the same tensors. Cost: nothing for an anatomy; for a name,
building the modules on the meta device, without weights; a family without a row of its own is loaded, since
its parts are found by running it. The table comes from the same anatomy as the hooks, so it cannot drift
from them.
"""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..store.dtypes import GRADIENT
from ..store.names import printable
from . import models
from .adapters import adapter_of
from .anatomy import Anatomy, anatomy, config_of
from .site_names import DEFAULT_SITES
from .translations import LIBRARIES, has_norm, residual_path, translations

LINES = {
    "meaning": "what",
    "module": "where",
    "nnsight": "nnsight",
    "nnterp": "nnterp",
    "transformer_lens": "HookedTransformer",
    "transformer_bridge": "TransformerBridge",
    "interp_engine": "interp-engine",
    "note": "note",
}
"""Of a row, what has a line of its own, and how that is called."""


@dataclass(frozen=True, slots=True)
class _Site:
    name: str
    stored: str
    where: str
    meaning: str


def sites(
    model: str,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> list[dict[str, str]]:
    """The table of a model, which is loaded only where its family has no row in adapters.py."""
    options = {"revision": revision, "gguf_file": gguf_file, "trust_remote_code": trust_remote_code}
    found = models.outline(model, **options)
    if adapter_of(config_of(found)) is None:
        found = models.load(model, device="cpu", **options).model
    return sites_table(anatomy(found))


def sites_table(anatomy: Anatomy) -> list[dict[str, str]]:
    """One row per site: site, stored, layers, module (with {i} for the layer), meaning, shape; the names that
    nnsight, nnterp, TransformerLens (HookedTransformer and TransformerBridge) and interp-engine have for it
    (with i for the layer), "-" where one has none, and a note on these."""
    layers = f"0-{anatomy.n_layers - 1}"
    shape = f"(token, {anatomy.d_model})"
    elsewhere = translations(anatomy)
    rows = [
        {
            "site": site.name,
            "stored": site.stored,
            "layers": layers if "{i}" in site.where else "-",
            "module": site.where,
            "meaning": site.meaning,
            "shape": shape,
            **{name: getattr(elsewhere[site.name], name) for name in (*LIBRARIES, "note")},
        }
        for site in _sites(anatomy)
    ]
    if anatomy.positions is not None:
        rows[1]["shape"] = f"({anatomy.positions.shape[0]} positions, {anatomy.d_model})"
    return rows


def sites_text(rows: Iterable[Mapping[str, str]], width: int = 80) -> str:
    """The rows for a person: a paragraph for each site, no line longer than `width` where its words allow."""
    paragraphs = [_paragraph(row, max(width, 60)) for row in rows]
    below = "i: the layer; -: this library has no name for the tensor"
    return "\n\n".join([*paragraphs, below])


def _paragraph(row: Mapping[str, str], width: int) -> str:
    layers = "" if row["layers"] == "-" else f", layers {row['layers']}"
    label = max(map(len, LINES.values())) + 2
    lines = [f"{row['site']}: {row['shape']}{layers}, stored {row['stored']}"]
    for key, name in LINES.items():
        if row[key]:
            lines += textwrap.wrap(
                printable(row[key]),
                width,
                initial_indent=f"  {name.ljust(label)}",
                subsequent_indent=" " * (label + 2),
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _sites(anatomy: Anatomy) -> list[_Site]:
    paths = anatomy.paths
    first_block = paths["block"].format(i=0)
    found = [
        _Site(
            "embedding",
            _stored("embedding"),
            f"input of {first_block}",
            "what enters block 0, after scaling and positions",
        )
    ]
    if anatomy.positions is not None:
        found.append(
            _Site(
                "position_embedding",
                "always",
                paths["positions"],
                "the table of absolute positions, once, not per token",
            )
        )
    return [*found, _residual(anatomy), _mlp_input(anatomy), _mlp_output(anatomy), _gradient(anatomy)]


def _residual(anatomy: Anatomy) -> _Site:
    kind = (
        "parallel block: the block's input, which attention and MLP both read"
        if anatomy.parallel
        else "sequential block: the residual stream after attention"
    )
    reader = (
        "pre-norm, what the MLP's norm reads" if has_norm(anatomy) else "what the MLP reads, without a norm"
    )
    return _Site("residual", _stored("residual"), f"input of {residual_path(anatomy)}", f"{reader}; {kind}")


def _mlp_input(anatomy: Anatomy) -> _Site:
    where = f"input of {anatomy.paths['mlp_first']}"
    what = "post-norm, x = norm(residual)" if has_norm(anatomy) else "x, the residual itself"
    return _Site("mlp_input", _stored("mlp_input"), where, f"{what}: fits recompute it")


def _mlp_output(anatomy: Anatomy) -> _Site:
    layer, after = anatomy.layers[0], "the MLP's raw output y"
    if "post_norm" in anatomy.paths:
        after += f", before {anatomy.paths['post_norm'].rsplit('.', 1)[-1]}"
    elif layer.multiplier != 1.0:
        after += f", before the residual multiplier {layer.multiplier:g}"
    else:
        after += ", which is also what the MLP adds to the residual stream"
    if layer.sum_norm is not None:
        after += "; a norm follows that sum"
    return _Site("mlp_output", _stored("mlp_output"), f"output of {anatomy.paths['mlp_last']}", after)


def _gradient(anatomy: Anatomy) -> _Site:
    where = f"gradient at the output of {anatomy.paths['mlp_last']}"
    what = "∂(summed loss of the sequence)/∂y, one backward pass a batch; zero where no target follows"
    return _Site(GRADIENT, _stored(GRADIENT), where, what)


def _stored(site: str) -> str:
    return "by default" if site in DEFAULT_SITES else "with --sites"

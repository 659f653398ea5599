"""The sites of a model, as a table: what each stored tensor is and where in the modules it is taken.

In: an `Anatomy`, or the name of a model, of which only the config is read. Out: rows for `nearline sites`.
Cost: nothing for an anatomy; for a name, building the modules on the meta device, without weights. The table
comes from the same adapter names that the hooks use, so it cannot drift from them.
"""

from dataclasses import dataclass

from .anatomy import Anatomy, anatomy
from .models import outline


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
    """The table of a model that need not be loaded."""
    found = outline(model, revision=revision, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
    return sites_table(anatomy(found))


def sites_table(anatomy: Anatomy) -> list[dict[str, str]]:
    """One row per site: site, stored, layers, module (with {i} for the layer), meaning, shape."""
    layers = f"0-{anatomy.n_layers - 1}"
    shape = f"(token, {anatomy.d_model})"
    rows = [
        {
            "site": site.name,
            "stored": site.stored,
            "layers": layers if "{i}" in site.where else "-",
            "module": site.where,
            "meaning": site.meaning,
            "shape": shape,
        }
        for site in _sites(anatomy)
    ]
    if anatomy.positions is not None:
        rows[1]["shape"] = f"({anatomy.positions.shape[0]} positions, {anatomy.d_model})"
    return rows


def _sites(anatomy: Anatomy) -> list[_Site]:
    paths = anatomy.paths
    first_block = paths["block"].format(i=0)
    found = [
        _Site(
            "embedding",
            "always",
            f"input of {first_block}",
            "what enters block 0, after scaling and positions",
        )
    ]
    if anatomy.positions is not None:
        found.append(
            _Site(
                "position_embedding",
                "always",
                f"weight of {paths['positions']}",
                "the table of absolute positions, once, not per token",
            )
        )
    return [*found, _residual(anatomy), _mlp_input(anatomy), _mlp_output(anatomy)]


def _residual(anatomy: Anatomy) -> _Site:
    kind = (
        "parallel block: the block's input, which attention and MLP both read"
        if anatomy.parallel
        else "sequential block: the residual stream after attention"
    )
    where = anatomy.paths["norm"]
    return _Site("residual", "always", f"input of {where}", f"pre-norm, what the MLP's norm reads; {kind}")


def _mlp_input(anatomy: Anatomy) -> _Site:
    where = f"input of {anatomy.paths['mlp_first']}"
    return _Site("mlp_input", "no", where, "post-norm, x = norm(residual): recomputed offline, not stored")


def _mlp_output(anatomy: Anatomy) -> _Site:
    after = "the MLP's raw output y"
    if "post_norm" in anatomy.paths:
        after += f", before {anatomy.paths['post_norm'].rsplit('.', 1)[-1]}"
    elif anatomy.layers[0].multiplier != 1.0:
        after += f", before the residual multiplier {anatomy.layers[0].multiplier:g}"
    else:
        after += ", which is also what the MLP adds to the residual stream"
    return _Site("mlp_output", "always", f"output of {anatomy.paths['mlp_last']}", after)

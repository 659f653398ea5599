"""The dataset card of a store: README.md, for whoever finds the folder without knowing nearline.

In: the attributes, the plan, the bytes. Out: Markdown with a Hugging Face front matter: what it is, how to
open it with and without nearline, the two-line decode of bfloat16 bits, sizes, licence fields to fill in.
Stored strings stand in it as code, so that none can change the page.
Its code blocks run in the folder of the store.
"""

import json

from .attributes import Attributes
from .dtypes import GRADIENT, array_name
from .names import printable
from .plan import SPLITS, Plan

_FRONT = """---
pretty_name: {title}
license: other
license_name: see-model-and-corpus
license_link: LICENSE
tags:
- activations
- interpretability
- zarr
- nearline
size_categories:
- {size}
---
"""

_BODY = """
# {title}

MLP inputs and outputs of {model} ({model_type}, {n_layers} layers, d = {d_model}) on {corpus}:
{n_tokens:,} token rows of {n_documents:,} documents ({n_groups:,} groups of near-duplicates), layers
{layers}, stored as {dtype}, {size_text}. Made by nearline {version}.

| array | axes | what it is |
|---|---|---|
{arrays}

Rows: {rows}. Splits go by group, so that near-duplicates never stand on both sides.
`position` 0 and `special` rows are attention sinks: leave them out of statistics unless you mean them.

## Open it

With xarray alone (run in this folder):

```python
import xarray as xr

data = xr.open_zarr("activations.zarr")
```
{decode}{gradient}
With nearline (reading a chunk that is missing or damaged is an error; values as float32):

```python
import nearline.store

data = nearline.store.open(".")
values = data["{site}"].sel(layer={layer})[:4].values
```

The MLP reads `norm(residual)`: kinds, epsilons and multipliers of the norms are in the attributes, their
weights in `norm_weight` and `norm_bias`. `documents.parquet` has a row per document, `vocabulary.parquet` one
per token id, `plan.json` the order of rows. `SEALED` holds the digest of `manifest.json`; a copy
without it is not whole.

## Where it comes from

| | |
|---|---|
| model | {model}, revision {revision} |
| weights | {weights} |
| corpus | {corpus}, content {content} |
| tokenizer | {fingerprint} |
| computed | {compute}, attention {attention}, {device} |

## Licence

Activations are derived from the model and from the corpus: the licences of both apply. Fill in before you
share them.

- model licence: *to be filled in*
- corpus licence: *to be filled in*
- contact: *to be filled in*
"""

_DECODE = """
Arrays named `*_bits` hold bfloat16 as uint16 bits. Two lines decode them:

```python
bits = data["{array}"][0, :4].values
values = (bits.astype("<u4") << 16).view("<f4")
```
"""

_GRADIENT = """
`{array}` is stored times a power of two, one for each layer, so that it fits {dtype}. With the
exponent in hand, a layer's values become nats per unit of `mlp_output`:

```python
exponents = data.attrs["storage"]["gradient_exponents"]
gradient = data["{array}"][0, :4].values.astype("f4") * 2.0 ** -exponents[0]
```
"""

_MEANING = {
    "embedding": "what enters decoder block 0",
    "residual": "what enters the norm in front of the MLP",
    "mlp_output": "raw output of the MLP",
    "mlp_input": "what the MLP receives",
    "mlp_output_grad": "gradient of the sequence's summed loss at the MLP's output",
}


def card(title: str, attributes: Attributes, plan: Plan, chunk_bytes: int) -> str:
    """The text of README.md; the same store gives the same text."""
    model, storage, corpus, compute = (
        attributes.model,
        attributes.storage,
        attributes.corpus,
        attributes.compute,
    )
    site = next((name for name in storage.sites if name != "embedding"), storage.sites[0])
    array = array_name(site, storage.dtype)
    return _FRONT.format(title=json.dumps(_plain(title)), size=_size_category(plan.n_tokens)) + _BODY.format(
        title=_plain(title),
        model=_code(model.name),
        model_type=_code(model.model_type),
        n_layers=model.n_layers,
        d_model=model.d_model,
        corpus=_code(corpus.spec),
        n_tokens=plan.n_tokens,
        n_documents=corpus.n_documents,
        n_groups=corpus.n_groups,
        layers=_layers(storage.layers),
        dtype=storage.dtype,
        size_text=_size_text(chunk_bytes),
        version=_code(attributes.versions.get("nearline", "unknown")),
        arrays=_arrays(attributes),
        rows=_rows(plan),
        decode=_DECODE.format(array=array) if storage.dtype == "bfloat16" else "",
        gradient=_gradient(attributes),
        site=site,
        layer=storage.layers[0],
        revision=_code(model.revision or "none"),
        weights=_code(model.weights_hash),
        content=_code(corpus.content_hash),
        fingerprint=_code(attributes.tokenizer.fingerprint),
        compute=_code(compute.dtype),
        attention=_code(compute.attention),
        device=_code(compute.device_type),
    )


def _arrays(attributes: Attributes) -> str:
    lines: list[str] = []
    for site in attributes.storage.sites:
        axes = "token, feature" if site == "embedding" else "layer, token, feature"
        lines.append(f"| `{array_name(site, attributes.storage.dtype)}` | {axes} | {_MEANING[site]} |")
    lines.append(
        "| `token_id`, `target_id`, `position`, `sequence`, `document` | token | identity of the row |"
    )
    lines.append(
        "| `split`, `special`, `valid` | token | 0 fit 1 gate 2 test; BOS and the like; all values finite |"
    )
    lines.append("| `nll` | token | nats of predicting `target_id`; NaN where there is none |")
    return "\n".join(lines)


def _gradient(attributes: Attributes) -> str:
    storage = attributes.storage
    if not storage.gradient_exponents:
        return ""
    return _GRADIENT.format(array=array_name(GRADIENT, storage.dtype), dtype=storage.dtype)


def _rows(plan: Plan) -> str:
    counts = [int(plan.block_rows[plan.block_split == index].sum()) for index in range(len(SPLITS))]
    return ", ".join(f"{count:,} {name}" for name, count in zip(SPLITS, counts, strict=True))


def _layers(layers: tuple[int, ...]) -> str:
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers))


def _size_text(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


def _size_category(n_tokens: int) -> str:
    for exponent, name in (
        (3, "n<1K"),
        (4, "1K<n<10K"),
        (5, "10K<n<100K"),
        (6, "100K<n<1M"),
        (7, "1M<n<10M"),
    ):
        if n_tokens < 10**exponent:
            return name
    return "10M<n<100M" if n_tokens < 10**8 else "100M<n<1B"


def _plain(text: str) -> str:
    """A name as ordinary words: nothing in it that Markdown or YAML would read as more."""
    return " ".join("".join(c if c.isalnum() or c in "-_.,()+=@" else " " for c in text).split())


def _code(text: str) -> str:
    """A stored string as code: one line, shown as it is, no link and no markup; safe in a table too."""
    plain = "".join(" " if c in "`|" else c for c in printable(text)).strip()
    return f"`{plain or '?'}`"

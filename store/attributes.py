"""Root attributes of a store: only what the settings determine, so that equal settings give equal bytes.

In: the sections below, filled by the harvest, or the `attributes` object of activations.zarr/zarr.json.
Out: one frozen Attributes value and its plain-JSON form. A local model is named, never located: no path is
kept here.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from .dtypes import GRADIENT, MOST_EXPONENT, SITES, STORAGE_DTYPES
from .errors import FormatError
from .parsing import (
    check_plain,
    get_int,
    get_list,
    get_object,
    get_str,
)
from .plan import Plan
from .sections import MAX_ENTRIES, parse_section

SCHEMA = 1
NORM_KINDS = ("layernorm", "rmsnorm", "none")
BOS_POLICIES = ("auto", "always", "never")
COMPRESSORS = (None, "zstd")
LINEAGE_KINDS = ("shortened", "repaired", "selection")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    name: str
    model_type: str
    revision: str | None
    config_hash: str
    weights_hash: str
    n_layers: int
    d_model: int
    vocab_size: int
    parallel: bool  # attention and MLP read the same stream
    span: str  # where the MLP is, e.g. "layers.{i}.mlp"
    quantization: str | None  # how the weights were packed when the model ran; None: plain numbers
    adapters: tuple[str, ...]  # active PEFT adapters, by name


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    fingerprint: str
    sentence: str
    ids: tuple[int, ...]  # of the sentence
    bos_id: int | None
    special_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CorpusFacts:
    spec: str
    content_hash: str
    n_documents: int
    n_groups: int
    passages: bool  # long texts were cut into passages that count as documents


@dataclass(frozen=True, slots=True)
class PlanFacts:
    digest: str
    n_tokens: int
    n_blocks: int
    block: int
    sequence_length: int
    min_length: int
    batch_tokens: int
    seed: int
    bos: str
    fractions: tuple[float, ...]

    @classmethod
    def of(cls, plan: Plan, bos: str) -> "PlanFacts":
        """The facts of a plan, under a BOS policy as resolved."""
        names = [
            field.name
            for field in dataclasses.fields(cls)
            if field.name not in ("digest", "bos", "fractions")
        ]
        values: dict[str, Any] = {name: int(getattr(plan, name)) for name in names}
        return cls(digest=plan.digest, bos=bos, fractions=tuple(map(float, plan.fractions)), **values)


@dataclass(frozen=True, slots=True)
class NormFacts:
    """One entry per stored layer, in the order of `storage.layers`."""

    kinds: tuple[str, ...]
    epsilons: tuple[float, ...]
    post_kinds: tuple[str, ...]
    post_epsilons: tuple[float, ...]
    multipliers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StorageFacts:
    dtype: str
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    compressor: str | None
    # `mlp_output_grad` is stored times 2 to this power, one for each stored layer; not written where empty
    gradient_exponents: tuple[int, ...] = ()

    def gradient_exponent(self, layer: int) -> int:
        """The power of two that the gradient at this layer was multiplied by."""
        return self.gradient_exponents[self.layers.index(layer)] if self.gradient_exponents else 0


@dataclass(frozen=True, slots=True)
class ComputeFacts:
    dtype: str
    attention: str
    device_type: str
    torch_threads: int


@dataclass(frozen=True, slots=True)
class Attributes:
    """Everything that the root group says about a store."""

    model: ModelFacts
    tokenizer: TokenizerFacts
    corpus: CorpusFacts
    plan: PlanFacts
    norm: NormFacts
    storage: StorageFacts
    compute: ComputeFacts
    proof: dict[str, float]
    policies: dict[str, Any]
    versions: dict[str, str]
    lineage: tuple[dict[str, Any], ...] = ()  # what happened to the store since its plan, oldest first

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values (tuples as lists)."""
        found = {key: _plain(value) for key, value in dataclasses.asdict(self).items()}
        if not self.storage.gradient_exponents:
            del found["storage"]["gradient_exponents"]
        return {"nearline": {"schema": SCHEMA}, **found}


def parse_attributes(data: object, where: str = "attributes") -> Attributes:
    """Checked Attributes from untrusted JSON."""
    names = [field.name for field in dataclasses.fields(Attributes)]
    found = get_object(data, where, keys=("nearline", *names))
    head = get_object(found["nearline"], f"{where}.nearline")
    schema = get_int(head, "schema", f"{where}.nearline")
    get_object(head, f"{where}.nearline", keys=("schema",))
    if schema != SCHEMA:
        raise FormatError(
            f"{where}: schema {schema} is not known to this version, which reads schema {SCHEMA}"
        )
    sections = {
        field.name: parse_section(field.type, found[field.name], f"{where}.{field.name}")
        for field in dataclasses.fields(Attributes)
        if field.name != "lineage"
    }
    sections["lineage"] = _lineage(found, where)
    attributes = Attributes(**sections)
    check_consistent(attributes, where)
    return attributes


def _lineage(found: dict[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    entries = get_list(found, "lineage", where, dict, MAX_ENTRIES)
    check_plain(entries, f"{where}.lineage")
    for index, entry in enumerate(entries):
        get_str(entry, "kind", f"{where}.lineage[{index}]", LINEAGE_KINDS)
    return tuple(entries)


def check_consistent(attributes: Attributes, where: str = "attributes") -> None:
    """Values are among those allowed; layers are in range; there is one norm entry per stored layer."""
    storage, n_layers = attributes.storage, attributes.model.n_layers
    _check_among(f"{where}.storage: `dtype`", [storage.dtype], STORAGE_DTYPES)
    _check_among(f"{where}.storage: `sites`", storage.sites, SITES)
    _check_among(f"{where}.storage: `compressor`", [storage.compressor], COMPRESSORS)
    _check_among(f"{where}.plan: `bos`", [attributes.plan.bos], BOS_POLICIES)
    _check_among(f"{where}.norm: `kinds`", attributes.norm.kinds, NORM_KINDS)
    _check_among(f"{where}.norm: `post_kinds`", attributes.norm.post_kinds, NORM_KINDS)
    if not storage.sites or len(set(storage.sites)) < len(storage.sites):
        raise FormatError(f"{where}.storage: `sites` must name different sites, at least one")
    layers = list(storage.layers)
    if layers != sorted(set(layers)) or not layers or layers[0] < 0 or layers[-1] >= n_layers:
        raise FormatError(
            f"{where}.storage: `layers` must be increasing numbers in 0..{n_layers - 1}: {layers[:20]}"
        )
    if attributes.model.d_model < 1:
        raise FormatError(f"{where}.model: `d_model` must be at least 1, found {attributes.model.d_model}")
    _check_exponents(storage, where)
    for field in dataclasses.fields(attributes.norm):
        n_entries = len(getattr(attributes.norm, field.name))
        if n_entries != len(layers):
            raise FormatError(
                f"{where}.norm: `{field.name}` has {n_entries} entries for {len(layers)} layers"
            )


def _check_exponents(storage: StorageFacts, where: str) -> None:
    exponents, spot = storage.gradient_exponents, f"{where}.storage: `gradient_exponents`"
    if not exponents:
        return
    if GRADIENT not in storage.sites or len(exponents) != len(storage.layers):
        raise FormatError(
            f"{spot} has {len(exponents)} entries for {len(storage.layers)} layers and the sites "
            f"{', '.join(storage.sites)}"
        )
    if max(map(abs, exponents)) > MOST_EXPONENT:
        raise FormatError(f"{spot} must be in -{MOST_EXPONENT}..{MOST_EXPONENT}: {list(exponents)[:20]}")


def _check_among(where: str, values: Sequence[str | None], allowed: Sequence[str | None]) -> None:
    for value in values:
        if value not in allowed:
            raise FormatError(f"{where} holds {str(value)[:80]!r}; allowed: {', '.join(map(str, allowed))}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("list[Any]", value)]
    return value

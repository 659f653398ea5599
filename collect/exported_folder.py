"""The folder of an export: substitutes of a model's MLPs, and which model they belong to.

    config.json              the model (name, digests), the intervention, layers, gates' numbers, the rule by
                             which tokens keep their MLP, digests of the files beside it; written last
    surrogates.safetensors   LAYER.weight, LAYER.bias, …: what is computed in place of each MLP
    gates.safetensors        LAYER.PIECE.own, …: vectors of gates in float32; empty without gates

A gate with hidden units has LAYER.hidden.weight (unit × d), .bias and .out (unit) among its vectors; its p is
σ(out · gelu(weight @ x + bias) + the bias in config.json). Exports with such gates are of schema 2, others 1.

In: an `Exported`, or a folder. Out: the folder, the same bytes for the same values; or an `Exported` on the
CPU. A folder may come from anywhere: it is parsed, no code in it is run, and files that are not those written
with config.json are refused. Cost: one copy of the tensors in memory.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors.torch
from blake3 import blake3
from safetensors import SafetensorError
from torch import Tensor

from .. import __version__
from ..store import durable
from ..store.errors import DamageError, FormatError, IncompleteError, UsageError
from ..store.parsing import (
    SMALL_JSON_BYTES,
    get_hex,
    get_int,
    get_ints,
    get_object,
    get_str,
    parse_json,
    readable,
)
from ..store.places import LocalPlace
from .exported_gates import gate_facts, router_of
from .gate_routing import GateRouter
from .interventions import parse_intervention
from .substitutes import Constant, LinearMap, LowRankMap, Substitute

CONFIG: Final = "config.json"
SURROGATES: Final = "surrogates.safetensors"
GATES: Final = "gates.safetensors"
FORMAT: Final = "nearline-linearised"
SCHEMA: Final = 1
WITH_HIDDEN: Final = 2  # what a reader of schema 1 alone has to refuse
COVERED: Final = "tokens that are not special, not padding and not at position 0; the others keep the MLP"
EVERYWHERE: Final = "all tokens"
EXPORTABLE: Final = ("linear", "mean", "zero", "low_rank", "gated", "soft")
"""Kinds that know nothing of a token but what the model itself knows of it."""

_MAPS: Final = {"linear": LinearMap, "low_rank": LowRankMap, "constant": Constant}
_SHAPES: Final = {"weight": 2, "down": 2, "up": 2, "bias": 1, "value": 1}
_KEYS: Final = ("format", "schema", "nearline", "model", "intervention", "covered", "special_ids", "layers")
_MAX_LAYERS: Final = 2**16


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """Which model the substitutes belong to."""

    name: str
    revision: str | None
    config_hash: str
    weights_hash: str
    n_layers: int
    d_model: int


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """What an export holds. `special_ids`: of tokens that keep their MLP."""

    model: ExportedModel
    special_ids: tuple[int, ...]
    substitutes: Mapping[int, Substitute]

    @property
    def intervention(self) -> str:
        return next(iter(self.substitutes.values())).intervention.name


def write_exported(folder: Path, exported: Exported) -> None:
    """Write all files into `folder`, which is made or holds an older export; config.json comes last."""
    claim_export(folder)
    maps, gates, described = {}, {}, {}
    for layer, one in sorted(exported.substitutes.items()):
        kind, tensors = tensors_of(one)
        maps |= {f"{layer}.{name}": _plain(tensor) for name, tensor in tensors.items()}
        gate = None
        if one.router is not None:
            assert isinstance(one.router, GateRouter)
            gate, vectors = gate_facts(one.router)
            gates |= {f"{layer}.{name}": _plain(tensor) for name, tensor in vectors.items()}
        described[str(layer)] = {"map": kind, "gate": gate}
    contents = {SURROGATES: safetensors.torch.save(maps), GATES: safetensors.torch.save(gates)}
    one = next(iter(exported.substitutes.values())).intervention
    config = {
        "format": FORMAT,
        "schema": WITH_HIDDEN if any(map(_hides, exported.substitutes.values())) else SCHEMA,
        "nearline": __version__,
        "model": dataclasses.asdict(exported.model),
        "intervention": one.name,
        "covered": EVERYWHERE if one.everywhere else COVERED,
        "special_ids": list(exported.special_ids),
        "layers": described,
        "files": {name: blake3(content).hexdigest() for name, content in contents.items()},
    }
    for name, content in contents.items():
        durable.write_file(folder / name, content)
    durable.write_file(folder / CONFIG, readable(config))


def claim_export(folder: Path) -> None:
    """Make `folder`, or refuse it if it holds anything but an older export."""
    found = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if found and (CONFIG not in found or not _is_export(folder)):
        shown = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise UsageError(f"{folder} holds {shown}, and no export of nearline: name a new or an empty folder")
    if not found:
        durable.claim_folder(folder)


def read_exported(folder: Path) -> Exported:
    """What an export holds, checked; on the CPU."""
    where = str(folder / CONFIG)
    config = get_object(_config(folder), where)
    get_str(config, "format", where, allowed=(FORMAT,))
    schema = get_int(config, "schema", where)
    if schema not in (SCHEMA, WITH_HIDDEN):
        raise FormatError(
            f"{where}: schema {schema} is not known to this version, which reads schemas {SCHEMA} and "
            f"{WITH_HIDDEN}"
        )
    get_object(config, where, keys=(*_KEYS, "files"))
    model = _model(config["model"], f"{where}: model")
    one = parse_intervention(get_str(config, "intervention", where))
    if one.kind not in EXPORTABLE:
        raise FormatError(f"{where}: `intervention` {one.name} cannot stand in an export")
    maps, gates = _tensors(folder, SURROGATES, config, where), _tensors(folder, GATES, config, where)
    substitutes: dict[int, Substitute] = {}
    for key, layer in get_object(config["layers"], f"{where}: layers").items():
        at = f"{where}: layers.{key[:20]}"
        if not key.isdecimal() or int(key) >= model.n_layers or str(int(key)) != key:
            raise FormatError(f"{at}: the model has layers 0-{model.n_layers - 1}")
        described = get_object(layer, at, keys=("map", "gate"))
        kind = get_str(described, "map", at, allowed=_MAPS)
        router = None
        if one.is_routed:
            hidden = schema == WITH_HIDDEN
            router = router_of(
                described["gate"], _own(gates, key), model.d_model, f"{at}.gate", hidden=hidden
            )
        replacement = _replacement(kind, _own(maps, key), model.d_model, at)
        substitutes[int(key)] = Substitute(one, int(key), replacement, router)
    if not substitutes:
        raise FormatError(f"{where}: `layers` is empty")
    special = get_ints(config, "special_ids", where, most=2**20)
    return Exported(model, tuple(special), dict(sorted(substitutes.items())))


def tensors_of(substitute: Substitute) -> tuple[str, dict[str, Tensor]]:
    """The kind of a replacement and its tensors by name."""
    for kind, maker in _MAPS.items():
        if isinstance(substitute.replacement, maker):
            fields = dataclasses.fields(maker)
            return kind, {one.name: getattr(substitute.replacement, one.name) for one in fields}
    raise UsageError(f"{substitute.intervention.name} puts nothing in the place of an MLP: nothing to export")


def map_of(kind: str, tensors: Mapping[str, Tensor]) -> LinearMap | LowRankMap | Constant:
    """The replacement of this kind."""
    return _MAPS[kind](**tensors)


def _hides(one: Substitute) -> bool:
    return isinstance(one.router, GateRouter) and one.router.hidden is not None


def _is_export(folder: Path) -> bool:
    try:
        config = _config(folder)
    except (DamageError, IncompleteError):
        return False
    return isinstance(config, dict) and config.get("format") == FORMAT


def _config(folder: Path) -> object:
    where = folder / CONFIG
    try:
        content = LocalPlace(folder).read(CONFIG, limit=SMALL_JSON_BYTES)
    except FileNotFoundError:
        raise IncompleteError(f"{where} does not exist; `nearline export STUDY {folder}` makes it") from None
    return parse_json(content, str(where))


def _model(data: object, where: str) -> ExportedModel:
    found = get_object(data, where, keys=[one.name for one in dataclasses.fields(ExportedModel)])
    return ExportedModel(
        name=get_str(found, "name", where),
        revision=None if found["revision"] is None else get_str(found, "revision", where),
        config_hash=get_hex(found, "config_hash", where),
        weights_hash=get_hex(found, "weights_hash", where),
        n_layers=get_int(found, "n_layers", where, 1, _MAX_LAYERS),
        d_model=get_int(found, "d_model", where, 1),
    )


def _tensors(folder: Path, name: str, config: dict[str, Any], where: str) -> dict[str, Tensor]:
    """The tensors of a file, if it is the one that was written with config.json."""
    files = get_object(config["files"], f"{where}: files", keys=(SURROGATES, GATES))
    try:
        content = (folder / name).read_bytes()
    except FileNotFoundError:
        raise IncompleteError(f"{folder / name} does not exist: export the study again") from None
    if blake3(content).hexdigest() != get_hex(files, name, f"{where}: files"):
        raise DamageError(f"{folder / name} is not the file that {CONFIG} was written with: export again")
    try:
        return safetensors.torch.load(content)
    except SafetensorError as error:
        raise DamageError(f"{folder / name} is no safetensors file ({str(error)[:100]})") from None


def _own(tensors: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
    prefix = f"{layer}."
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


def _replacement(
    kind: str, tensors: Mapping[str, Tensor], d_model: int, where: str
) -> LinearMap | LowRankMap | Constant:
    names = [one.name for one in dataclasses.fields(_MAPS[kind])]
    if sorted(tensors) != sorted(names):
        raise FormatError(f"{where}: a {kind} map has {', '.join(names)}, found {', '.join(tensors)[:80]}")
    for name, tensor in tensors.items():
        outer = {"down": tensor.shape[-1:], "up": tensor.shape[:1]}.get(name, tensor.shape)
        if tensor.ndim != _SHAPES[name] or set(outer) != {d_model} or not tensor.is_floating_point():
            raise FormatError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, {tensor.dtype}; d is {d_model}"
            )
    if kind == "low_rank" and tensors["down"].shape[0] != tensors["up"].shape[1]:
        raise FormatError(f"{where}: down and up have other ranks")
    return map_of(kind, tensors)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()

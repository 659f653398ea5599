"""What PEFT's adapters do to a live model: which act, and which of its weights a forward pass uses.

In: a model, wrapped by PEFT or with adapters inside (transformers' own `load_adapter`), or without any. Out:
the adapters by name, and the weights under the names they have in a model without PEFT. An adapter that is
disabled, not active or merged adds nothing: a model with a disabled adapter *is* its base, one with a merged
adapter is what `merge_and_unload` makes of it. Cost: a walk over the modules; peft is not imported.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, TypeGuard

from torch import nn

from ..store.errors import UsageError

# Of a PEFT config: where it came from, and what only training reads.
_NOT_THE_FUNCTION = (
    "base_model_name_or_path revision inference_mode task_type auto_mapping peft_version runtime_config"
).split()
# Methods whose wrapper does more in its own forward pass than put modules inside the model.
_BY_THE_WRAPPER = frozenset({"POLY", "SHADOW", "XLORA"})


@dataclass(frozen=True, slots=True)
class Acting:
    """Name of each weight that is used → its key in the state dict; and what of the adapters is no tensor."""

    names: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)


def acting(model: nn.Module, keys: Iterable[str]) -> Acting:
    """`keys` of a state dict, without those of adapters that do nothing. Adapters are numbered, not named:
    the same weights under another name are the same weights."""
    if not any(_is_tuner(module) for module in model.modules()):
        return Acting({key: key for key in keys})
    names: dict[str, str] = {}
    for key in keys:
        name = _name(model, key)
        if name in names:
            raise UsageError(
                f"weights {names[name]!r} and {key!r} of an adapter cannot be told apart, so the model "
                "cannot be identified. Merge the adapter into the model (merge_and_unload) first."
            )
        if name is not None:
            names[name] = key
    facts = {"layers": dict(_numbers(model)), "configs": _configs(model)}
    return Acting(names, facts if facts["layers"] else {})


def adapters_of(model: nn.Module) -> tuple[str, ...]:
    """The adapters that act, in their order; one that is merged into the weights says so."""
    tuners: list[Any] = [module for module in model.modules() if _is_tuner(module)]
    active = dict.fromkeys(name for module in tuners for name in _active(module))
    merged = dict.fromkeys(name for module in tuners for name in _merged(module))
    return (*active, *(f"{name} (merged)" for name in merged if name not in active))


def refuse_unfaithful(model: nn.Module) -> None:
    """Refuse adapters that would not act as usual when the model's own modules run."""
    for path, module in model.named_modules():
        if _is_tuner(module) and _merged(module) and module.disable_adapters:
            raise UsageError(
                f"adapter {_merged(module)[0]!r} is merged into {path} and disabled at once, so the next "
                "forward pass would take it out again. Call unmerge_adapter(), or enable the adapter."
            )
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    for name in adapters_of(model):
        config = configs.get(name)
        kind = _kind(config)
        if kind in _BY_THE_WRAPPER or getattr(config, "alora_invocation_tokens", None):
            raise UsageError(
                f"adapter {name!r} ({kind or 'PEFT'}) acts through its wrapper's forward pass, depending on "
                "the input, and not by its layers alone: its activations cannot be collected. Allowed are "
                "adapters inside the layers (LoRA and its kin), or the merged model."
            )


def acting_module(module: nn.Module) -> nn.Module:
    """The module whose weights are used where PEFT put a trained copy beside it (LN-tuning); else itself."""
    tuner: Any = module
    if not _is_tuner(tuner) or not hasattr(tuner, "ln_tuning_layers"):
        return module
    active = _active(tuner)
    return tuner.ln_tuning_layers[active[0]] if active else tuner.base_layer


def _is_tuner(module: Any) -> bool:
    """Whether PEFT put this module in. Where peft was never imported, it put none."""
    layers, wrappers = (sys.modules.get(name) for name in ("peft.tuners.tuners_utils", "peft.utils.other"))
    return (layers is not None and isinstance(module, layers.BaseTunerLayer)) or (
        wrappers is not None and isinstance(module, wrappers.AuxiliaryTrainingWrapper)
    )


def _merged(module: Any) -> list[str]:
    return list(module.merged_adapters)


def _active(module: Any) -> list[str]:
    """The adapters that this module applies, in the order in which it adds them up."""
    if module.disable_adapters or _merged(module):
        return []
    known = _known(module)
    return [name for name in module.active_adapters if name in known]


def _known(module: Any) -> set[str]:
    own = getattr(module, "_adapters", None)
    return set(own) if own is not None else set(module._all_available_adapter_names())


def _name(model: nn.Module, key: str) -> str | None:
    """`key` without what PEFT put between; None for a weight that is not used."""
    parts, found = key.split("."), []
    current: Any = model
    while parts:
        part = parts.pop(0)
        below = _child(current, part)
        if not _is_tuner(current):
            found.append(part)
        elif part in ("base_layer", "original_module") or (below is not None and _is_tuner(below)):
            if part == "original_module" and _replaces(current):
                return None
        elif part == "modules_to_save":
            if not _replaces(current) or parts[0] != _active(current)[0]:
                return None
            below = _child(below, parts.pop(0))
        else:
            active = _active(current)
            if not active or (parts and parts[0] in _known(current) and parts[0] not in active):
                return None
            found += [*_parameter(current), part]
            if parts and parts[0] in active:
                found.append(str(active.index(parts[0])))
                below = _child(below, parts.pop(0))
        current = below
    return ".".join(found)


def _parameter(tuner: Any) -> list[str]:
    """The parameter that a tuner changes, where it is one of several of its module (those of experts)."""
    name = getattr(tuner, "parameter_name", None)
    return [name] if isinstance(name, str) else []


def _child(module: Any, name: str) -> Any:
    """A module inside; None for a parameter, and below one."""
    return module._modules.get(name) if isinstance(module, nn.Module) else None


def _replaces(wrapper: Any) -> bool:
    """Whether a wrapper runs its trained copy in the place of the original module."""
    return hasattr(wrapper, "modules_to_save") and bool(_active(wrapper))


def _numbers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Per tuner that acts: its numbers that are no tensors (LoRA's scaling, ranks, indices)."""
    tuners: list[tuple[str, Any]] = [(path, one) for path, one in model.named_modules() if _is_tuner(one)]
    for path, module in tuners:
        # A copy that replaces a whole module has no numbers beside its weights.
        if (active := _active(module)) and not _replaces(module):
            where = _name(model, f"{path}.base_layer") or path
            yield ".".join((where, *_parameter(module))), [_numbers_of(module, adapter) for adapter in active]


def _numbers_of(module: Any, adapter: str) -> dict[str, Any]:
    names = [name for name in module.other_param_names if "." not in name and "dropout" not in name]
    tables = {name: getattr(module, name, None) for name in names}
    found = {name: table[adapter] for name, table in tables.items() if _has(table, adapter)}
    return {name: value for name, value in found.items() if _is_plain(value)}


def _has(table: Any, adapter: str) -> TypeGuard[dict[str, Any]]:
    return isinstance(table, dict) and adapter in table


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None) or (
        isinstance(value, list | tuple) and all(isinstance(one, bool | int | float | str) for one in value)
    )


def _configs(model: nn.Module) -> list[Any]:
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    return [_facts(configs[name]) for name in adapters_of(model) if name in configs]


def _facts(config: Any) -> dict[str, Any]:
    """What was chosen: a later peft has more settings, which are at their defaults in an earlier adapter."""
    given = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    usual = {part.name: _default(part) for part in fields(config)} if is_dataclass(config) else {}
    unread = {key for key in given if key in _NOT_THE_FUNCTION or "dropout" in key}
    unread |= {key for key in given if key in usual and given[key] == usual[key]}
    return {key: given[key] for key in given if key not in unread} | {"peft_type": _kind(config)}


def _default(part: Any) -> Any:
    return part.default if part.default_factory is MISSING else part.default_factory()


def _kind(config: Any) -> str:
    kind = config.get("peft_type") if isinstance(config, Mapping) else getattr(config, "peft_type", None)
    return str(getattr(kind, "value", kind) or "")

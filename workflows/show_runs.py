"""What commands on whole studies print on standard output.

In: results of library functions. Out: a few aligned lines for a person, or one JSON document with `--json`.
Cost: none.
"""

from collections.abc import Callable
from typing import Any, Final

from .show import bytes_text, print_json, print_table

UNKNOWN: Final = "unknown"
STORES: Final = (
    "disk, objects: exact where a corpus has as many tokens, the most it can be where it has fewer"
)
CORES: Final = (
    "operations: two for a multiplication and an addition, no padding; of fit and analyze their products",
    "CPU hours: of one core of this machine by a probe; an estimate, good to a factor of 2",
)
DEVICE: Final = (
    "device hours of losses, measure, finetune: their operations at the speed of the newest harvest of the",
    "model, writing included; another device or dtype has another speed; timing on the clock is not in it",
)
NO_DEVICE: Final = (
    "device hours: unknown without a probe; `nearline plan MODEL CORPUS STORE` makes one on the device, and",
    "the first harvest of a model gives the hours of its others and of the steps behind them",
)


def steps(result: Any, as_json: bool) -> None:
    """What ran, what was current, why, and where the reports are."""
    if as_json:
        return print_json(result)
    print_table(
        [{"step": step.name, "state": step.state, "why": step.why} for step in result.steps],
        ("step", "state", "why"),
    )
    for where in result.reports:
        print(f"report: {where}")
    return None


def plan(found: Any, as_json: bool) -> None:
    """What a study will take, a line a store and one for all of them."""
    if as_json:
        return print_json(found)
    rows = [
        {
            "store": one.store,
            "tokens": f"{one.tokens:,}",
            "layers": _known(one.n_layers, str),
            "d": _known(one.d_model, str),
            "disk": _known(one.bytes, bytes_text),
            "objects": _known(one.objects, "{:,}".format),
            "operations": _known(one.flops, "{:.3g}".format),
            "device hours": _known(one.device_hours, "{:.2g}".format),
        }
        for one in found.stores
    ]
    whole = {
        "store": "all",
        "tokens": f"{sum(one.tokens for one in found.stores):,}",
        "disk": _known(found.bytes, bytes_text),
        "objects": _known(found.objects, "{:,}".format),
        "device hours": _known(found.device_hours, "{:.2g}".format),
    }
    print_table([*rows, whole], list(rows[0]))
    print()
    _steps_of_plan(found)
    known = any(one.device_hours is not None for one in found.stores)
    unknown = any(one.device_hours is None for one in found.stores)
    for line in ("", STORES, *CORES, *(DEVICE if known else ()), *(NO_DEVICE if unknown else ())):
        print(line)
    return None


def _steps_of_plan(found: Any) -> None:
    """Those behind the harvests. What a step does not use is left blank."""
    columns = ("step", "model", "operations", "CPU hours", "device hours")
    rows = []
    for one in found.steps:
        rows.append(
            {
                "step": one.step,
                "model": one.model,
                "operations": _known(one.flops, "{:.3g}".format),
                "CPU hours": _known(one.cpu_hours, "{:.2g}".format) if one.on_cores else "",
                "device hours": "" if one.on_cores else _known(one.device_hours, "{:.2g}".format),
            }
        )
    whole = {
        "step": "all",
        "model": "harvests too",
        "CPU hours": _known(found.cpu_hours, "{:.2g}".format),
        "device hours": _known(found.device_hours, "{:.2g}".format),
    }
    print_table([*rows, whole], columns)


def _known(value: Any, text: Callable[[Any], str]) -> str:
    return UNKNOWN if value is None else text(value)

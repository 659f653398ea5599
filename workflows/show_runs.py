"""What commands on whole studies print on standard output.

In: results of library functions. Out: a few aligned lines for a person, or one JSON document with `--json`.
Cost: none.
"""

from collections.abc import Callable
from typing import Any, Final

from ..collect.few_groups import ENOUGH_GROUPS
from .progress import short_duration_text
from .show import bytes_text, print_json, print_table

UNKNOWN: Final = "unknown"
SUSTAINED: Final = 1e14  # operations a second, at which time is stated where no device is known
TEXTS: Final = (
    f"texts are not looked at: whether a corpus has documents enough for verdicts ({ENOUGH_GROUPS} groups a "
    "split),",
    "`nearline plan MODEL CORPUS STORE` says",
)
STORES: Final = (
    "disk, objects: exact where a corpus has as many tokens, the most it can be where it has fewer"
)
CORES: Final = (
    "operations: two for a multiplication and an addition, no padding; of fit and analyze their products",
    "CPU time: of one core of this machine by a probe; an estimate, good to a factor of 2",
)
DEVICE: Final = (
    "device time of losses, measure, finetune: their operations at the speed of the newest harvest of the",
    "model, writing included; another device or dtype has another speed; timing on the clock is not in it",
)
NO_DEVICE: Final = (
    "device time: unknown without a probe; `nearline plan MODEL CORPUS STORE` makes one on the device, and",
    "the first harvest of a model gives the time of its others and of the steps behind them",
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
            "device time": _known(one.device_hours, _hours),
        }
        for one in found.stores
    ]
    whole = {
        "store": "all",
        "tokens": f"{sum(one.tokens for one in found.stores):,}",
        "disk": _known(found.bytes, bytes_text),
        "objects": _known(found.objects, "{:,}".format),
        "device time": _known(found.device_hours, _hours),
    }
    print_table([*rows, whole], list(rows[0]))
    print()
    _steps_of_plan(found)
    known = any(one.device_hours is not None for one in found.stores)
    unknown = any(one.device_hours is None for one in found.stores)
    for line in (
        "",
        *_at_speed(found.flops),
        STORES,
        *CORES,
        *(DEVICE if known else ()),
        *(NO_DEVICE if unknown else ()),
        *TEXTS,
    ):
        print(line)
    return None


def _steps_of_plan(found: Any) -> None:
    """Those behind the harvests. What a step does not use is left blank."""
    columns = ("step", "model", "operations", "CPU time", "device time")
    rows = []
    for one in found.steps:
        rows.append(
            {
                "step": one.step,
                "model": one.model,
                "operations": _known(one.flops, "{:.3g}".format),
                "CPU time": _known(one.cpu_hours, _hours) if one.on_cores else "",
                "device time": "" if one.on_cores else _known(one.device_hours, _hours),
            }
        )
    whole = {
        "step": "all, harvests too",
        "CPU time": _known(found.cpu_hours, _hours),
        "device time": _known(found.device_hours, _hours),
    }
    print_table([*rows, whole], columns)


def _at_speed(flops: float | None) -> tuple[str, ...]:
    """Operations are no time that anyone knows: what they are at a round speed, to be scaled."""
    if flops is None:
        return ()
    took = short_duration_text(flops / SUSTAINED)
    return (
        f"steps that run a model, harvests too: {flops:.2g} operations together, {took} at a sustained "
        f"{SUSTAINED / 1e12:.0f} Tflop/s",
    )


def _hours(hours: float) -> str:
    return short_duration_text(3600 * hours)


def _known(value: Any, text: Callable[[Any], str]) -> str:
    return UNKNOWN if value is None else text(value)

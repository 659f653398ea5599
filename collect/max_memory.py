"""How a model is spread over devices, and how much of it each may take: "0=20GiB,cpu=64GiB".

In: text. Out: types for the fields of settings that say so, and bytes by the number of a GPU, or "cpu" for
main memory, as accelerate takes them; or one sentence with what is allowed. Cost: none; needs no torch.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, ValidationInfo

from ..store.errors import UsageError
from ..store.settings import parse_bytes


def parse_max_memory(text: str) -> dict[int | str, int]:
    """`"0=20GiB,cpu=64GiB"` as {0: 21474836480, "cpu": 68719476736}."""
    found: dict[int | str, int] = {}
    for part in text.split(","):
        place, equals, size = (piece.strip() for piece in part.partition("="))
        key = int(place) if place.isdecimal() else place
        if not equals or not (isinstance(key, int) or key in ("cpu", "mps")):
            raise UsageError(
                f"max_memory={text!r}: {part.strip()!r} is no device with a size; write the number of a GPU "
                "or cpu, such as 0=20GiB,cpu=64GiB"
            )
        if key in found:
            raise UsageError(f"max_memory={text!r} gives {place} twice; give each device once")
        try:
            found[key] = parse_bytes(size)
        except UsageError as error:
            raise UsageError(f"max_memory={text!r}: {error}") from None
    return found


def _has_no_device(value: str | None, info: ValidationInfo) -> str | None:
    device = info.data.get("device", "auto")
    if value is not None and device != "auto":
        raise UsageError(
            f"device_map={value} chooses the devices itself: leave out device={device}, or device_map; "
            "max_memory limits what each device takes"
        )
    return value


def _only_with_device_map(value: str | None, info: ValidationInfo) -> str | None:
    if value is not None and info.field_name == "max_memory":
        parse_max_memory(value)
    if value is not None and info.data.get("device_map") is None:
        raise UsageError(
            f"{info.field_name}={value} says how to spread a model: set device_map=auto too (--device-map "
            "auto)"
        )
    return value


DeviceMap = Annotated[Literal["auto", "balanced", "sequential"] | None, AfterValidator(_has_no_device)]
MaxMemory = Annotated[str | None, AfterValidator(_only_with_device_map)]
OffloadFolder = Annotated[str | None, AfterValidator(_only_with_device_map)]

"""How much of a model each device may take, as a person writes it: "0=20GiB,cpu=64GiB".

In: text. Out: bytes by the number of a GPU, or "cpu" for main memory, as accelerate takes them; or one
sentence with what is allowed. Cost: none; needs no torch.
"""

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

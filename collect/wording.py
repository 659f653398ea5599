"""Numbers in sentences.

In: a number and what is counted. Out: both as a person writes them. Cost: none.
"""


def counted(number: int, thing: str, things: str | None = None) -> str:
    """`1 document`, `2,000 documents`."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def is_or_are(number: int) -> str:
    """The verb for so many."""
    return "is" if number == 1 else "are"

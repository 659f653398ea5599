"""Long texts cut at paragraph bounds into passages that count as documents.

In: one text. Out: its passages in order; joined with a blank line they hold every word of it once.
Few long texts give too few units to split and to bootstrap: a book becomes some hundred passages.
Cost: one pass over the text.
"""

from collections.abc import Iterator, Sequence

FEW_TEXTS = 40  # fewer than this are too few units
LARGE_SHARE = 0.1  # so is a corpus where one text holds more than this share of the characters
PASSAGE_CHARS = 1500  # about 350 tokens


def few_long_texts(texts: Sequence[str]) -> bool:
    """Whether texts are too few, or one of them too large, to serve as units themselves."""
    sizes = [len(text) for text in texts]
    return len(texts) < FEW_TEXTS or max(sizes) > LARGE_SHARE * sum(sizes)


def cut_keyed(key: str, text: str) -> Iterator[tuple[str, str]]:
    """The text under its key, or where it is long its passages under KEY#0000, KEY#0001, …"""
    passages = cut_text(text)
    if len(passages) == 1:
        yield key, text
    else:
        yield from ((f"{key}#{number:04d}", passage) for number, passage in enumerate(passages))


def cut_text(text: str, size: int = PASSAGE_CHARS) -> list[str]:
    """Runs of whole paragraphs, each the shortest that has `size` characters; a last run below half of that
    joins the one before. A paragraph of more than twice `size` is cut first, at lines or else words."""
    passages: list[str] = []
    current: list[str] = []
    length = 0
    for paragraph in text.split("\n\n"):
        for piece in cut_paragraph(paragraph, size):
            current.append(piece)
            length += len(piece) + 2
            if length >= size:
                passages.append("\n\n".join(current))
                current, length = [], 0
    rest = "\n\n".join(current)
    if rest.strip() and passages and length < size // 2:
        passages[-1] = f"{passages[-1]}\n\n{rest}"
    elif rest.strip():
        passages.append(rest)
    return passages


def cut_paragraph(paragraph: str, size: int) -> Iterator[str]:
    """Pieces of half of `size` to twice `size`: after a line where there is one, else after a word."""
    while len(paragraph) > 2 * size:
        ends = (paragraph.rfind(mark, size // 2, size) for mark in "\n ")
        at = next((end for end in ends if end > 0), size - 1)
        yield paragraph[: at + 1].rstrip()
        paragraph = paragraph[at + 1 :]
    yield paragraph

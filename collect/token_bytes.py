"""The bytes that token ids stand for, so that reports can show tokens in context without a tokenizer.

In: a tokenizer and ids. Out: bytes per id, such that the bytes of consecutive tokens join to their text.
Four spellings cover the tokenizers of decoders: byte-level BPE (each byte is a printable letter),
sentencepiece (▁ is a space, <0xNN> a byte), bytes as Latin-1 letters (ByT5), and plain strings. Which one
applies is read from the tokenizer's decoder, because ▁ and Ġ are also ordinary letters.
The text that comes back is the one that the model saw: with the space that many sentencepiece tokenizers put
in front, lower-cased or composed where the tokenizer does so, `<unk>` where it knows no better. Word pieces
and whole words come back without the spaces between words, which their ids do not hold.
Cost: a dictionary look-up per character.
"""

import json
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

byte_token = re.compile(r"<0x([0-9A-Fa-f]{2})>").fullmatch


def token_bytes(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[bytes]:
    """Bytes of each id; empty for an id that the vocabulary does not hold (padding of the table)."""
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    spell = spelling(tokenizer)
    result = []
    for index in ids:
        token = added.get(index)
        if token is not None:  # added tokens are matched in the text itself, so they are spelled as they are
            result.append(token.encode())
        else:
            found = token_of(tokenizer, int(index))
            result.append(b"" if found is None else SPELLINGS[spell](found))
    return result


def token_of(tokenizer: PreTrainedTokenizerBase, index: int) -> str | None:
    """How the vocabulary spells an id; None for one without a token (a padded vocabulary)."""
    try:
        found: object = tokenizer.convert_ids_to_tokens(index)
    except IndexError:
        return None
    return found if isinstance(found, str) else None


def spelling(tokenizer: PreTrainedTokenizerBase) -> str:
    """`byte_level`, `sentencepiece`, `latin_1` or `plain`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # slow tokenizers say it by what they offer
        if hasattr(tokenizer, "byte_decoder"):
            return "byte_level"
        if hasattr(tokenizer, "sp_model"):
            return "sentencepiece"
        return "latin_1" if tokenizer.tokenize("é") == ["Ã", "©"] else "plain"
    whole = json.dumps(json.loads(backend.to_str())["decoder"], ensure_ascii=False)
    if '"ByteLevel"' in whole:
        return "byte_level"
    return "sentencepiece" if "▁" in whole else "plain"


def letters_of_bytes() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable Latin-1 bytes are their own,
    the others take the letters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF_LETTER = letters_of_bytes()


def byte_level(token: str) -> bytes:
    return b"".join(
        bytes([BYTE_OF_LETTER[letter]]) if letter in BYTE_OF_LETTER else letter.encode() for letter in token
    )


def sentencepiece(token: str) -> bytes:
    match = byte_token(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def plain(token: str) -> bytes:
    """Words, with the continuation mark of word pieces taken off."""
    return token.removeprefix("##").encode()


def latin_1(token: str) -> bytes:
    """Letters up to U+00FF are bytes."""
    return b"".join(bytes([ord(letter)]) if ord(letter) < 0x100 else letter.encode() for letter in token)


SPELLINGS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "latin_1": latin_1, "plain": plain}

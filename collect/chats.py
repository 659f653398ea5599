"""Chats as token ids: the tokenizer's own template writes them, and only what it writes is a control token.

In: Documents of messages and a tokenizer with a chat template. Out: int32 ids of each. A message that spells
`<|im_end|>` does not end: what it spells is encoded as text, piece by piece between the control tokens of the
template. Each time it is checked, on the same chat without characters that open a control token, that these
are the tokens which the template writes and that encoding by pieces gives the ids of encoding at once; where
not (a template takes messages apart, or joins what none of them spells alone), the chat is refused. Templates
that write today's date are given the same day always.
Cost: rendering, about 0.1 ms a message (twice where it holds such a character), and tokenising.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

import numpy as np
from blake3 import blake3
from transformers import PreTrainedTokenizerBase

from ..store.errors import EnvironmentFault, UsageError
from .documents import Document
from .encoding import Ids, any_of, encode, special_tokens

DAY = datetime(2024, 7, 26)  # the date that Llama's templates fall back to
MARKS = "\ue000\ue001\ue002\ue003\ue004\ue005\ue006\ue007"  # of private use; two that the chat does not hold
# transformers lets a template call strftime_now, and nobody give it another one: this stands in front of it.
ONE_DAY = (
    "{% macro strftime_now(form) %}"
    "{% if form not in day_in_form %}{{ raise_exception('it makes up the form of a date') }}{% endif %}"
    "{{ day_in_form[form] }}{% endmacro %}\n"
)
form_of_date = re.compile(r"""strftime_now\(\s*(?:'([^']*)'|"([^"]*)")""").finditer
ROLE = re.compile(r"[A-Za-z][\w.-]*")

Messages = Sequence[dict[str, str]]
Way = Callable[[PreTrainedTokenizerBase, list[str]], list[Ids]]

logger = logging.getLogger("nearline")


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """BLAKE3 of the chat template, which no fingerprint of a tokenizer covers."""
    return blake3(template_of(tokenizer).encode()).hexdigest()


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template in use; UsageError where there is none."""
    try:
        return tokenizer.get_chat_template()
    except (ValueError, AttributeError):
        raise UsageError(
            "the documents are chats, and this tokenizer has no chat template. Set tokenizer.chat_template, "
            "take the tokenizer of the model's chat version, or give texts."
        ) from None


def encode_chats(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> list[Ids]:
    """Ids of each chat as the template writes it, nothing added."""
    template_of(tokenizer)
    known = special_tokens(tokenizer)
    spelled = any_of([*known])
    rendered = [_checked(tokenizer, document) for document in documents]
    _warn_of_gaps(documents, rendered)
    ids = encode(tokenizer, rendered, special=True)
    for number, document in enumerate(documents):
        messages = _messages(document)
        spells = any(spelled.search(value) for message in messages for value in message.values())
        harmless = _harmless(messages, known)
        if not spells and harmless != [*messages]:  # what no message spells, several may together
            written = spelled.findall(render(tokenizer, harmless, document.key))
            spells = written != spelled.findall(rendered[number])
        if spells:
            ids[number] = encode_guarded(tokenizer, document)
    return ids


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, key: str) -> str:
    """The chat as its template writes it, on DAY."""
    template = template_of(tokenizer)
    if "strftime_now" in template:
        template = ONE_DAY + template
    forms = [found[1] or found[2] or "" for found in form_of_date(template)]
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=template,
                tokenize=False,
                day_in_form={form: DAY.strftime(form) for form in forms},
            )
        )
    except ImportError as error:
        raise EnvironmentFault(f"chat {key}: {str(error).splitlines()[0]}") from None
    except Exception as error:  # a template is a program that came with the model
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        roles = ", ".join(message["role"] for message in messages)
        raise UsageError(
            f"chat {key}: the tokenizer's chat template refuses it ({reason}); its roles are {roles}."
        ) from None


def encode_guarded(tokenizer: PreTrainedTokenizerBase, document: Document) -> Ids:
    """Ids of a chat whose messages spell special tokens, none of which they get."""
    messages = _messages(document)
    harmless = _harmless(messages, special_tokens(tokenizer))
    right = encode(tokenizer, [render(tokenizer, harmless, document.key)], special=True)[0]
    parts = _parts(tokenizer, messages, document.key)
    probe = _parts(tokenizer, harmless, document.key)
    if parts[1] != probe[1]:
        raise UsageError(
            f"chat {document.key}: the chat template joins what messages hold to a special token, which none "
            "of them should get. Leave out the chat."
        )
    for way in (encode, _after_newline):
        if np.array_equal(_joined(tokenizer, probe, way), right):
            return _joined(tokenizer, parts, way)
    raise UsageError(
        f"chat {document.key}: a message spells a special token, and this tokenizer does not let it be "
        "encoded as text. Leave out the chat, or change how the message spells it."
    )


def _harmless(messages: Messages, known: Iterable[str]) -> list[dict[str, str]]:
    """The same chat without a character that opens a special token: those left are the template's."""
    openers = {ord(spelling[0]): "x" for spelling in known if spelling}
    return [
        {name: value if name == "role" else value.translate(openers) for name, value in message.items()}
        for message in messages
    ]


def _checked(tokenizer: PreTrainedTokenizerBase, document: Document) -> str:
    for message in _messages(document):
        if not ROLE.fullmatch(message["role"]):
            raise UsageError(
                f"chat {document.key}: the role {message['role'][:40]!r} is no word; roles are words such as "
                "system, user and assistant."
            )
    return render(tokenizer, _messages(document), document.key)


def _warn_of_gaps(documents: Sequence[Document], rendered: Sequence[str]) -> None:
    """Templates drop messages of unknown roles, or thoughts of earlier turns, without a word."""
    gaps = [
        document.key
        for document, text in zip(documents, rendered, strict=True)
        if any(message["content"].strip() not in text for message in _messages(document))
    ]
    if gaps:
        logger.warning(
            "the chat template leaves out or changes text of %d of %d chats; the first is %s",
            len(gaps),
            len(documents),
            gaps[0],
        )


def _parts(tokenizer: PreTrainedTokenizerBase, messages: Messages, key: str) -> tuple[list[str], list[int]]:
    """The rendered chat as texts and, one between each two, the control tokens that the template wrote."""
    known = special_tokens(tokenizer)
    spelled = any_of([*known])
    held = "".join(value for message in messages for value in message.values()) + template_of(tokenizer)
    free = [mark for mark in MARKS if mark not in held]
    if len(free) < 2:
        raise UsageError(f"chat {key}: holds characters of private use that are needed to mark its parts.")
    left, right = free[:2]
    marked = [
        {name: spelled.sub(f"{left}\\1{right}", value) for name, value in message.items()}
        for message in messages
    ]
    rendered = render(tokenizer, marked, key)
    texts, tokens, end = [""], [], 0
    for found in re.finditer(f"{left}{spelled.pattern}{right}|{spelled.pattern}", rendered):
        texts[-1] += rendered[end : found.start()] + (found[1] or "")
        if found[2]:
            tokens.append(known[found[2]])
            texts.append("")
        end = found.end()
    texts[-1] += rendered[end:]
    spoken = {index: spelling for spelling, index in known.items()}
    whole = texts[0] + "".join(spoken[token] + text for token, text in zip(tokens, texts[1:], strict=True))
    if whole != render(tokenizer, messages, key):
        raise UsageError(
            f"chat {key}: a message spells a special token, and the chat template takes the message apart, "
            "so that nothing tells which are the template's own. Leave out the chat."
        )
    return _stripped(tokenizer, texts, tokens), tokens


def _stripped(tokenizer: PreTrainedTokenizerBase, texts: list[str], tokens: list[int]) -> list[str]:
    """Some control tokens swallow the white space beside them."""
    texts = list(texts)
    for number, token in enumerate(tokens):
        added = tokenizer.added_tokens_decoder.get(token)
        if added is not None and added.lstrip:
            texts[number] = texts[number].rstrip()
        if added is not None and added.rstrip:
            texts[number + 1] = texts[number + 1].lstrip()
    return texts


def _joined(tokenizer: PreTrainedTokenizerBase, parts: tuple[list[str], list[int]], way: Way) -> Ids:
    texts, tokens = parts
    rows = [row if text else row[:0] for text, row in zip(texts, way(tokenizer, texts), strict=True)]
    between = [np.array([token], np.int32) for token in tokens]
    pairs = zip(between, rows[1:], strict=True)
    return np.concatenate([rows[0], *(row for pair in pairs for row in pair)])


def _after_newline(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Ids]:
    """For tokenizers that put a space in front of the first word of a text, and only there."""
    newline = encode(tokenizer, ["\n"])[0]
    rows = encode(tokenizer, [texts[0], *("\n" + text for text in texts[1:])])
    return [rows[0], *(row[len(newline) :] for row in rows[1:])]


def _messages(document: Document) -> Messages:
    return document.messages or ()

"""What the bundled models are trained on, and what they are judged by.

In: the reserved parts of the built-in corpora, and docstrings of packages that come with
`nearline[collect]`. Out: training and held-out texts; a tokenizer; a stream of token ids and its windows.
Every text whose group of near-duplicates holds a text that users may harvest is dropped, so no activation
that a user harvests from a built-in corpus comes from a text the model has read. Cost: about 20 s of
parsing, 1 GB while grouping.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from jaxtyping import Int32, Int64
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .built_in import DOCSTRING_CHARS, RESERVED
from .corpora import Document, load
from .docstrings import docstrings
from .groups import near_duplicate_groups

BOS = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 512
EXTRA_PACKAGES = (
    "torch", "transformers", "sympy", "networkx", "dask", "xarray", "polars", "pandas", "zarr", "altair",
    "datasets", "huggingface_hub", "accelerate", "pydantic",
)  # fmt: skip
PER_GROUP = 4  # at most so many near-duplicates of one another are read
HELD_OUT = 0.03  # share of the reserved groups that is never trained on


@dataclass(frozen=True, slots=True)
class Texts:
    """Training and held-out texts, with the numbers that describe them."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    reserved: frozenset[str]  # keys of the training texts that come from the built-in corpora
    counts: dict[str, int]


def gather_texts() -> Texts:
    """Reserved parts and extra docstrings, without whatever resembles a text that can be harvested."""
    harvest = [document for spec in RESERVED for document in load(spec).documents]
    reserved = [document for spec in RESERVED for document in load(spec, "train").documents]
    extra = [Document(key, text) for package in EXTRA_PACKAGES for key, text in docstrings(package)]
    candidates = reserved + [document for document in extra if len(document.text) >= DOCSTRING_CHARS]
    members = groups_apart(candidates, harvest)
    return divide(members, frozenset(document.key for document in reserved), len(candidates))


def groups_apart(candidates: Sequence[Document], harvest: Sequence[Document]) -> list[list[Document]]:
    """Near-duplicate groups of the candidates, without those that reach a harvestable text."""
    groups = near_duplicate_groups([document.text for document in [*harvest, *candidates]])
    harvested = set(groups[: len(harvest)].tolist())
    members: dict[int, list[Document]] = {}
    for document, group in zip(candidates, groups[len(harvest) :].tolist(), strict=True):
        if group not in harvested:
            members.setdefault(group, []).append(document)
    return list(members.values())


def divide(members: Sequence[Sequence[Document]], reserved: frozenset[str], n_candidates: int) -> Texts:
    """One text of each held-out group, at most PER_GROUP of each other group. Extras are never held out."""
    aside = [group[0].key in reserved and share(group[0].key) < HELD_OUT for group in members]
    held_out = [group[0] for group, held in zip(members, aside, strict=True) if held]
    train = [
        text for group, held in zip(members, aside, strict=True) if not held for text in group[:PER_GROUP]
    ]
    counts = {
        "candidates": n_candidates,
        "dropped_as_harvestable": n_candidates - sum(map(len, members)),
        "train_documents": len(train),
        "train_documents_reserved": sum(document.key in reserved for document in train),
        "train_characters": sum(len(document.text) for document in train),
        "held_out_documents": len(held_out),
    }
    return Texts(tuple(train), tuple(held_out), reserved, counts)


def share(key: str) -> float:
    """A number in [0, 1) that depends on the key alone, and not as what is reserved does."""
    return (
        int.from_bytes(blake3(key.encode(), derive_key_context="nearline held out").digest(length=4)) / 2**32
    )


def train_tokenizer(texts: Texts) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the reserved training texts. One special token is BOS and EOS; the tokenizer opens a
    text with it when asked for special tokens, because the models have always seen it at position 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in texts.train if d.key in texts.reserved), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=BOS,
        add_bos_token=True,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> list[list[int]]:
    """Token ids of each document, nothing added. A docstring that spells the special token gets it here."""
    texts = [document.text for document in documents]
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]


def token_stream(
    texts: Texts, tokenizer: PreTrainedTokenizerFast, bos_id: int
) -> Int32[np.ndarray, " token"]:
    """One epoch: every training document behind a BOS token, those of the built-in corpora a second time."""
    again = [document for document in texts.train if document.key in texts.reserved]
    encoded = encode(tokenizer, [*texts.train, *again])
    return np.concatenate([np.array([bos_id, *ids], np.int32) for ids in encoded])


def windows(
    stream: Int32[np.ndarray, " token"], bos_id: int, batch: int, seed: int
) -> Iterator[Int64[np.ndarray, "batch position"]]:
    """Endless batches of BOS + CONTEXT−1 tokens; each epoch cuts at another offset and in another order."""
    generator = np.random.default_rng(seed)
    body = CONTEXT - 1
    while True:
        offset = int(generator.integers(body))
        starts = generator.permutation(np.arange(offset, len(stream) - body, body))
        for at in range(0, len(starts) - batch + 1, batch):
            rows = [
                np.concatenate(([bos_id], stream[start : start + body])) for start in starts[at : at + batch]
            ]
            yield np.stack(rows).astype(np.int64)

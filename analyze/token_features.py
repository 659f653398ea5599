"""What can be said of a token without a model: the vocabulary of a store and its rows in, one number for each
row and feature out.

A token's text is that of its bytes, without the blank in front; where a token cuts a character, a replacement
mark stands for the rest. Function words are English ones: for a corpus in another language that column says
nothing. The frequency of a token is counted on body rows of the fit split of its own store, so that the rows
tested do not count themselves. Cost: one look at each text of the vocabulary, a look-up a row.
"""

import unicodedata
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int, Int32

from ..store import Reader
from .population import FIT, Population

# The closed classes of English: articles, pronouns, prepositions, conjunctions, auxiliaries, particles; and
# the pieces that tokenizers make of contractions.
FUNCTION_WORDS: Final = frozenset(
    """
    a an the this that these those each every either neither some any no all both half such what which whose
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her
    hers herself it its itself they them their theirs themselves one who whom someone anyone everyone nobody
    something anything everything nothing
    about above across after against along among around as at before behind below beneath beside besides
    between beyond by despite down during except for from in inside into like near of off on onto out outside
    over past per since than through throughout till to toward towards under underneath until unto up upon via
    with within without
    and but or nor so yet if unless because although though while whereas whether when whenever where wherever
    why how once
    am is are was were be been being have has had having do does did doing will would shall should can could
    may might must ought
    not never too very just only also then there here again
    's 't 're 've 'll 'd 'm n't
    """.split()
)
TYPE_TERMS: Final = (
    "length",
    "function_word",
    "capital",
    "digit",
    "punctuation",
    "begins_word",
    "log_frequency",
)
TERMS: Final = (*TYPE_TERMS, "log_position")


@dataclass(frozen=True, slots=True, eq=False)
class TokenFeatures:
    """Features of the tokens of one store."""

    token_id: Int32[np.ndarray, "type"]  # rising
    by_type: Float64[np.ndarray, "type term"]
    population: Population

    def of(self, rows: Int[np.ndarray, "row"]) -> Float64[np.ndarray, "row term"]:
        """The columns `TERMS` of the named rows."""
        token = np.searchsorted(self.token_id, self.population.token_id[rows])
        position = np.log1p(self.population.position[rows].astype(np.float64))
        return np.concatenate([self.by_type[token], position[:, None]], axis=1)


def token_features(reader: Reader, population: Population) -> TokenFeatures:
    """The features of a store's tokens."""
    vocabulary = reader.vocabulary.sort_by("token_id")
    token_id = vocabulary["token_id"].to_numpy().astype(np.int32)
    spelled = np.array([describe(raw.decode("utf-8", "replace")) for raw in vocabulary["bytes"].to_pylist()])
    frequency = log_frequency(population, token_id)
    return TokenFeatures(token_id, np.column_stack([spelled.astype(np.float64), frequency]), population)


def describe(text: str) -> tuple[float, ...]:
    """The features of a token that its text decides, in the order of `TYPE_TERMS`."""
    bare = text.removeprefix(" ")
    return (
        float(len(bare)),
        float(bare.lower().replace("’", "'") in FUNCTION_WORDS),
        float(bare[:1].isupper()),
        float(any(character.isdigit() for character in bare)),
        float(bool(bare) and all(map(_is_mark, bare))),
        float(bare != text),
    )


def _is_mark(character: str) -> bool:
    """Punctuation or a symbol; not the mark that stands for a cut character."""
    return unicodedata.category(character)[0] in "PS" and character != "\ufffd"


def log_frequency(population: Population, token_id: Int32[np.ndarray, "type"]) -> Float64[np.ndarray, "type"]:
    """Log of each token's share of the body rows of `fit`; one more is counted of each, so that none is 0."""
    place = np.searchsorted(token_id, population.token_id[population.rows(FIT)])
    counts = np.bincount(place, minlength=token_id.size) + 1.0
    return np.log(counts / counts.sum())

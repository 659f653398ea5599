"""Names of interventions: what replaces a layer's MLP, and at which rows. A name in, a frozen value out.

    none                 the true MLP, by the same machinery
    linear               the surrogate, at the rows that the fit covers (`linear@all`: everywhere)
    mean, zero           the mean output of the fitted rows; nothing at all (`mean@all`, `zero@all`)
    low_rank@K           the surrogate cut to rank K
    gated@FEATURES       surrogate where p > the threshold that the gates step chose, MLP elsewhere
    gated@FEATURES:SHARE the threshold lets this share of the gate rows go linear
    soft@FEATURES        (1 - p)·MLP + p·surrogate
    random@SHARE         surrogate at rows drawn by their number in the store; `random@SHARE#2` is one draw
    oracle@NEED:SHARE    surrogate at the share of rows with the smallest need: no upper bound, and no router
    token_list@SHARE     surrogate at the tokens whose type has the smallest mean need

A need may be named where a gate or list goes by one, behind a dot (`gated@input.loss:0.5`,
`token_list@loss:0.5`), and so may a size of gate (`gated@input.pca6`); otherwise it is the need that a
measurement goes by. Layers are no part of a name: one intervention is tried on many layers, and on sets of
them. Cost: none; no torch is loaded.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Final

from ..analyze.gate_features import FEATURES
from ..store.errors import UsageError

KINDS: Final = (
    "none",
    "linear",
    "mean",
    "zero",
    "low_rank",
    "gated",
    "soft",
    "random",
    "oracle",
    "token_list",
)
SIZES: Final = ("linear", "paper", "pca2", "pca6", "pca12")
ROUTED: Final = ("gated", "soft", "random", "oracle", "token_list")
"""Kinds that send some of the covered rows to the surrogate and others to the MLP."""
_FORMS: Final = (
    "none, linear, linear@all, mean, zero, low_rank@K, gated@FEATURES, gated@FEATURES:SHARE, soft@FEATURES, "
    "random@SHARE, oracle@NEED:SHARE, token_list@SHARE"
)
_WHOLE: Final = ("linear", "mean", "zero")  # kinds that know `@all`
# What a gate cannot look at before it decides, and what says the same without a gate.
_INSTEAD: Final = {
    "random": "random@SHARE routes at random",
    "oracle": "oracle@NEED:SHARE routes by the need itself",
}
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+]*")


@dataclass(frozen=True, slots=True)
class Intervention:
    """One replacement. `name` is how it is written, in one way only: equal names are equal interventions."""

    kind: str
    everywhere: bool = False  # also at the rows that the fit left out
    features: str | None = None  # of gates
    size: str = "linear"  # of gates
    need: str | None = None  # None: that of the measurement
    share: float | None = None  # of rows that go linear; None: as the gates step chose
    rank: int | None = None
    draw: int | None = None  # of random rows; None: not told apart yet

    @property
    def name(self) -> str:
        return f"{self.kind}{self._argument}{'' if self.draw is None else f'#{self.draw}'}"

    @property
    def _argument(self) -> str:
        share = "" if self.share is None else f"{self.share:g}"
        if self.everywhere:
            return "@all"
        if self.rank is not None:
            return f"@{self.rank}"
        if self.features is not None:
            size = "" if self.size == "linear" else self.size
            word = ".".join(part for part in (self.features, self.need, size) if part)
            return f"@{word}:{share}" if share else f"@{word}"
        if share:
            return f"@{share}" if self.need is None else f"@{self.need}:{share}"
        return ""

    @property
    def is_routed(self) -> bool:
        """Whether it can leave some covered rows to the MLP."""
        return self.kind in ROUTED

    def draws(self, n_draws: int) -> "tuple[Intervention, ...]":
        """The single draws of random routing, unless one is named; any other intervention as it is."""
        if self.kind != "random" or self.draw is not None:
            return (self,)
        return tuple(replace(self, draw=draw) for draw in range(n_draws))


def parse_intervention(text: str) -> Intervention:
    """The intervention of a name; UsageError says what is allowed."""
    body, hash_sign, draw = text.strip().partition("#")
    kind, at, argument = body.partition("@")
    if kind not in KINDS:
        close = get_close_matches(kind, KINDS, 1)
        raise _refusal(text, f"did you mean {close[0]}?" if close else f"write one of {_FORMS}")
    if at and not argument:
        raise _refusal(text, "something has to follow the @")
    found = _with_argument(text, Intervention(kind), argument)
    if not hash_sign:
        return found
    if kind != "random" or not draw.isdecimal():
        raise _refusal(text, "only random@SHARE has draws, numbered from 0: random@0.5#0")
    return replace(found, draw=int(draw))


def parse_interventions(names: Sequence[str]) -> tuple[Intervention, ...]:
    """Those of several names, each once, in their order."""
    return tuple(dict.fromkeys(parse_intervention(name) for name in names))


def check_rank(one: Intervention, width: int) -> None:
    """A map of the residual stream has no rank above its width, at which it is the whole surrogate."""
    if one.rank is not None and one.rank > width:
        raise _refusal(
            one.name,
            f"the model is {width} wide: allowed are low_rank@1 to low_rank@{width}, which is linear",
        )


def _with_argument(text: str, bare: Intervention, argument: str) -> Intervention:
    match bare.kind:
        case "low_rank":
            if not argument.isdecimal() or int(argument) < 1:
                raise _refusal(text, "the rank is a whole number from 1 up: low_rank@16")
            return replace(bare, rank=int(argument))
        case "gated" | "soft":
            return _with_gate(text, bare, argument)
        case "random":
            return replace(bare, share=_share(text, argument))
        case "oracle" | "token_list":
            need, colon, share = argument.rpartition(":")
            return replace(bare, need=_word(text, need, "need") if colon else None, share=_share(text, share))
        case _:
            if argument and (argument != "all" or bare.kind not in _WHOLE):
                raise _refusal(text, f"write one of {_FORMS}")
            return replace(bare, everywhere=argument == "all")


def _with_gate(text: str, bare: Intervention, argument: str) -> Intervention:
    """FEATURES[.NEED][.SIZE][:SHARE]."""
    word, colon, share = argument.partition(":")
    if colon and bare.kind == "soft":
        raise _refusal(text, "a soft gate mixes by p itself and has no share: soft@input")
    features, *rest = word.split(".")
    _check_features(text, features)
    sizes = [part for part in rest if part in SIZES]
    needs = [_word(text, part, "need") for part in rest if part not in SIZES]
    if len(sizes) > 1 or len(needs) > 1:
        raise _refusal(text, "a gate has one need and one size: gated@input.loss.pca6")
    return replace(
        bare,
        features=features,
        size=sizes[0] if sizes else "linear",
        need=needs[0] if needs else None,
        share=_share(text, share) if colon else None,
    )


def _check_features(text: str, features: str) -> None:
    known = [name for name, one in FEATURES.items() if one.available and name not in _INSTEAD]
    if features in known:
        return
    if features in _INSTEAD:
        raise _refusal(text, _INSTEAD[features])
    if features in FEATURES:
        raise _refusal(
            text, f"{features} is not known before the layer has run; features: {', '.join(known)}"
        )
    raise _refusal(text, f"a gate looks at one of {', '.join(known)}")


def _share(text: str, share: str) -> float:
    try:
        value = float(f"{float(share):g}")  # as the name writes it: six digits
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise _refusal(text, f"{share or 'nothing'!r} is no share of rows between 0 and 1")
    return value


def _word(text: str, word: str, what: str) -> str:
    if not _NAME.fullmatch(word):
        raise _refusal(text, f"{word!r} cannot name a {what}")
    return word


def _refusal(text: str, why: str) -> UsageError:
    return UsageError(f"intervention {text[:80]!r}: {why}")

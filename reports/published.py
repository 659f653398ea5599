"""What arXiv 2603.03459 published for a model: the cost of one linear MLP, layer by layer, and of its gate.

In: the name of a model. Out: the published numbers where it is one of the paper's, else nothing. The costs
are in percent of perplexity, from L0 upwards: those of the author's public result files, which hold every
layer (the paper prints a few of them). They are not measured as ours are: WikiText-103, one fit on 10,000
tokens, every position replaced (the first one too), the same tokens for choosing and scoring. Cost: none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Published:
    """Costs in percent of perplexity by layer; None where a layer was left out. `gated` and `share` (tokens
    that went linear, percent) are of the author's own gate.
    """

    model: str
    basis: str
    linear: tuple[float | None, ...]
    gated: tuple[float | None, ...] = ()
    share: tuple[float | None, ...] = ()


def _numbers(line: str) -> tuple[float | None, ...]:
    return tuple(None if word == "-" else float(word) for word in line.split())


_SWEEP: Final = "one sweep over 12,000 tokens, without intervals"
_BOOTSTRAP: Final = "50,014 tokens in 470 rows"

PAPER: Final[Mapping[str, Published]] = {
    "gpt2-medium": Published(
        "GPT-2 Medium",
        "35,839 tokens in 318 rows",
        _numbers(
            "22780 3.59 2.18 2.20 2.19 2.81 2.27 2.36 1.58 1.99 1.79 1.87 2.08 2.09 2.08 2.82 2.96 4.38 2.86 "
            "3.45 4.19 4.90 5.19 12.58"
        ),
        _numbers(
            "- 1.12 1.20 1.02 1.09 1.42 1.39 0.85 0.18 0.38 0.41 0.21 0.07 0.53 0.51 0.60 1.23 1.02 0.04 "
            "0.29 1.41 1.10 0.73 1.46"
        ),
        _numbers("- 58 46 44 42 49 48 45 44 43 46 45 39 44 41 48 50 44 40 41 50 43 33 38"),
    ),
    "gpt2-large": Published(
        "GPT-2 Large",
        _SWEEP,
        _numbers(
            "1.77 .61 .47 .72 .63 .38 .75 2.25 1.70 1.19 .76 1.06 .77 .66 .85 .88 .97 .97 .88 1.40 1.26 1.34 "
            "1.33 1.87 1.31 1.11 2.02 1.47 1.59 1.50 1.80 3.69 2.66 2.61 3.31 3.61"
        ),
    ),
    "pythia-160m": Published(
        "Pythia-160M",
        _BOOTSTRAP,
        _numbers("29.1 36.1 102.6 18.7 9.6 7.2 8.7 8.7 13.4 14.6 16.8 23.0"),
    ),
    "pythia-410m": Published(
        "Pythia-410M",
        _BOOTSTRAP,
        _numbers(
            "7.3 3.0 17.1 16.2 12.9 261.6 31.1 5.8 4.0 2.8 3.0 3.7 3.0 4.4 5.2 5.0 5.8 5.9 7.6 7.9 8.5 8.5 "
            "13.7 18.8"
        ),
    ),
    "pythia-1b": Published(
        "Pythia-1B",
        _BOOTSTRAP,
        _numbers("20.0 16.7 25.4 428.0 11.9 10.6 6.0 6.9 6.8 6.8 9.9 10.6 12.0 14.9 17.2 26.5"),
    ),
    "pythia-2.8b": Published(
        "Pythia-2.8B",
        _SWEEP,
        _numbers(
            "513.2 32.9 33.2 15.9 10.2 5.5 6.5 3.7 3.1 3.5 1.9 2.7 2.8 3.2 2.7 3.7 3.8 3.4 4.7 4.6 5.2 4.6 "
            "5.1 4.8 6.4 6.7 8.4 7.0 7.6 7.8 9.7 12.8"
        ),
    ),
}
"""By the last part of the model's name on the Hub."""


def of_model(name: str, n_layers: int) -> Published | None:
    """The paper's numbers of a model of this name that has as many layers."""
    found = PAPER.get(name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower())
    return found if found is not None and len(found.linear) == n_layers else None

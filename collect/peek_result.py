"""The result of a preview: one frozen value with a table, a short text and an HTML form for notebooks.

In: the errors of every token at every layer. Out: `Peek`. Statistics are over the rows that a fit would take
(not position 0, not special tokens, not rows with values that are not finite); the others stand apart. Cost:
a few passes over (layer, token) numbers.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32

from ..analyze.ridge import r_squared
from .peek_study import StudyFacts
from .peek_text import PeekedText

if TYPE_CHECKING:
    import polars as pl

EASY = 0.5  # an error below this counts as "error < 0.5"
SHOWN_LAYERS = 3  # best, and as many worst
SHOWN_TOKENS = 5
HTML_TOKENS = 400
COLOURED = (5, 95)  # percentiles of the errors shown that get the palest and the fullest colour
COLOUR, PALEST, FULLEST = "213,94,0", 0.05, 0.85
CELL = "padding:0.15em 0.9em;text-align:right"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Peek:
    """Errors of `tokens` at `layers`. `r2`, `mean`, `median` and `share_below_half` have one value a layer,
    over the tokens in `body`; `r2_test` is what the study found on its own held-out text. `pieces` are the
    tokens for the eye, (text, number of tokens): those that cut a character stand together."""

    study: str
    store: str
    model: str
    layers: tuple[int, ...]
    tokens: tuple[str, ...]
    pieces: tuple[tuple[str, int], ...]
    token_id: Int32[np.ndarray, "token"]
    text: Int32[np.ndarray, "token"]
    position: Int32[np.ndarray, "token"]
    body: Bool[np.ndarray, "token"]
    error: Float32[np.ndarray, "layer token"]
    r2: Float64[np.ndarray, "layer"]
    r2_test: Float64[np.ndarray, "layer"]
    mean: Float64[np.ndarray, "layer"]
    median: Float64[np.ndarray, "layer"]
    share_below_half: Float64[np.ndarray, "layer"]
    sink_mean: Float64[np.ndarray, "layer"]
    notes: tuple[str, ...]

    @property
    def table(self) -> "pl.DataFrame":
        """One row a layer."""
        import polars as pl

        n_body, n_sink = int(self.body.sum()), int((~self.body).sum())
        return pl.DataFrame(
            {
                "layer": list(self.layers),
                "r2": self.r2,
                "r2_test": self.r2_test,
                "error_mean": self.mean,
                "error_median": self.median,
                "share_below_half": self.share_below_half,
                "n_tokens": [n_body] * len(self.layers),
                "error_sink": self.sink_mean,
                "n_sink": [n_sink] * len(self.layers),
            }
        )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [self._title(), "  ".join(f"{name:>12}" for name in _HEAD)]
        lines += ["  ".join(f"{cell:>12}" for cell in row) for row in self._shown_rows()]
        hardest = ", ".join(f"{_visible(text)!r} {value:.2f}" for text, value in self._hardest())
        lines += [f"highest mean error: {hardest}"] if hardest else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        head = "".join(f'<th style="{CELL}">{html.escape(name)}</th>' for name in _HEAD)
        cells = (
            (f'<td style="{CELL}">{html.escape(cell)}</td>' for cell in row) for row in self._shown_rows()
        )
        rows = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
        notes = "".join(f"<p>note: {html.escape(note)}</p>" for note in self.notes)
        return (
            f"<div><p>{html.escape(self._title())}</p><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table>{self._coloured()}{notes}</div>"
        )

    def _title(self) -> str:
        n_texts = int(self.text[-1]) + 1
        several = f"{n_texts} texts" if n_texts > 1 else "one text"
        n_body = int(self.body.sum())
        return (
            f"{self.model} on {n_body:,} tokens of {several}, against the surrogates of study {self.study} "
            f"({len(self.tokens) - n_body} at position 0 or special stand apart)"
            + ("; the best and the worst layers by R²" if len(self.layers) > 2 * SHOWN_LAYERS else "")
        )

    def _shown_rows(self) -> list[list[str]]:
        """Of all layers in their order; where they are many, of the best and the worst in that of R²."""
        if len(self.layers) <= 2 * SHOWN_LAYERS:
            return [self._row(index) for index in range(len(self.layers))]
        order = np.argsort(-np.nan_to_num(self.r2, nan=-np.inf), kind="stable").tolist()
        best, worst = order[:SHOWN_LAYERS], order[-SHOWN_LAYERS:]
        left_out = f"… {len(order) - 2 * SHOWN_LAYERS} more"
        return [*map(self._row, best), [left_out, *[""] * (len(_HEAD) - 1)], *map(self._row, worst)]

    def _row(self, index: int) -> list[str]:
        numbers = [column[index] for column in (self.r2, self.r2_test, self.mean, self.median)]
        share = self.share_below_half[index]
        return [
            str(self.layers[index]),
            *("-" if np.isnan(number) else f"{number:.3f}" for number in numbers),
            "-" if np.isnan(share) else f"{100 * share:.0f} %",
        ]

    def _by_piece(self) -> list[tuple[str, float]]:
        """Text and mean error over layers and tokens; NaN for what stands apart."""
        errors = np.where(self.body, self.error.mean(axis=0, dtype=np.float64), np.nan)
        ends = np.cumsum([n for _, n in self.pieces])[:-1]
        parts = (part[np.isfinite(part)] for part in np.split(errors, ends))
        means = [float(part.mean()) if part.size else np.nan for part in parts]
        return [(text, mean) for (text, _), mean in zip(self.pieces, means, strict=True)]

    def _hardest(self) -> list[tuple[str, float]]:
        counted = [piece for piece in self._by_piece() if np.isfinite(piece[1])]
        return sorted(counted, key=lambda piece: -piece[1])[:SHOWN_TOKENS]

    def _coloured(self) -> str:
        """The text, and what its colours mean: they span the errors that are shown."""
        shown = self._by_piece()[:HTML_TOKENS]
        values = [value for _, value in shown if np.isfinite(value)]
        low, high = np.percentile(values, COLOURED) if values else (0.0, 0.0)
        spans = "".join(_span(text, value, low, high) for text, value in shown)
        more = len(self.pieces) - HTML_TOKENS
        spans += f" … {more:,} more" if more > 0 else ""
        bar = f"linear-gradient(to right,rgba({COLOUR},{PALEST}),rgba({COLOUR},{FULLEST}))"
        legend = (
            f"Each token by its mean error over the layers: {low:.2f} or less "
            f'<span style="display:inline-block;width:8em;height:0.9em;vertical-align:middle;'
            f'background:{bar}"></span> {high:.2f} or more'
        )
        return f'<p>{legend}</p><p style="white-space:pre-wrap;line-height:1.6">{spans}</p>'


_HEAD = ("layer", "R²", "R² in study", "mean error", "median error", "error < 0.5")


def peek_of(
    facts: StudyFacts,
    given: PeekedText,
    model: str,
    layers: Sequence[int],
    columns: Mapping[str, np.ndarray],
    notes: Sequence[str],
) -> Peek:
    """Statistics of the columns `error`, `error_norm` and `y_centred_norm`, each (layer, token)."""
    error = columns["error"]
    finite = np.isfinite(error).all(axis=0)
    apart = given.special | (given.position == 0)
    body, sink = finite & ~apart, finite & apart
    if n_bad := int((~finite).sum()):
        notes = [*notes, f"{n_bad} tokens gave values that are not finite and count nowhere"]
    if not body.any():
        notes = [*notes, "no token is left to count: position 0 and special tokens stand apart"]
    squares = {name: columns[name][:, body].astype(np.float64) ** 2 for name in columns if name != "error"}
    r2 = [
        r_squared(float(sse), float(total))
        for sse, total in zip(squares["error_norm"].sum(1), squares["y_centred_norm"].sum(1), strict=True)
    ]
    counted = error[:, body].astype(np.float64)
    nothing = np.full(len(layers), np.nan)
    return Peek(
        study=facts.study,
        store=facts.store,
        model=model,
        layers=tuple(layers),
        tokens=given.tokens,
        pieces=given.pieces,
        token_id=given.token_id,
        text=given.text,
        position=given.position,
        body=body,
        error=error,
        r2=np.array(r2),
        r2_test=np.array([facts.r2_test.get(layer, np.nan) for layer in layers]),
        mean=counted.mean(axis=1) if body.any() else nothing,
        median=np.median(counted, axis=1) if body.any() else nothing,
        share_below_half=(counted < EASY).mean(axis=1) if body.any() else nothing,
        sink_mean=error[:, sink].mean(axis=1, dtype=np.float64) if sink.any() else nothing,
        notes=tuple(notes),
    )


def _span(text: str, value: float, low: float, high: float) -> str:
    shown = html.escape(text)
    if np.isnan(value):
        return f'<span title="stands apart" style="opacity:0.5">{shown}</span>'
    part = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0
    alpha = PALEST + part * (FULLEST - PALEST)
    return f'<span title="{value:.2f}" style="background:rgba({COLOUR},{alpha:.2f})">{shown}</span>'


def _visible(token: str) -> str:
    return token.replace("\n", "↵").replace("\t", "⇥")

"""A study for notebooks: what it has learned, its tables and its tokens, each one attribute away.

In: a study's folder. Out: `OpenStudy`, which reads what is asked for and nothing else; charts of it are in
`reports.notebook`. Cost of opening: one small file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..store import IncompleteError, NearlineError, Reader, Study, UsageError
from ..store.fitted import Gate, Surrogates, gate_of
from ..store.names import printable, typed
from ..store.settings import nearest_known
from ..store.shown import cut, fragment

if TYPE_CHECKING:
    import polars as pl

SHOWN_LAYERS = 12


@dataclass(frozen=True, slots=True, repr=False)
class OpenStudy:
    """A study on disk; `nearline.open(path)` gives it."""

    study: Study  # the handle that the steps work with

    @property
    def path(self) -> Path:
        return self.study.path

    @property
    def stores(self) -> dict[str, str | Path]:
        """Where its stores were when they were fitted, by name."""
        return self.study.stores()

    def store(self, name: str) -> Reader:
        """One of its stores, opened."""
        if name not in self.stores:
            raise UsageError(f"{self.path} has no store {name!r}; it has {', '.join(self.stores)}")
        return Reader.open(self.stores[name])

    @property
    def surrogates(self) -> Surrogates:
        """Layer → its linear map: `study.surrogates[3].weight`, `.bias`, and `study.surrogates[3](x)`."""
        self._fitted()
        return Surrogates(self.study)

    def surrogates_of(self, fit: str) -> Surrogates:
        """Of another fit of this study: one named after a store, or `pooled`."""
        there = sorted(path.stem.partition("@")[2] for path in self.path.glob("surrogates@*.zarr"))
        if fit not in there:
            known = f"it has {', '.join(map(printable, there))}" if there else "it has the main one only"
            raise UsageError(f"{self.path} has no other fit {fit!r}; {known}")
        return Surrogates(self.study, fit)

    def gate(
        self, layer: int, features: str = "input", *, size: str = "linear", need: str | None = None
    ) -> Gate:
        """A gate of a layer; `need`: the first that there are gates for."""
        self._fitted()
        return gate_of(self.study, layer, features=features, size=size, need=need)

    @property
    def tokens(self) -> "pl.LazyFrame":
        """Every token row at every layer with its needs, lazily: filter, then `collect()`."""
        return self.tokens_of()

    def tokens_of(
        self,
        layers: int | str | Sequence[int] | None = None,
        stores: str | Sequence[str] | None = None,
    ) -> "pl.LazyFrame":
        """As `tokens`, of some layers and stores; no file of the others is read."""
        from .token_frames import tokens

        return tokens(self.study, layers, stores)

    @property
    def tables(self) -> list[str]:
        """Names of its tables; docs/tables.md explains them."""
        return self.study.tables()

    def table(self, name: str) -> "pl.DataFrame":
        """One of its tables."""
        import polars as pl

        if name not in self.tables:
            near = nearest_known(name, self.tables)
            raise UsageError(f"{self.path} has no table {name!r}; it has {', '.join(self.tables)}{near}")
        return pl.DataFrame(self.study.table(name))

    def __repr__(self) -> str:
        return f"OpenStudy({self.study!r})"

    def _repr_html_(self) -> str:
        try:
            facts = self._facts()
        except (NearlineError, OSError, LookupError, TypeError, ValueError) as error:
            facts = [("cannot be read", cut(str(error)))]  # a study is shown, whatever is in it
        return fragment(f"Study {cut(str(self.path))}", facts)

    def _facts(self) -> list[tuple[str, str]]:
        steps = list(self.study.provenance())
        facts = [
            ("steps", ", ".join(cut(step) for step in steps) or "none yet: `nearline fit` makes the first"),
            ("stores", ", ".join(cut(name) for name in self.stores) or "none"),
            ("tables", f"{len(self.tables)}"),
        ]
        if "fit" in steps and "surrogates" in self.tables:
            facts[1:1] = _fit_facts(self.table("harvest").to_dicts(), self._scores())
        return facts

    def _scores(self) -> list[dict[str, Any]]:
        """Rows of the store that was fitted, least linear layer first; layers without a score last."""
        rows = self.table("surrogates").to_dicts()
        own = [row for row in rows if row["store"] == row["fit_on"]] or rows
        return sorted(own, key=lambda row: math.inf if _is_nothing(row["r2_test"]) else row["r2_test"])

    def _fitted(self) -> None:
        if "fit" not in self.study.provenance():
            raise IncompleteError(
                f"{self.path} is not fitted yet: run `nearline fit {typed(self.path)} STORE…` first"
            )


def _fit_facts(harvest: list[dict[str, Any]], scores: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The model, and held-out R² of the least and the most linear layers."""
    models = ", ".join(dict.fromkeys(cut(row["model"]) for row in harvest))
    shown = scores if len(scores) <= SHOWN_LAYERS else [scores[0], scores[len(scores) // 2], scores[-1]]
    words = "least, middle and most linear layer: " if len(shown) < len(scores) else ""
    ranked = ", ".join(f"layer {row['layer']} {_score(row['r2_test'])}" for row in shown)
    held = sum(row["verdict"] == "supported" for row in scores)
    said = f"{words}{ranked}; nearly linear: {held} of {len(scores)}"
    return [("model", models), ("R² on test", said)]


def _is_nothing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _score(value: float | None) -> str:
    return "–" if value is None or _is_nothing(value) else f"{value:.3f}"

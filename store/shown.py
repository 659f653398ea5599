"""A store as a few lines of HTML, for notebooks.

In: a reader. Out: a fragment with styles of its own, no script, and nothing that a browser would fetch; what
the store says of itself is cut and escaped. Cost: none; no file is read.
"""

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from .folder import show_numbers
from .names import printable
from .plan import SPLITS

if TYPE_CHECKING:
    from .reader import Reader

MOST = 80  # characters of a string from elsewhere
CELL = "padding:0.1em 0.9em 0.1em 0;text-align:left;vertical-align:top"


def store_html(reader: "Reader") -> str:
    """What is in a store."""
    model, corpus, storage = reader.attributes.model, reader.attributes.corpus, reader.attributes.storage
    rows = np.bincount(reader.plan.block_split, weights=reader.plan.block_rows, minlength=len(SPLITS))
    splits = ", ".join(f"{name} {int(count):,}" for name, count in zip(SPLITS, rows, strict=True))
    arrays = f"{', '.join(storage.sites)} in {storage.dtype}, d = {model.d_model:,}"
    sealed = "sealed" if reader.manifest is not None else "not sealed"
    facts = [
        ("model", f"{cut(model.name)} ({cut(model.model_type)})"),
        ("corpus", f"{cut(corpus.spec)}: {corpus.n_documents:,} documents"),
        ("rows", f"{reader.n_tokens:,} ({splits}) in {reader.n_blocks:,} blocks"),
        ("layers", show_numbers(list(storage.layers))),
        ("sites", arrays),
    ]
    return fragment(f"Store {cut(reader.path)}, {sealed}", facts)


def fragment(title: str, facts: Iterable[tuple[str, str]], more: str = "") -> str:
    """A title over a table of names and values, all of them text, and HTML that is safe already."""
    lines = "".join(
        f'<tr><td style="{CELL};opacity:0.7">{html.escape(name)}</td>'
        f'<td style="{CELL}">{html.escape(value)}</td></tr>'
        for name, value in facts
    )
    return f"<div><b>{html.escape(title)}</b><table><tbody>{lines}</tbody></table>{more}</div>"


def cut(text: str) -> str:
    """A string from elsewhere: printable, its middle left out where it is long."""
    shown = printable(text)
    return shown if len(shown) <= MOST else f"{shown[: MOST // 2]}…{shown[-MOST // 2 :]}"

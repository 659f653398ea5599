"""Where the numbers come from: the footer of the page.

In: settings, digests and versions of a study. Out: HTML. No time, host or absolute path enters, so that the
page of the same study is the same bytes anywhere; a path in a setting is shown by its last part.
"""

import json
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from . import findings, text
from .columns import FINETUNE, MEASURE
from .layout import numbers
from .results import Results
from .tables import Column, Row, house, value

DRAWN_WITH = ("nearline", "altair", "polars", "vl-convert-python")
"""Packages that shape the page itself."""


def without_folders(setting: Any) -> Any:
    """A setting with every absolute path cut to its last part."""
    if isinstance(setting, Mapping):
        return {str(key): without_folders(part) for key, part in setting.items()}
    if isinstance(setting, list | tuple):
        return [without_folders(part) for part in setting]
    if isinstance(setting, str) and (setting.startswith(("/", "~", "\\\\")) or setting[1:3] in (":\\", ":/")):
        return setting.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return setting


def written(setting: Any) -> str:
    """A setting as text: words as they are, everything else as JSON."""
    bare = without_folders(setting)
    return text.name(
        bare if isinstance(bare, str) else json.dumps(bare, ensure_ascii=False, sort_keys=True), 200
    )


def _pairs(pairs: Mapping[str, Any]) -> str:
    """`name value, name value` in the order of names."""
    return ", ".join(
        f"{text.escape(text.name(name))} {text.escape(written(pairs[name]))}" for name in sorted(pairs)
    )


def _stores(results: Results) -> str:
    columns = [
        Column("store", value("store", text.name), number=False),
        Column("corpus", value("corpus", text.name), number=False),
        Column("digest of the store", _code("digest"), number=False, markup=True),
        Column("digest of the weights", _code("weights_hash"), number=False, markup=True),
    ]
    return house(
        results.harvest.to_dicts(), columns, key="table-stores", caption="Digests of stores and weights"
    )


def _code(key: str):
    return lambda row: f"<code>{text.escape(text.name(str(row[key] or text.NONE), 32))}</code>"


def _settings(results: Results) -> str:
    rows: list[Row] = [
        {"name": name, "value": written(results.settings[name])} for name in sorted(results.settings)
    ]
    columns = [
        Column("setting", value("name", text.name), number=False),
        Column("value", value("value", str), number=False),
    ]
    return house(rows, columns, key="table-settings", caption="Settings of the fit") if rows else ""


def _analyses(results: Results) -> str:
    """Settings of each analysis and of the measurement that was run."""
    rows: list[Row] = [
        {"analysis": analysis, "name": name, "value": written(settings[name])}
        for analysis, settings in results.analyses.items()
        for name in sorted(settings)
    ]
    columns = [
        Column("setting", value("name", text.name), number=False),
        Column("value", value("value", str), number=False),
    ]
    caption = "Settings of the analyses"
    group = value("analysis", text.name)
    return house(rows, columns, key="table-analyses", caption=caption, group=group) if rows else ""


def footer(results: Results) -> str:
    """Study, stores, settings, commands and versions."""
    study = text.escape(text.name(results.study))
    fit_on = results.surrogates["fit_on"].unique(maintain_order=True).to_list()
    fitted = text.listing([text.name(str(store)) for store in fit_on])
    visits = (MEASURE, FINETUNE)
    ran = {"analyze": bool(results.analyses.keys() - set(visits))}
    ran |= {step: step in results.analyses for step in visits}
    analysed = "".join(f"<code>nearline {name} STUDY</code>, " for name, done in ran.items() if done)
    drawn_with = {name: metadata.version(name) for name in DRAWN_WITH}
    parts = [
        f"<p>Study <b>{study}</b>: <code>nearline fit STUDY STORE…</code>, {analysed}then <code>nearline "
        f"report STUDY</code>. Surrogates of {text.escape(findings.model(results))} were fitted on "
        f"the fit rows of {text.escape(fitted)} and scored on the test rows of every store. Everything "
        "shown here stands in <code>tables/*.parquet</code>, digests of every step in "
        "<code>provenance.json</code>.</p>",
        _stores(results),
        _settings(results),
        numbers("Settings of the analyses", _analyses(results)),
    ]
    if results.versions:
        parts.append(f"<p>Fitted with {_pairs(results.versions)}.</p>")
    parts.append(f"<p>Drawn with {_pairs(drawn_with)}.</p>")
    return "\n".join(part for part in parts if part)

"""Synthetic study tables as fit writes them: plausible values, any number of stores and layers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from helpers_reports_analyses import ANALYSIS_SETTINGS
from helpers_reports_costs import MEASURE_SCHEMAS, MEASURE_SETTINGS
from nearline.analyze.analysis_tables import ANALYSIS_SCHEMAS
from nearline.analyze.finetune_tables import FINETUNE_SCHEMAS
from nearline.analyze.results import SCHEMAS
from nearline.reports.columns import MEASURE, step_of
from nearline.reports.results import Results, assemble
from nearline.store import Study

QUANTILES = {
    "q01": -2.33,
    "q05": -1.64,
    "q10": -1.28,
    "q25": -0.67,
    "q50": 0.0,
    "q75": 0.67,
    "q90": 1.28,
    "q95": 1.64,
    "q99": 2.33,
}
NEEDS = ("error", "error_raw", "error_norm", "error_stream")
VERDICTS = ("supported", "not supported", "cannot tell", "too few documents")
LINEAR_AT = 0.9


def harvest_row(store: str, *, n_layers: int, index: int, **changes: object) -> dict[str, object]:
    row: dict[str, object] = {
        "store": store,
        "model": "tiny-gpt2",
        "model_type": "gpt2",
        "revision": None,
        "weights_hash": "9f" * 16,
        "corpus": ("docs:python", "docs:scientific", "docs:stdlib")[index % 3],
        "n_tokens": 40_000 + 8_000 * index,
        "n_fit": 16_000,
        "n_gate": 8_000,
        "n_test": 16_000 + 8_000 * index,
        "n_documents": 912 + index,
        "n_groups": 640 + index,
        "n_groups_fit": 256,
        "n_groups_test": 255 + index,
        "n_layers": n_layers,
        "d_model": 192,
        "storage_dtype": "float16",
        "compute_dtype": "float32",
        "attention": "eager",
        "sequence_length": 256,
        "block": 1024,
        "bos": "auto",
        "passages": False,
        "n_targets": 39_500,
        "ppl": 31.4 + index,
        "ppl_test": 32.04 + index,
        "ppl_test_lo": 30.11 + index,
        "ppl_test_hi": 34.2 + index,
        "sample": 'The "with" statement\n********************\n\nis used to wrap the execution of a block '
        "with methods defined by a context manager.\n\twith_stmt ::= ",
        "digest": f"{index:x}c" * 32,
        "proof": json.dumps(
            {
                "norm_error": 2.4e-7,
                "identity_error": 3.1e-7,
                "batch_error": 1.9e-6,
                "isolation_error": 0.0,
                "norm_tolerance": 1e-5,
                "n_sequences": 3.0,
            }
        ),
    }
    return row | changes


def surrogate_row(
    store: str, layer: int, r2: float, width: float, *, fit_on: str, verdict: str | None = None
) -> dict[str, object]:
    low, high = r2 - 1.5 * width, min(1.0, r2 + 1.4 * width)
    found = "supported" if low >= LINEAR_AT else "not supported" if high < LINEAR_AT else "cannot tell"
    return {
        "store": store,
        "layer": layer,
        "fit_on": fit_on,
        "alpha": 10.0 ** -(1 + layer % 4),
        "r2_fit": r2 + 0.011 if store == fit_on else None,
        "r2_cv": r2 - 0.004 if store == fit_on else None,
        "r2_test": r2,
        "r2_lo": r2 - width,
        "r2_hi": r2 + 0.95 * width,
        "r2_sim_lo": low,
        "r2_sim_hi": high,
        "r2_contribution": r2 + 0.002,
        "largest_row": 0.01,
        "n_tokens": 15_900,
        "n_groups": 256,
        "n_test_tokens": 15_800,
        "n_test_groups": 255,
        "tokens_per_feature": 15_900 / 192,
        "condition": 10.0 ** (3 + layer % 5) * 3.2,
        "r2_sink": -0.8 - layer,
        "n_sink": 151,
        "verdict": verdict or found,
    }


def need_row(
    store: str, layer: int, need: str, split: str, population: str, median: float, spread: float
) -> dict[str, object]:
    values = {name: median * float(np.exp(spread * z)) for name, z in QUANTILES.items()}
    below_half = float(np.clip(0.5 / median / 2, 0.02, 0.97))
    below_one = min(1.0, below_half + 0.02 + 0.3 * (1 - below_half))
    return {
        "store": store,
        "layer": layer,
        "need": need,
        "split": split,
        "population": population,
        "n_tokens": 15_800,
        "n_groups": 255,
        "mean": median * 1.1,
        "mean_lo": median * 1.08,
        "mean_hi": median * 1.13,
        "sd": median * spread,
        "skew": 4 * spread,
        **values,
        "max": median * float(np.exp(4.5 * spread)),
        "share_below_half": below_half,
        "share_below_half_lo": below_half - 0.02,
        "share_below_half_hi": below_half + 0.018,
        "share_below_one": below_one,
        "share_below_one_lo": below_one - 0.01,
        "share_below_one_hi": below_one + 0.009,
        "top5_share": 0.05 + 0.5 * spread * spread,
    }


def histogram_rows(
    store: str, layer: int, median: float, spread: float, rng: np.random.Generator
) -> list[dict[str, object]]:
    counts, edges = np.histogram(
        median * np.exp(spread * rng.normal(size=16_000)), bins=np.linspace(0, 2, 51)
    )
    return [
        {
            "store": store,
            "layer": layer,
            "need": "error",
            "bin_lo": float(low),
            "bin_hi": float(high),
            "count": int(n),
        }
        for low, high, n in zip(edges, edges[1:], counts, strict=False)
    ]


TEXTS = (
    (" returns", "The method", " a new iterator over the items.\n"),
    (" def", "\n\nclass Spam:\n\t", " eggs(self):"),
    ("\n", "Changed in version 3.2:", "\tNone is accepted"),
    (" ndarray", "out :", ", optional"),
    (" the", "    Compute", " largest eigenvalue of x < y & z"),
)


def example_rows(store: str, layer: int, median: float, n: int = 8) -> list[dict[str, object]]:
    rows = []
    for kind in ("highest", "lowest"):
        for rank in range(1, n + 1):
            token, before, after = TEXTS[(rank + layer) % len(TEXTS)]
            value = median * (3.1 - 0.2 * rank if kind == "highest" else 0.2 + 0.01 * rank)
            rows.append(
                {
                    "store": store,
                    "layer": layer,
                    "need": "error",
                    "kind": kind,
                    "rank": rank,
                    "value": value,
                    "before": before,
                    "token": token,
                    "after": after,
                    "document_key": f"numpy.linalg.norm{rank}",
                    "position": 12 + 7 * rank,
                }
            )
    return rows


def make_tables(
    stores: tuple[str, ...] = ("gpt2-python", "gpt2-scientific"), *, n_layers: int = 12, seed: int = 0
) -> dict[str, list[dict[str, object]]]:
    """Rows of the five tables, by name; `write_study` makes a study of them."""
    rng = np.random.default_rng(seed)
    rows: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("harvest", "surrogates", "needs", "need_histogram", "examples")
    }
    for index, store in enumerate(stores):
        rows["harvest"].append(harvest_row(store, n_layers=n_layers, index=index))
        for layer in range(n_layers):
            r2 = (
                0.96
                - 0.36 * (layer / max(1, n_layers - 1) - 0.3) ** 2 * 2
                - 0.02 * index
                + 0.01 * float(rng.normal())
            )
            median, spread = float(np.sqrt(1 - r2)) * 1.1, 0.35 + 0.03 * layer
            rows["surrogates"].append(
                surrogate_row(store, layer, r2, 0.012 + 0.012 * float(rng.random()), fit_on=stores[0])
            )
            for need in NEEDS:
                for split in ("fit", "gate", "test"):
                    rows["needs"].append(need_row(store, layer, need, split, "body", median, spread))
                rows["needs"].append(need_row(store, layer, need, "test", "sink", 2.5 * median, spread))
            rows["need_histogram"] += histogram_rows(store, layer, median, spread, rng)
            rows["examples"] += example_rows(store, layer, median)
    return rows


SETTINGS = {"alpha": "cv", "folds": 5, "linear_at": LINEAR_AT, "seed": 0}


def arrow(table: str, content: list[dict[str, Any]]) -> pa.Table:
    """The rows with the types that fit and analyze write; a column that no row has is left out."""
    schema = (SCHEMAS | ANALYSIS_SCHEMAS | MEASURE_SCHEMAS | FINETUNE_SCHEMAS)[table]
    fields = [field for field in schema if not content or field.name in content[0]]
    return pa.Table.from_pylist(content, schema=pa.schema(fields))


def by_step(rows: dict[str, list[dict[str, Any]]]) -> dict[str, list[str]]:
    """Which step writes which of the tables."""
    steps: dict[str, list[str]] = {}
    for table in rows:
        steps.setdefault(step_of(table), []).append(table)
    return steps


def write_study(
    path: Path, rows: dict[str, list[dict[str, Any]]], settings: dict[str, object] | None = None
) -> Path:
    study = Study.create(path)
    for table, content in rows.items():
        study.write_table(table, arrow(table, content))
    inputs = {str(row["store"]): str(row["digest"]) for row in rows.get("harvest", [])}
    for step, tables in by_step(rows).items():
        of_steps = {"fit": SETTINGS if settings is None else settings, MEASURE: MEASURE_SETTINGS}
        study.record_step(
            step,
            inputs=inputs,
            settings=of_steps.get(step, ANALYSIS_SETTINGS),
            outputs=[f"tables/{table}.parquet" for table in tables],
            facts={"seconds": 1.5},
        )
    return path


def make_results(
    rows: dict[str, list[dict[str, Any]]],
    settings: dict[str, object] | None = None,
    analyses: dict[str, Any] | None = None,
) -> Results:
    """What `results.read` would give for a study of these rows, without the folder."""
    frames = {table: pl.DataFrame(arrow(table, content)) for table, content in rows.items()}
    asked = ANALYSIS_SETTINGS if analyses is None else analyses
    steps = {step: MEASURE_SETTINGS if step == MEASURE else asked for step in by_step(rows) if step != "fit"}
    return assemble("demo", frames, SETTINGS if settings is None else settings, {"numpy": "2.4.0"}, steps)

"""SmolLM2-135M on three corpora, from text to tables.

In: `python tests/benchmarks/smollm2_study.py OUT [TOKENS]`, token rows a corpus (16,000). Out: three stores,
one study with every analysis, its report, and the tables of what was found as Markdown on standard output.
What is there and current is not done again. Cost: 20 minutes on two quiet cores, most of it reading the model
and running it over the corpora, and 2.5 GiB of disk.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers_models import smollm2_path
from nearline.analyze import AnalyzeSettings, analyze, fit
from nearline.reports import report
from nearline.store import Study

CORPORA = ("docs:stdlib", "docs:python", "docs:scientific")
TOKENS = 16_000
KEEP = "1/4"  # of the sequences: as many rows from four times as many documents
SHOWN_LAYERS = 7  # of all layers, at equal distances
NEED = "error"
VERDICTS = ("supported", "not supported", "cannot tell", "too few documents")
Row = dict[str, Any]


def harvest_all(out: Path, model: str, gguf_file: str | None, dtype: str, tokens: int) -> dict[str, Path]:
    """A store of each corpus; the model is read once, and only where a store is missing."""
    stores = {corpus.partition(":")[2]: out / "stores" / corpus.partition(":")[2] for corpus in CORPORA}
    missing = [corpus for corpus in CORPORA if not (stores[corpus.partition(":")[2]] / "SEALED").exists()]
    if missing:
        from nearline.collect import corpora
        from nearline.collect.harvesting import harvest
        from nearline.collect.loading import load_both
        from nearline.collect.settings import parse

        settings = parse({"model": model, "gguf_file": gguf_file, "corpus": missing[0], "dtype": dtype})
        _, loaded = load_both(settings)
        for name in missing:
            harvest(
                loaded.model,
                loaded.tokenizer,
                corpora.load(name),
                stores[name.partition(":")[2]],
                name=loaded.name,
                tokens=tokens,
                keep=KEEP,
                sequence_length=128,  # short ones, so that they come from more documents
            )
    return stores


def make_study(out: Path, stores: dict[str, Path], settings: AnalyzeSettings | None = None) -> Study:
    """Fit, every analysis, report."""
    path = out / "study"
    timed("fit", lambda: fit(path, stores))
    timed("analyze", lambda: analyze(path, settings))
    timed("report", lambda: report(path))
    return Study.open(path)


def timed(name: str, work: Callable[[], Any]) -> Any:
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    found = work()
    spent = f"{time.monotonic() - start_s:.0f} s, {time.process_time() - start_cpu_s:.0f} s of CPU"
    print(f"{name}: {spent}", file=sys.stderr, flush=True)
    return found


def tables(study: Study) -> str:
    """What was found, as Markdown."""
    layers = sorted(set(study.table("surrogates")["layer"].to_pylist()))
    step = max(1, (len(layers) - 1) // (SHOWN_LAYERS - 1)) if len(layers) > SHOWN_LAYERS else 1
    shown = sorted({*layers[::step][: SHOWN_LAYERS - 1], layers[-1]})
    parts = [
        _harvest(study),
        _surrogates(study, shown),
        _identity(study),
        _nofly(study),
        _gates(study, shown),
        _differences(study),
    ]
    return "\n\n".join(parts)


def _harvest(study: Study) -> str:
    rows = study.table("harvest").to_pylist()
    error = max(row["identity_error"] for row in study.table("decomposition").to_pylist())
    carried = [row["token_in_context"] for row in study.table("decomposition").to_pylist()]
    lines = [
        [row["store"], row["corpus"], row["n_tokens"], row["n_groups"], f"{row['ppl_test']:.2f}"]
        for row in rows
    ]
    found = _markdown(["store", "corpus", "rows", "groups", "test perplexity"], lines)
    return (
        f"### Stores\n\n{found}\n\nx = β + t + p + k to {error:.1e} of a row's scale at worst; a linear map "
        f"recovers {min(carried):.2f} to {max(carried):.2f} of the token embedding's variance from k."
    )


def _surrogates(study: Study, shown: Sequence[int]) -> str:
    rows = study.table("surrogates").to_pylist()
    lines = [
        [
            store,
            f"{median(r['r2_test'] for r in found):.3f}",
            *(_at(found, layer, "r2_test") for layer in shown),
        ]
        for (store,), found in _by(rows, "store")
    ]
    return "### R² of surrogates on test rows\n\n" + _markdown(["store", "median", *_layers(shown)], lines)


def _identity(study: Study) -> str:
    rows = [row for row in study.table("variance").to_pylist() if row["need"] == NEED]
    lines = [
        [*key, f"{_middle(found, 'share'):.3f}", _spread(found, "share"), _verdicts(found)]
        for key, found in _by(rows, "store", "key")
    ]
    head = ["store", "token", "median share", "over layers", "explains at least half"]
    return f"### Share of the variance of `{NEED}` that the token's identity explains\n\n" + _markdown(
        head, lines
    )


def _nofly(study: Study) -> str:
    """One surrogate of all stores, keyed by the token that the MLP processes."""
    rows = [
        row
        for row in study.table("nofly").to_pylist()
        if (row["need"], row["surrogate"], row["key"]) == (NEED, "pooled", "input")
    ]
    parts = [f"### No-fly: token means of `{NEED}` in two corpora (pooled surrogate, input token)"]
    for (one, other), found in _by(rows, "store_a", "store_b"):
        lines = [
            [
                row["layer"],
                row["n_types"],
                f"{row['r']:.3f}",
                f"{row['reliability_a']:.3f}, {row['reliability_b']:.3f}",
                _number(row["ceiling"]),
                _interval(row, "r_disattenuated"),
                f"{row['p_permutation']:.3f}",
                _number(row["paper_r"]),
                row["verdict"],
            ]
            for row in found
        ]
        head = ["layer", "types", "r", "reliabilities", "ceiling", "r disattenuated [simultaneous]", "p"]
        parts.append(f"{one} and {other}:\n\n" + _markdown([*head, "paper's r", "verdict"], lines))
    return "\n\n".join(parts)


def _gates(study: Study, shown: Sequence[int]) -> str:
    rows = [row for row in study.table("gates").to_pylist() if row["need"] == NEED]
    parts = [f"### AUC of gates for `{NEED}`"]
    for (store,), found in _by(rows, "store"):
        lines = [
            [
                f"{features} ({size})" if size != "linear" else features,
                "" if of[0]["available_at_routing"] else "no",
                f"{_middle(of, 'auc'):.3f}",
                *(_at(of, layer, "auc") for layer in shown),
                _verdicts(of),
            ]
            for (features, size), of in _by(found, "features", "size")
        ]
        head = ["features", "at routing", "median", *_layers(shown), "above chance"]
        parts.append(f"{store}:\n\n" + _markdown(head, lines))
    return "\n\n".join(parts)


def _differences(study: Study) -> str:
    rows = [row for row in study.table("gate_differences").to_pylist() if row["need"] == NEED]
    lines = [
        [claim, store, f"{_middle(found, 'difference'):+.4f}", _spread(found, "difference"), _verdicts(found)]
        for (claim, store), found in _by(rows, "claim", "store")
    ]
    head = ["claim", "store", "median difference of AUC", "over layers", "verdicts"]
    return "### Nested, paired differences\n\n" + _markdown(head, lines)


def _by(rows: Iterable[Row], *keys: str) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Rows of equal keys together, in the order they came."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.items())


def _number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.3f}"


def _middle(rows: Sequence[Row], column: str) -> float:
    values = [row[column] for row in rows if row[column] is not None and row[column] == row[column]]
    return median(values) if values else float("nan")


def _spread(rows: Sequence[Row], column: str) -> str:
    values = [row[column] for row in rows if row[column] is not None and row[column] == row[column]]
    return f"{min(values):.3f} to {max(values):.3f}" if values else ""


def _at(rows: Sequence[Row], layer: int, column: str) -> str:
    return next((f"{row[column]:.3f}" for row in rows if row["layer"] == layer), "")


def _interval(row: Row, column: str) -> str:
    low, high = row[f"{column}_sim_lo"], row[f"{column}_sim_hi"]
    return f"{row[column]:.3f} [{low:.3f}, {high:.3f}]" if row[column] == row[column] else ""


def _verdicts(rows: Sequence[Row]) -> str:
    counts = Counter(row["verdict"] for row in rows)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def _layers(shown: Sequence[int]) -> list[str]:
    return [f"L{layer}" for layer in shown]


def _markdown(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    rows = [list(head), ["---"] * len(head), *(list(line) for line in lines)]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def main(out: Path, tokens: int = TOKENS) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("nearline").setLevel(logging.INFO)
    folder, gguf_file = smollm2_path()
    stores = timed("collect", lambda: harvest_all(out, str(folder), gguf_file, "bfloat16", tokens))
    print(tables(make_study(out, stores)))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python tests/benchmarks/smollm2_study.py OUT [TOKENS]")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))

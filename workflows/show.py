"""What commands print on standard output.

In: results of library functions. Out: a few aligned lines for a person, or one JSON document with `--json`.
Cost: none.
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..store import info as info_of
from ..store.names import printable
from .progress import duration_text

MAX_PROBLEMS = 20  # on a terminal; the first ones say what is going on


def jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jsonable({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def print_json(value: Any) -> None:
    json.dump(jsonable(value), sys.stdout, indent=2)
    print()


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Columns aligned by their widest cell; the last one runs free."""
    cells = [[printable(str(row.get(column, ""))) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    for line in [list(columns), *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _print_facts(facts: Mapping[str, Any], indent: str = "") -> None:
    width = max((len(str(key)) for key in facts), default=0)
    for key, value in facts.items():
        if isinstance(value, Mapping):
            print(f"{indent}{key}")
            _print_facts(value, indent + "  ")
        else:
            print(f"{indent}{printable(str(key)).ljust(width)}  {_value_text(value)}")


def _value_text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(_value_text(item) for item in value) or "none"
    if isinstance(value, Mapping):
        return "; ".join(f"{printable(str(key))} {_value_text(item)}" for key, item in value.items())
    return printable(str(value))


def bytes_text(n_bytes: float) -> str:
    """`1.2 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:,.0f} bytes" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def harvest(result: Any, as_json: bool) -> None:
    """What `collect` did."""
    if as_json:
        return print_json(result)
    if result.n_collected:
        rate = f"{result.tokens_per_s:,.0f} tokens/s"
        print(f"{result.n_collected:,} tokens in {result.seconds:.1f} s ({rate}){_waits(result)}")
    state = "sealed" if result.sealed else f"{result.n_committed:,} of {result.n_blocks:,} blocks committed"
    print(f"store: {result.path} ({state})")
    return None


def _waits(result: Any) -> str:
    """Which side waited for the other, where it did for a part of the run worth mentioning."""
    waits = [f"{100 * result.waited_s / result.seconds:.0f} % of it waiting for the disk"]
    if result.device_idle_share is not None:
        waits.append(f"the GPU idle for {100 * result.device_idle_share:.0f} %")
    return f"; {', '.join(waits)}"


def sites(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """The sites, and what other libraries call the same tensors."""
    if as_json:
        return print_json(list(rows))
    from ..collect.sites import sites_text

    print(sites_text(rows, shutil.get_terminal_size().columns))
    return None


def info(facts: Mapping[str, Any], as_json: bool) -> None:
    """The facts of a store."""
    return print_json(facts) if as_json else _print_facts(facts)


def forecast(found: Any, as_json: bool) -> None:
    """What a harvest will take."""
    if as_json:
        return print_json(found)
    rows = ", ".join(f"{name} {count:,}" for name, count in found.splits.items())
    left = "" if not found.n_committed else f", {found.n_committed} of them committed"
    room = "" if found.free_files is None else f"; room for {found.free_files:,}"
    facts = {
        "model": f"{found.model}: {len(found.layers)} layers, d = {found.d_model}, on {found.device}",
        "corpus": found.corpus,
        "rows": f"{found.n_tokens:,} in windows of {found.sequence_length}: {rows}",
        "blocks": f"{found.n_blocks:,} of {found.block:,} rows{left}",
        "sites": ", ".join(found.sites),
        "store": f"{bytes_text(found.store_bytes)} in {found.storage_dtype}"
        f"{' before ' + found.compressor if found.compressor else ''}, "
        f"{bytes_text(found.bytes_per_token)} a token; {bytes_text(found.missing_bytes)} to write, "
        f"{bytes_text(found.free_bytes)} free",
        "files": f"{found.n_objects:,} chunk objects of up to {bytes_text(found.chunk_bytes)}, "
        f"{found.n_files:,} files and {found.n_folders:,} folders in all{room}",
        "memory": f"{_parts(found.host_bytes, found.host_parts)}; "
        f"{bytes_text(found.available_bytes)} available",
    }
    if found.device != "cpu":
        facts["GPU"] = (
            f"{_parts(found.device_bytes, found.device_parts)}; {bytes_text(found.device_free_bytes)} free"
        )
    if (speeds := found.speeds) is not None:
        rank = "" if found.world_size == 1 else f" for rank {found.rank} of {found.world_size}"
        facts["time"] = (
            f"{duration_text(speeds.seconds)}{rank}: model {duration_text(speeds.model_s)} "
            f"({speeds.padded_tokens_per_s:,.0f} tokens/s, padding counted), "
            f"disk {duration_text(speeds.write_s)} ({bytes_text(speeds.write_bytes_per_s)}/s) meanwhile; "
            f"{duration_text(found.setup_s)} to start"
        )
    _print_facts(facts)
    for limit in found.hub:
        verdict = "fits" if limit.fits else "DOES NOT FIT"
        print(f"Hub: {limit.name}: {limit.value:,} of {limit.limit:,}: {verdict}")
    for note in found.notes:
        print(f"note: {note}")
    return None


def _parts(total: int, parts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{name} {bytes_text(n)}" for name, n in parts.items())
    return f"{bytes_text(total)} at the peak ({listed})"


def verified(found: Any, as_json: bool) -> None:
    """What `verify` looked at, what is wrong and where."""
    if as_json:
        return print_json({**jsonable(found), "whole": found.whole, "counts": found.counts()})
    for problem in found.problems[:MAX_PROBLEMS]:
        print(f"{problem.kind}: {problem.message}")
    if len(found.problems) > MAX_PROBLEMS:
        print(f"... and {len(found.problems) - MAX_PROBLEMS:,} more (--json lists them all)")
    if found.leftovers:
        print(f"harmless leftovers: {len(found.leftovers):,}, first {printable(found.leftovers[0])}")
    if found.strays:
        n_strays, first = len(found.strays), printable(found.strays[0])
        print(f"files that nearline does not know and no reader looks at: {n_strays:,}, first {first}")
    n_read = "all" if found.n_objects_read == found.n_objects else f"{found.n_objects_read:,}"
    looked = f"{found.n_files:,} files, {found.n_objects:,} chunk objects, the content of {n_read} read"
    verdict = "whole" if found.level == "full" else "whole as far as was looked (--full reads everything)"
    verdict = verdict if found.whole else "damaged" if found.damaged else "not whole"
    print(f"{found.url}: {verdict}; {looked} ({bytes_text(found.n_bytes_read)})")
    if found.repairable:
        command = f"`nearline repair {printable(found.url)}`"
        print(f"next: {command} collects bad blocks again, or fetch the named files from a copy")
    if found.digest:
        print(f"seal: {found.digest}")
    return None


def repaired(result: Any, as_json: bool) -> None:
    """What `repair` found and did."""
    if as_json:
        return print_json(result)
    for file in result.files[:MAX_PROBLEMS]:
        print(f"damaged: {printable(file)}")
    if len(result.files) > MAX_PROBLEMS:
        print(f"... and {len(result.files) - MAX_PROBLEMS:,} more (--json lists them all)")
    print(f"{result.note}\nstore: {result.path}\nseal: {result.digest}")
    return None


def sealed(store: Path, digest: str, as_json: bool) -> None:
    """The seal, and what is under it."""
    facts = _extent(store)
    if as_json:
        return print_json({"seal": digest, "store": store, **facts})
    print(f"store: {store} ({_extent_text(facts)})\nseal: {digest}")
    return None


def _extent(store: Path) -> dict[str, Any]:
    facts = info_of(store)
    return {name: facts[name] for name in ("n_tokens", "layers", "sites", "n_blocks")}


def _extent_text(facts: Mapping[str, Any]) -> str:
    sites = ", ".join(facts["sites"])
    return (
        f"{facts['n_tokens']:,} token rows in {facts['n_blocks']:,} blocks, layers {facts['layers']}, {sites}"
    )


def moved(result: Any, as_json: bool, facts_of: Path | None = None) -> None:
    """What `push` or `pull` did; what a pull has brought here."""
    facts = {} if facts_of is None else _extent(facts_of)
    if as_json:
        return print_json({**jsonable(result), **facts})
    kept = f" ({result.n_kept:,} were there)" if result.n_kept else ""
    moved_now = f"{result.n_files:,} files, {bytes_text(result.n_bytes)} moved{kept}"
    print(moved_now if result.n_files or result.n_kept else "nothing to do: the store is there already")
    held = f" ({_extent_text(facts)})" if facts else ""
    print(f"store: {result.target}{held}\nseal: {result.digest}")
    return None

"""`make bench`: the numbers that the design wants to reach, measured on this machine in one run.

In: nothing (or names of benchmarks). Out: a table of measured values beside what is to be reached, and the
machine they were measured on. Cost: about ten minutes on two quiet cores. Ratios are taken within one run;
speeds of two runs are not to be compared.
"""

import os
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import bench_analyze
import bench_batches
import bench_collect
import bench_fit
import bench_measure
import bench_share
import bench_store
import bench_verify

BENCHMARKS: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
    "store": bench_store.rows,
    "batches": bench_batches.rows,
    "share": bench_share.rows,
    "verify": bench_verify.rows,
    "fit": bench_fit.rows,
    "analyze": bench_analyze.rows,
    "collect": bench_collect.rows,
    "measure": bench_measure.rows,
}


def main(names: list[str]) -> None:
    """Run the named benchmarks, all by default."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for name in names or BENCHMARKS:
        for row in BENCHMARKS[name]():
            value = f"{row['value']:,.3g}" if isinstance(row["value"], float) else f"{row['value']:,}"
            reach = f"reach {row['reach']}" if row.get("reach") else ""
            print(
                f"{row['name']:<66} {value:>10} {row['unit']:<10} {reach:<14} {row.get('note', '')}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])

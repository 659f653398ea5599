"""The benchmark of harvests runs, so that it cannot rot; its numbers are for `make bench`."""

import json
import sys
from pathlib import Path

from helpers_harvest import texts
from helpers_models import tiny_model, tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
import bench_collect


def test_the_benchmark_gives_its_rows(tmp_path: Path) -> None:
    tiny_model("llama")[0].save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    rows = bench_collect.collect_rows(
        str(tmp_path / "model"),
        ("float32",),
        n_tokens=300,
        repeats=1,
        threads=1,
        corpus=f"jsonl:{tmp_path / 'corpus.jsonl'}",
    )
    assert [row["value"] > 0 for row in rows[:3]] == [True] * 3
    assert all(set(row) == {"name", "value", "unit", "reach", "note"} for row in rows)

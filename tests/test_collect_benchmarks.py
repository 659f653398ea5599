"""The benchmarks of harvests run, so that they cannot rot; their numbers are for `make bench`."""

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers_harvest import texts
from helpers_models import tiny_model, tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
import bench_collect
import bench_measure
import cuda_check
import cuda_finetune


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
    rows += bench_collect.moments_rows(
        str(tmp_path / "model"),
        n_tokens=300,
        repeats=1,
        threads=1,
        corpus=f"jsonl:{tmp_path / 'corpus.jsonl'}",
        layers="0-1",
        folds=2,
    )
    assert [row["value"] > 0 for row in rows[-3:]] == [True] * 3
    rows += bench_measure.rows(
        str(tmp_path / "model"),
        ("float32",),
        n_tokens=60,
        rounds=1,
        threads=1,
        corpus=f"jsonl:{tmp_path / 'corpus.jsonl'}",
    )
    assert [row["value"] > 0 for row in rows[-3:]] == [True] * 3
    assert all(set(row) == {"name", "value", "unit", "reach", "note"} for row in rows)


def test_the_check_for_machines_with_a_gpu_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    size = cuda_check.Size("tiny", 2, 64, torch.float32, 600, 32)
    assert cuda_check.main("cpu", sizes=(size,)) == 0
    said = capsys.readouterr().out
    assert "store whole: True" in said
    assert "predictions by moments summed here differ by" in said
    assert "all checks passed" in said


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_check.main() == cuda_check.NO_CUDA
    assert capsys.readouterr().out.startswith("no CUDA here")


@pytest.mark.long
def test_fine_tuning_on_a_device_is_compared_with_the_host() -> None:
    assert cuda_finetune.main("cpu", tokens=1_500) == 0


def test_without_cuda_fine_tuning_there_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        assert cuda_finetune.main() == 0
        return
    assert cuda_finetune.main() == cuda_finetune.NO_CUDA
    assert capsys.readouterr().out.count("\n") == 1

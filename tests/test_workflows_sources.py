"""What a study names and no harvest could read is refused before the first step, by `plan` as by `run`.

Cost: a second; nothing is harvested.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nearline.collect.corpora import load
from nearline.store import NearlineError
from nearline.workflows.cli import run

STUDY = '[[models]]\nmodel = "{model}"\n[[corpora]]\nname = "own"\ncorpus = "{corpus}"\n'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Texts under one name in each format, and what is none."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"sentence {number}", "name": number / 2} for number in range(3)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    np.save("floats.npy", np.ones((2, 3), np.float32))
    Path("empty.jsonl").touch()
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], command: str, **named: str) -> tuple[int, str]:
    """Exit code and message of a command on a study of these."""
    text = STUDY.format(**({"model": "tiny-gpt2", "corpus": "docs:python"} | named))
    Path("study.toml").write_text(text, encoding="utf-8")
    code = run(["plan", "study.toml", "--no-probe"] if command == "plan" else ["run", "study.toml", command])
    return code, capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("corpus", "words"),
    [
        ("jsonl:rows.jsonl:txt", "rows.jsonl, line 1: no field 'txt'; its fields are 'text', 'name'."),
        ("jsonl:rows.jsonl:name", "holds a float"),
        ("jsonl:empty.jsonl", "jsonl:empty.jsonl:text: the corpus holds no text"),
        ("parquet:rows.parquet:txt", "no column 'txt'; its columns are 'text', 'name'"),
        ("parquet:rows.jsonl", "not a Parquet file"),
        ("ids:floats.npy", "shape (2, 3) and dtype float32"),
    ],
)
def test_a_corpus_that_no_harvest_could_read(
    files: Path, capsys: pytest.CaptureFixture[str], corpus: str, words: str
) -> None:
    """In the words of the harvest."""
    kind, _, rest = corpus.partition(":")
    with pytest.raises(NearlineError) as harvest:
        load(f"{kind}:{files / rest}")
    for command in ("plan", "--dry-run"):
        code, said = refused(capsys, command, corpus=corpus)
        assert code == 2
        assert words in said
        assert said == f"nearline: study.toml, [[corpora]] own: {harvest.value}"


@pytest.mark.parametrize(
    "corpus", ["jsonl:rows.jsonl", "parquet:rows.parquet:text", "jsonl:not-here.jsonl:x"]
)
def test_a_plan_needs_no_corpus_and_takes_a_good_one(
    files: Path, capsys: pytest.CaptureFixture[str], corpus: str
) -> None:
    assert refused(capsys, "plan", corpus=corpus) == (0, "")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("tiny-pythai", "did you mean 'tiny-pythia'? Bundled models are tiny-gpt2, tiny-pythia"),
        ("my model", "there is no such folder, and it is not a hub id (OWNER/NAME)"),
    ],
)
def test_a_model_that_none_can_be(
    files: Path, capsys: pytest.CaptureFixture[str], model: str, words: str
) -> None:
    for command in ("plan", "--dry-run"):
        code, said = refused(capsys, command, model=f'{model}"\nname = "mine')
        assert code == 2
        assert said.startswith(f"nearline: study.toml, [[models]] mine: model {model!r}: ")
        assert words in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize("model", ["tiny-pythia", "owner/name", "./to-be-copied-here"])
def test_a_plan_needs_no_model(files: Path, capsys: pytest.CaptureFixture[str], model: str) -> None:
    named = f'{model}"\nname = "mine'
    assert refused(capsys, "plan", model=named) == (0, "")


def test_a_rank_above_the_width_of_a_model(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of its whole width it is the surrogate itself, which is allowed."""
    for rank, words in ((192, ""), (193, "allowed are low_rank@1 to low_rank@192, which is linear")):
        named = f'docs:python"\n[measure]\ninterventions = ["linear", "low_rank@{rank}'
        text = STUDY.format(model="tiny-gpt2", corpus=named).removesuffix('"\n') + '"]\n'
        Path("study.toml").write_text(text, encoding="utf-8")
        assert run(["plan", "study.toml", "--no-probe"]) == (2 if words else 0)
        assert words in capsys.readouterr().err

"""The dataset card and `info`: what a stranger reads about a store is right, and its code runs."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_store import make_store, synthetic
from nearline.store import STORAGE_DTYPES, decode, info

SETTINGS: dict[str, Any] = {"n_tokens": 500, "block": 160, "layers": [2, 5]}


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_the_code_of_the_card_runs_in_its_folder(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "a store", **SETTINGS, storage_dtype=dtype)
    text = (store / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == (3 if dtype == "bfloat16" else 2)
    monkeypatch.chdir(store)
    names: dict[str, Any] = {}
    expected = decode(synthetic(**SETTINGS, storage_dtype=dtype).stored["residual"], dtype)[0, :4]
    for block in blocks:
        exec(block, names)
        if "values" in names:  # the decode of the bits, and then the values by nearline
            assert np.array_equal(names.pop("values"), expected)
    assert names["data"]["residual"].dims == ("layer", "token", "feature")


def test_the_card_says_what_the_store_is(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", **SETTINGS, storage_dtype="bfloat16")
    text = (store / "README.md").read_text(encoding="utf-8")
    assert text.startswith('---\npretty_name: "s"\nlicense: ')
    for part in (
        "500 token rows",
        "layers\n2, 5",
        "`residual_bits`",
        "bfloat16",
        "n<1K",
        "reading a chunk that is missing or damaged is an error",
        "model licence",
        "0.1 MiB",
    ):
        assert part in text, part
    assert str(tmp_path) not in text
    assert "Rows: 180 fit, 160 gate, 160 test" in text


def test_stored_strings_cannot_change_the_page(tmp_path: Path) -> None:
    """Nothing of a model's or a folder's name is read as Markdown, HTML or YAML."""
    evil = "evil | <script>x</script> # [t](http://u) `c` {0} **b** ![i](x) $y$"
    store = make_store(tmp_path / "a: [b] 'c' # d `e` *f*", **SETTINGS, model_name=evil)
    text = (store / "README.md").read_text(encoding="utf-8")
    assert text.startswith('---\npretty_name: "a b c d e f"\nlicense: ')
    outside = re.sub(r"`[^`\n]*`", "", text)  # what is not code
    for part in ("<script>", "[t]", "http://u", "**b**", "$y$", "evil"):
        assert part in text
        assert part not in outside
    row = next(line for line in text.splitlines() if line.startswith("| model |"))
    assert row.count("|") == 3
    assert "\n# a b c d e f\n" in text


def test_info_of_a_sealed_and_of_an_unfinished_store(tmp_path: Path) -> None:
    sealed = info(make_store(tmp_path / "a", **SETTINGS, storage_dtype="float16"))
    assert json.loads(json.dumps(sealed)) == sealed
    assert (sealed["sealed"], sealed["n_blocks"], sealed["n_committed"], sealed["missing_blocks"]) == (
        True,
        4,
        4,
        "",
    )
    assert sealed["n_fit"] + sealed["n_gate"] + sealed["n_test"] == sealed["committed_rows"] == 500
    assert sealed["chunk_bytes"] == sealed["planned_bytes"]
    residual = np.abs(synthetic(**SETTINGS, storage_dtype="float16").sites["residual"]).max()
    assert sealed["values"]["residual"] == {"max_abs": float(residual), "n_nonfinite": 0, "n_out_of_range": 0}
    unfinished = info(make_store(tmp_path / "b", **SETTINGS, seal=False, blocks=[1, 3]) / "activations.zarr")
    assert (unfinished["sealed"], unfinished["digest"]) == (False, None)
    assert (unfinished["n_committed"], unfinished["missing_blocks"]) == (2, "0, 2")
    assert unfinished["committed_rows"] == 180

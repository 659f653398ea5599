"""The step `measure`: its numbers are those of plain passes, one that is stopped goes on to the same bytes,
layers are chosen on gate rows alone, and whatever cannot be done is refused before the model runs.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_harvest import texts
from helpers_models import tiny_model, tiny_tokenizer
from helpers_store import tree
from nearline.analyze import AnalyzeSettings, FitSettings, fit
from nearline.analyze.analyze import analyze
from nearline.analyze.currency import stale_steps
from nearline.collect import MeasureSettings, collect, measure, measure_is_current, measured_noise, models
from nearline.collect.made_with import MadeWith
from nearline.collect.measure_settings import parse
from nearline.collect.measured_before import measured_before
from nearline.collect.measured_pieces import LOCK, Piece, Pieces
from nearline.collect.settings import parse as harvest_settings
from nearline.store import EnvironmentFault, IncompleteError, Reader, Study, UsageError
from nearline.store.disk import claimed
from transformers import AutoModelForCausalLM

# Sums of a few hundred float32 losses of about 5 nats against float64 ones of the same passes in float32:
# what the passes themselves round, 1e-6 relative, is all there is.
SUM_TOLERANCE = 2e-6
ROW_TOLERANCE = 2e-5  # of single losses, nats
SPLITS = ("fit", "gate", "test")
FEW: dict[str, Any] = {
    "interventions": "linear,gated@input,random@0.5",
    "draws": 2,
    "compound": "cheapest@2",
    "noise_floor": False,
}
SETTINGS: dict[str, Any] = {
    "tokens": 600,
    "sequence_length": 24,
    "min_length": 4,
    "batch_tokens": 120,
    "block": 120,
    "threads": 1,
}
FIT = FitSettings(folds=2, alphas=(1e-2,), examples=1)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, a store of it, a study with gates and one that is only fitted, all side by side."""
    folder = tmp_path_factory.mktemp("lab")
    tiny_model("llama")[0].save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    lines = [json.dumps({"text": text}) for text in texts(40)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    source = {"model": str(folder / "model"), "corpus": f"jsonl:{folder / 'texts.jsonl'}"}
    collect(harvest_settings(SETTINGS | source), folder / "store")
    fit(folder / "fitted", [folder / "store"], FIT)
    shutil.copytree(folder / "fitted", folder / "study")
    gates = AnalyzeSettings(only=("gates",), features=("input", "token_type"), folds=2, c_grid=(1e-2,))
    analyze(folder / "study", gates)
    return folder


@pytest.fixture
def study(lab: Path, tmp_path: Path) -> Path:
    """A copy of the study with gates, beside its store."""
    return copied(lab, "study", tmp_path)


@pytest.fixture(scope="module")
def measured(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, measured with `FEW` settings."""
    path = copied(lab, "study", tmp_path_factory.mktemp("measured"))
    measure(path, few())
    return path


@pytest.fixture(scope="module")
def model(lab: Path) -> torch.nn.Module:
    """The model alive: loaded once."""
    return AutoModelForCausalLM.from_pretrained(lab / "model").eval().requires_grad_(False)


def copied(lab: Path, name: str, folder: Path) -> Path:
    """A study of the lab in another folder, its store and model beside it."""
    folder.mkdir(exist_ok=True)
    for one in ("store", "model"):
        (folder / one).symlink_to((lab / one).resolve())
    return Path(shutil.copytree(lab / name, folder / name, symlinks=True))


def few(**more: Any) -> MeasureSettings:
    return parse(FEW | more)


# The numbers


def test_sums_and_losses_are_those_of_plain_passes(measured: Path, lab: Path) -> None:
    study, reader = Study.open(measured), Reader.open(lab / "store")
    plain = Plain(study, reader)
    base = plain.losses({})
    np.testing.assert_allclose(base, reader.column("nll"), rtol=0, atol=ROW_TOLERANCE)
    table = [row for row in study.table("measured").to_pylist() if row["split"] == "test"]
    order = study.provenance()["measure"]["facts"]["orders"]["linear"]
    for layers in ((0,), (1,), (2,), tuple(order[:2])):
        replaced = plain.losses({layer: plain.covered for layer in layers})
        rows = [
            row
            for row in table
            if row["name"] == "linear"
            and row["layers"] == ",".join(map(str, layers))
            and row["split"] == "test"
        ]
        assert sum(row["n_tokens"] for row in rows) == plain.scored("test").sum()
        for row in rows:
            own = plain.scored("test") & (plain.group == row["group"])
            assert row["n_tokens"] == own.sum() == row["n_linear"] / len(layers)
            np.testing.assert_allclose(row["base_nll"], base[own].sum(), rtol=SUM_TOLERANCE)
            np.testing.assert_allclose(row["nll"], replaced[own].sum(), rtol=SUM_TOLERANCE)
        if len(layers) == 1:
            need = study.need(layers[0], "store", step="measure")["loss"].to_numpy()
            known = (plain.split != 0) & (plain.target >= 0)
            assert np.array_equal(np.isfinite(need), known)
            np.testing.assert_allclose(need[known], (replaced - base)[known], rtol=0, atol=ROW_TOLERANCE)


def test_gates_and_random_routing_send_the_rows_they_say(measured: Path, lab: Path) -> None:
    study = Study.open(measured)
    plain = Plain(study, Reader.open(lab / "store"))
    p = study.routing(1, "error", "store")
    linear = np.zeros(plain.split.size, bool)
    linear[p["token"].to_numpy()] = p["input@linear"].to_numpy() > 0.5
    table = [row for row in study.table("measured").to_pylist() if row["split"] == "test"]
    rows = [row for row in table if row["name"] == "gated@input" and row["layers"] == "1"]
    assert sum(row["n_linear"] for row in rows) == (plain.scored("test") & linear).sum()
    replaced = plain.losses({1: plain.covered & linear})
    total = sum(row["nll"] for row in rows)
    np.testing.assert_allclose(total, replaced[plain.scored("test")].sum(), rtol=SUM_TOLERANCE)
    draws = [row for row in table if row["name"] == "random@0.5" and row["layers"] == "1"]
    assert {row["draw"] for row in draws} == {0, 1}
    shares = [sum(row["n_linear"] for row in draws if row["draw"] == one) for one in (0, 1)]
    assert shares[0] != shares[1]
    assert all(0.35 < share / plain.scored("test").sum() < 0.65 for share in shares)


def test_windows_cut_anew_are_passes_of_these_windows(study: Path, lab: Path) -> None:
    settings = few(interventions="linear", compound="none", sequence_length="8,24", layers="1")
    measure(study, settings)
    rows = [row for row in Study.open(study).table("measured").to_pylist() if row["split"] == "test"]
    assert {row["sequence_length"] for row in rows} == {8, 24}
    plain = Plain(Study.open(study), Reader.open(lab / "store"), length=8)
    short = [row for row in rows if row["sequence_length"] == 8]
    scored = plain.scored("test")
    assert sum(row["n_tokens"] for row in short) == scored.sum()
    for name, replaced in (("base_nll", {}), ("nll", {1: plain.covered})):
        total = sum(row[name] for row in short)
        np.testing.assert_allclose(total, plain.losses(replaced)[scored].sum(), rtol=SUM_TOLERANCE)
    assert not np.isclose(
        sum(row["base_nll"] for row in short) / scored.sum(),
        sum(row["base_nll"] for row in rows if row["sequence_length"] == 24)
        / sum(row["n_tokens"] for row in rows if row["sequence_length"] == 24),
        rtol=1e-4,
    )


def test_layers_are_chosen_on_gate_rows(study: Path) -> None:
    """Greedily too: the second layer is the one that costs least beside the first, on gate rows."""
    pairs = "0+1,0+2,1+2"
    measure(study, few(interventions="linear", compound=f"cheapest@1,{pairs}", progressive="greedy"))
    facts = Study.open(study).provenance()["measure"]["facts"]["orders"]
    costs = costs_of(study, "gate")
    by_itself = sorted(costs, key=lambda layers: costs[layers])
    assert [(layer,) for layer in facts["linear"]] == [one for one in by_itself if len(one) == 1]
    rows = Study.open(study).table("measured").to_pylist()
    assert {row["layers"] for row in rows if row["chosen"] == "cheapest@1"} == {str(facts["linear"][0])}
    greedy = facts["linear, greedy"]
    steps = {row["layers"] for row in rows if row["chosen"] == "greedy"}
    assert steps == {",".join(map(str, greedy[:n])) for n in (1, 2, 3)}
    assert sorted(greedy) == [0, 1, 2]
    assert greedy[0] == facts["linear"][0]
    plain = Plain(Study.open(study), Reader.open(study.parent / "store"))
    gate = plain.scored("gate")
    beside = {
        layer: plain.losses({one: plain.covered for one in (greedy[0], layer)})[gate].sum()
        for layer in greedy[1:]
    }
    assert min(beside, key=lambda layer: beside[layer]) == greedy[1]


def test_the_papers_set_is_the_best_on_its_own_rows(study: Path) -> None:
    measure(study, few(interventions="linear", compound="paper@1,all"))
    costs = {one: cost for one, cost in costs_of(study, "test").items() if len(one) == 1}
    rows = Study.open(study).table("measured").to_pylist()
    (chosen,) = {row["layers"] for row in rows if row["chosen"] == "paper@1"}
    assert (int(chosen),) == min(costs, key=lambda layers: costs[layers])
    assert {row["layers"] for row in rows if row["chosen"] == "all"} == {"0,1,2"}


def test_the_noise_floor_is_the_distance_to_the_finer_dtype(study: Path) -> None:
    """bfloat16 against the same weights in float32, one window at a time."""
    measure(study, few(interventions="linear", compound="none", dtype="bfloat16", noise_floor=True))
    rows = Study.open(study).table("noise_floor").to_pylist()
    assert [row["layer"] for row in rows] == [0, 1, 2]
    plain = Plain(Study.open(study), Reader.open(study.parent / "store"))
    for parameter in plain.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    scored, base = plain.scored("test"), plain.losses({})
    for row in rows:
        layer = row["layer"]
        assert (row["dtype"], row["finer_dtype"]) == ("bfloat16", "float32")
        assert row["n_tokens"] == scored.sum()
        coarse = Study.open(study).need(layer, "store", step="measure")["loss"].to_numpy()
        fine = plain.losses({layer: plain.covered}) - base
        floor = np.median(np.abs(coarse - fine)[scored])
        np.testing.assert_allclose(row["floor"], floor, rtol=0, atol=ROW_TOLERANCE)
        assert row["floor"] > 50 * ROW_TOLERANCE  # bfloat16 has eight bits


def test_a_live_model_is_left_as_it_was(study: Path, model: torch.nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    try:
        measure(study, few(interventions="linear", compound="none", noise_floor=True), model=model)
        assert model.training
    finally:
        model.eval()
    rows = Study.open(study).table("noise_floor").to_pylist()
    assert {(row["dtype"], row["finer_dtype"]) for row in rows} == {("float32", "float64")}
    assert all(row["floor"] <= row["floor_q95"] < ROW_TOLERANCE for row in rows)
    after = model.state_dict()
    assert all(value.dtype == after[name].dtype for name, value in before.items())
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("quantization", "gguf Q8_0, dequantised", None),
        ("quantisation_of", "torchao int8", "left out: these are packed (torchao int8)"),
        ("hf_device_map", {"": "cpu"}, "left out: these are spread over devices"),
    ],
)
def test_the_noise_floor_needs_weights_that_can_be_cast(
    study: Path,
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    attribute: str,
    value: object,
    words: str | None,
) -> None:
    """Those of a GGUF file were unpacked when they were loaded."""
    describe = models.describe

    def told(*given: Any) -> models.LoadedModel:
        found = describe(*given)
        return replace(found, quantization=str(value)) if attribute == "quantization" else found

    monkeypatch.setattr(models, "describe", told)
    if attribute != "quantization":
        of = measured_noise if attribute == "quantisation_of" else model
        monkeypatch.setattr(of, attribute, value if of is model else lambda *_: value, raising=False)
    with caplog.at_level(logging.INFO, logger="nearline"):
        measure(study, few(interventions="linear", compound="none", noise_floor=True), model=model)
    assert bool(Study.open(study).table("noise_floor").num_rows) == (words is None)
    assert (words or "") in caplog.text
    assert ("noise floor" in caplog.text) == (words is not None)


# Again, and after being stopped


def test_what_is_current_is_not_measured_again(
    measured: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = tree(measured)
    assert measure_is_current(measured, few())
    assert not measure_is_current(measured, few(seed=1))
    assert not measure_is_current(measured, few(interventions="linear,mean"))
    with caplog.at_level(logging.INFO, logger="nearline"):
        measure(measured, few(model=str(tmp_path / "not there")))
    assert "is current" in caplog.text
    assert tree(measured) == before


def test_asking_whether_it_is_current_loads_no_torch() -> None:
    """A rerun with nothing to do must not wait for it."""
    code = "import sys; from nearline.collect import measure_is_current; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_stopped_it_goes_on_to_the_same_bytes(
    lab: Path, measured: Path, model: torch.nn.Module, tmp_path: Path
) -> None:
    """Stopped in the middle of the sweep, and while results are put in place."""
    stop_and_go_on(lab, tree(measured), model, tmp_path, [0.5, 0.99])


@pytest.mark.long
def test_stopped_anywhere_it_goes_on_to_the_same_bytes(
    lab: Path, measured: Path, model: torch.nn.Module, tmp_path: Path
) -> None:
    places = np.linspace(0.0, 1.0, 40).tolist()
    print(f"{stop_and_go_on(lab, tree(measured), model, tmp_path, places)} stops")


def test_killed_it_goes_on_to_the_same_bytes(lab: Path, measured: Path, tmp_path: Path) -> None:
    kill_and_go_on(lab, measured, tmp_path, [0.6])


@pytest.mark.long
def test_killed_anywhere_it_goes_on_to_the_same_bytes(lab: Path, measured: Path, tmp_path: Path) -> None:
    places = np.linspace(0.02, 0.98, 20).tolist()
    print(f"{kill_and_go_on(lab, measured, tmp_path, places)} kills")


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_collect_measure import Changes, few, measure
with Changes(Path(sys.argv[2]), int(sys.argv[3]), kills=True):
    measure(sys.argv[2], few())
"""


def kill_and_go_on(lab: Path, measured: Path, folder: Path, places: list[float]) -> int:
    """Kill the process at these shares of all changes that a measurement makes to the study, and measure
    again: the same bytes. How many kills there were.
    """
    with Changes(study := copied(lab, "study", folder / "undisturbed")) as seen:
        measure(study, few())
    for place in places:
        other = copied(lab, "study", folder / f"{place}")
        program = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(other)]
        done = subprocess.run([*program, str(round(place * seen.count))], capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        measure(other, few())
        assert tree(other) == tree(measured), place
    return len(places)


def stop_and_go_on(
    lab: Path, whole: dict[str, bytes], model: torch.nn.Module, folder: Path, places: list[float]
) -> int:
    """Stop at these shares of all changes that a measurement makes to the study, and measure again: the same
    bytes, and at most the block in hand is measured twice. How many stops there were.
    """
    study = copied(lab, "study", folder / "undisturbed")
    with Changes(study) as seen, Passes(model) as all_passes:
        measure(study, few(), model=model)
    assert tree(study) == whole
    stops = sorted({max(1, round(place * seen.count)) for place in places})
    for stop_at in stops:
        other = copied(lab, "study", folder / f"{stop_at}")
        with Changes(other, stop_at), Passes(model) as before, pytest.raises(KeyboardInterrupt):
            measure(other, few(), model=model)
        with Passes(model) as after:
            measure(other, few(), model=model)
        # A block of test rows, with every replacement, is nearly half of these few blocks.
        assert before.count + after.count <= 1.5 * all_passes.count, stop_at
        assert tree(other) == whole, stop_at
    return len(stops)


def test_more_interventions_take_only_their_own_passes(
    measured: Path, model: torch.nn.Module, lab: Path, tmp_path: Path
) -> None:
    more = few(interventions="linear,gated@input,random@0.5,zero")
    fresh, added = (copied(lab, "study", tmp_path / name) for name in ("fresh", "added"))
    with Passes(model) as of_fresh:
        measure(fresh, more, model=model)
    shutil.rmtree(added)
    shutil.copytree(measured, added)
    with Passes(model) as of_added:
        measure(added, more, model=model)
    assert of_added.count < of_fresh.count / 2
    assert tree(added) == tree(fresh)


def test_a_corpus_that_is_added_takes_only_its_own_passes(
    measured: Path, model: torch.nn.Module, lab: Path, tmp_path: Path
) -> None:
    """Harvested, taken into the study, measured; what is there of the first store stays as it is."""
    lines = [json.dumps({"text": text}) for text in texts(40, seed=1)]
    (tmp_path / "more.jsonl").write_text("\n".join(lines) + "\n")
    harvest = SETTINGS | {"model": str(lab / "model"), "corpus": f"jsonl:{tmp_path / 'more.jsonl'}"}
    collect(harvest_settings(harvest), tmp_path / "other")
    fresh, added = (copied(lab, "study", tmp_path / name) for name in ("fresh", "added"))
    shutil.rmtree(added)
    shutil.copytree(measured, added)
    counts = []
    for study in (fresh, added):
        (study.parent / "other").symlink_to(tmp_path / "other")
        fit(study, [study.parent / "store", study.parent / "other"], FIT)
        with Passes(model) as passes:
            measure(study, few(), model=model)
        counts.append(passes.count)
    assert 0 < counts[1] < 0.75 * counts[0]
    assert tree(added) == tree(fresh)


def test_numbers_of_a_store_that_is_another_by_now_are_forgotten(measured: Path, tmp_path: Path) -> None:
    record = Study.open(measured).provenance()["measure"]["facts"]["made_with"]
    before = MadeWith(record["key"], {"store": record["stores"]["store"], "other": "1"}, record["routes"])
    now = MadeWith(before.key, {**before.stores, "other": "2"}, before.routes)
    piece = Piece(np.array([3]), np.array([7]), np.array([1.5]), {})
    pieces = Pieces.open(tmp_path, before)
    for name in before.stores:
        pieces.write(name, 24, 0, piece)
        pieces.losses(name, 2, 5).flush()
    again = Pieces.open(tmp_path, now)
    assert again.read("store", 24, 0) is not None
    assert again.read("other", 24, 0) is None
    assert [path.name for path in tmp_path.rglob("*.f32")] == ["store.f32"]
    study = Study.open(measured)
    assert {place[0] for place in measured_before(study, "measure", before).pieces} == {"store"}
    moved = MadeWith(before.key, {"store": "2"}, before.routes)
    assert measured_before(study, "measure", moved).pieces == {}


def test_another_fit_takes_the_measurement_away(measured: Path, tmp_path: Path) -> None:
    """Gates that are fitted anew do not: they make it outdated, and nothing that was measured is lost."""
    study = copied(measured.parent, "study", tmp_path)
    gates = AnalyzeSettings(only=("gates",), features=("input", "token_type"), folds=2, c_grid=(1e-1,))
    analyze(study, gates)
    assert Study.open(study).has_table("measured")
    assert not measure_is_current(study, few())
    assert stale_steps(Study.open(study)) == []
    fit(study, [tmp_path / "store"], FitSettings(folds=2, alphas=(1e-1,), examples=1))
    assert "measure" not in Study.open(study).provenance()
    assert not Study.open(study).has_table("measured")
    assert not list(study.rglob("*@measure.parquet"))


# What cannot be

REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("study", {"layers": "7"}, UsageError, "layer 7 was not fitted"),
    ("study", {"stores": "other"}, UsageError, "stores=other"),
    ("fitted", {}, UsageError, "has no gates yet: run `nearline analyze"),
    ("fitted", {"interventions": "gated@input"}, UsageError, "gated@input: .* has no gates yet"),
    ("study", {"interventions": "gated@norm"}, UsageError, "no gate of norm .there are input, token_type"),
    ("study", {"interventions": "gated@input.loss"}, UsageError, "none for loss: run `nearline analyze"),
    ("study", {"interventions": "oracle@loss:0.5"}, UsageError, "what is measured here"),
    ("study", {"interventions": "lineer"}, UsageError, "did you mean linear"),
    (
        "study",
        {"interventions": "low_rank@33"},
        UsageError,
        "the model is 32 wide: allowed are low_rank@1 to",
    ),
    ("study", {"compound_with": "low_rank@33", "compound": "1+2"}, UsageError, "the model is 32 wide"),
    ("study", {"sequence_length": "64"}, UsageError, "at most 24 tokens"),
    ("study", {"compound": "1+9"}, UsageError, "layer 9 is not among those"),
    ("study", {"validate_estimate": True}, UsageError, "--sites .mlp_output_grad"),
    ("nothing", {}, IncompleteError, "nearline fit"),
]


@pytest.mark.parametrize(("name", "given", "error", "said"), REFUSED)
def test_refused_before_the_model_is_looked_for(
    lab: Path, tmp_path: Path, name: str, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    path = copied(lab, name, tmp_path) if name != "nothing" else tmp_path / name
    before = tree(path)
    with pytest.raises(error, match=said):
        measure(path, parse({"model": str(tmp_path / "no model"), "noise_floor": False, **given}))
    assert tree(path) == before


def test_another_model_is_refused(study: Path, tmp_path: Path) -> None:
    tiny_model("llama", seed=1)[0].save_pretrained(tmp_path / "other")
    before = tree(study)
    with pytest.raises(UsageError, match="is not the model of store store: its weights have digest"):
        measure(study, few(model=str(tmp_path / "other")))
    with pytest.raises(UsageError, match="there is no such folder"):
        measure(study, few(model=str(tmp_path / "none")))
    assert tree(study) == before


def test_a_model_that_moved_is_named_with_its_store(lab: Path, tmp_path: Path) -> None:
    path = copied(lab, "study", tmp_path)
    (tmp_path / "store").unlink()
    shutil.copytree(lab / "store", tmp_path / "store")
    for run in (tmp_path / "store" / "runs").glob("*.json"):
        run.write_text(run.read_text().replace(str(lab / "model"), str(tmp_path / "gone" / "model")))
    with pytest.raises(UsageError, match=r"a local model called model, which .* --model"):
        measure(path, few())
    measure(path, few(interventions="linear", compound="none", layers="1", model=str(lab / "model")))


def test_out_of_memory_is_one_sentence_and_goes_on(
    study: Path, measured: Path, model: torch.nn.Module
) -> None:
    calls = 0

    def full(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    handle = model.get_submodule("model.layers.2").register_forward_pre_hook(full)
    try:
        with pytest.raises(EnvironmentFault, match=r"out of memory .* same command continues") as raised:
            measure(study, few(), model=model)
    finally:
        handle.remove()
    assert "\n" not in str(raised.value)
    measure(study, few(), model=model)
    assert tree(study) == tree(measured)


def test_only_one_process_measures_a_study(study: Path) -> None:
    with claimed(study / LOCK), pytest.raises(UsageError, match="another process is measuring"):
        measure(study, few())


# Slow and plain


class Plain:
    """The model on one window at a time, its MLPs replaced by hooks written out here."""

    def __init__(self, study: Study, reader: Reader, length: int | None = None) -> None:
        places = study.settings(), study.stores()["store"]
        self.model = AutoModelForCausalLM.from_pretrained(Path(places[1]).parent / "model").eval()
        columns = {name: np.asarray(reader.column(name)) for name in ("token_id", "target_id", "special")}
        self.ids, self.target, special = columns.values()
        self.split, self.group = np.asarray(reader.column("split")), _groups(reader)
        self.windows = list(_windows(reader, length))
        position = np.zeros(self.ids.size, int)
        for rows in self.windows:
            position[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
        self.covered = ~special.astype(bool) & (position != 0)
        fitted = study.surrogates()
        self.weight, self.bias = fitted["weight"].values, fitted["bias"].values
        self.bos = reader.plan.bos_id

    def scored(self, split: str) -> np.ndarray:
        return self.covered & (self.split == SPLITS.index(split)) & (self.target >= 0)

    def losses(self, replaced: Mapping[int, np.ndarray]) -> np.ndarray:
        """nll of each row where the surrogate stands in for these layers' MLPs at these rows."""
        found = np.full(self.ids.size, np.nan)
        for rows in self.windows:
            stored = rows >= 0
            ids = np.where(stored, self.ids[np.maximum(rows, 0)], self.bos or 0)
            handles = [
                self.model.model.layers[layer].mlp.register_forward_hook(
                    self._swap(layer, stored & mask[np.maximum(rows, 0)])
                )
                for layer, mask in replaced.items()
            ]
            with torch.no_grad():
                logits = self.model(input_ids=torch.from_numpy(ids).long()[None]).logits[0]
            for handle in handles:
                handle.remove()
            log_p = torch.log_softmax(logits.double(), -1).numpy()
            target = np.where(stored, self.target[np.maximum(rows, 0)], -1)
            at = np.flatnonzero(target >= 0)
            found[rows[at]] = -log_p[at, target[at]]
        return found

    def _swap(self, layer: int, mask: np.ndarray) -> Callable[..., torch.Tensor]:
        def swap(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            changed = output.clone()
            straight = args[0][0].double().numpy() @ self.weight[layer].T.astype(float) + self.bias[layer]
            changed[0, torch.from_numpy(mask)] = torch.from_numpy(straight[mask]).to(output.dtype)
            return changed

        return swap


def _groups(reader: Reader) -> np.ndarray:
    return reader.documents["group"].to_numpy()[np.asarray(reader.column("document"))]


def _windows(reader: Reader, length: int | None) -> Iterator[np.ndarray]:
    """Row numbers of each window, -1 for a BOS that is not stored."""
    plan = reader.plan
    for start, stop, bos in zip(plan.row_offsets, plan.row_offsets[1:], plan.bos, strict=False):
        rows = np.arange(start, stop)
        if length is None:
            yield rows
            continue
        text, step = rows[int(bos) :], length - int(bos)
        for at in range(0, text.size, step):
            head = [] if not bos else [rows[0] if at == 0 else -1]
            window = np.concatenate([head, text[at : at + step]]).astype(int)
            if window.size >= min(plan.min_length, length):
                yield window


def costs_of(path: Path, split: str) -> dict[tuple[int, ...], float]:
    """Cost of `linear` on each set of layers, nats a token."""
    found: dict[tuple[int, ...], list[float]] = {}
    for row in Study.open(path).table("measured").to_pylist():
        if row["name"] == "linear" and row["split"] == split:
            layers = tuple(int(one) for one in row["layers"].split(","))
            total = found.setdefault(layers, [0.0, 0.0])
            total[0] += row["nll"] - row["base_nll"]
            total[1] += row["n_tokens"]
    return {layers: nats / tokens for layers, (nats, tokens) in found.items()}


class Passes:
    """Counts forward passes of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._backbone, self.count = model.get_submodule("model"), 0

    def __enter__(self) -> "Passes":
        self._handle = self._backbone.register_forward_pre_hook(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _see(self, *_: object) -> None:
        self.count += 1


class Changes:
    """Counts changes of files in a folder, and stops the process's work at one of them, or all of it."""

    _active: "Changes | None" = None
    _watching = False

    def __init__(self, folder: Path, stop_at: int = 0, *, kills: bool = False) -> None:
        self._folder, self._stop_at, self._kills = str(folder.resolve()), stop_at, kills
        self.count = 0

    def __enter__(self) -> "Changes":
        if not Changes._watching:
            sys.addaudithook(_audit)
            Changes._watching = True
        Changes._active = self
        return self

    def __exit__(self, *_: object) -> None:
        Changes._active = None

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if not writes and event not in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link"):
            return
        if isinstance(arguments[0], str | os.PathLike) and os.fsdecode(arguments[0]).startswith(self._folder):
            self.count += 1
            if self.count == self._stop_at and self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.count == self._stop_at:
                raise KeyboardInterrupt


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if Changes._active is not None:
        Changes._active.see(event, arguments)

"""The step `finetune`: its arms are what they are called, train as a plain loop would, leave frozen weights
alone, go on to the same bytes when stopped, and never see what they are scored on.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from helpers_harvest import texts
from helpers_models import tiny_model, tiny_tokenizer
from helpers_store import tree
from nearline.analyze import AnalyzeSettings, FitSettings, fit
from nearline.analyze.gathering import gather
from nearline.collect import collect, finetune, finetune_is_current, load_linearised, measure
from nearline.collect.anatomy import Anatomy, anatomy
from nearline.collect.gate_routing import LiveRows
from nearline.collect.measure_settings import parse as measure_settings
from nearline.collect.settings import parse as harvest_settings
from nearline.collect.substitutes import substitutes_of
from nearline.collect.tuned_export import _router
from nearline.collect.tuned_layers import Gate
from nearline.collect.tuned_scores import score
from nearline.collect.tuning_arms import ARMS, COURSES
from nearline.collect.tuning_data import Windows, require_unseen, scored_rows, training_windows
from nearline.collect.tuning_experiment import Experiment
from nearline.collect.tuning_refit import refitted
from nearline.collect.tuning_request import tuning_request
from nearline.collect.tuning_settings import FinetuneSettings, parse
from nearline.reports.report import report
from nearline.store import IncompleteError, Reader, Study, UsageError
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerState

LAYERS = (0, 2)
FEW: dict[str, Any] = {
    "layers": "0,2",
    "seeds": "0,1",
    "learning_rates": "1e-3,1e-2",
    "gate_learning_rates": "1e-1",
    "steps": 4,
    "gate_steps": 2,
    "points": 2,
    "batch_sequences": 3,
    "warmup": 2,
}
HARVEST: dict[str, Any] = {
    "tokens": 600,
    "sequence_length": 24,
    "min_length": 4,
    "batch_tokens": 120,
    "block": 120,
    "threads": 1,
}
# Sums of a few hundred float32 losses of about 5 nats, in passes of other shapes.
SUM_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, a store of it, and a fitted study, side by side."""
    folder = tmp_path_factory.mktemp("lab")
    tiny_model("llama")[0].save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    lines = [json.dumps({"text": text}) for text in texts(40)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    corpus = {"model": str(folder / "model"), "corpus": f"jsonl:{folder / 'texts.jsonl'}"}
    collect(harvest_settings(HARVEST | corpus), folder / "store")
    fit(folder / "study", [folder / "store"], FitSettings(folds=2, alphas=(1e-2,), examples=1))
    return folder


@pytest.fixture(scope="module")
def tuned(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with all arms."""
    study = copied(lab, tmp_path_factory.mktemp("tuned"))
    finetune(study, few(timing=True))
    return study


@pytest.fixture
def study(lab: Path, tmp_path: Path) -> Path:
    return copied(lab, tmp_path)


def copied(lab: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for one in ("store", "model"):
        (folder / one).symlink_to((lab / one).resolve())
    return Path(shutil.copytree(lab / "study", folder / "study", symlinks=True))


def few(**more: Any) -> FinetuneSettings:
    return parse(FEW | more)


def live(lab: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(lab / "model", dtype=torch.float32)


def frame(study: Path, table: str) -> pl.DataFrame:
    found = pl.from_arrow(Study.open(study).table(table))
    assert isinstance(found, pl.DataFrame)
    return found


def sums(study: Path, **where: Any) -> Mapping[int, float]:
    rows = frame(study, "finetune_scores").filter(*(pl.col(name) == value for name, value in where.items()))
    return dict(zip(rows["group"].to_list(), rows["nll"].to_list(), strict=True))


# What the arms are


def test_every_arm_is_there_with_its_points(tuned: Path) -> None:
    found = frame(tuned, "finetune").filter("chosen", pl.col("split") == "test")
    steps = {arm: sorted(set(rows["step"])) for (arm,), rows in found.group_by("arm")}
    assert steps.keys() == ARMS.keys()
    assert steps["base"] == [0]
    assert steps["linear"] == steps["control"] == [0, 2, 4, 5, 6]
    assert steps["gated"] == steps["scaled"] == [0, 2, 4, 5, 6]
    assert steps["restored"] == [0, 2, 4, 5, 6]
    assert steps["gated_hard"] == [0, 2, 4, 6]
    assert steps["gate_only"] == [0, 1, 2]
    seeds = {arm: sorted(set(rows["seed"])) for (arm,), rows in found.group_by("arm")}
    assert seeds == {arm: [0, 1] if arm != "base" else [0] for arm in ARMS}
    assert finetune_is_current(Study.open(tuned), few())
    assert not list(tuned.glob(".finetune*/*"))


def test_before_the_first_step_arms_are_what_measure_replaces(tuned: Path, study: Path, lab: Path) -> None:
    """`measure` and `finetune` put surrogates into the model by other ways."""
    named = {"interventions": "linear", "compound": "0+2", "compound_with": "linear,mean,zero"}
    measure(study, measure_settings(named), model=live(lab).eval())
    rows = frame(study, "measured").filter(pl.col("chosen") == "given", pl.col("split") == "test")
    for name in ("linear", "mean", "zero"):
        of = rows.filter(pl.col("name") == name)
        wanted = dict(zip(of["group"].to_list(), of["nll"].to_list(), strict=True))
        found = sums(tuned, arm=name, seed=0, learning_rate=1e-3, step=0, split="test")
        assert found == pytest.approx(wanted, rel=SUM_TOLERANCE)
        base = dict(zip(of["group"].to_list(), of["base_nll"].to_list(), strict=True))
        assert sums(tuned, arm="base", step=0, split="test") == pytest.approx(base, rel=SUM_TOLERANCE)


def test_arms_start_where_they_should(tuned: Path) -> None:
    first = {"seed": 0, "learning_rate": 1e-3, "step": 0, "split": "test"}
    base = sums(tuned, arm="base", step=0, split="test")
    for arm in ("control", "control_matched"):
        assert sums(tuned, arm=arm, **first) == base
    linear = sums(tuned, arm="linear", **first)
    assert linear != base
    assert sums(tuned, arm="linear_trainable", **first) == linear
    gates = frame(tuned, "finetune_gates").filter(pl.col("arm") == "gate_only", pl.col("step") == 0)
    assert set(gates["layer"]) == set(LAYERS)
    assert np.allclose(gates["mean_gate"], 0.05, rtol=1e-6)
    scaled = frame(tuned, "finetune_gates").filter(pl.col("arm") == "scale_only", pl.col("step") == 0)
    assert np.allclose(scaled["mean_gate"], 0.95, rtol=1e-6)


def test_a_second_phase_starts_from_the_first_and_moves_gates_alone(tuned: Path) -> None:
    """With the MLPs back at full weight it is `restored`, which stands still."""
    rows = frame(tuned, "finetune").filter("chosen", pl.col("split") == "test", pl.col("seed") == 1)
    restored = rows.filter(pl.col("arm") == "restored", pl.col("phase") == 2)
    assert restored["nll"].n_unique() == 1
    assert sorted(set(restored["step"])) == [4, 5, 6]
    first = rows.filter(pl.col("arm") == "gated", pl.col("phase") == 1).sort("step")
    assert first["step"].to_list() == [0, 2, 4]
    linear = rows.filter(pl.col("arm") == "linear", pl.col("step") <= 4).sort("step")
    assert first["nll"].to_list() == linear["nll"].to_list()
    gates = frame(tuned, "finetune_gates").filter(
        pl.col("arm") == "gated", pl.col("seed") == 1, pl.col("split") == "test"
    )
    assert gates.filter(pl.col("step") == 6)["mean_gate"].n_unique() == len(LAYERS)


def test_learning_rates_are_chosen_on_gate_rows(tuned: Path) -> None:
    rows = frame(tuned, "finetune").filter(pl.col("split") == "gate", pl.col("seed") == 0)
    for arm in ("control", "linear", "zero"):
        ends = rows.filter(pl.col("arm") == arm, pl.col("step") == 6).sort("nll")
        assert ends["chosen"].to_list() == [True, False]


def test_in_domain_is_what_was_trained_on(lab: Path, tmp_path: Path) -> None:
    """Not what surrogates were fitted on."""
    (tmp_path / "texts.jsonl").write_text(
        "".join(f"{json.dumps({'text': text})}\n" for text in texts(40, seed=1))
    )
    corpus = {"model": str(lab / "model"), "corpus": f"jsonl:{tmp_path / 'texts.jsonl'}"}
    collect(harvest_settings(HARVEST | corpus), tmp_path / "other")
    fit(
        tmp_path / "study",
        [lab / "store", tmp_path / "other"],
        FitSettings(folds=2, alphas=(1e-2,), examples=1),
    )
    settings = {"arms": "control", "seeds": "0", "learning_rates": "1e-3", "points": 1}
    finetune(tmp_path / "study", few(train_on="other", **settings), model=live(lab))
    rows = frame(tmp_path / "study", "finetune_summary").select("store", "in_domain").unique()
    assert dict(rows.rows()) == {"store": False, "other": True}


def test_tokens_are_matched_and_counted(tuned: Path, lab: Path) -> None:
    windows = training_windows(Reader.open(lab / "store"))
    order = windows.order(1, 6 * 3)
    seen = frame(tuned, "finetune").filter(pl.col("step") == 6, pl.col("seed") == 1)
    assert set(seen["tokens_seen"]) == {sum(windows.ids[one].size for one in order)}
    assert set(seen["distinct_tokens"]) == {sum(windows.ids[one].size for one in set(order.tolist()))}


# That they train as they should


def test_a_control_trains_as_a_plain_loop_does(tuned: Path, lab: Path) -> None:
    """AdamW, a rate that rises over two steps and stays, mean loss over all targets of a step."""
    model, windows = live(lab).train(), training_windows(Reader.open(lab / "store"))
    rate = float(frame(tuned, "finetune").filter("chosen", pl.col("arm") == "control")["learning_rate"][0])
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    order = windows.order(1, 18).reshape(6, 3)
    for step, chosen in enumerate(order):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, step / 2)
        losses = [
            torch.nn.functional.cross_entropy(
                model(torch.from_numpy(ids)[None]).logits[0, :-1], torch.from_numpy(ids)[1:], reduction="sum"
            )
            for ids in (windows.ids[one] for one in chosen)
        ]
        loss = torch.stack(losses).sum() / sum(windows.ids[one].size - 1 for one in chosen)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    model.eval()
    reader = Reader.open(lab / "store")
    total, n_tokens = 0.0, 0
    for block in np.flatnonzero(reader.plan.block_split == 2).tolist():
        row0, _ = reader.plan.block_range(block)
        names = ("token_id", "target_id", "special")
        columns = {name: np.asarray(reader.column_block(name, block)) for name in names}
        for sequence in reader.plan.sequences_of(block):
            rows = slice(*(int(reader.plan.row_offsets[sequence + end]) - row0 for end in (0, 1)))
            ids, target = (torch.from_numpy(columns[name][rows].astype(np.int64)) for name in names[:2])
            with torch.no_grad():
                log_p = torch.log_softmax(model(ids[None]).logits[0], dim=-1)
            nll = -log_p.gather(1, target.clamp(min=0)[:, None])[:, 0].double().numpy()
            scored = ~columns["special"][rows].astype(bool) & (target.numpy() >= 0)
            scored[0] = False
            total, n_tokens = total + float(nll[scored].sum()), n_tokens + int(scored.sum())
    found = frame(tuned, "finetune").filter(
        "chosen",
        pl.col("arm") == "control",
        pl.col("seed") == 1,
        pl.col("step") == 6,
        pl.col("split") == "test",
    )
    assert int(found["n_tokens"][0]) == n_tokens
    # Six steps of Adam turn rounding of 1e-7 into differences of at most about 1e-4 of a weight's move.
    assert float(found["nll"][0]) == pytest.approx(total / n_tokens, abs=2e-4)
    start = frame(tuned, "finetune").filter(pl.col("arm") == "base", pl.col("split") == "test")["nll"][0]
    assert abs(float(found["nll"][0]) - float(start)) > 0.01


@pytest.mark.parametrize("course", ["control_matched", "linear", "linear_trainable", "gated", "restored"])
def test_what_may_not_learn_does_not_move(
    course: str, study: Path, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are looked at when the course ends, before the model is put back."""
    model, moved = live(lab), set[str]()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    finish = Experiment._course

    def watched(self: Any, name: Any) -> None:
        finish(self, name)
        if name.course == course and not moved:
            moved.update(n for n, one in model.named_parameters() if not torch.equal(one, before[n]))

    monkeypatch.setattr(Experiment, "_course", watched)
    arms = next(arm for arm in ARMS if course in (ARMS[arm].second or ARMS[arm].first, ARMS[arm].first))
    finetune(study, few(arms=arms, seeds="0", learning_rates="1e-2", points=1), model=model)
    mlps = {name for name in before if any(f"layers.{layer}.mlp." in name for layer in LAYERS)}
    assert moved == before.keys() - mlps
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())
    assert model.config.to_dict() == live(lab).config.to_dict()
    assert not any("nearline" in name for name, _ in model.named_modules())


def test_gates_are_what_their_formulas_say() -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    for kind in ("linear", "mlp"):
        gate = Gate(8, kind, 0.2, seed=3)  # type: ignore[arg-type]
        assert torch.allclose(gate(x), torch.full((5,), 0.2))
        with torch.no_grad():
            gate.out.weight.normal_(generator=torch.Generator().manual_seed(1))
        hidden = x
        if gate.hidden is not None:
            hidden = torch.nn.functional.gelu(x @ gate.hidden.weight.T + gate.hidden.bias)
        wanted = 1.0 / (1.0 + torch.exp(-(hidden @ gate.out.weight[0] + gate.out.bias)))
        assert torch.allclose(gate(x), wanted, atol=1e-6)
        # Exported it says the same of the other way.
        router, nothing = _router(gate), torch.zeros(5, dtype=torch.long)
        p = router.probability(LiveRows(x, None, None, nothing, nothing))
        assert torch.allclose(1.0 - p, gate(x), atol=1e-6)
        assert torch.equal(p > router.threshold, gate(x) < 0.5)
    parameters = [
        sum(one.numel() for one in Gate(8, kind, 0.2, 0).parameters()) for kind in ("linear", "mlp")
    ]
    assert parameters == [9, 8 * 32 + 32 + 32 + 1]


# Stopped, repeated


def test_two_runs_give_the_same_bytes(some: Path, study: Path) -> None:
    finetune(study, few(**SOME))
    assert tree(study) == tree(some)


@pytest.fixture(scope="module")
def some(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with the arms that a gate needs, one seed."""
    study = copied(lab, tmp_path_factory.mktemp("some"))
    finetune(study, few(**SOME))
    return study


SOME = {"arms": "scaled", "seeds": "1", "learning_rates": "1e-2"}


@pytest.mark.parametrize(
    "stop_at",
    [3, 14, *(pytest.param(at, marks=pytest.mark.long) for at in range(1, 20) if at not in (3, 14))],
)
def test_stopped_it_goes_on_to_the_same_bytes(
    stop_at: int, some: Path, study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped when a point has been scored, in the middle of a course."""
    whole, seen, point = Experiment._point, 0, Experiment._point

    def stopping(self: Any, name: Any, *given: Any) -> None:
        nonlocal seen
        point(self, name, *given)
        seen += 1
        if seen == stop_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(Experiment, "_point", stopping)
    with pytest.raises(KeyboardInterrupt):
        finetune(study, few(**SOME))
    monkeypatch.setattr(Experiment, "_point", whole)
    assert not Study.open(study).has_table("finetune")
    finetune(study, few(**SOME))
    assert tree(study) == tree(some)


@pytest.mark.parametrize("half_done", ["_save_optimizer_and_scheduler", "_save_rng_state", "save_to_json"])
def test_a_checkpoint_that_was_cut_short_is_not_gone_on_from(
    half_done: str, some: Path, study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `Trainer` writes the files of a checkpoint one after the other, in place."""
    saves, of = 0, TrainerState if half_done == "save_to_json" else Trainer
    save = getattr(of, half_done)

    def stopping(self: Any, *given: Any) -> None:
        nonlocal saves
        saves += 1
        if saves == 2:
            raise KeyboardInterrupt
        save(self, *given)

    monkeypatch.setattr(of, half_done, stopping)
    with pytest.raises(KeyboardInterrupt):
        finetune(study, few(**SOME))
    monkeypatch.setattr(of, half_done, save)
    finetune(study, few(**SOME))
    assert tree(study) == tree(some)


def test_a_mean_output_is_refitted_like_a_map(study: Path, lab: Path) -> None:
    """By hand: the mean over the rows of all windows, without positions 0 and special tokens."""
    request = tuning_request(Study.open(study), few(schedule="given", layers="2,0", refit=True))
    model, windows = live(lab).eval(), training_windows(Reader.open(lab / "store"))
    with torch.no_grad():  # another model than the one harvested
        model.model.layers[0].mlp.down_proj.weight *= 3.0
    outputs: list[torch.Tensor] = []
    hook = model.model.layers[2].mlp.register_forward_hook(lambda _, __, out: outputs.append(out[0]))
    special = torch.tensor(Reader.open(lab / "store").attributes.tokenizer.special_ids)
    rows = []
    for ids in map(torch.from_numpy, windows.ids):
        with torch.no_grad():
            model(ids[None])
        rows.append(outputs.pop()[1:][~torch.isin(ids[1:], special)])
    hook.remove()
    found = refitted(anatomy(model), request, windows, (2,), "mean")[2]
    assert torch.allclose(found.bias, torch.cat(rows).mean(dim=0), rtol=0, atol=1e-6)
    of_study: Any = substitutes_of(request.study, "mean", (2,), torch.float32)[2].replacement
    assert not torch.allclose(found.bias, of_study.value, rtol=0, atol=1e-3)


def test_layers_can_be_replaced_one_after_the_other(study: Path, lab: Path) -> None:
    """With surrogates of the model as it is then; the controls take the same steps."""
    more = {"stage_steps": 2, "refit": True, "seeds": "0", "learning_rates": "1e-2", "gate_start": 1e-6}
    finetune(study, few(arms="gated", schedule="given", layers="2,0", **more), model=live(lab))
    rows = frame(study, "finetune").filter("chosen", pl.col("split") == "test")
    # Gates that are all but shut: the second phase has the surrogates that the first one ended with.
    ended, shut = rows.filter(pl.col("arm") == "gated", pl.col("step") == 6).sort("phase")["nll"]
    assert float(shut) == pytest.approx(float(ended), abs=1e-5)
    steps = {arm: sorted(set(of["step"])) for (arm,), of in rows.group_by("arm")}
    assert steps["restored"] == steps["control"] == [0, 2, 3, 6, 7, 8]
    # One layer is linear until the second stage: less is lost than with both.
    first = rows.filter(pl.col("arm") == "gated", pl.col("step") == 0)["nll"][0]
    base = rows.filter(pl.col("arm") == "base")["nll"][0]
    assert float(first) != float(base)
    assert Study.open(study).provenance()["finetune"]["settings"]["layers"] == [2, 0]


def test_mixed_precision_accumulation_and_checkpointing(lab: Path, tmp_path: Path) -> None:
    """Three passes a step that keep no activations are one step of three times the windows; products in
    bfloat16 round to eight bits, and a few steps of a small rate change little.
    """
    model, ends, products = live(lab).eval(), list[np.ndarray](), set[torch.dtype]()
    before, ids = vars(model).keys() | {}, torch.arange(1, 20)[None]
    with torch.no_grad():
        logits = model(ids).logits

    def watched(module: Any, _: Any, output: torch.Tensor) -> None:
        if module.training:
            products.add(output.dtype)

    model.model.layers[1].self_attn.q_proj.register_forward_hook(watched)
    ways: list[dict[str, Any]] = [
        {"batch_sequences": 3},
        {"batch_sequences": 1, "accumulate": 3, "gradient_checkpointing": True},
        {"dtype": "bfloat16", "gate": "mlp"},
        {"batch_sequences": 3},
    ]
    for number, way in enumerate(ways):
        study = copied(lab, tmp_path / f"{number}")
        products.clear()
        finetune(
            study,
            few(arms="linear,gate_only", seeds="0", learning_rates="1e-3", points=1, **way),
            model=model,
        )
        assert products == {getattr(torch, way.get("dtype", "float32"))}
        # The model that was lent goes on as before, its products in float32.
        with torch.no_grad():
            assert torch.equal(model(ids).logits, logits)
        assert vars(model).keys() == before
        assert not model.get_input_embeddings()._forward_hooks
        rows = frame(study, "finetune").filter("chosen", pl.col("split") == "test", pl.col("step") == 2)
        rows = rows.vstack(
            frame(study, "finetune").filter("chosen", pl.col("split") == "test", pl.col("step") == 4)
        )
        ends.append(rows.sort("arm", "step")["nll"].to_numpy())
    assert ends[0].size == 5
    assert np.allclose(ends[0], ends[1], rtol=0, atol=1e-4)
    assert np.allclose(ends[0], ends[2], rtol=0, atol=2e-2)
    assert not np.array_equal(ends[0], ends[2])
    assert np.array_equal(ends[0], ends[3])


def test_the_penalty_on_gates_is_that_of_a_step(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many passes it has, and whether or not the model takes the number of its targets (that of
    Gemma 4 does not). Windows of one length, or else the mean over passes is not that over tokens.
    """

    def long_ones(reader: Reader) -> Windows:
        found = training_windows(reader)
        chosen = [index for index, ids in enumerate(found.ids) if ids.size == 24]
        return Windows(tuple(found.ids[index] for index in chosen), found.document[chosen])

    monkeypatch.setattr("nearline.collect.tuning.training_windows", long_ones)
    ends = []
    ways: list[dict[str, int]] = [{"batch_sequences": 6}, {"batch_sequences": 1, "accumulate": 6}]
    for number, (counts, way) in enumerate(product((True, False), ways)):
        model = live(lab)
        model.accepts_loss_kwargs = counts
        study = copied(lab, tmp_path / f"{number}")
        more = {"arms": "gate_only", "seeds": "0", "points": 1, "warmup": 0, "gate_start": 0.5}
        finetune(study, few(sparsity=0.3, **more, **way), model=model)
        gates = frame(study, "finetune_gates").filter("chosen", pl.col("arm") == "gate_only")
        ends.append(gates.sort("split", "step", "layer")["mean_gate"].to_numpy())
    for end in ends[1:]:
        assert np.allclose(end, ends[0], rtol=0, atol=1e-4)


@pytest.mark.long
def test_several_processes_do_what_one_does(lab: Path, study: Path, tmp_path: Path) -> None:
    """Each has half of the passes of a step; sums come in another order."""
    settings = {"arms": "gated", "seeds": "0", "learning_rates": "1e-3", "points": 1, "accumulate": 2}
    together = copied(lab, tmp_path / "together")
    finetune(study, few(**settings, batch_sequences=2))
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in (FEW | settings | {"batch_sequences": 2}).items()
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "nearline", "finetune", str(together), *flags, "--device=cpu"],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout.count("study: ") == 1
    ours, theirs = (
        frame(one, "finetune").filter("chosen").sort("arm", "phase", "step", "split")
        for one in (study, together)
    )
    assert ours["step"].to_list() == theirs["step"].to_list()
    assert np.allclose(ours["nll"], theirs["nll"], rtol=0, atol=1e-4)
    assert ours["tokens_seen"].to_list() == theirs["tokens_seen"].to_list()
    assert Study.open(together).provenance()["finetune"]["facts"]["processes"] == 2
    assert not list(together.glob(".finetune*/*"))


# What is kept


def test_a_kept_arm_is_the_one_that_was_scored(lab: Path, study: Path) -> None:
    arms = ("linear", "linear_trainable", "scaled", "gated", "gated_hard", "mean", "control")
    finetune(study, few(arms=",".join(arms), seeds="1", keep=",".join(arms), learning_rates="1e-2"))
    kept_are_scored(lab, study, arms, 6)


def kept_are_scored(lab: Path, study: Path, arms: Sequence[str], last: int) -> None:
    """Loaded by transformers and `load_linearised`, without a study: the losses of the last point."""
    reader = Reader.open(lab / "store")
    scored = scored_rows("store", reader, 2, _scored(study), population(study).group)
    losses = {}
    for arm in arms:
        folder = study / "tuned" / arm
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        assert _reads_as(lab / "model", folder / "model")
        if arm != "control":
            load_linearised(model, folder / "linearised")
        (found,) = score(anatomy(model), [scored], torch.float32, None)
        losses[arm] = dict(zip(scored.groups.tolist(), found.nll.tolist(), strict=True))
        wanted = sums(study, arm=arm, seed=1, step=last, split="test")
        assert losses[arm] == pytest.approx(wanted, rel=SUM_TOLERANCE), arm
    assert len({round(sum(of.values()), 3) for of in losses.values()}) == len(arms)


def _reads_as(model: Path, kept: Path) -> bool:
    """Whether the tokenizers in both folders make the same ids of the same text."""
    first, second = (AutoTokenizer.from_pretrained(folder) for folder in (model, kept))
    text = texts(1)[0]
    return len(first(text).input_ids) > 4 and first(text).input_ids == second(text).input_ids


HIDDEN: dict[str, Any] = {
    "gate": "mlp",
    "gate_start": 0.5,  # so that some rows end on either side
    "arms": "scaled,gated_hard",
    "keep": "scaled,gated,gated_hard",
    "seeds": "1",
    "learning_rates": "1e-2",
    "steps": 2,
    "points": 1,
}


@pytest.fixture(scope="module")
def hidden(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with gates of d → 32 → 1, kept and timed."""
    study = copied(lab, tmp_path_factory.mktemp("hidden"))
    finetune(study, few(**HIDDEN, timing=True))
    return study


def test_kept_gates_with_hidden_units_are_those_that_were_scored(lab: Path, hidden: Path) -> None:
    kept_are_scored(lab, hidden, ("scaled", "gated", "gated_hard"), 4)
    of = pl.col("arm") == "gated_hard", pl.col("split") == "test", pl.col("phase") == 2
    shares = frame(hidden, "finetune_gates").filter(*of)["share_linear"]
    assert all(0 < share < 1 for share in shares)  # or a loss would not tell routes


def population(study: Path) -> Any:
    return gather(Study.open(study), AnalyzeSettings()).stores["store"].population


def _scored(study: Path) -> np.ndarray:
    return tuning_request(Study.open(study), few()).scored("store", 2)


# What it computes


def test_what_each_arm_computes_is_counted(tuned: Path, lab: Path) -> None:
    """From the sizes of the matrices: three in a llama's MLP, one in a surrogate, a vector in a gate."""
    config = live(lab).config
    d, mlp = config.hidden_size, 2 * 3 * config.hidden_size * config.intermediate_size
    rows = population(tuned)
    covered = float(rows.body[rows.split == 2].mean())
    all_mlps = config.num_hidden_layers * mlp
    work = {row["arm"]: row for row in frame(tuned, "finetune_work").filter(pl.col("seed") == 0).to_dicts()}
    assert work.keys() == ARMS.keys()
    assert all(work[arm]["mlp_flops_saved"] == 0 for arm in ("base", "control", "restored"))
    wanted = {
        "linear": 2 * covered * (mlp - 2 * d * d),
        "mean": 2 * covered * mlp,
        "gated": -2 * (2 * d * d + 2 * d),
        "scaled": -2 * 2 * d,
    }
    gates = frame(tuned, "finetune_gates").filter(
        pl.col("arm") == "gated_hard", pl.col("seed") == 0, pl.col("split") == "test", pl.col("phase") == 2
    )
    share = covered * float(gates["share_linear"].sum())
    wanted["gated_hard"] = share * (mlp - 2 * d * d) - 2 * 2 * d
    for arm, saved in wanted.items():
        assert work[arm]["mlp_flops_saved"] == pytest.approx(saved / all_mlps), arm
    assert work["gated_hard"]["share_linear"] == pytest.approx(share / 2)
    assert 0 < work["linear"]["flops_saved"] < work["linear"]["mlp_flops_saved"]


def test_gates_with_hidden_units_are_charged_for_them(hidden: Path, lab: Path) -> None:
    """By hand: d products and one more a hidden unit, 32 of them, at every row of two layers."""
    config = live(lab).config
    d, mlp = config.hidden_size, 2 * 3 * config.hidden_size * config.intermediate_size
    gate, of_mlps = 2 * 32 * (d + 1), config.num_hidden_layers * mlp
    work = {row["arm"]: row for row in frame(hidden, "finetune_work").to_dicts()}
    assert work["scaled"]["mlp_flops_saved"] == pytest.approx(-2 * gate / of_mlps)
    assert work["gated"]["mlp_flops_saved"] == pytest.approx(-2 * (gate + 2 * d * d) / of_mlps)
    share = work["gated_hard"]["share_linear"]
    saved = 2 * share * (mlp - 2 * d * d) - 2 * gate
    assert work["gated_hard"]["mlp_flops_saved"] == pytest.approx(saved / of_mlps)
    times = frame(hidden, "finetune_timing").filter(pl.col("phase") == "prefill")
    soft = times.filter(pl.col("name") == "soft@input")["flops_saved"].unique()
    whole = work["scaled"]["mlp_flops_saved"] / work["scaled"]["flops_saved"]  # of the model, in MLPs
    # Timed windows have other lengths, and so more or less attention, than those that are scored.
    assert soft.to_list() == [pytest.approx(-2 * (gate + 2 * d * d) / of_mlps / whole, rel=0.05)]


@pytest.mark.parametrize("gates", ["tuned", "hidden"])
def test_what_was_timed_is_what_stands_in(gates: str, request: pytest.FixtureRequest) -> None:
    tuned = request.getfixturevalue(gates)
    times = frame(tuned, "finetune_timing")
    assert times["name"].unique(maintain_order=True).to_list() == [
        "original",
        "linear",
        "soft@input",
        "gated@input",
    ]
    assert set(times.filter(pl.col("name") != "original")["layers"]) == {"0,2"}
    assert Study.open(tuned).provenance()["finetune_timing"]["outputs"]


def test_seconds_are_taken_later_without_training_again(
    hidden: Path, some: Path, lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was kept; where that is gone, of the same weights, trained at one seed and rate. A soft gate's
    share is the mean of its p, so that equal shares are equal gates in equal models.
    """
    trained, course = list[tuple[str, int]](), Experiment._course

    def watched(self: Any, name: Any) -> None:
        trained.append((name.course, name.seed))
        course(self, name)

    def shares(study: Path) -> list[Any]:
        return frame(study, "finetune_timing").select("name", "phase", "batch_size", "share").rows()

    monkeypatch.setattr(Experiment, "_course", watched)
    study = copied(hidden.parent, tmp_path)
    model, wanted = live(lab), shares(hidden)
    assert any(0 < share < 1 for name, *_, share in wanted if name == "gated@input")
    for broken, courses in ((False, []), (True, [("linear", 1), ("gated", 1)])):
        Study.open(study).drop_step("finetune_timing")
        if broken:
            weights = study / "tuned" / "gated" / "model" / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
            shutil.rmtree(study / "tuned" / "gated_hard")
        before = {path: content for path, content in tree(study).items() if "timing" not in str(path)}
        assert not finetune_is_current(Study.open(study), few(**HIDDEN, timing=True))
        assert finetune_is_current(Study.open(study), few(**HIDDEN))
        finetune(study, few(**HIDDEN, timing=True), model=model)
        assert trained == courses
        assert shares(study) == wanted
        after = tree(study)
        assert all(
            after[path] == content for path, content in before.items() if "provenance" not in str(path)
        )
        assert finetune_is_current(Study.open(study), few(**HIDDEN, timing=True))
        assert not list(study.glob(".finetune*/*"))
    trained.clear()
    linear = copied(some.parent, tmp_path / "linear")
    finetune(linear, few(**SOME, timing=True), model=model)
    assert not trained  # without gates surrogates are timed, in the model as it was
    assert set(frame(linear, "finetune_timing")["name"]) == {"original", "linear"}
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), live(lab).parameters(), strict=True)
    )


# What is shown


def test_the_report_shows_every_arm_beside_its_controls(tuned: Path, tmp_path: Path) -> None:
    page = report(tuned, tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<section id="tuning"' in page
    assert re.search(
        r"After the same windows of each seed \(\d+ tokens on average, \d+ to \d+\), linear against control_",
        page,
    )
    last = frame(tuned, "finetune_summary").filter("last", pl.col("against") == "scaled")
    shown = re.sub(r"<[^>]+>", " ", page)
    for row in last.to_dicts():
        assert f"{row['tokens_seen']:,}".replace(",", "\u202f") in shown or f"{row['tokens_seen']:,}" in shown
        assert row["verdict"] in shown
    for arm in ("gated", "restored", "scaled", "gate_only", "zero"):
        assert arm in shown


# What cannot be


def test_what_is_scored_is_never_trained_on(lab: Path, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader.open(lab / "store")
    readers, scored = {"store": reader}, tuning_request(Study.open(study), few()).scored_documents()
    for split, called in ((1, "gate"), (2, "test")):
        with pytest.raises(UsageError, match=f"among the {called} documents of store store"):
            require_unseen("store", training_windows(reader, split), readers, scored)
    require_unseen("store", training_windows(reader), readers, scored)
    monkeypatch.setattr("nearline.collect.tuning.training_windows", lambda one: training_windows(one, 2))
    before = tree(study)
    with pytest.raises(UsageError, match="what is scored is never trained on"):
        finetune(study, few())
    assert tree(study) == before


@pytest.mark.parametrize("of", ["learned", "scored"])
def test_near_duplicates_of_what_is_scored_are_not_trained_on(of: str) -> None:
    """Those that are left out of a store for its size speak for the others of their group."""

    def holding(*documents: tuple[str, int]) -> Any:
        names = [f"hash {name}" for name, _ in documents]
        groups = [group for _, group in documents]
        return SimpleNamespace(documents=pa.table({"key": names, "content_hash": names, "group": groups}))

    # `a` and `b` are alike; `c` is alone. Trained on, and scored, is document 0.
    trained, other = holding(("a", 0), ("b", 0)), holding(("b", 0), ("c", 1))
    if of == "scored":
        trained, other = holding(("b", 0), ("c", 1)), holding(("a", 0), ("b", 0))
    windows, readers = Windows((), np.array([0])), {"trained": trained, "other": other}
    with pytest.raises(UsageError, match="'hash b' of store trained would be trained on, or one much"):
        require_unseen("trained", windows, readers, {("other", 2): np.array([0])})
    if of == "learned":
        require_unseen("trained", windows, readers, {("other", 2): np.array([1])})


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layers": "cheapest@1"}, IncompleteError, "run `nearline measure"),
    ({"layers": "7"}, UsageError, "layer 7 was not fitted"),
    ({"stores": "other"}, UsageError, "'other' is no store"),
    ({"train_on": "other"}, UsageError, "'other' is no store"),
]


@pytest.mark.parametrize(("given", "error", "said"), REFUSED)
def test_refused_before_the_model_is_looked_for(
    given: dict[str, Any], error: type[Exception], said: str, study: Path
) -> None:
    before = tree(study)
    with pytest.raises(error, match=said):
        finetune(study, few(**given))
    assert tree(study) == before


def test_weights_that_are_away_are_not_trained(study: Path, lab: Path, tmp_path: Path) -> None:
    """As a harvest leaves them that spread the model over more memory than devices have."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{layer}": "disk" if layer == 1 else "cpu" for layer in range(3)}
    away = AutoModelForCausalLM.from_pretrained(
        lab / "model", dtype=torch.float32, device_map=places, offload_folder=str(tmp_path / "away")
    )
    before = tree(study)
    with pytest.raises(UsageError, match="are offloaded, and what is trained has to be in memory: name its"):
        finetune(study, few(), model=away)
    assert tree(study) == before


def test_a_gpu_is_not_left_for_another_one(study: Path, lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for --device cuda:1, a `Trainer` would train on cuda:0."""
    monkeypatch.setattr(Anatomy, "device", property(lambda _: torch.device("cuda", 1)))
    with pytest.raises(UsageError, match="set CUDA_VISIBLE_DEVICES=1"):
        finetune(study, few(), model=live(lab))


def test_a_layer_without_a_cost_cannot_be_put_in_order(study: Path, lab: Path) -> None:
    measure(study, measure_settings({"interventions": "linear", "layers": "0"}), model=live(lab).eval())
    with pytest.raises(
        IncompleteError, match=r"the cost of layer 2 was not measured; .* has those of 0: run"
    ):
        tuning_request(Study.open(study), few(schedule="cheapest"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arms": "linnear"}, "is no arm; known are"),
        ({"layers": "paper@2"}, "chosen on test rows"),
        ({"learning_rates": "0"}, "greater than 0"),
        ({"stepps": 3}, "did you mean 'steps'"),
        ({"arms": "linear", "keep": "gated"}, "not trained here"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(given)


def test_every_course_belongs_to_an_arm() -> None:
    used = {course for arm in ARMS.values() for course in (arm.first, arm.second)}
    assert used - {None} == COURSES.keys()
    assert {other for arm in ARMS.values() for other in arm.against} <= ARMS.keys()

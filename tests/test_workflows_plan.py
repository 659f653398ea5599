"""The plan of a whole study against what its steps really run: rows through blocks and heads counted by
hooks, courses of a fine-tuning counted one by one; CPU hours follow what is asked of the analyses.
"""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_harvest import texts
from helpers_models import tiny_model, tiny_tokenizer
from nearline import workflows
from nearline.analyze import FitSettings, fit
from nearline.analyze.core_speed import CoreSpeed
from nearline.collect import collect, measure
from nearline.collect.anatomy import anatomy
from nearline.collect.model_shape import ModelShape
from nearline.collect.planned_passes import Passes, block_flops, head_flops, spread
from nearline.store import Reader
from nearline.workflows.cli import run
from nearline.workflows.show_runs import plan as show_plan
from nearline.workflows.study_plan import passes_of, plan_study, work_of
from nearline.workflows.study_settings import ModelStudy, read_study
from transformers import AutoModelForCausalLM

PAPER = Path(workflows.__path__[0]) / "paper.toml"
SHAPE = ModelShape(layers=12, d_model=256, d_ff=1024, vocabulary=5000)
SPEED = CoreSpeed(flops_per_s=1e11, eigen_s=2.5e-10, value_s=1.4e-9)
# Replacements of one layer and of several, draws, sets that are chosen on gate and on test rows, one layer
# after another, both splits.
MEASURE = """
[measure]
interventions = ["linear", "mean", "random@0.5"]
draws = 2
compound = ["cheapest@2", "paper@2", "0+2", "all"]
compound_with = ["linear", "random@0.5"]
progressive = "greedy"
splits = ["gate", "test"]
"""
STORE = """
[collect]
tokens = 1200
sequence_length = 24
min_length = 24
batch_tokens = 120
block = 120
threads = 1
[analyze]
only = ["clusters"]
"""


def study_of(folder: Path, text: str, n_corpora: int = 1, shape: ModelShape = SHAPE) -> ModelStudy:
    """The only model of a study with these settings."""
    sizes = ", ".join(f"{name} = {value}" for name, value in shape.model_dump().items())
    text += f'[[models]]\nmodel = "a/model"\nshape = {{ {sizes} }}\n'
    for index in range(n_corpora):
        text += f'[[corpora]]\ncorpus = "jsonl:corpus{index}.jsonl"\n'
    (folder / "study.toml").write_text(text, encoding="utf-8")
    return read_study(folder / "study.toml").models[0]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A settings file, a store as it says, and the study fitted. Windows are full: nothing is padded."""
    folder = tmp_path_factory.mktemp("study")
    tiny_model("llama")[0].save_pretrained(folder / "model")
    tiny_tokenizer(bos=False).save_pretrained(folder / "model")
    long = [" ".join(texts(4, seed=seed)) for seed in range(120)]
    (folder / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": one}) for one in long), encoding="utf-8"
    )
    tables = (
        f'{STORE}{MEASURE}[[models]]\nmodel = "./model"\n[[corpora]]\ncorpus = "jsonl:texts.jsonl:text"\n'
    )
    (folder / "study.toml").write_text(tables, encoding="utf-8")
    model = read_study(folder / "study.toml").models[0]
    collect(model.stores[0].settings, model.stores[0].path)
    fit(model.path, model.store_paths, FitSettings(folds=2, alphas=(1e-2,), examples=1))
    return folder / "study.toml"


def test_rows_through_blocks_and_heads_are_those_of_a_measurement(study: Path) -> None:
    """Counted where they run: attention of each block (a block that is left out has none) and the head. Which
    layers are cheapest decides where a set begins, and the plan cannot know it; a proof passes a batch twice.
    """
    model = read_study(study).models[0]
    plan = Reader.open(model.stores[0].path).plan
    assert set(plan.length.tolist()) == {24}
    live = AutoModelForCausalLM.from_pretrained(study.parent / "model").eval().requires_grad_(False)
    rows = Counter[str]()

    def count(what: str) -> Any:
        def hook(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            rows[what] += given.shape[:-1].numel()

        return hook

    net = anatomy(live)
    for layer in net.layers:
        layer.attention.register_forward_pre_hook(count("blocks"), with_kwargs=True)
    net.head.register_forward_pre_hook(count("heads"), with_kwargs=True)
    measure(model.path, model.measure, model=live)
    shape = ModelShape(layers=3, d_model=32, d_ff=64, vocabulary=160)
    planned = passes_of("measure", model, shape)
    assert planned.blocks == pytest.approx(rows["blocks"], rel=0.1)
    assert planned.heads == pytest.approx(rows["heads"], rel=0.1)
    of_each = planned.blocks * block_flops(shape, 24) + planned.heads * head_flops(shape)
    assert planned.flops == pytest.approx(of_each)


def test_a_harvest_gives_the_hours_of_the_steps_behind_it(study: Path) -> None:
    """At its operations a second."""
    found = plan_study(read_study(study), probe=False)
    store, step = found.stores[0], next(one for one in found.steps if one.step == "measure")
    assert store.device_hours is not None
    assert step.device_hours is not None
    assert store.flops is not None
    assert step.flops is not None
    assert step.device_hours / store.device_hours == pytest.approx(step.flops / store.flops)
    assert found.device_hours == pytest.approx(store.device_hours + step.device_hours)
    assert found.cpu_hours is None


def test_a_layer_by_itself_runs_the_blocks_from_there_upwards(tmp_path: Path) -> None:
    """One intervention, no set: a base pass and twelve suffixes of every gate and test row."""
    model = study_of(
        tmp_path, '[measure]\ninterventions = ["linear"]\ncompound = ["none"]\nnoise_floor = false\n'
    )
    rows = 0.6 * 100_000
    blocks = rows * (12 + sum(12 - layer for layer in range(12)))
    found = passes_of("measure", model, SHAPE)
    assert (found.blocks, found.heads) == pytest.approx((blocks, rows * 13))


def test_other_lengths_and_patched_positions_are_more_passes(tmp_path: Path) -> None:
    """Test rows once more in shorter windows; ten batches of 4,096 rows where each sequence of 512 has up to
    three of 200 patched rows."""
    alone = '[measure]\ninterventions = ["linear"]\ncompound = ["none"]\nnoise_floor = false\n'
    suffixes = sum(12 - layer for layer in range(12))
    plain = passes_of("measure", study_of(tmp_path, alone), SHAPE)
    lengths = passes_of("measure", study_of(tmp_path, f"{alone}sequence_length = [128, 512]\n"), SHAPE)
    assert lengths.blocks - plain.blocks == pytest.approx(0.4 * 100_000 * (12 + suffixes))
    patched = passes_of("measure", study_of(tmp_path, f"{alone}validate_estimate = true\n"), SHAPE)
    assert patched.blocks - plain.blocks == pytest.approx(10 * 4096 * (12 + 3 * suffixes))


def test_what_losses_have_measured_is_not_planned_twice(tmp_path: Path) -> None:
    only = 'interventions = ["linear"]\ncompound = ["none"]\nnoise_floor = false\n'
    model = study_of(tmp_path, f'[analyze]\nneed = ["error", "loss"]\n[measure]\n{only}')
    alone = study_of(tmp_path, f"[measure]\n{only}")
    assert passes_of("losses", model, SHAPE) == passes_of("measure", alone, SHAPE)
    assert passes_of("measure", model, SHAPE) == Passes()


def test_default_replacements_are_counted_with_the_gates_that_there_are(tmp_path: Path) -> None:
    """Five routers by gates without `features`; as many fewer suffixes as gates are not made."""
    whole = passes_of("measure", study_of(tmp_path, ""), SHAPE)
    few = passes_of("measure", study_of(tmp_path, '[analyze]\nfeatures = ["input"]\n'), SHAPE)
    suffixes = sum(12 - layer for layer in range(12))
    assert whole.blocks - few.blocks == pytest.approx(4 * suffixes * 0.4 * 100_000)


def test_courses_of_a_fine_tuning_counted_one_by_one(tmp_path: Path) -> None:
    """`linear` and what it is compared with: three courses that train, at two rates and one more seed."""
    settings = """
[collect]
sequence_length = 128
[finetune]
arms = ["linear"]
layers = "3,5"
seeds = [0, 1]
learning_rates = [1e-4, 1e-3]
steps = 4
points = 2
batch_sequences = 3
"""
    found = passes_of("finetune", study_of(tmp_path, settings, 2), SHAPE)
    test, gate = 2 * 0.4 * 100_000, 0.2 * 100_000
    trained = scored = gates = 0.0
    for course in ("base", "control", "control_matched", "linear"):
        if course == "base":  # scored once, at its only point, which is its end
            scored, gates = scored + 1, gates + 1
            continue
        scored += (
            course != "control_matched"
        )  # before its first step it is the model that `control` starts from
        for _ in range(3):
            trained += 4 * 3 * 128
            scored, gates = scored + 2, gates + 1
    rows = 3 * trained + scored * test + gates * gate
    assert (found.blocks, found.heads) == pytest.approx((12 * rows, rows))


def test_gates_learn_through_the_blocks_above_the_lowest_of_them(tmp_path: Path) -> None:
    """Per row: forward through twelve blocks, back through those from layer 3 upwards, the head both ways."""
    text = '[finetune]\narms = ["scale_only"]\nlayers = "3,5"\nseeds = [0]\ngate_learning_rates = [1e-3]\n'
    one = passes_of("finetune", study_of(tmp_path, f"{text}gate_steps = 100\n"), SHAPE)
    more = passes_of("finetune", study_of(tmp_path, f"{text}gate_steps = 200\n"), SHAPE)
    rows = 100 * 8 * 512
    assert more.blocks - one.blocks == pytest.approx(rows * (12 + 9))
    assert more.heads - one.heads == pytest.approx(rows * 2)


def test_analyses_take_what_is_asked_of_them(tmp_path: Path) -> None:
    """More with more layers, stores, needs and features; nothing of what is not asked for."""

    def hours(text: str, n_corpora: int = 2) -> dict[str, float]:
        work = work_of("analyze", study_of(tmp_path, text, n_corpora), SHAPE)
        return {name: one.hours(SPEED) for name, one in work.items()}

    whole = hours("")
    assert set(whole) == {"decomposition", "identity", "gates", "nofly", "clusters", "regression"}
    half = hours('[analyze]\nlayers = "0-5"\n')
    for name in ("decomposition", "gates", "clusters"):
        assert whole[name] == pytest.approx(2 * half[name], rel=0.05)
    assert half == hours('[fit]\nlayers = "0-5"\n') == hours('[collect]\nlayers = "0-5"\n')
    assert sum(hours("", 3).values()) > 1.2 * sum(whole.values())
    assert hours("", 3)["nofly"] > 2 * whole["nofly"] > 20 * hours("", 1)["nofly"]
    assert hours('[analyze]\nneed = ["error", "error_stream"]\n')["gates"] > 1.5 * whole["gates"]
    assert hours('[analyze]\nfeatures = ["input"]\n')["gates"] < 0.3 * whole["gates"]
    assert set(hours('[analyze]\nonly = ["clusters"]\n')) == {"clusters"}
    assert set(hours('[analyze]\nonly = ["gates"]\n')) == {"decomposition", "gates"}  # which it needs


def test_cpu_hours_are_near_those_of_the_benchmark(tmp_path: Path) -> None:
    """bench_analyze.py at 100,000 + 20,000 rows × 12 layers × 768, as docs/lab-log.md has it: 383 CPU
    seconds, 135 of them gates, on the machine whose probe gives these speeds.
    """
    shape = SHAPE.model_copy(update={"d_model": 768})
    model = study_of(tmp_path, '[fit]\nfit_on = "corpus0"\n', 2, shape)
    first, second = model.stores
    small = replace(second, settings=second.settings.model_copy(update={"tokens": 20_000}))
    model = replace(model, stores=(first, small))
    speed = CoreSpeed(flops_per_s=9.5e10, eigen_s=2.4e-10, value_s=1.36e-9)
    seconds = {name: 3600 * one.hours(speed) for name, one in work_of("analyze", model, shape).items()}
    seconds["fit"] = 3600 * work_of("fit", model, shape)["fit"].hours(speed)
    assert sum(seconds.values()) == pytest.approx(383, rel=0.25)
    assert seconds["gates"] == pytest.approx(135, rel=0.25)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 12, 30])
def test_layers_that_stand_for_the_cheapest_are_spread(n: int) -> None:
    order = spread(tuple(range(10, 10 + n)))
    assert sorted(order) == list(range(10, 10 + n))
    assert order[0] == 10 + n // 2


def test_a_plan_of_known_shapes_is_time_at_a_stated_speed(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_study(read_study(PAPER), probe=False)
    each = [*found.stores, *(one for one in found.steps if not one.on_cores)]
    assert found.flops is not None
    assert found.flops is not None
    assert found.flops == pytest.approx(sum(one.flops or 0 for one in each))
    show_plan(replace(found, cpu_hours=0.00022, device_hours=3.21), as_json=False)
    printed = capsys.readouterr().out
    assert (
        f"{found.flops:.2g} operations together, {found.flops / 3.6e17:.1f} h at a sustained 100 T" in printed
    )
    assert " ".join(next(line for line in printed.splitlines() if "0.8 s" in line).split()) == (
        "all, harvests too 0.8 s 3.2 h"
    )
    assert "(20 groups a split)" in printed


def test_a_plan_is_a_page_and_loads_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(PAPER), "--no-probe"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 110
    for step in ("fit", "losses", "analyze", "measure", "finetune"):
        assert f"\n{step}" in printed
    program = (
        "import sys; from nearline.workflows.cli import run; "
        f"run(['plan', {str(PAPER)!r}, '--no-probe', '--json']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert [one["step"] for one in found["steps"]].count("losses") == 6
    assert all(one["flops"] > 0 for one in found["steps"])

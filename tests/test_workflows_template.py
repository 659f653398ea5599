"""The bundled settings files: the template has every field and means the defaults; the plan of the paper's
study is what a person would add up."""

import math
import re
import tomllib
from pathlib import Path

import pytest
from nearline import workflows
from nearline.analyze.compute_settings import MACHINE_FIELDS
from nearline.collect.model_shape import ModelShape
from nearline.collect.planned_passes import forward_flops
from nearline.workflows.cli import run
from nearline.workflows.flags import own_first
from nearline.workflows.study_plan import plan_study
from nearline.workflows.study_settings import Whole, read_study
from nearline.workflows.study_tables import COMPUTED, NOT_HERE, STEP_SETTINGS
from nearline.workflows.template import template

FOLDER = Path(workflows.__path__[0])
TEMPLATE = FOLDER / "template.toml"
PAPER = FOLDER / "paper.toml"
# What the paper's models are, by their own config files.
SHAPES = {
    "gpt2-medium": (24, 1024, 4096, 50257),
    "gpt2-large": (36, 1280, 5120, 50257),
    "pythia-160m": (12, 768, 3072, 50304),
    "pythia-410m": (24, 1024, 4096, 50304),
    "pythia-1b": (16, 2048, 8192, 50304),
    "pythia-2.8b": (32, 2560, 10240, 50304),
}
TOKENS = 102_400
# Token columns, checksums and the padding of a last block beside the activations.
BESIDE_ACTIVATIONS = 0.02


def uncommented(text: str) -> str:
    return re.sub(r"^#(?=\w+ = |\[)", "", text, flags=re.MULTILINE)


def test_the_template_is_what_the_settings_classes_say() -> None:
    assert TEMPLATE.read_text(encoding="utf-8") == template()


@pytest.mark.parametrize("commented", [True, False])
def test_the_template_means_the_defaults(tmp_path: Path, commented: bool) -> None:
    text = TEMPLATE.read_text(encoding="utf-8")
    (tmp_path / "study.toml").write_text(text if commented else uncommented(text), encoding="utf-8")
    whole = read_study(tmp_path / "study.toml")
    model = whole.models[0]
    assert whole.out == tmp_path / "study"
    assert [store.name for store in model.stores] == ["tiny-gpt2-stdlib", "tiny-gpt2-python"]
    for store in model.stores:
        given = {"model": "tiny-gpt2", "corpus": f"docs:{store.corpus}"}
        assert store.settings == STEP_SETTINGS["collect"](**given)
    for step in ("fit", "analyze", "measure"):
        assert getattr(model, step) == STEP_SETTINGS[step]()
    assert model.finetune == (None if commented else STEP_SETTINGS["finetune"]())


def test_every_field_of_every_step_is_in_the_template() -> None:
    tables = tomllib.loads(uncommented(TEMPLATE.read_text(encoding="utf-8")))
    for step, kind in STEP_SETTINGS.items():
        elsewhere = {*NOT_HERE.get(step, ()), *(MACHINE_FIELDS if step in COMPUTED else ())}
        assert list(tables[step]) == [name for name in own_first(kind) if name not in elsewhere], step
        assert set(tables[step]) == kind.model_fields.keys() - elsewhere
    assert len(tables["compute"]) == len(MACHINE_FIELDS)


@pytest.fixture(scope="module")
def paper() -> Whole:
    return read_study(PAPER)


def test_the_models_of_the_paper_are_written_down(paper: Whole) -> None:
    found = {model.name: model.shape for model in paper.models}
    assert {name: tuple(shape.model_dump().values()) for name, shape in found.items() if shape} == SHAPES
    for model in paper.models:
        owner = "openai-community" if model.name.startswith("gpt2") else "EleutherAI"
        assert model.stores[0].settings.model == f"{owner}/{model.name}"
        assert len(model.stores) == 3
        assert "loss" in model.analyze.need
    assert [model.name for model in paper.models if model.finetune] == ["gpt2-medium"]


def test_the_bytes_of_the_paper_added_up_by_hand(paper: Whole) -> None:
    """Residual and MLP output of every layer and one embedding, two bytes a value, for every token."""
    found = plan_study(paper, probe=False)
    by_hand = {}
    for name, (layers, width, _, _) in SHAPES.items():
        for corpus in ("wikitext", "lambada", "scientific"):
            by_hand[f"{name}-{corpus}"] = TOKENS * (layers * 2 + 1) * width * 2
    assert {one.store for one in found.stores} == set(by_hand)
    for one in found.stores:
        assert by_hand[one.store] < (one.bytes or 0) < by_hand[one.store] * (1 + BESIDE_ACTIVATIONS)
    total = sum(by_hand.values())
    assert total < (found.bytes or 0) < total * (1 + BESIDE_ACTIVATIONS)


def test_the_objects_of_the_paper_counted_one_by_one(paper: Whole) -> None:
    """Blocks of at most 64 MiB a chunk, two buffers in 4 GiB, ten of them at least: every chunk is listed."""
    columns = {"token_id": 4, "target_id": 4, "position": 4, "sequence": 4, "document": 4, "nll": 4}
    columns |= {"split": 1, "special": 1, "valid": 1}
    for one in plan_study(paper, probe=False).stores:
        layers, width, _, _ = SHAPES[one.model]
        row = (2 * layers + 1) * width * 2 + sum(columns.values())
        block = min(2**26 // (2 * width), 2**32 // (2 * row), TOKENS // 10) // 64 * 64
        sizes: list[int] = []
        for _ in range(math.ceil(TOKENS / block)):
            sizes += [block * width * 2 + 4] * (2 * layers + 1)
            sizes += [block * size + 4 for size in columns.values()]
            sizes += [0]  # the record of the block
        assert (one.objects, one.bytes) == (len(sizes), sum(sizes)), one.store


def test_operations_of_a_forward_pass_counted_product_by_product() -> None:
    """Two operations a multiplication, of each matrix of GPT-2 small and of scores over half a window."""
    width, inner, length = 768, 3072, 512
    layer = [(width, 3 * width), (width, width), (width, inner), (inner, width)]
    scores_and_values = 2 * width * length / 2
    by_hand = 12 * (sum(2 * rows * columns for rows, columns in layer) + 2 * scores_and_values)
    by_hand += 2 * width * 50257
    shape = ModelShape(layers=12, d_model=width, d_ff=inner, vocabulary=50257)
    assert forward_flops(shape, length) == by_hand


def test_a_plan_says_what_it_cannot_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(PAPER), "--no-probe"]) == 0
    printed = capsys.readouterr().out
    assert "pythia-2.8b-lambada" in printed
    assert "unknown without a probe" in printed
    assert plan_study(read_study(PAPER), probe=False).cpu_hours is None
    probed = plan_study(read_study(PAPER))
    assert probed.device_hours is None
    assert probed.cpu_hours is not None
    assert 0 < probed.cpu_hours < 1000


def test_a_model_without_a_shape_leaves_the_plan_open(tmp_path: Path) -> None:
    text = '[[models]]\nmodel = "nobody/nothing"\n[[corpora]]\ncorpus = "docs:python"\n'
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")
    found = plan_study(read_study(tmp_path / "study.toml"), probe=False)
    assert (found.bytes, found.stores[0].bytes, found.steps[0].flops) == (None, None, None)

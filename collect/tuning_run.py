"""One course of fine-tuning: from given weights, for given steps, by Hugging Face's `Trainer`.

In: the live model, a course with its stages, a seed and a learning rate. Out: scores of held-out rows at
points of the course, kept aside as they come; the weights that learned, at its end or where another course
goes on. A course that was stopped goes on from its last point, to the same losses. What must not learn is
compared by digest before and after. Cost: the steps, `points` evaluations, and two digests of the weights.
"""

import copy
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import blake3
import torch
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..store import durable
from ..store.errors import ProofFailed
from .linearised import SUBMODULE
from .tuned_layers import Tuned
from .tuned_weights import load_weights, put_weights, save_weights, trained
from .tuning_arms import Course
from .tuning_data import Batches, Windows, collate
from .tuning_schedule import Stage
from .tuning_settings import FinetuneSettings

WEIGHTS: Final = "trained.safetensors"
# In a checkpoint that was written to its end: a `Trainer` writes its files one after the other in place.
WHOLE: Final = "whole"
_PREPARED: Final = "_is_accelerate_prepared"


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What one course is made of. `points`: steps of the whole course after which it is scored."""

    course: Course
    stages: tuple[Stage, ...]
    seed: int
    learning_rate: float
    points: tuple[int, ...]


def chosen_weights(model: nn.Module, run: Run, layers: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The weights that learn, by name; `requires_grad` says so afterwards. `layers`: modules of the chosen
    MLPs.
    """
    kept = {id(weight) for module in layers for weight in module.parameters()}
    found: dict[str, nn.Parameter] = {}
    for name, weight in model.named_parameters():
        ours = f".{SUBMODULE}." in f".{name}"
        match run.course.learns:
            case "all":
                learns = True
            case "rest":
                learns = id(weight) not in kept if not ours else run.course.body == "trainable"
            case "gates":
                learns = ours and ".gate." in name
            case _:
                learns = False
        weight.requires_grad_(learns and weight.is_floating_point())
        if weight.requires_grad:
            found[name] = weight
    return found


def digest_of_frozen(model: nn.Module) -> str:
    """Of all weights that do not learn, and of all buffers."""
    digest = blake3.blake3()
    # By parameters, not by the state: there a head that is tied to the embedding has a name of its own.
    frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
    for name, value in sorted([*frozen, *model.named_buffers()], key=lambda pair: pair[0]):
        digest.update(name.encode())
        plain = value.detach().cpu().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return digest.hexdigest()


def train_stage(
    model: Any,
    tuned: Tuned,
    run: Run,
    stage: Stage,
    at: int,
    before: int,
    windows: Windows,
    settings: FinetuneSettings,
    folder: Path,
    n_processes: int,
    at_point: Callable[[int], None],
) -> None:
    """The steps of one stage, `at` steps into the course, which has the windows after those of `before`
    steps; goes on from a checkpoint in `folder`.
    """
    a_step, first = settings.batch_sequences * settings.accumulate, before + at
    order = windows.order(run.seed, (first + stage.steps) * a_step)[first * a_step :]
    points = [one - at for one in run.points if at < one <= at + stage.steps]
    frozen = digest_of_frozen(model)
    with _as_it_was(model):
        trainer = _Trainer(
            tuned,
            settings.sparsity if run.course.body == "soft" else 0.0,
            model=model,
            args=_arguments(run, stage, settings, folder, next(model.parameters()).device, n_processes),
            train_dataset=Batches(windows, order),
            data_collator=collate,
            callbacks=[_Points(frozenset(points), lambda step: at_point(at + step), n_processes)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=last_whole(folder))
        if n_processes > 1:  # the next stage wraps the model anew, and no weight may answer to two wrappers
            trainer.model_wrapped = model
            trainer.accelerator.free_memory()
    if digest_of_frozen(model) != frozen:
        raise ProofFailed("weights that were to stay as they are have moved in training; this is a defect")


def last_whole(folder: Path) -> str | None:
    """The last checkpoint that was written to its end."""
    found = [mark.parent for mark in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{WHOLE}")]
    return str(max(found, key=lambda one: int(one.name.rpartition("-")[2]))) if found else None


def _arguments(
    run: Run, stage: Stage, settings: FinetuneSettings, folder: Path, device: torch.device, n_processes: int
) -> TrainingArguments:
    found = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=settings.batch_sequences,
        gradient_accumulation_steps=settings.accumulate // n_processes,
        max_steps=stage.steps,
        learning_rate=run.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        seed=run.seed,
        data_seed=run.seed,
        bf16=settings.dtype == "bfloat16",
        use_cpu=device.type == "cpu",
        activation_checkpointing=settings.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False},
        save_strategy="no",  # the callback asks for it
        save_total_limit=1,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        log_level="error",
    )
    _ = found.device
    found._n_gpu = min(found._n_gpu, 1)  # replicas would share the state of what stands in
    return found


@contextmanager
def _as_it_was(model: Any) -> Generator[None]:
    """What a `Trainer` and accelerate put on a model is taken off again.

    The cache is switched off in its configuration, which is part of what a model is. With mixed precision it
    gets a `forward` that casts, and a mark by which it is not given another one: the next training of this
    model would have the precision of the first one, whatever it asks for. Kept activations bring hooks.
    """
    config, before = copy.deepcopy(vars(model.config)), dict(vars(model))
    vars(model).pop(_PREPARED, None)
    try:
        yield
    finally:
        if vars(model).get("_require_grads_hooks") and "_require_grads_hooks" not in before:
            model.disable_input_require_grads()
        for name in vars(model).keys() - before.keys():
            del vars(model)[name]
        vars(model).update({name: before[name] for name in ("forward", _PREPARED) if name in before})
        vars(model.config).clear()
        vars(model.config).update(config)


class _Points(TrainerCallback):
    """Scores and saves after chosen steps; marks what was saved as whole."""

    def __init__(self, steps: frozenset[int], at_point: Callable[[int], None], n_processes: int) -> None:
        self._steps, self._at_point, self._n_processes = steps, at_point, n_processes

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step in self._steps:
            self._at_point(state.global_step)
            control.should_save = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._n_processes > 1:  # each process saves the state of its own random numbers
            torch.distributed.barrier()
        if args.should_save:
            folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            durable.write_file(folder / WHOLE)


class _Trainer(Trainer):
    """Windows in the order given; a penalty on gates; checkpoints hold what learns, as safetensors."""

    def __init__(self, tuned: Tuned, sparsity: float, **given: Any) -> None:
        super().__init__(**given)
        self._tuned, self._sparsity = tuned, sparsity

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        data: Any = train_dataset if train_dataset is not None else self.train_dataset
        return SequentialSampler(data)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = found if return_outputs else (found, None)
        gate = self._tuned.mean_gate()
        if gate is not None and self._sparsity:
            # A model that takes no count of targets has its loss divided among the passes after this.
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            passes = self.args.gradient_accumulation_steps if counted else 1
            loss = loss + self._sparsity * gate.to(loss.device) / passes
        return (loss, outputs) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(trained(self.model), folder / WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        there: Any = self.model if model is None else model
        put_weights(there, load_weights(Path(resume_from_checkpoint) / WEIGHTS))


logging.getLogger("transformers.trainer").setLevel(logging.ERROR)

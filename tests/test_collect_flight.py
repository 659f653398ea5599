"""Judging one forward pass behind, as on a GPU, gives the same store, the same errors and the same masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_harvest import SMALL, Planted, files_of, texts
from helpers_models import tiny_model, tiny_tokenizer
from nearline.collect import corpora, flight, loop, models
from nearline.collect.anatomy import anatomy
from nearline.collect.describing import attributes_of
from nearline.collect.forward import evaluating, inputs_of
from nearline.collect.harvesting import begin_with
from nearline.collect.lanes import Lane, moved
from nearline.collect.loop import run_blocks
from nearline.collect.preparing import Prepared, prepare
from nearline.collect.recorder import Recorder
from nearline.collect.settings import parse
from nearline.collect.stopping import Interrupted, StopRequest, Watch
from nearline.collect.tokenise import tokenise
from nearline.store import Reader, StoreWriter, silent
from nearline.store.errors import EnvironmentFault, NearlineError, NotFinite, OutOfRange
from torch import Tensor

ALL = "embedding,residual,mlp_output,mlp_input"
IN_FLIGHT = [0, 1]  # on a CPU; on a GPU


def begun(path: Path, model: Any = None, **overrides: Any) -> tuple[Prepared, StoreWriter]:
    """A prepared harvest of a tiny model and its store, as `harvest` has them before the first batch."""
    loaded = models.describe(model or tiny_model("llama")[0], tiny_tokenizer(), None)
    settings = parse({**SMALL, "tokens": 450, "sites": ALL, **overrides})
    corpus = corpora.from_documents(texts(), "documents")
    path.mkdir(parents=True)
    tokens = tokenise(corpus, loaded.tokenizer, bos=settings.bos)
    prepared = prepare(anatomy(loaded.model), corpus, tokens, settings, path)
    return prepared, begin_with(path, attributes_of(prepared, loaded, settings, {}), prepared)


def collected(path: Path, ahead: int, *, mask: bool = False, **given: Any) -> Path:
    """A whole store, collected with so many passes in flight."""
    prepared, writer = begun(path, **given)
    with evaluating(prepared.anatomy.model, 1):
        waits = run_blocks(prepared, writer, mask_nonfinite=mask, progress=silent, ahead=ahead)
    assert waits.busy_s is None, "a CPU has no events"
    writer.seal()
    return path


def stored_of(path: Path) -> dict[str, bytes]:
    """Every file but the card, which is called after its folder."""
    return files_of(path, without=("README.md", "runs"))


def late_token(path: Path) -> int:
    """A token id that first occurs in block 1 or later."""
    reader = Reader.open(path)
    ids, first = np.unique(reader.column("token_id"), return_index=True)
    assert first.max() >= reader.block_range(1)[0]
    return int(ids[np.argmax(first)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Collected as on a CPU."""
    return collected(tmp_path_factory.mktemp("plain") / "store", 0)


@pytest.mark.parametrize("batch_tokens", [48, 10_000], ids=["many", "one a block"])
def test_the_bytes_are_the_same(batch_tokens: int, tmp_path: Path) -> None:
    one, other = (collected(tmp_path / f"{ahead}", ahead, batch_tokens=batch_tokens) for ahead in IN_FLIGHT)
    assert stored_of(one) == stored_of(other)


def test_a_pass_is_judged_after_the_next_is_launched_and_before_its_block_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    forward, judge, submit = flight.forward, Recorder.judge, loop.Pipeline.submit

    def launching(*given: Any) -> Any:
        calls.append("launch")
        return forward(*given)

    def judging(self: Recorder, launched: Any) -> Any:
        calls.append("judge")
        return judge(self, launched)

    def submitting(self: Any, buffer: Any, block: Any) -> None:
        calls.append("write")
        assert not np.isnan(block.columns["nll"][block.columns["target_id"] >= 0]).any()
        submit(self, buffer, block)

    monkeypatch.setattr(flight, "forward", launching)
    monkeypatch.setattr(Recorder, "judge", judging)
    monkeypatch.setattr(loop.Pipeline, "submit", submitting)
    collected(tmp_path / "store", 1)
    in_flight, most = 0, 0
    for call in calls:
        in_flight += {"launch": 1, "judge": -1, "write": 0}[call]
        most = max(most, in_flight)
    assert (in_flight, most) == (0, 2), "one computing, one beyond it"
    assert calls[:3] == ["launch", "launch", "judge"]
    assert calls.count("write") == 5
    assert calls[-2:] == ["judge", "write"]


class TwoLanes(Recorder):
    """As if the odd layers lay on another device: sizes, masks and copies of a pass come from two lanes."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._elsewhere: dict[torch.device, Lane] = {}

    def __call__(self, site: str, layer: int | None, tensor: Tensor) -> None:
        odd = bool(layer and layer % 2)
        self._lanes, self._elsewhere = (
            (self._elsewhere, self._lanes) if odd else (self._lanes, self._elsewhere)
        )
        super().__call__(site, layer, tensor)
        self._lanes, self._elsewhere = (
            (self._elsewhere, self._lanes) if odd else (self._lanes, self._elsewhere)
        )


@pytest.mark.parametrize("ahead", IN_FLIGHT)
def test_layers_on_two_devices(
    ahead: int, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one CPU can show of it; the copies themselves need two real devices."""
    token = late_token(plain)
    model = Planted(float("nan"), token, layer=1).model
    wanted = collected(tmp_path / "one", 0, model=model, mask=True)
    monkeypatch.setattr(loop, "Recorder", TwoLanes)
    assert stored_of(collected(tmp_path / "two", ahead, model=model, mask=True)) == stored_of(wanted)


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (70000.0, OutOfRange, r"\|value\| 70,000 does not fit float16"),
        (float("nan"), NotFinite, "not finite"),
    ],
)
def test_a_value_that_cannot_be_stored_is_named_as_without_delay(
    value: float, kind: type[NearlineError], says: str, plain: Path, tmp_path: Path
) -> None:
    token = late_token(plain)
    row = int(np.flatnonzero(Reader.open(plain).column("token_id") == token)[0])
    messages = []
    for ahead in IN_FLIGHT:
        prepared, writer = begun(tmp_path / f"{ahead}", Planted(value, token).model)
        with evaluating(prepared.anatomy.model, 1), pytest.raises(kind, match=says) as caught:
            run_blocks(prepared, writer, mask_nonfinite=False, progress=silent, ahead=ahead)
        assert writer.committed == set(range(row // prepared.planned.plan.block))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert f"`mlp_output` layer 1, token row {row:,} (token id {token}" in messages[0]


@pytest.mark.parametrize("ahead", IN_FLIGHT)
def test_masked_rows_are_those_that_are_not_finite(ahead: int, plain: Path, tmp_path: Path) -> None:
    model = Planted(float("inf"), late_token(plain)).model
    reader = Reader.open(collected(tmp_path / "store", ahead, model=model, mask=True))
    values = [reader.rows(site, 1, 0, reader.n_blocks) for site in ("residual", "mlp_output", "mlp_input")]
    values += [reader.rows(site, 2, 0, reader.n_blocks) for site in ("residual", "mlp_output", "mlp_input")]
    np.testing.assert_array_equal(reader.column("valid"), np.isfinite(np.stack(values)).all(axis=(0, 2)))
    assert not reader.column("valid").all()


@pytest.mark.parametrize("ahead", IN_FLIGHT)
def test_a_stop_keeps_the_block_that_was_launched_whole(ahead: int, tmp_path: Path) -> None:
    prepared, writer = begun(tmp_path / "store", batch_tokens=10_000)  # a batch is a block
    request, launched = StopRequest(), list[int]()

    def progress(stage: str, done: int, total: int, unit: str) -> None:
        launched.append(done)
        request.requested = len(launched) == 3

    with evaluating(prepared.anatomy.model, 1), pytest.raises(Interrupted, match="3 of 5 blocks"):
        run_blocks(
            prepared, writer, mask_nonfinite=False, progress=progress, watch=Watch(request), ahead=ahead
        )
    assert writer.committed == {0, 1, 2}


class Full:
    """A tiny model on a device that has memory for so many tokens at once, from the n-th pass on."""

    def __init__(self, most_tokens: int, after: int = 0) -> None:
        self.model, _ = tiny_model("llama")
        self.most_tokens, self.after, self.sizes = most_tokens, after, list[int]()
        self.model.model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.sizes.append(kwargs["input_ids"].numel())
        if self.sizes[-1] > self.most_tokens and len(self.sizes) > self.after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full")


@pytest.mark.parametrize("ahead", IN_FLIGHT)
def test_a_device_that_fills_up_later_ends_the_run_with_what_to_set(
    ahead: int, plain: Path, tmp_path: Path
) -> None:
    full = Full(0, after=3)
    prepared, writer = begun(tmp_path / "store", full.model)
    with evaluating(full.model, 1), pytest.raises(EnvironmentFault) as caught:
        run_blocks(prepared, writer, mask_nonfinite=False, progress=silent, ahead=ahead)
    n_safe, message = len(writer.committed), str(caught.value)
    assert n_safe
    assert f"ran out of memory (CUDA out of memory). {n_safe} of 5 blocks are committed and stay" in message
    assert "batch_tokens=48, begin another one" in message
    assert len(list((tmp_path / "store" / "blocks").glob("*.json"))) == n_safe
    full.most_tokens = 10**9
    again = StoreWriter(writer.path, writer.plan, writer.attributes)
    with evaluating(full.model, 1):
        run_blocks(prepared, again, mask_nonfinite=False, progress=silent, ahead=ahead)
    again.seal()
    assert stored_of(tmp_path / "store") == stored_of(plain)


def pinning_as_torch_does(tensor: Tensor) -> Tensor:
    """Into memory of the same strides, which cannot be written where an element stands for many."""
    pinned = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return pinned.copy_(tensor)


def test_every_input_of_a_pass_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", pinning_as_torch_does)
    ids = np.arange(12).reshape(3, 4)
    inputs = inputs_of(ids, ids < 11, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="more than one element"):
        pinning_as_torch_does(torch.arange(4).expand(3, 4))
    for value in inputs.values():
        assert value is not None
        assert moved(value, torch.device("meta")).shape == (3, 4)


def test_a_masked_row_that_overflows_too_is_named(plain: Path, tmp_path: Path) -> None:
    """What is not finite in a row hides nothing else that cannot be stored."""
    token = late_token(plain)
    row = int(np.flatnonzero(Reader.open(plain).column("token_id") == token)[0])
    both = Planted(float("nan"), token, layer=2)

    def overflow(module: Any, args: Any, output: Tensor) -> Tensor:
        return torch.where((both.ids == token)[..., None], 70000.0, output)

    both.model.model.layers[1].mlp.register_forward_hook(overflow)
    prepared, writer = begun(tmp_path / "store", both.model)
    with (
        evaluating(prepared.anatomy.model, 1),
        pytest.raises(OutOfRange, match=rf"layer 1, token row {row:,} \(token id {token}.*70,000"),
    ):
        run_blocks(prepared, writer, mask_nonfinite=True, progress=silent)

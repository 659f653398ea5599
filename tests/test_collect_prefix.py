"""Leaving out the blocks below a replaced MLP changes no bit, in any family, whatever the memory; where it
would, it is not done. Losses and divergences are those of the whole model's own logits.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers_harvest import harvested
from helpers_models import FAMILIES, KIN, NEW_FAMILIES, VOCAB_SIZE, tiny_config, tiny_model
from helpers_wirings import in_place, sequential, wired
from nearline.collect import losses
from nearline.collect.adapters import ADAPTERS
from nearline.collect.anatomy import Anatomy, anatomy
from nearline.collect.capture import first_tensor
from nearline.collect.forward import evaluating, final_hidden, inputs_of
from nearline.collect.interventions import parse_intervention
from nearline.collect.losses import base_scores, loss_and_kl
from nearline.collect.measured_windows import Cut
from nearline.collect.nll import token_nll
from nearline.collect.passes import Visit
from nearline.collect.prefix import Prefix
from nearline.collect.substitutes import LinearMap, Substitute
from nearline.collect.substitution import Substitution
from nearline.store import Reader
from torch import Tensor, nn

PLENTY = 2**30
LITTLE = 1  # so that one block's output is kept at a time
# Float32 log-softmax of logits near 10: a few roundings of 1e-6, in the KL weighted with p.
TOLERANCE = 5e-6
# One of each way to pass things on: flat rows and a norm behind the sum (OPT), alibi and tuples (BLOOM,
# Falcon), several rotary tables (Gemma 3), experts, a mask of their own in blocks (GPT-Neo), none at all.
SAMPLE = ("gpt2", "gemma3", "bloom", "falcon_rw", "opt", "opt_350m", "mixtral", "gpt_neo", "ctrl")
LENGTHS = (24, 17, 9)


def batch(*, padded: bool) -> tuple[np.ndarray, np.ndarray]:
    mask = np.arange(LENGTHS[0])[None, :] < np.array(LENGTHS)[:, None]
    ids = np.where(mask, np.random.default_rng(0).integers(3, VOCAB_SIZE, mask.shape), 0)
    return ids, mask if padded else np.ones_like(mask)


@contextmanager
def replaced(net: Anatomy, layer: int) -> Generator[None]:
    """Another MLP at one layer, by a hook that knows nothing of the code under test."""

    def other(_: nn.Module, __: Any, output: Any) -> Any:
        y = first_tensor(output)
        z = 0.3 * y + 0.1
        return z if isinstance(output, Tensor) else tuple(z if one is y else one for one in output)

    handle = net.layers[layer].mlp_last.register_forward_hook(other)
    try:
        yield
    finally:
        handle.remove()


def check_exact(net: Anatomy, room_bytes: int, *, padded: bool = True) -> None:
    """Final hidden states, nll and kl by way of the prefix are those of whole passes, bit for bit."""
    ids, mask = batch(padded=padded)
    inputs = inputs_of(ids, mask, net.device)
    where = torch.from_numpy(np.flatnonzero(mask))
    target = torch.from_numpy(np.roll(ids, -1, axis=1)[mask])

    def chosen(hidden: Tensor) -> Tensor:
        return hidden.flatten(0, 1)[where]

    with evaluating(net.model, None):
        prefix = Prefix(net, inputs, room_bytes)
        hidden = prefix.base()
        assert torch.equal(hidden, final_hidden(net, inputs))
        assert prefix.holds(hidden)
        base = base_scores(net, chosen(hidden), target, keep_bytes=PLENTY)
        for layer in range(net.n_layers):
            prefix.reach(layer)
            with replaced(net, layer):
                naive, reused = final_hidden(net, inputs), prefix.above(layer)
            assert torch.equal(naive, reused), f"layer {layer}"
            assert not torch.equal(naive, hidden), "the replacement does something"
            for one, other in zip(*(loss_and_kl(net, chosen(h), base) for h in (naive, reused)), strict=True):
                assert torch.equal(one, other)
        assert torch.equal(final_hidden(net, inputs), hidden), "the model is as it was"
    assert all("forward" not in vars(layer.block) for layer in net.layers)


@pytest.mark.sampled
def test_every_family_gives_the_same_bits(request: pytest.FixtureRequest) -> None:
    every = (*FAMILIES, *NEW_FAMILIES, *KIN)
    assert {tiny_config(family).model_type for family in every} == set(ADAPTERS), "every row has a tiny model"
    families = every if request.config.getoption("--run-long") else SAMPLE
    for family in families:
        net = anatomy(tiny_model(family)[0])
        check_exact(net, PLENTY)
        check_exact(net, LITTLE, padded=False)
    print(f"{len(families)} families")


def test_bfloat16_and_a_traced_model_that_writes_in_place_give_the_same_bits() -> None:
    check_exact(anatomy(tiny_model("llama", dtype=torch.bfloat16)[0]), PLENTY)

    def spoiling(b: Any, h: Tensor) -> Tensor:
        """Writes into what it was given, too: what is kept of the block before has to be a copy."""
        out = in_place(b, h)
        h.mul_(0.5)
        return out

    model = wired(in_place)
    net = anatomy(model)
    for block in model.base_model.blocks:
        block.wiring = spoiling
    for room in (PLENTY, LITTLE):
        check_exact(net, room, padded=False)


def deep_model(n_layers: int) -> Any:
    return wired(*[sequential] * n_layers)


class Counter:
    """Which blocks really ran."""

    def __init__(self, net: Anatomy) -> None:
        self.ran: list[int] = []
        for layer in net.layers:
            layer.attention.register_forward_pre_hook(lambda *_, index=layer.index: self.ran.append(index))

    def take(self) -> list[int]:
        ran, self.ran = self.ran, []
        return ran


def test_lower_blocks_do_not_run_and_memory_stays_in_its_bounds() -> None:
    n_layers = 6
    net = anatomy(deep_model(n_layers))
    ids, mask = batch(padded=False)
    inputs, counter = inputs_of(ids, mask, net.device), Counter(net)
    one_output = ids.size * net.d_model * 4
    with evaluating(net.model, None):
        for n_kept in (n_layers, 3, 1):
            prefix = Prefix(net, inputs, n_kept * one_output)
            prefix.base()
            counter.take()
            again: list[int] = []
            for layer in range(n_layers):
                prefix.reach(layer)
                again += counter.take()
                assert prefix.kept_bytes <= n_kept * one_output
                prefix.above(layer)
                assert counter.take() == list(range(layer, n_layers))
            # Each block behind those that were kept at first runs once more, and none twice.
            assert again == list(range(n_kept, n_layers - 1))


def test_layers_may_come_in_any_order() -> None:
    net = anatomy(deep_model(5))
    ids, mask = batch(padded=True)
    inputs = inputs_of(ids, mask, net.device)
    with evaluating(net.model, None):
        for room in (PLENTY, LITTLE):
            prefix = Prefix(net, inputs, room)
            hidden = prefix.base()
            for layer in (3, 1, 4, 0, 2, 2):
                with replaced(net, layer):
                    naive, unprepared = final_hidden(net, inputs), prefix.above(layer)
                prefix.reach(layer)
                with replaced(net, layer):
                    assert torch.equal(naive, prefix.above(layer))
                assert torch.equal(naive, unprepared)
            assert torch.equal(prefix.above(2), hidden)


def test_the_model_is_restored_after_an_error() -> None:
    net = anatomy(tiny_model("llama")[0])
    ids, mask = batch(padded=True)
    inputs = inputs_of(ids, mask, net.device)
    net.layers[0].block.forward = own = net.layers[0].block.forward  # as accelerate does

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    with evaluating(net.model, None):
        prefix = Prefix(net, inputs, PLENTY)
        hidden = prefix.base()
        handle = net.layers[2].mlp_last.register_forward_hook(broken)
        with pytest.raises(KeyboardInterrupt):
            prefix.above(1)
        handle.remove()
        assert vars(net.layers[0].block)["forward"] is own
        assert torch.equal(final_hidden(net, inputs), hidden)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_losses_and_divergences_are_those_of_the_full_logits(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CACHE_BYTES", 2 * 4 * VOCAB_SIZE)  # two rows at once
    model = tiny_model("gemma2")[0]
    model.config.final_logit_softcapping = softcap
    net = anatomy(model)
    ids, mask = batch(padded=False)
    inputs = inputs_of(ids, mask, net.device)
    target = torch.from_numpy(np.roll(ids, -1, axis=1).ravel())
    target[::7] = -1
    with evaluating(model, None):
        hidden, log_p = final_hidden(net, inputs).flatten(0, 1), full_log_p(model, ids)
        with replaced(net, 1):
            changed, log_q = final_hidden(net, inputs).flatten(0, 1), full_log_p(model, ids)
        few = 5 * 4 * VOCAB_SIZE  # portions of five rows
        bases = [
            base_scores(net, hidden, target, keep_bytes=keep, limit_bytes=few)
            for keep in (PLENTY, 3 * few, 0)
        ]
        found = [loss_and_kl(net, changed, base) for base in bases]
        own, nothing = loss_and_kl(net, hidden, bases[0])
    assert [base.kept_bytes for base in bases] == [4 * ids.size * VOCAB_SIZE, 3 * few, 0]
    for nll, kl in found[1:]:  # what is not kept is made again, to the bit
        assert torch.equal(kl, found[0][1])
        assert torch.equal(nll.nan_to_num(-1), found[0][0].nan_to_num(-1))
    nll, kl = found[0]
    has = target != -1
    rows = torch.arange(len(target))
    wanted = -log_q[rows, target.clamp(min=0)]
    torch.testing.assert_close(nll[has].double(), wanted[has], rtol=0, atol=TOLERANCE)
    assert torch.equal(nll.isnan(), ~has)
    torch.testing.assert_close(kl.double(), (log_p.exp() * (log_p - log_q)).sum(1), rtol=0, atol=TOLERANCE)
    assert kl.min() > 100 * TOLERANCE, "the models differ by far more than is rounded"
    # The same model gives the same bits, and no divergence at all; and its nll is that of the harvest.
    assert torch.equal(own.nan_to_num(-1), bases[0].nll.nan_to_num(-1))
    assert torch.equal(nothing, torch.zeros_like(nothing))
    torch.testing.assert_close(own, token_nll(net, hidden, target), rtol=0, atol=TOLERANCE, equal_nan=True)


def full_log_p(model: Any, ids: np.ndarray) -> Tensor:
    return torch.log_softmax(model(input_ids=torch.from_numpy(ids)).logits.double(), -1).flatten(0, 1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader.open(harvested(tmp_path_factory.mktemp("prefix") / "store", "gemma3"))


def linear(net: Anatomy, layer: int, name: str = "linear") -> Substitute:
    generator = torch.Generator().manual_seed(layer)
    weight = 0.1 * torch.randn(net.d_model, net.d_model, generator=generator)
    return Substitute(parse_intervention(name), layer, LinearMap(weight, torch.ones(net.d_model)))


def visited(net: Anatomy, reader: Reader, memory_limit: int) -> dict[Any, np.ndarray]:
    """Of every row that has a target: its number, nll, and by layers (nll, kl)."""
    scored = np.asarray(reader.column("target_id")) >= 0
    visit = Visit(net, reader, scored, memory_limit=memory_limit)
    found: dict[Any, list[Any]] = {}
    with evaluating(net.model, reader.attributes.compute.torch_threads):
        for one in visit.batches(range(reader.plan.n_blocks)):
            base = visit.base(one)
            found.setdefault("row", []).append(base.row)
            found.setdefault("base", []).append(base.nll)
            for layers in ((0,), (1,), (1, 2), (2,)):
                live = Substitution(net, {layer: linear(net, layer) for layer in layers})
                scores = visit.under(base, live, layers)
                found.setdefault(layers, []).append(torch.stack([scores.nll, scores.kl]))
            same = visit.under(
                base, Substitution(net, {1: Substitute(parse_intervention("none"), 1, None)}), [1]
            )
            assert torch.equal(same.nll, base.nll)
            assert not same.kl.any()
    assert visit.reuses_prefix is True
    return {
        name: np.concatenate([np.asarray(one) for one in parts], axis=-1) for name, parts in found.items()
    }


def test_a_visit_gives_the_losses_that_were_stored_and_the_same_whatever_the_memory(store: Reader) -> None:
    model = tiny_model("gemma3")[0]
    net = anatomy(model)
    plenty, little = (visited(net, store, limit) for limit in (PLENTY, LITTLE))
    stored = np.asarray(store.column("nll"))
    assert plenty["row"].tolist() == np.flatnonzero(~np.isnan(stored)).tolist()
    np.testing.assert_array_equal(plenty["base"], stored[plenty["row"]])
    assert all(np.array_equal(values, little[name]) for name, values in plenty.items())
    for layers in ((0,), (1, 2)):
        np.testing.assert_allclose(plenty[layers], one_by_one(net, store, layers), rtol=0, atol=TOLERANCE)


@contextmanager
def linearised(net: Anatomy, layer: int, covered: Tensor) -> Generator[None]:
    """By a hook, at the covered positions of one sequence."""
    replacement = linear(net, layer).replacement
    assert replacement is not None

    def other(_: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return torch.where(covered, replacement(args[0]), y)

    handle = net.layers[layer].mlp_last.register_forward_hook(other)
    try:
        yield
    finally:
        handle.remove()


def one_by_one(net: Anatomy, reader: Reader, layers: tuple[int, ...]) -> np.ndarray:
    """The slow twin: each sequence by itself, the whole model, replaced by a hook, all logits in float64."""
    out = []
    columns = {
        name: np.asarray(reader.column(name)) for name in ("token_id", "target_id", "special", "position")
    }
    offsets = reader.plan.row_offsets
    for start, stop in pairwise(offsets):
        ids, target = (
            torch.from_numpy(columns[name][start:stop]).long() for name in ("token_id", "target_id")
        )
        covered = ~columns["special"][start:stop] & (columns["position"][start:stop] != 0)
        keep = torch.from_numpy(covered)[:, None]
        with torch.inference_mode():
            log_p = full_log_p(net.model, ids[None].numpy())
            with ExitStack() as stack:
                for layer in layers:
                    stack.enter_context(linearised(net, layer, keep))
                log_q = full_log_p(net.model, ids[None].numpy())
        has = target >= 0
        nll = -log_q.gather(1, target.clamp(min=0)[:, None])[:, 0]
        kl = (log_p.exp() * (log_p - log_q)).sum(1)
        out.append(torch.stack([nll[has], kl[has]]).numpy())
    return np.concatenate(out, axis=1)


def test_a_new_batch_frees_what_the_last_one_kept(store: Reader) -> None:
    net = anatomy(tiny_model("gemma3")[0])
    visit = Visit(net, store, np.asarray(store.column("target_id")) >= 0, memory_limit=PLENTY)
    with evaluating(net.model, None):
        first, second = list(visit.batches([0]))[:2]
        base = visit.base(first)
        kept = base.prefix.kept_bytes, base.scores.kept_bytes
        assert kept == (3 * first.ids.size * 32 * 4, base.row.size * VOCAB_SIZE * 4)
        live = Substitution(net, {1: linear(net, 1)})
        before = visit.under(base, live, [1])
        visit.base(second)
        assert (base.prefix.kept_bytes, base.scores.kept_bytes) == (0, 0)
        after = visit.under(base, live, [1])
    assert torch.equal(before.nll, after.nll)
    assert torch.equal(before.kl, after.kl)


def test_windows_cut_anew_are_visited_too(store: Reader) -> None:
    net = anatomy(tiny_model("gemma3")[0])
    scored = np.zeros(store.n_tokens, bool)
    scored[5:40:3] = np.asarray(store.column("target_id"))[5:40:3] >= 0
    visit = Visit(net, store, scored, memory_limit=PLENTY)
    rows = []
    with evaluating(net.model, None):
        for one in visit.batches([0, 1], Cut(length=8)):
            assert one.ids.shape[1] <= 8
            rows += visit.base(one).row.tolist()
    assert rows
    assert set(rows) <= set(np.flatnonzero(scored).tolist())
    assert list(visit.batches([3])) == [], "no scored row in there"


def talking(*, loud: bool) -> Any:
    """Every block but the first adds what the first one gave, past the stream; the first does not run where
    its output is reused. `loud`: nothing is there then; else what an earlier pass left."""
    said: list[Tensor] = []

    def first(b: Any, h: Tensor) -> Tensor:
        said[:] = [sequential(b, h)]
        return said[0]

    def other(b: Any, h: Tensor) -> Tensor:
        return sequential(b, h) + 0.1 * said[0]

    model = wired(sequential, sequential, sequential)
    blocks = model.base_model.blocks
    net = anatomy(model)  # traced while all is well
    for index, block in enumerate(blocks):
        block.wiring = other if index else first
    if loud:
        blocks[0].register_forward_pre_hook(lambda *_: said.clear())
    return net


@pytest.mark.parametrize("loud", [False, True])
def test_where_blocks_speak_past_the_stream_every_pass_is_whole(
    store: Reader, caplog: pytest.LogCaptureFixture, *, loud: bool
) -> None:
    net = talking(loud=loud)
    visit = Visit(net, store, np.asarray(store.column("target_id")) >= 0, memory_limit=PLENTY)
    with evaluating(net.model, None):
        for one in visit.batches([0]):
            base = visit.base(one)
            for layer in range(3):
                live = Substitution(net, {layer: linear(net, layer)})
                found = visit.under(base, live, [layer])
                with live:
                    live.rows = base.rows
                    hidden = final_hidden(net, inputs_of(one.ids, one.mask, net.device))
                wanted = loss_and_kl(net, hidden.flatten(0, 1)[base.where], base.scores)
                assert torch.equal(found.nll, wanted[0])
                assert torch.equal(found.kl, wanted[1])
    assert visit.reuses_prefix is False
    assert caplog.text.count("every replacement runs the whole model") == 1

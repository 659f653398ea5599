"""Replaced MLPs: bit for bit the model where nothing is replaced, the slow way's numbers where something is,
in every family; each path for its own rows only; and nothing is left on the model, whatever happens.
"""

from pathlib import Path
from typing import Any

import helpers_wirings as wirings
import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from helpers_harvest import harvested
from helpers_models import FAMILIES, KIN, NEW_FAMILIES, tiny_model
from helpers_peft import with_lora
from helpers_substitution import (
    INPUTS,
    MASK,
    ROWS,
    SHAPE,
    covered_weight,
    exchanged,
    hidden_of,
    linear_map,
    other_rows,
    substitute,
    unchanged,
)
from nearline.analyze import AnalyzeSettings, FitSettings, analyze, fit
from nearline.analyze.gate_features import FEATURES, TypeMeans
from nearline.analyze.layers import layer_source
from nearline.collect import substitution
from nearline.collect.anatomy import Anatomy, anatomy
from nearline.collect.capture import Capture
from nearline.collect.forward import evaluating, final_hidden
from nearline.collect.gate_routing import GateRouter, LiveRows, gate_router
from nearline.collect.interventions import Intervention, parse_intervention, parse_interventions
from nearline.collect.nll import token_nll
from nearline.collect.norm_parameters import norm_parameters
from nearline.collect.passes import Visit
from nearline.collect.row_routers import ColumnRouter, RandomRouter, lowest, salt, type_router
from nearline.collect.substitutes import LinearMap, Replacement, Substitute, substitutes_of
from nearline.collect.substitution import Substitution
from nearline.collect.tracing import traced
from nearline.store import Reader, Study
from nearline.store.errors import IncompleteError, ProofFailed, UsageError
from torch import Tensor

# Other numbers of rows in a product sum float32 in another order: some 1e-7 of the largest value per layer.
TOLERANCE = 2e-5
# p is a float32 sigmoid of a float32 sum, made here of folded vectors and there of features.
P_TOLERANCE = 5e-6
# Rows whose MLP gives a tuple, is flat, is split, routes to experts, or stands in a parallel block.
SPECIAL_KIN = ("biogpt", "ctrl", "dbrx", "deepseek_v3", "gpt_oss", "granitemoe", "openai-gpt", "xglm")
LAYER = 1
UNKNOWN_BEFORE = ("target_type", "output_norm", "random", "oracle")
NO_TYPES = TypeMeans(np.zeros(0, np.int64), np.zeros(0, np.float32), np.float32(0.0))


def close(got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    """At the places that are not padding."""
    got, wanted = (one[torch.from_numpy(MASK)].float() for one in (got, wanted))
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


def plain(found: Anatomy) -> Tensor:
    with torch.inference_mode():
        return final_hidden(found, INPUTS)


# Names


@pytest.mark.parametrize(
    "name",
    (
        "none linear linear@all mean zero zero@all low_rank@16 gated@input gated@input:0.5 soft@norm "
        "gated@token_all+context_only.loss.pca6:0.25 random@0.5 random@0.5#3 oracle@error:0.5 oracle@0 "
        "token_list@0.5 token_list@loss:1"
    ).split(),
)
def test_a_name_is_read_as_it_is_written(name: str) -> None:
    assert parse_intervention(name).name == name


def test_equal_interventions_have_one_name() -> None:
    found = parse_interventions(
        ["random@0.50", "random@.5", " random@0.5", "oracle@error:1.0", "oracle@error:1"]
    )
    assert [one.name for one in found] == ["random@0.5", "oracle@error:1"]
    assert [one.name for one in found[0].draws(3)] == ["random@0.5#0", "random@0.5#1", "random@0.5#2"]
    assert found[1].draws(3) == (found[1],)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("liner", "did you mean linear"),
        ("gated", "a gate looks at one of input"),
        ("gated@", "has to follow the @"),
        ("gated@oracle", "oracle@NEED:SHARE routes by the need"),
        ("gated@random:0.5", "random@SHARE routes at random"),
        ("gated@target_type", "not known before the layer has run"),
        ("gated@input.loss.error", "one need and one size"),
        ("soft@input:0.5", "has no share"),
        ("linear@half", "write one of"),
        ("none@all", "write one of"),
        ("random", "no share of rows"),
        ("random@1.5", "no share of rows"),
        ("random@nan", "no share of rows"),
        ("oracle@:0.5", "cannot name a need"),
        ("linear#1", "only random@SHARE has draws"),
        ("random@0.5#-1", "only random@SHARE has draws"),
        ("low_rank@0", "whole number"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_intervention(name)


# Every family


def check_family(found: Anatomy) -> None:
    linear = linear_map(found.d_model)
    base = plain(found)
    wanted: dict[str, Tensor] = {
        "linear": covered_weight(),
        "linear@all": torch.ones(SHAPE),
        "random@0.5": covered_weight(RandomRouter(0.5, 7 + LAYER)),
    }
    with unchanged(found.model):
        for name in ("none", "random@0"):
            assert torch.equal(hidden_of(found, {LAYER: substitute(name, LAYER, linear)})[0], base), name
        got = {n: hidden_of(found, {LAYER: substitute(n, LAYER, linear)}) for n in wanted}
        everything, _ = hidden_of(found, {LAYER: substitute("random@1", LAYER, linear)})
    for name, weight in wanted.items():
        hidden, live = got[name]
        assert torch.equal(live.linear(LAYER), weight), name
        close(hidden, exchanged(found, LAYER, linear, weight))
        assert not torch.allclose(hidden[0], base[0], rtol=0, atol=100 * TOLERANCE), name
    assert torch.equal(everything, got["linear"][0])


@pytest.mark.parametrize("family", [*FAMILIES, *NEW_FAMILIES, *SPECIAL_KIN])
def test_every_family_gives_what_the_slow_way_gives(family: str) -> None:
    check_family(anatomy(tiny_model(family)[0]))


@pytest.mark.long
@pytest.mark.parametrize("family", [one for one in KIN if one not in SPECIAL_KIN])
def test_so_do_the_other_families(family: str) -> None:
    check_family(anatomy(tiny_model(family)[0]))


@pytest.mark.parametrize("wiring", ["sequential", "flat_span", "in_place"])
def test_so_do_models_without_a_row(wiring: str) -> None:
    check_family(anatomy(wirings.wired(getattr(wirings, wiring))))


@pytest.mark.parametrize("family", ["opt", "bloom", "mixtral"])
def test_so_do_traced_ones(family: str) -> None:
    check_family(traced(tiny_model(family)[0]))


def test_so_do_adapters_on_the_mlp() -> None:
    check_family(anatomy(with_lora(tiny_model("llama")[0])))


@pytest.mark.parametrize("family", ["llama", "opt", "granitemoe"])
def test_the_dtype_of_the_model_stays(family: str) -> None:
    found = anatomy(tiny_model(family, dtype=torch.bfloat16)[0])
    base, linear = plain(found), linear_map(found.d_model, dtype=torch.bfloat16)
    assert torch.equal(hidden_of(found, {LAYER: substitute("none", LAYER, linear)})[0], base)
    # Of the surrogate's product, rounded to 8 bits, and of all that follows.
    for dtype in (torch.float32, torch.bfloat16):
        linear = linear_map(found.d_model, dtype=dtype)
        hidden, live = hidden_of(found, {LAYER: substitute("random@0.5", LAYER, linear)})
        assert hidden.dtype is torch.bfloat16
        close(hidden, exchanged(found, LAYER, linear, live.linear(LAYER)), tolerance=0.05)


def test_offloaded_layers_are_replaced_too(tmp_path: Path) -> None:
    model, _ = tiny_model("llama")
    wanted, _ = hidden_of(anatomy(model), {LAYER: substitute("random@0.5", LAYER, linear_map(32))})
    parts = ("embed_tokens", "layers.0", "layers.2", "norm", "rotary_emb")
    places: dict[str, Any] = {f"model.{part}": "cpu" for part in parts}
    places |= {"model.layers.1": "disk", "lm_head": "cpu"}
    main: Any = "cpu"
    model: Any = dispatch_model(model, places, main_device=main, offload_dir=str(tmp_path))
    own = vars(model.model.layers[LAYER].mlp)["forward"]
    got, _ = hidden_of(anatomy(model), {LAYER: substitute("random@0.5", LAYER, linear_map(32))})
    assert torch.equal(got, wanted)
    assert vars(model.model.layers[LAYER].mlp)["forward"] is own


# What runs, and what it costs


@pytest.fixture(scope="module")
def llama() -> Anatomy:
    return anatomy(tiny_model("llama")[0])


class Counting:
    """A replacement that notes how many rows it is asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.rows = inner, list[int]()

    def __call__(self, x: Tensor) -> Tensor:
        self.rows.append(x.numel() // x.shape[-1])
        return self.inner(x)

    def on(self, device: torch.device) -> Replacement:
        return self


@pytest.mark.parametrize("family", ["llama", "opt", "mpt"])
def test_each_way_runs_for_its_own_rows_only(family: str) -> None:
    found = anatomy(tiny_model(family)[0])
    last = {"llama": "mlp.down_proj", "opt": "fc2", "mpt": "ffn.down_proj"}[family]
    ran: list[int] = []
    handle = (
        found.layers[LAYER]
        .block.get_submodule(last)
        .register_forward_hook(lambda _, args, __: ran.append(args[0].numel() // args[0].shape[-1]))
    )
    for name, n_linear in (("random@0.5", None), ("none", 0), ("linear@all", ROWS.row.size)):
        ran.clear()
        counted = Counting(linear_map(found.d_model))
        one = substitute(name, LAYER, counted.inner)
        _, live = hidden_of(
            found,
            {LAYER: one if name == "none" else Substitute(one.intervention, LAYER, counted, one.router)},
        )
        n_linear = int(live.linear(LAYER).sum()) if n_linear is None else n_linear
        # Where nothing is left for the MLP, one row shows what its answer looks like.
        assert ran == [max(1, ROWS.row.size - n_linear)]
        assert counted.rows == ([n_linear] if n_linear else [])
    handle.remove()


def test_the_mlp_in_its_own_place_is_the_model(llama: Anatomy) -> None:
    """The true MLP as its own surrogate, at every row: the undivided path changes no bit."""
    mlp = llama.layers[LAYER].mlp_first
    own = Counting(type(mlp).forward.__get__(mlp))
    hidden, _ = hidden_of(llama, {LAYER: Substitute(parse_intervention("linear@all"), LAYER, own)})
    assert torch.equal(hidden, plain(llama))
    assert own.rows == [ROWS.row.size]


@pytest.mark.parametrize("name", ["none", "random@0", "oracle@error:0", "gated@input:0", "token_list@0"])
def test_the_base_loss_stays_bit_for_bit(llama: Anatomy, name: str) -> None:
    routers = {
        "oracle@error:0": ColumnRouter(lowest(np.ones(40, np.float32), 0.0, 1, [np.arange(40)])),
        "gated@input:0": gate_on_input(llama, threshold=float("inf")),
        "token_list@0": type_router(NO_TYPES, ROWS.token_id.reshape(-1), 0.0, 1),
    }
    target = torch.from_numpy(np.where(MASK, np.roll(ROWS.token_id, -1, 1), -1).reshape(-1))
    one = substitute(name, LAYER, linear_map(32), routers.get(name))
    base, hidden = plain(llama), hidden_of(llama, {LAYER: one})[0]
    with torch.inference_mode():
        losses = [token_nll(llama, states.reshape(-1, 32), target) for states in (base, hidden)]
    assert torch.equal(losses[0].nan_to_num(0), losses[1].nan_to_num(0))
    assert int(losses[0].isfinite().sum()) == MASK.sum()


def gate_on_input(found: Anatomy, threshold: float, bias: float = 0.0) -> GateRouter:
    weight = np.random.default_rng(4).standard_normal(found.d_model).astype(np.float32)
    return gate_router(weight, bias, threshold, {"x": weight.size}, NO_TYPES)


def test_a_gate_routes_by_its_probability(llama: Anatomy) -> None:
    linear = linear_map(32)
    soft = substitute("soft@input", LAYER, linear, gate_on_input(llama, 0.5))
    mixed, live = hidden_of(llama, {LAYER: soft})
    p = live.linear(LAYER)
    assert 0 < float(p[torch.from_numpy(ROWS.covered)].min()) < 0.5 < float(p.max()) < 1
    close(mixed, exchanged(llama, LAYER, linear, p))
    hard = substitute("gated@input", LAYER, linear, gate_on_input(llama, 0.5))
    hidden, live = hidden_of(llama, {LAYER: hard})
    assert torch.equal(live.linear(LAYER), (p > 0.5).float())
    close(hidden, exchanged(llama, LAYER, linear, (p > 0.5).float()))
    everything = substitute("gated@input:1", LAYER, linear, gate_on_input(llama, -float("inf")))
    assert torch.equal(
        hidden_of(llama, {LAYER: everything})[0],
        hidden_of(llama, {LAYER: substitute("linear", LAYER, linear)})[0],
    )
    # A gate whose label had one class has no bias, and sends nobody.
    for name in ("gated@input", "soft@input"):
        nobody = substitute(name, LAYER, linear, gate_on_input(llama, 0.5, bias=float("nan")))
        assert torch.equal(hidden_of(llama, {LAYER: nobody})[0], plain(llama))


@pytest.mark.parametrize("family", ["opt", "gpt_oss", "falcon_7b"])
def test_soft_gates_mix_in_every_kind_of_span(family: str) -> None:
    found, linear = anatomy(tiny_model(family)[0]), linear_map(32)
    mixed, live = hidden_of(
        found, {LAYER: substitute("soft@input", LAYER, linear, gate_on_input(found, 0.5))}
    )
    close(mixed, exchanged(found, LAYER, linear, live.linear(LAYER)))


def test_a_gate_sees_what_was_there_before_a_model_wrote_over_it() -> None:
    """Blocks that write into the very tensor that entered them: the stream is gone when the MLP runs."""

    def written_over(b: Any, h: Tensor) -> Tensor:
        h += b.attn(b.n1(h))[0]
        return h + b.ff(b.n2(h))

    found, seen = anatomy(wirings.wired(written_over)), dict[tuple[str, int], Tensor]()

    def keep(site: str, layer: int, tensor: Tensor) -> None:
        seen[site, layer] = tensor.clone().reshape(-1, 32)

    with torch.inference_mode(), Capture(found, keep, sites=("embedding", "residual", "mlp_input")):
        final_hidden(found, INPUTS)
    weight = np.random.default_rng(5).standard_normal(64).astype(np.float32)
    gate = gate_router(
        weight, 0.1, 0.5, {"k": 32, "x": 32}, NO_TYPES, norm=norm_parameters(found.layers[LAYER].norm)
    )
    token, position = (torch.from_numpy(one.reshape(-1).copy()) for one in (ROWS.token_id, ROWS.position))
    x, residual, stream = seen["mlp_input", LAYER], seen["residual", LAYER], seen["embedding", 0]
    p = gate.probability(LiveRows(x, residual, stream, token, position))
    _, live = hidden_of(found, {LAYER: substitute("soft@context", LAYER, linear_map(32), gate)})
    assert torch.equal(live.linear(LAYER).reshape(-1), p * torch.from_numpy(ROWS.covered).reshape(-1))


def test_several_layers_at_once(llama: Anatomy) -> None:
    linear = linear_map(32)
    both = {layer: substitute("random@0.5", layer, linear) for layer in (0, 2)}
    hidden, live = hidden_of(llama, both)
    with Substitution(llama, {0: both[0]}) as outer:
        outer.rows = ROWS
        wanted = exchanged(llama, 2, linear, live.linear(2))
    close(hidden, wanted)
    assert {layer: one.covered for layer, one in live.counts.items()} == dict.fromkeys(
        (0, 2), ROWS.covered.sum()
    )
    assert live.counts[0].rows == MASK.sum()
    assert live.counts[0].linear == float(live.linear(0)[torch.from_numpy(MASK)].sum())
    assert not torch.equal(live.linear(0), live.linear(2))


# Nothing is left behind


class Breaking:
    """A replacement that fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, x: Tensor) -> Tensor:
        raise self.error

    def on(self, device: torch.device) -> Replacement:
        return self


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("family", ["opt", "qwen2_moe"])
def test_the_model_is_whole_after_a_failure(family: str, error: BaseException) -> None:
    found = anatomy(tiny_model(family)[0])
    base, parts = plain(found), gate_router(np.ones(64, np.float32), 0.0, 0.5, {"k": 32, "x": 32}, NO_TYPES)
    one = parse_intervention("soft@context")
    with unchanged(found.model):
        with pytest.raises(type(error)):
            hidden_of(found, {layer: Substitute(one, layer, Breaking(error), parts) for layer in range(3)})
    assert torch.equal(plain(found), base)


def test_the_model_is_whole_after_a_failed_beginning(llama: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third layer cannot be replaced: the first two are put back."""
    entered: list[int] = []

    class Late(substitution.Span):
        def enter(self) -> None:
            entered.append(len(entered))
            super().enter()
            if len(entered) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(substitution, "Span", Late)
    with unchanged(llama.model), pytest.raises(KeyboardInterrupt):
        hidden_of(llama, {layer: substitute("linear", layer, linear_map(32)) for layer in range(3)})
    assert len(entered) == 3


def test_one_substitution_at_a_time(llama: Anatomy) -> None:
    one = {LAYER: substitute("linear", LAYER, linear_map(32))}
    other = {0: substitute("linear", 0, linear_map(32))}
    with unchanged(llama.model), Substitution(llama, one):
        with pytest.raises(UsageError, match="replaced already"):
            Substitution(llama, other).__enter__()
    with Substitution(llama, other):
        pass


def test_what_cannot_be_told_apart_is_an_error(llama: Anatomy) -> None:
    one = {LAYER: substitute("random@0.5", LAYER, linear_map(32))}
    with pytest.raises(UsageError, match="layers 0-2"):
        Substitution(llama, {3: one[LAYER]})
    with pytest.raises(UsageError, match="set `rows` first"):
        hidden_of(llama, one, rows=None)
    fewer = other_rows(
        **{name: getattr(ROWS, name)[:2] for name in ("token_id", "position", "covered", "row")}
    )
    with pytest.raises(ProofFailed, match="given 33 rows where the pass has 22"):
        hidden_of(llama, one, rows=fewer)
    with torch.inference_mode(), Substitution(llama, one) as live:
        live.rows = ROWS
        with pytest.raises(ProofFailed, match="did not run"):
            live.linear(LAYER)
        final_hidden(llama, INPUTS)
        with pytest.raises(ProofFailed, match="ran twice"):
            final_hidden(llama, INPUTS)


# Routers by what is known of a row


def test_random_rows_are_nested_and_independent_of_their_batch() -> None:
    half, most = (RandomRouter(share, salt(3, 5, 1)).linear(ROWS) for share in (0.5, 0.8))
    assert not (half & ~most).any()
    assert half.sum() < most.sum()
    turned = other_rows(row=ROWS.row[::-1])
    assert np.array_equal(RandomRouter(0.5, salt(3, 5, 1)).linear(turned), half[::-1])
    others = {(seed, layer, draw) for seed in (0, 1) for layer in (0, 1) for draw in (0, 1)}
    assert len({salt(*one) for one in others}) == len(others)


def test_an_oracle_takes_the_smallest_needs_of_each_split() -> None:
    draw = np.random.default_rng(2)
    need = draw.standard_normal(1000).astype(np.float32)
    need[::10] = np.nan
    need[1:300:2] = 0.25  # ties
    splits = [np.arange(400), np.arange(500, 1000)]
    chosen = lowest(need, 0.3, 8, splits)
    assert not chosen[400:500].any()
    for rows in splits:
        known = rows[np.isfinite(need[rows])]
        assert chosen[known].sum() == round(0.3 * known.size)
        assert need[known][chosen[known]].max() <= need[known][~chosen[known]].min()
    unknown = np.flatnonzero(np.isnan(need[:400]))
    assert 0 < chosen[unknown].sum() < unknown.size
    assert not lowest(need, 0.0, 8, splits).any()
    assert lowest(need, 1.0, 8, splits).sum() == 900


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.77, 1.0])
def test_a_token_list_meets_its_share(share: float) -> None:
    draw = np.random.default_rng(6)
    types = np.arange(50)
    means = TypeMeans(types, np.round(draw.random(50), 1).astype(np.float32), np.float32(0.5))
    ids = draw.choice(60, (40, 500), p=np.arange(60, 0, -1) / 1830)  # some have no mean of their own
    rows = other_rows(
        token_id=ids,
        position=np.ones_like(ids),
        covered=np.ones(ids.shape, bool),
        row=np.arange(ids.size).reshape(ids.shape),
    )
    sent = type_router(means, ids.reshape(-1), share, 9).linear(rows)
    # Only ties are drawn: a binomial of at most 20,000 rows has a standard deviation below 0.0036.
    assert sent.mean() == pytest.approx(share, abs=0.01 if 0 < share < 1 else 0)
    if 0 < share < 1:
        needs = means.of(ids.reshape(-1)).reshape(ids.shape)
        assert needs[sent].max() <= needs[~sent].min()


# A study's substitutes


class Fitted:
    """A tiny model, its store, and a study with gates."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, model = family, tiny_model(family)[0]
        self.path = harvested(folder / "store", model=model, storage_dtype="float32")
        fit(folder / "study", [self.path], FitSettings(folds=2))
        asked = AnalyzeSettings(only=("gates",), layers=str(LAYER), need=("error",), folds=2, c_grid=(0.1,))
        analyze(folder / "study", asked)
        self.study, self.reader = Study.open(folder / "study"), Reader.open(self.path)
        self.found = anatomy(model)
        self.rows = self.study.rows("store")
        self.split = np.asarray(self.rows["split"].to_pylist())

    def substitute(self, name: str, layer: int = LAYER, **options: Any) -> Substitute:
        return substitutes_of(self.study, name, [layer], anatomy=self.found, **options)[layer]

    def weights(self, *names: str) -> dict[str, np.ndarray]:
        """How much of each row of the store came from the replacement, by the name of an intervention."""
        visit = Visit(self.found, self.reader, np.ones(self.split.size, bool), memory_limit=2**24)
        made = {name: self.substitute(name, store="store") for name in names}
        found = {name: np.full(self.split.size, np.nan) for name in names}
        with evaluating(self.found.model, 1):
            for batch in visit.batches(range(self.reader.n_blocks)):
                base = visit.base(batch)
                for name, one in made.items():
                    live = Substitution(self.found, {LAYER: one})
                    visit.under(base, live, [LAYER])
                    found[name][batch.row] = live.linear(LAYER).numpy()[batch.mask]
        return found

    def gate_and_test(self) -> tuple[np.ndarray, np.ndarray]:
        """Their rows in the routing table and in the store: out of fold, and scored."""
        token = self.study.routing(LAYER, "error", "store")["token"].to_numpy()
        return token[self.split[token] == "gate"], token[self.split[token] == "test"]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def fitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    return Fitted(request.param, tmp_path_factory.mktemp(request.param))


def test_a_live_gate_says_what_it_said_offline(fitted: Fitted) -> None:
    routing = fitted.study.routing(LAYER, "error", "store")
    token = routing["token"].to_numpy()
    test = fitted.split[token] == "test"
    names = [f"soft@{features}" for features in FEATURES if f"{features}@linear" in routing.column_names]
    asked = [name for name in names if name.removeprefix("soft@") not in UNKNOWN_BEFORE]
    assert len(asked) == (12 if fitted.family == "gpt2" else 11)  # gpt2 has a part of positions
    for name, p in fitted.weights(*asked).items():
        wanted = routing[name.replace("soft@", "") + "@linear"].to_numpy()
        np.testing.assert_allclose(p[token][test], wanted[test], rtol=0, atol=P_TOLERANCE, err_msg=name)


def test_thresholds_are_those_of_the_gates_or_of_a_share_of_gate_rows(fitted: Fitted) -> None:
    gates = fitted.study.group("gates")
    chosen = fitted.substitute("gated@input").router
    assert isinstance(chosen, GateRouter)
    index = {"gate": gates.attrs["gates"].index("input@linear"), "need": 0}
    assert chosen.threshold == float(gates["threshold"].sel(layer=LAYER).isel(index))
    gate, _ = fitted.gate_and_test()
    routing = fitted.study.routing(LAYER, "error", "store")
    p = routing["input@linear"].to_numpy()[np.isin(routing["token"].to_numpy(), gate)]
    for share in (0.25, 0.5):
        router = fitted.substitute(f"gated@input:{share}").router
        assert isinstance(router, GateRouter)
        assert abs(np.mean(p > router.threshold) - share) <= 1 / p.size
    found = fitted.weights("linear", "gated@input:0", "gated@input:1")
    assert not found["gated@input:0"].any()
    assert np.array_equal(found["gated@input:1"], found["linear"])
    body = (fitted.rows["position"].to_numpy() > 0) & ~np.asarray(fitted.rows["special"].to_pylist())
    assert np.array_equal(found["linear"] == 1, body)


def test_the_share_of_a_token_list_and_an_oracle(fitted: Fitted) -> None:
    gate, test = fitted.gate_and_test()
    need = fitted.study.need(LAYER, "store")["error"].to_numpy()
    found = fitted.weights("oracle@error:0.3", "token_list@0.3", "random@0.3#1", "random@0.3#2")
    oracle, listed = found["oracle@error:0.3"], found["token_list@0.3"]
    for rows in (gate, test):
        assert oracle[rows].sum() == round(0.3 * rows.size)
        assert need[rows][oracle[rows] == 1].max() <= need[rows][oracle[rows] == 0].min()
    # Ties are drawn: the largest type has about a twentieth of the rows.
    assert abs(listed[gate].mean() - 0.3) < 3 * np.sqrt(0.25 / 20 / gate.size) + 1 / gate.size
    assert not np.array_equal(found["random@0.3#1"], found["random@0.3#2"])


def test_replacements_are_what_the_study_has(fitted: Fitted) -> None:
    x = np.random.default_rng(3).standard_normal((20, 32)).astype(np.float32)
    arrays = fitted.study.surrogates().sel(layer=LAYER)
    weight, bias, mean_y = (arrays[name].to_numpy() for name in ("weight", "bias", "mean_y"))
    wanted = {
        "linear": x @ weight.T + bias,
        "linear@all": x @ weight.T + bias,
        "mean": np.tile(mean_y, (20, 1)),
        "zero": np.zeros((20, 32)),
        "low_rank@32": x @ weight.T + bias,  # of all ranks: the map itself
    }
    for name, values in wanted.items():
        made = fitted.substitute(name).replacement
        assert made is not None
        np.testing.assert_allclose(made(torch.from_numpy(x)), values, rtol=1e-4, atol=1e-4, err_msg=name)
    rounded = fitted.substitute("linear", dtype=torch.bfloat16).replacement
    assert isinstance(rounded, LinearMap)
    assert rounded(torch.from_numpy(x)).dtype is torch.bfloat16


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_a_map_of_low_rank_scores_what_the_fit_says(fitted: Fitted, rank: int) -> None:
    """R² on test rows, by rows here and by moments there."""
    made = fitted.substitute(f"low_rank@{rank}").replacement
    assert made is not None
    source, (_, test) = layer_source(fitted.reader, LAYER), fitted.gate_and_test()
    blocks = [source.inputs(block) for block in range(fitted.reader.n_blocks)]
    x, y = (np.concatenate([one[side] for one in blocks])[test] for side in (0, 1))
    mean_y = fitted.study.surrogates()["mean_y"].sel(layer=LAYER).to_numpy()
    error = np.square(y - made(torch.from_numpy(x)).numpy()).sum() / np.square(y - mean_y).sum()
    (wanted,) = (
        row["r2_test"]
        for row in fitted.study.table("ranks").to_pylist()
        if (row["layer"], row["rank"]) == (LAYER, rank)
    )
    assert 1 - error == pytest.approx(wanted, abs=1e-5)  # float32 rows against float64 moments


def test_what_a_study_lacks_is_said_in_a_sentence(fitted: Fitted, tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("linear", {"layer": 7}, "layer 7 was not fitted in .*; it has 0-2"),
        ("gated@input", {"layer": 0}, "layer 0 has no gates in .*; it has 1. .*--layers 0` makes them"),
        ("gated@input.loss", {}, "has gates for error.*--need error,loss` makes them"),
        ("gated@input", {"need": "kl"}, "need=kl: .* has gates for error"),
    ]
    for name, options, says in cases:
        with pytest.raises(UsageError, match=says):
            fitted.substitute(name, **options)
    if fitted.family == "llama":
        with pytest.raises(UsageError, match="has no gate position_part@linear; it has input@linear"):
            fitted.substitute("gated@position_part")
    bare = Study.create(tmp_path / "study")
    for name, says in (("linear", "is not fitted yet"), ("gated@input", "is not fitted yet")):
        with pytest.raises(IncompleteError, match=says):
            substitutes_of(bare, name, [0])
    fit(tmp_path / "study", [fitted.path], FitSettings(folds=2))
    with pytest.raises(
        IncompleteError, match=r"has no gates yet: run `nearline analyze .* --only gates` first"
    ):
        substitutes_of(Study.open(tmp_path / "study"), Intervention("gated", features="input"), [0])

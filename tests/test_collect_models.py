"""Loading and describing models: identity without paths, no network for local ones, one sentence per
failure.
"""

import copy
import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import FAMILIES, smollm2_path, tiny_config, tiny_model, tiny_tokenizer
from huggingface_hub import errors as hub
from nearline.collect import pretrained, sources
from nearline.collect.hashes import config_hash, weights_hash
from nearline.collect.loading_faults import explain
from nearline.collect.models import LoadedModel, describe, load, outline
from nearline.collect.pretrained import guarded
from nearline.collect.sites import sites
from nearline.collect.sources import Source
from nearline.store.errors import EnvironmentFault, NearlineError, UsageError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GgufConfig, modeling_gguf_pytorch_utils

SECRET = "hf_" + "a1B2" * 8


def saved(folder: Path, family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    tiny_model(family, seed=seed, dtype=dtype)[0].save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_comes_back_unmodified(family: str, tmp_path: Path, no_network: None) -> None:
    folder = saved(tmp_path / "some-model", family)
    found = load(str(folder))
    wanted, _ = tiny_model(family)
    state = found.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.state_dict().items())
    assert (found.name, found.revision) == ("some-model", None)
    assert found.weights_hash == weights_hash(wanted)
    assert not found.model.training
    assert not any(parameter.requires_grad for parameter in found.model.parameters())
    config: Any = found.model.config
    assert found.attention == config._attn_implementation
    assert found.tokenizer is not None
    ids = found.tokenizer("the same text", add_special_tokens=False)["input_ids"]
    assert ids == tiny_tokenizer()("the same text", add_special_tokens=False)["input_ids"]


def test_identity_does_not_depend_on_the_place_or_the_dtype_asked_for(tmp_path: Path) -> None:
    one = load(str(saved(tmp_path / "here" / "model")))
    two = load(str(saved(tmp_path / "there" / "model")), dtype="float32")
    half = load(str(tmp_path / "here" / "model"), dtype="bfloat16")
    assert identity(one) == identity(two)
    assert half.config_hash == one.config_hash
    assert half.weights_hash != one.weights_hash
    assert str(tmp_path) not in json.dumps(identity(one))


def identity(found: LoadedModel) -> list[str | None]:
    return [found.name, found.revision, found.config_hash, found.weights_hash]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_dtype_is_the_checkpoints(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = str(saved(tmp_path / "model", dtype=dtype))
    assert next(load(folder).model.parameters()).dtype is dtype
    assert next(load(folder, dtype="float32").model.parameters()).dtype is torch.float32


def test_weights_hash_sees_values_and_names_and_not_where_they_lie() -> None:
    model, _ = tiny_model("gpt2")
    first = weights_hash(model)
    assert first == weights_hash(copy.deepcopy(model))
    assert first != weights_hash(tiny_model("gpt2", seed=1)[0])
    untied = copy.deepcopy(model)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.clone())
    assert weights_hash(untied) == first
    with torch.no_grad():
        untied.lm_head.weight[7, 3] += 1e-6
    assert weights_hash(untied) != first
    with torch.no_grad():
        model.transformer.h[2].mlp.c_fc.bias[5] += 1e-6
    assert weights_hash(model) != first


def test_weights_hash_sees_a_cast_that_rounds_rotary_frequencies(tmp_path: Path) -> None:
    folder = str(saved(tmp_path / "model"))
    loaded, cast = load(folder, dtype="bfloat16"), load(folder, dtype="float32").model.to(torch.bfloat16)
    state = cast.state_dict()
    assert all(torch.equal(state[name], one) for name, one in loaded.model.state_dict().items())
    ids = torch.arange(3, 60)[None]
    assert not torch.equal(loaded.model(ids).logits, cast(ids).logits)
    assert weights_hash(cast) != loaded.weights_hash == load(folder, dtype="bfloat16").weights_hash


def test_config_hash_sees_settings_only() -> None:
    config = tiny_config("llama")
    first = config_hash(config)
    config._name_or_path = "/somewhere/else"
    assert config_hash(config) == first
    config.quantization_config = GgufConfig(gguf_file="model.gguf")  # as `from_pretrained` leaves it
    assert config_hash(config) == first
    config.rms_norm_eps = 1e-5
    assert config_hash(config) != first


def test_a_live_model_is_described_as_it_is() -> None:
    model, _ = tiny_model("gpt_neox")
    model.train()
    found = describe(model, tiny_tokenizer(), "mine")
    assert (found.name, found.revision) == ("mine", None)
    assert found.model is model
    assert model.training
    assert describe(model).name == "gpt_neox"
    model.config._name_or_path = "owner/name"
    assert describe(model).name == "owner/name"
    for path in ("/data/folder/name", "../folder/name", "~/name", "folder/of/name", r"C:\folder\name"):
        model.config._name_or_path = path  # of a folder that may be gone
        assert describe(model).name == "name"


def test_a_model_without_weights_in_memory_has_no_identity(tmp_path: Path) -> None:
    empty = outline(str(saved(tmp_path / "model")))
    with pytest.raises(UsageError, match="is not in memory"):
        describe(empty)


def test_bundled_names_come_before_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "elsewhere", "gpt2")
    monkeypatch.setattr(sources, "bundled_path", lambda name: folder)
    assert load("tiny-gpt2").name == "tiny-gpt2"


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_need_a_config_only(family: str, tmp_path: Path, no_network: None) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    rows = sites(str(tmp_path))
    assert {"embedding", "residual", "mlp_input", "mlp_output"} <= {row["site"] for row in rows}


def test_sites_of_a_gguf_file(no_network: None) -> None:
    folder, file = smollm2_path()
    rows = sites(str(folder), gguf_file=file)
    assert [row["layers"] for row in rows] == ["-", *["0-29"] * 4]
    assert rows[1]["module"] == "input of model.layers.{i}.post_attention_layernorm"


def test_pickles_only_when_allowed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    torch.save(tiny_model("llama")[0].state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"only as a pickle .*allow_pickle"):
        load(str(folder))
    assert load(str(folder), allow_pickle=True).weights_hash == weights_hash(tiny_model("llama")[0])


def one_sentence(error: NearlineError, *words: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 500
    assert SECRET not in text
    for word in words:
        assert word in text


def refusal(model: str | Path, kind: type[NearlineError] = UsageError, **options: Any) -> NearlineError:
    with pytest.raises(kind) as caught:
        load(str(model), **options)
    return caught.value


def test_what_is_not_a_model_is_refused(tmp_path: Path, no_network: None) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")
    one_sentence(refusal(file), "is a file", "gguf_file 'weights.gguf'")
    one_sentence(refusal(tmp_path / "missing"), "no such folder", "tiny-gpt2")
    one_sentence(refusal("not a name!"), "not a hub id")
    one_sentence(refusal(tmp_path), "no config.json", "gguf_file: weights.gguf")
    one_sentence(refusal(tmp_path, gguf_file="other.gguf"), "no file 'other.gguf'", "weights.gguf")
    one_sentence(refusal(tmp_path, gguf_file="weights.gguf"), "weights.gguf is no whole GGUF file (4 bytes)")
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    one_sentence(refusal(text), "a model is a folder")


def test_a_slip_in_a_bundled_name_is_answered_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: pytest.fail("a look-up"))
    slips = {"tiny-gpt-2": "tiny-gpt2", "tiny_pythia": "tiny-pythia", "tiny-gpt": "tiny-gpt2"}
    for slip, meant in slips.items():
        error = refusal(slip)
        one_sentence(error, slip, f"did you mean {meant!r}?")
        assert "network" not in str(error)


def test_a_folder_without_tokenizer_files_is_loaded_for_ids(tmp_path: Path, no_network: None) -> None:
    tiny_model("gpt2")[0].save_pretrained(tmp_path)
    found = load(str(tmp_path))
    assert found.tokenizer is None
    assert found.weights_hash == weights_hash(tiny_model("gpt2")[0])
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    one_sentence(refusal(tmp_path), "could not be loaded")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_and_attention_are_what_was_asked_for(dtype: str, attention: str, tmp_path: Path) -> None:
    found = load(str(saved(tmp_path / "model")), dtype=dtype, attention=attention)
    assert found.attention == attention
    assert {parameter.dtype for parameter in found.model.parameters()} == {getattr(torch, dtype)}


def test_folders_that_lack_something_are_refused(tmp_path: Path, no_network: None) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    one_sentence(refusal(empty), "has no config.json")
    tiny_config("llama").save_pretrained(empty)
    one_sentence(refusal(empty), "holds no weights")
    tiny_model("llama")[0].save_pretrained(empty)
    (empty / "model.safetensors").write_bytes(b"\x10")
    one_sentence(refusal(empty), "could not be loaded")
    (empty / "config.json").write_text('{"model_type": "no_such_type"}')
    one_sentence(refusal(empty), "family, 'no_such_type', that the installed transformers does not know")
    code = '{"model_type": "mine", "auto_map": {"AutoConfig": "own.Config"}}'
    (empty / "config.json").write_text(code)
    one_sentence(refusal(empty), "brings code of its own", "set trust_remote_code")
    error = refusal(empty, trust_remote_code=True)
    one_sentence(error, "own.py")
    assert str(tmp_path) not in str(error)
    (empty / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    one_sentence(refusal(empty), "'hidden_size': ", "int")
    (empty / "config.json").write_text('{"model_type": "bert"}')
    one_sentence(refusal(empty), "family 'bert' cannot be harvested", "encoder")
    (empty / "config.json").write_text("{")
    one_sentence(refusal(empty), "could not be loaded")


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    one_sentence(refusal(folder), "lack 1 of the weights", "model.layers.1.mlp.up_proj.weight")


def test_weights_of_another_config_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}), encoding="utf-8")
    one_sentence(refusal(folder), "weights of other shapes than its config.json says")


def test_the_commit_is_read_from_a_cache_wherever_it_is() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    path = Path("/disk/snapshots/hub/models--a--b/snapshots") / commit / "snapshots/config.json"
    assert pretrained.commit_of(path) == commit


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    one_sentence(refusal(folder, dtype="int8"), "int8", "auto, float32, bfloat16, float16")
    one_sentence(refusal(folder, device="tpuu"), "tpuu", "cpu, cuda")
    one_sentence(refusal(folder, revision="main"), "local folder and has no revisions")
    one_sentence(refusal(folder, attention="no_such"), "no_such", "Allowed here: eager, sdpa")
    one_sentence(refusal(folder, attention="flash_attention_2"), "flash-attn", "Allowed here: eager, sdpa")
    if not torch.cuda.is_available():
        one_sentence(refusal(folder, EnvironmentFault, device="cuda"), "no CUDA device")


def test_a_hub_id_without_network(no_network: None) -> None:
    for name in ("gpt2", "owner/model-1.5B"):
        error = refusal(name, EnvironmentFault)
        one_sentence(error, name, "no folder here", "hub cannot be reached", "tiny-pythia")
        assert error.exit_code == 4


def test_secrets_of_a_request_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model")
    said = (
        f"\nbad header Authorization: Bearer {SECRET} for https://u:{SECRET}@host/x?token={SECRET} {SECRET}"
    )

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(said)

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    error = refusal(folder)
    one_sentence(error, "could not be loaded", "bad header")
    # Not in a printed traceback either.
    assert error.__suppress_context__
    assert error.__cause__ is None


class _Response:
    """The little of an HTTP response that the hub's errors look at."""

    def __init__(self, status: int) -> None:
        self.status_code, self.headers, self.request = status, {}, None


@pytest.mark.parametrize(
    ("kind", "status", "exit_code", "words"),
    [
        (hub.GatedRepoError, 403, 2, "is gated"),
        (hub.RepositoryNotFoundError, 404, 2, "neither a folder here nor on the hub"),
        (hub.RevisionNotFoundError, 404, 2, "no such revision"),
        (hub.RemoteEntryNotFoundError, 404, 2, "lacks a needed file"),
        (hub.HfHubHTTPError, 503, 4, "HTTP 503"),
    ],
)
def test_answers_of_the_hub_are_translated(kind: Any, status: int, exit_code: int, words: str) -> None:
    source = Source("owner/name", "owner/name", local=False, gguf_file=None)
    inner = kind(f"401 for {SECRET}", response=_Response(status))
    outer = OSError("transformers wraps it")
    outer.__cause__ = inner
    for error in (inner, outer):
        found = explain(error, source)
        one_sentence(found, words)
        assert found.exit_code == exit_code


def test_memory_and_transport_are_the_environments_fault() -> None:
    source = Source("owner/name", "owner/name", local=False, gguf_file=None)
    for error in (MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), TimeoutError()):
        assert explain(error, source).exit_code == 4


def test_our_own_errors_pass_through_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model")
    mine = UsageError("said once")
    monkeypatch.setattr(pretrained.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: _raise(mine))
    assert refusal(folder) is mine


def _raise(error: Exception) -> Any:
    raise error


def test_a_load_is_quiet_and_puts_back_what_it_silenced(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("torchao.kernel.intmm", "torch.utils._pytree", "accelerate.big_modeling")
    levels: list[int] = []
    torch_logger = logging.getLogger("torch.utils._pytree")

    def talk() -> None:
        assert list(modeling_gguf_pytorch_utils.tqdm([1, 2], desc="Converting")) == [1, 2]
        for name in names:
            logging.getLogger(name).warning("a kernel is not for this machine")
            logging.getLogger(name).error("something is wrong in %s", name)

    source = Source("owner/name", "owner/name", local=False, gguf_file=None)
    guarded(source, talk)
    assert capsys.readouterr().out == ""
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    assert {record.name for record in caplog.records} >= {names[0], names[2]}, "errors come through"
    assert torch_logger.level == logging.getLogger("torchao").level == logging.NOTSET
    list(modeling_gguf_pytorch_utils.tqdm([1, 2], desc="Converting"))
    assert "Converting" in capsys.readouterr().err, "and elsewhere all is as it was"
    monkeypatch.setattr(torch_logger, "level", logging.INFO)
    guarded(source, lambda: levels.append(torch_logger.level))
    assert levels == [logging.INFO]
    assert torch_logger.level == logging.INFO, "it was set on purpose"

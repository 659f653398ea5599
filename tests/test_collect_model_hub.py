"""Models on a hub: everything from one commit, and each refusal of the hub in one sentence without a token.

A hub on 127.0.0.1 and the real clients, in one process of their own that loads what it is told and prints
what came of it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_hub import TOKEN
from helpers_model_hub import FakeModelHub
from helpers_models import tiny_model, tiny_tokenizer
from helpers_peft import with_lora
from nearline.collect.hashes import config_hash, weights_hash

CHILD = """
import json, sys
from nearline.collect.models import load
from nearline.store.errors import NearlineError

for name, options in json.loads(sys.stdin.read()):
    try:
        found = load(name, **options)
        said = {key: getattr(found, key) for key in "name revision config_hash weights_hash adapters".split()}
        said["tokenizer"] = found.tokenizer is not None
    except NearlineError as error:
        said = {"error": str(error), "exit_code": error.exit_code}
    print(json.dumps(said))
"""
ASKED: dict[str, tuple[str, dict[str, str]]] = {
    "plain": ("org/llama", {}),
    "tag": ("org/llama", {"revision": "v1"}),
    "wrong revision": ("org/llama", {"revision": "v2"}),
    "gated": ("org/gated", {}),
    "missing": ("org/misspelt", {}),
    "without weights": ("org/pickles", {}),
    "without tokenizer": ("org/ids", {}),
    "down": ("down/model", {}),
    "adapter": ("org/llama", {"adapter": "org/lora"}),
    "adapter as model": ("org/lora", {}),
    "adapter missing": ("org/llama", {"adapter": "org/misspelt"}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hub")
    save_all(folder)
    with FakeModelHub() as hub:
        hub.fill("org/llama", folder / "model")
        hub.fill("org/gated", folder / "model")
        hub.gated.add("org/gated")
        hub.fill("org/pickles", folder / "model", without=("model.safetensors",))
        hub.fill("org/ids", folder / "model", without=("tokenizer.json", "tokenizer_config.json"))
        hub.fill("org/lora", folder / "adapter")
        child = subprocess.run(
            [sys.executable, "-c", CHILD],
            input=json.dumps(list(ASKED.values())),
            env=hub.environment(folder / "hf_home"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.returncode == 0, child.stderr
        assert TOKEN not in child.stdout + child.stderr
        assert f"Bearer {TOKEN}" in hub.tokens
        said = dict(zip(ASKED, map(json.loads, child.stdout.splitlines()), strict=True))
        return {**said, "commit": hub.commit("org/llama"), "seen": hub.seen}


def save_all(folder: Path) -> None:
    model, _ = tiny_model("llama")
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    with_lora(model).save_pretrained(folder / "adapter")


def test_everything_comes_from_the_commit_that_is_recorded(answers: dict[str, Any]) -> None:
    model, config = tiny_model("llama")
    for how in ("plain", "tag"):
        found = answers[how]
        assert found["name"] == "org/llama"
        assert found["revision"] == answers["commit"]
        assert found["weights_hash"] == weights_hash(model)
        assert found["config_hash"] == config_hash(config)
        assert found["tokenizer"]
    # A branch that moved meanwhile would give files of two commits.
    files = [line for line in answers["seen"] if "/org/llama/resolve/" in line and "/v2/" not in line]
    assert files
    assert all(f"/{answers['commit']}/" in line for line in files if not line.endswith("/main/config.json"))


def test_a_model_without_a_tokenizer_is_loaded_for_ids(answers: dict[str, Any]) -> None:
    assert answers["without tokenizer"]["tokenizer"] is False
    assert answers["without tokenizer"]["weights_hash"] == answers["plain"]["weights_hash"]


def test_an_adapter_of_the_hub_is_put_on(answers: dict[str, Any]) -> None:
    found = answers["adapter"]
    assert (found["name"], found["adapters"]) == ("org/llama+org/lora", ["org/lora"])
    assert found["weights_hash"] == weights_hash(with_lora(tiny_model("llama")[0]).get_base_model())


@pytest.mark.parametrize(
    ("how", "exit_code", "words"),
    [
        ("gated", 2, ["org/gated", "is gated", "HF_TOKEN", "hf auth login"]),
        ("missing", 2, ["org/misspelt", "neither a folder here nor on the hub", "HF_TOKEN"]),
        ("wrong revision", 2, ["org/llama", "no such revision"]),
        ("without weights", 2, ["org/pickles", "no safetensors", "allow_pickle"]),
        ("down", 4, ["down/model", "the hub cannot be reached", "tiny-gpt2"]),
        ("adapter as model", 2, ["org/lora", "config.json", "named as adapter"]),
        ("adapter missing", 2, ["adapter 'org/misspelt'", "neither a folder here nor on the hub"]),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    answers: dict[str, Any], how: str, exit_code: int, words: list[str]
) -> None:
    text = answers[how]["error"]
    assert answers[how]["exit_code"] == exit_code
    assert "\n" not in text
    assert "127.0.0.1" not in text
    for word in words:
        assert word in text, text

"""A shelf of models and data as first users bring them, most of them wrong in one way each."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from helpers_harvest import texts
from helpers_models import tiny_config, tiny_model, tiny_tokenizer
from transformers import BertConfig, CLIPVisionConfig, LlamaConfig, LlavaConfig, MambaConfig, T5Config

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 160,
}


def stock(shelf: Path) -> None:
    """Fill a folder: `llama` and `docs.jsonl` are a sound model and corpus, the rest what it is called."""
    _models(shelf)
    _texts(shelf)


def _models(shelf: Path) -> None:
    model, _ = tiny_model("llama")
    tokenizer = tiny_tokenizer()
    for name in ("llama", "no-tokenizer"):
        model.save_pretrained(shelf / name)
    for name in ("no-weights", "pickle"):
        tiny_config("llama").save_pretrained(shelf / name)
    for name in ("llama", "no-weights", "pickle"):
        tokenizer.save_pretrained(shelf / name)
    torch.save(model.state_dict(), shelf / "pickle/pytorch_model.bin")
    (shelf / "gguf").mkdir()
    (shelf / "gguf/model.Q4.gguf").write_bytes(b"GGUF")
    vision = CLIPVisionConfig(hidden_size=32, num_attention_heads=2)
    configs = {
        "encoder": BertConfig(**_SMALL),
        "encoder-decoder": T5Config(d_model=32, num_layers=2, vocab_size=160),
        "recurrent": MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=160),
        "multimodal": LlavaConfig(vision_config=vision, text_config=LlamaConfig(**_SMALL)),
    }
    for name, config in configs.items():
        config.save_pretrained(shelf / name)
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    raw = {"unheard-of": {"model_type": "strange9"}, "own-code": {"model_type": "mine9", "auto_map": code}}
    for name, content in raw.items():
        (shelf / name).mkdir()
        (shelf / name / "config.json").write_text(json.dumps(content), encoding="utf-8")
    for name in (*configs, *raw):
        (shelf / name / "model.safetensors").write_bytes(b"")  # never read: the config is refused before
    lora = {"peft_type": "LORA", "base_model_name_or_path": "/gone/base", "task_type": "CAUSAL_LM", "r": 4}
    (shelf / "adapter").mkdir()
    (shelf / "adapter/adapter_config.json").write_text(json.dumps(lora | {"target_modules": ["q_proj"]}))


def _texts(shelf: Path) -> None:
    rows = {
        "docs.jsonl": [{"text": text} for text in texts()],
        "numbers.jsonl": [{"text": number} for number in range(3)],
        "mixed.jsonl": [{"text": "a text"}, {"text": [5, 6, 7]}],
        "blank.jsonl": [{"text": ""}, {"text": ""}],
        "void.jsonl": [],
        "lists.jsonl": [[5, 6]],
    }
    for name, content in rows.items():
        (shelf / name).write_text("".join(f"{json.dumps(row)}\n" for row in content), encoding="utf-8")
    pq.write_table(pa.table({"body": texts(), "number": list(range(60))}), shelf / "docs.parquet")
    (shelf / "text.parquet").write_text("no Parquet", encoding="utf-8")
    np.save(shelf / "ids.npy", np.arange(3, 900))
    np.save(shelf / "floats.npy", np.ones(3))
    (shelf / "text.npy").write_text("no array", encoding="utf-8")
    (shelf / "keys.txt").write_text("no-such-key\n", encoding="utf-8")
    _data_set(shelf / "dataset")


def _data_set(path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    try:
        data = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts()})})
        data.save_to_disk(str(path))
    finally:
        datasets.enable_progress_bars()

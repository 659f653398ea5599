"""The two language models that this project trained and ships, by name. Names and paths only, no torch."""

from pathlib import Path

BUNDLED = ("tiny-gpt2", "tiny-pythia")


def bundled_path(name: str) -> Path:
    """The folder of a bundled model: config.json, model.safetensors, tokenizer files and training.json."""
    if name not in BUNDLED:
        raise KeyError(f"{name!r} is no bundled model; they are {', '.join(BUNDLED)}")
    return Path(__file__).parent / "bundled" / name

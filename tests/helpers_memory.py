"""What a process holds while a harvest runs, looked at from the progress callback after chosen batches.

As a program (`python helpers_memory.py FOLDER`), because the memory of a process can only be judged in a
process of its own: harvest a tiny model, plant a leak after the last look at the sound run, look on, and
print what was seen.
"""

import gc
import json
import sys
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers_harvest import WORDS
from helpers_models import tiny_model, tiny_tokenizer
from nearline.collect.available import process_bytes
from nearline.collect.harvesting import harvest

LOOKS = (50, 100, 200)  # batches after which is looked
LEAKING = (275, 350)  # the same, with a hook that keeps what it sees from batch 200 on
ROWS, D_MODEL = 256, 32  # of a batch: four sequences


@dataclass
class Watch:
    """A progress callback that looks at what is held."""

    n_batches: int = 0
    kept_bytes: int = 0  # of tensors that the planted leak holds; it holds a numpy copy of each as well
    seen: dict[int, dict[str, int]] = field(default_factory=dict)

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        if stage != "collect":
            return
        self.n_batches += 1
        if self.n_batches in (*LOOKS, *LEAKING):
            gc.collect()
            self.seen[self.n_batches] = {**look(), "kept": self.kept_bytes}


def look() -> dict[str, int]:
    """Bytes: of all live tensors, of what Python and numpy allocated, of the process, of the GPU."""
    return {
        "tensors": tensor_bytes(),
        "allocated": tracemalloc.get_traced_memory()[0],
        "process": own_bytes(),
        "gpu": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
    }


def tensor_bytes() -> int:
    """Of every tensor made since the start. Shared memory counts once, so views count nothing."""
    found = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    storages = (one.untyped_storage() for one in found if one.device.type != "meta")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def own_bytes() -> int:
    """Memory of this process's own; pages of its libraries come and go as the system likes."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    own = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")]
    return own[0] if own else process_bytes()


def long_run(path: Path, model: Any, watch: Watch) -> Path:
    """A harvest of some more batches than are looked at, in blocks of ten batches."""
    tokens, random = (LEAKING[-1] + 20) * ROWS, np.random.default_rng(0)
    documents = [" ".join(random.choice(WORDS, size=tokens // 30)) for _ in range(60)]
    sizes = {"sequence_length": 64, "min_length": 8, "batch_tokens": ROWS, "block": 10 * ROWS}
    # One layer keeps the store small; one thread, since tiny products would mostly wait for each other.
    settings = {"tokens": tokens, "layers": "1", "threads": 1, **sizes}
    return harvest(model, tiny_tokenizer(), documents, path, progress=watch, **settings)


def main(folder: Path) -> None:
    model, watch = tiny_model("llama")[0], Watch()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    kept: list[Any] = []

    def keep(module: Any, args: Any, output: torch.Tensor) -> None:
        """As a careless capture does."""
        if watch.n_batches >= LOOKS[-1]:
            kept.append((output, output.cpu().numpy().copy()))
            watch.kept_bytes += output.untyped_storage().nbytes()

    model.model.layers[1].mlp.register_forward_hook(keep)
    gc.freeze()  # what is there now is no concern of the looks, which are quicker without it
    tracemalloc.start()
    long_run(folder / "store", model, watch)
    print(json.dumps(watch.seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

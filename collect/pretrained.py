"""The calls of transformers that read a config, weights and a tokenizer, each guarded.

In: a `Source` and options. Out: what transformers made of it; of a hub id, everything from the one commit
that the revision named when it was first asked for. Cost: that of the load. Whatever transformers raises
becomes an error of ours, in one sentence.
"""

import logging
import re
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from ..store.errors import NearlineError, UsageError
from .loading_faults import explain
from .sources import Source, hub_unreachable

_Result = TypeVar("_Result")
# They warn of what a load brings about, or of a GPU's kernels that a first import finds no use for.
_TALKATIVE = ("torchao", "torch.utils._pytree", "accelerate.big_modeling")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# A tokenizer is in one of these, or in code of its own.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
    "tokenization_*.py",
)


def shared_options(source: Source, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Options of every call."""
    cached_only = source.local or hub_unreachable()
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": cached_only}
    if revision is not None:
        options["revision"] = revision
    if source.gguf_file is not None:
        options["gguf_file"] = source.gguf_file
    return options


def read_config(source: Source, shared: dict[str, Any]) -> Any:
    return guarded(source, lambda: AutoConfig.from_pretrained(source.where, **shared))


def first_file(source: Source, shared: dict[str, Any]) -> Path:
    """The file that the config came from; of a hub id, its copy in the cache."""
    name = source.gguf_file or "config.json"
    if source.local:
        return Path(source.where) / name
    found = cached_file(source.where, name, revision=shared.get("revision"), local_files_only=True)
    return Path(str(found))


def commit_of(path: Path) -> str:
    """The commit whose file this is, in the hub's cache: snapshots/COMMIT/…"""
    parts = path.parts
    return next(part for above, part in pairwise(parts) if above == "snapshots" and _COMMIT.fullmatch(part))


def read_weights(
    source: Source, config: Any, shared: dict[str, Any], *, allow_pickle: bool, **options: Any
) -> Any:
    """The model. GGUF is unpacked: packed weights would compute in float32 whatever dtype was asked for."""
    plain = {} if source.gguf_file is None else {"quantization_config": GgufConfig(dequantize=True)}
    loaded: Any = guarded(
        source,
        lambda: AutoModelForCausalLM.from_pretrained(
            source.where,
            config=config,
            use_safetensors=None if allow_pickle or source.gguf_file else True,
            output_loading_info=True,
            **plain,
            **options,
            **shared,
        ),
    )
    net, report = loaded
    _refuse_invented(source, report)
    return net


def empty_model(source: Source, config: Any, trust_remote_code: bool) -> Any:
    """The modules alone, on whatever device is torch's default."""
    return guarded(
        source, lambda: AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    )


def read_tokenizer(source: Source, folder: Path, shared: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """None where the model comes without one: ids can be collected then. `folder`: where its files are."""
    if source.local and not _has_tokenizer(source, folder):
        return None
    try:
        return guarded(source, lambda: AutoTokenizer.from_pretrained(source.where, **shared))
    except UsageError:
        if _has_tokenizer(source, folder):
            raise
        return None


def guarded(source: Source, action: Callable[[], _Result]) -> _Result:
    """Run one call of transformers; whatever it raises becomes an error of ours."""
    try:
        with _quiet():
            return action()
    except NearlineError:
        raise
    except Exception as error:
        # Only library calls pass here, and their exceptions have no common type. `from None`: the original's
        # text may quote a request.
        raise explain(error, source) from None


@contextmanager
def _quiet() -> Generator[None]:
    """No progress bars, which are the caller's to show, and of some loggers errors only, unless their level
    was set on purpose."""
    from transformers import modeling_gguf_pytorch_utils as gguf

    with ExitStack() as stack:
        if transformers_logging.is_progress_bar_enabled():
            stack.callback(transformers_logging.enable_progress_bar)
            transformers_logging.disable_progress_bar()
        if bar := getattr(gguf, "tqdm", None):  # one that the switch above does not reach
            stack.callback(setattr, gguf, "tqdm", bar)
            setattr(gguf, "tqdm", partial(bar, disable=True))  # noqa: B010
        for logger in map(logging.getLogger, _TALKATIVE):
            if logger.level == logging.NOTSET:
                stack.callback(logger.setLevel, logging.NOTSET)
                logger.setLevel(logging.ERROR)
        yield


def _has_tokenizer(source: Source, folder: Path) -> bool:
    return source.gguf_file is not None or any(
        True for pattern in _TOKENIZER_FILES for _ in folder.glob(pattern)
    )


def _refuse_invented(source: Source, report: Any) -> None:
    """transformers fills in random numbers for weights that a checkpoint lacks, and only warns."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise UsageError(
            f"model {source.name!r}: its files lack {len(missing)} of the weights that its config asks "
            f"for, the first is {missing[0]!r}. Give a complete checkpoint of a causal language model."
        )

"""Everything that steers a harvest, in one flat frozen value.

In: keyword arguments, a TOML table or command line flags, all under the same names. Out: a validated
`HarvestSettings`, or one sentence that names the wrong key, the nearest right one and what is allowed.
Cost: none. Numbers that follow from the model (the length of a window, the block) are left at None here
and resolved by the harvest, so that a settings file stays valid for another model.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import Field

from ..store.dtypes import GRADIENT
from ..store.errors import UsageError
from ..store.settings import parse_bytes, parse_layers, parse_settings
from .max_memory import DeviceMap, MaxMemory, OffloadFolder, parse_max_memory
from .setting_values import Duration, Layers, Share, Sites, Size, TokenIds, parse_ids
from .site_names import DEFAULT_SITES, MOMENTS_SITES, parse_sites
from .stopping import parse_duration

Count = Annotated[int, Field(ge=1)]
DEFAULT_SEQUENCE_LENGTH: Final = 512
DEFAULT_BATCH_TOKENS: Final = {"cpu": 4096, "cuda": 16384}


class HarvestSettings(pydantic.BaseModel):
    """What to harvest and how. Each field has a default and a sentence."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    model: str = Field(default="tiny-gpt2", description="A bundled model, a local folder or a Hub id.")
    corpus: str = Field(
        default="docs:python",
        description="docs:python, docs:scientific, docs:stdlib, text:PATH, jsonl:PATH[:FIELD], "
        "parquet:PATH[:COLUMN], hf:NAME[:CONFIG[:SPLIT[:COLUMN]]] or ids:PATH (.npy; "
        "one dimension is a stream, two are one document a row).",
    )
    tokens: Count = Field(
        default=100_000, description="Token rows to store; a shorter corpus lowers it and says so."
    )
    layers: Layers = Field(default=None, description="Layers to store, such as 0-5,8; default: all.")
    sites: Sites = Field(
        default=None,
        description="Sites to store: embedding, residual, mlp_output, mlp_input, mlp_output_grad, or all; "
        "default: the first three; +mlp_output_grad: these and the gradient of the loss there.",
    )
    max_documents: Count | None = Field(
        default=None, description="Read only so many documents of the corpus; default: all."
    )
    include: str | None = Field(
        default=None, description="File with the keys of the documents to take, one a line; default: all."
    )
    exclude: str | None = Field(
        default=None, description="File with the keys of documents to leave out, one a line."
    )
    keep: Share = Field(
        default=None, description="Keep a seeded share of the sequences, such as 1/8 or 12.5%; default: all."
    )
    join: Literal["auto", "never", "wikitext"] = Field(
        default="auto",
        description="Whether rows are joined into articles; auto does so where they look like WikiText.",
    )
    streaming: bool = Field(
        default=False, description="Read an hf: dataset as a stream; give max_documents with it."
    )
    separator: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Token id that ends a document of ids: input; default: the tokenizer's EOS token.",
    )
    exclude_tokens: TokenIds = Field(
        default=None,
        description="Token ids, such as 11,50256, whose rows count as special and enter no fit.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Compute dtype; auto keeps the checkpoint's own."
    )
    storage_dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        default=None, description="Stored dtype; default: the compute dtype, float16 for a float32 model."
    )
    sequence_length: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="Rows of one forward window; default: 512, or the model's limit if that is lower.",
    )
    min_length: Count = Field(
        default=16, description="Windows with fewer rows, such as a document's tail, are dropped."
    )
    batch_tokens: Count | None = Field(
        default=None, description="Padded tokens of one forward pass; default: 4096 on a CPU, 16384 on a GPU."
    )
    block: Count | None = Field(
        default=None,
        description="Token rows of one block, the unit of commit; default: from sizes and memory.",
    )
    bos: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether each window starts with the BOS token; auto follows the tokenizer.",
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N.")
    revision: str | None = Field(default=None, description="Commit, branch or tag of a Hub model.")
    gguf_file: str | None = Field(default=None, description="Name of a GGUF file inside the model's folder.")
    adapter: str | None = Field(
        default=None, description="A PEFT adapter to put on the model: a local folder or a Hub id."
    )
    device_map: DeviceMap = Field(
        default=None,
        description="Spread the model over devices, main memory and disk; default: all on one device.",
    )
    max_memory: MaxMemory = Field(
        default=None, description="With device_map: the most that each takes, such as 0=20GiB,cpu=64GiB."
    )
    offload_folder: OffloadFolder = Field(
        default=None, description="With device_map: a folder for weights that fit nowhere else."
    )
    attention: str | None = Field(
        default=None, description="Attention implementation; default: the model's own choice."
    )
    trust_remote_code: bool = Field(default=False, description="Run code that ships with the model.")
    allow_pickle: bool = Field(
        default=False, description="Load weights that are not safetensors (this can run code)."
    )
    seed: int = Field(default=0, description="Order of documents and their splits.")
    threads: Count | None = Field(
        default=None, description="Torch's intra-op threads (recorded); default: torch's own."
    )
    memory_limit: Size = Field(
        default=None,
        description="Limit for block buffers, such as 4 GiB; default: 4 GiB.",
    )
    compressor: Literal["zstd"] | None = Field(
        default=None, description="Lossless compressor of chunks; default: none."
    )
    on_nonfinite: Literal["stop", "mask"] = Field(
        default="stop",
        description="A NaN or infinity stops the run, or its row is stored with valid = false.",
    )
    max_time: Duration = Field(
        default=None,
        description="Stop cleanly before this much time has passed, such as 7h30m; default: no limit.",
    )
    rank: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Which of world_size processes this is, from 0; default: torchrun's, or 0."
    )
    world_size: Count | None = Field(
        default=None, description="How many processes share the blocks; default: torchrun's, or 1."
    )
    moments_only: bool = Field(
        default=False,
        description="Store no rows but the sums that surrogates are fitted on, summed while the model runs.",
    )
    folds: Annotated[int, Field(ge=2, le=100)] = Field(
        default=5, description="With moments_only: folds over groups of documents, as `fit` has them."
    )
    fold_seed: Annotated[int, Field(ge=0)] = Field(
        default=0, description="With moments_only: seed of the folds, the `seed` of `fit`."
    )

    @pydantic.field_validator("folds", "fold_seed")
    @classmethod
    def _only_of_moments(cls, value: int, info: pydantic.ValidationInfo) -> int:
        name = str(info.field_name)
        if value != cls.model_fields[name].default and not info.data.get("moments_only"):
            raise UsageError(
                f"{name}={value}: rows are stored without folds, `fit` makes them; set moments_only too to "
                "store sums by fold"
            )
        return value

    @pydantic.field_validator("moments_only")
    @classmethod
    def _nothing_about_rows_that_are_not_stored(cls, value: bool, info: pydantic.ValidationInfo) -> bool:
        given = {name: info.data.get(name) for name in ("sites", "compressor", "rank", "world_size")}
        useless = [f"{name}={found}" for name, found in given.items() if found is not None]
        if value and info.data.get("on_nonfinite") == "mask":
            raise UsageError(
                "on_nonfinite=mask goes with rows that are stored: a layer is summed before the next one "
                "shows whether a row is masked; use on_nonfinite=stop, or harvest the rows"
            )
        if value and useless:
            raise UsageError(
                f"{' and '.join(useless)} go with rows that are stored; here one process sums `residual` and "
                "`mlp_output` and stores no rows: leave this out"
            )
        return value

    @property
    def max_time_s(self) -> float | None:
        """The time limit in seconds."""
        return None if self.max_time is None else parse_duration(self.max_time)

    @property
    def kept_share(self) -> Fraction | None:
        """The share of the sequences to keep; None: all."""
        return None if self.keep is None else Fraction(self.keep)

    @property
    def excluded_ids(self) -> tuple[int, ...]:
        """The token ids that count as special beside the tokenizer's own."""
        return () if self.exclude_tokens is None else parse_ids(self.exclude_tokens)

    @property
    def n_sums(self) -> int:
        """Sums of a layer that moments have: by fold, of test, and of the sink rows of both; 0: rows are
        stored."""
        return self.folds + 3 if self.moments_only else 0

    @property
    def memory_limit_bytes(self) -> int | None:
        """The limit as a number; None where the harvest shall take 4 GiB."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    @property
    def chosen_sites(self) -> tuple[str, ...]:
        """The sites to store, or to sum, in the order in which a store lists them."""
        if self.moments_only:
            return MOMENTS_SITES
        return DEFAULT_SITES if self.sites is None else parse_sites(self.sites)

    @property
    def differentiates(self) -> bool:
        """Whether each forward pass is followed by a backward pass."""
        return GRADIENT in self.chosen_sites

    @property
    def max_memory_bytes(self) -> dict[int | str, int] | None:
        """The most that each device takes, by its number or "cpu"."""
        return None if self.max_memory is None else parse_max_memory(self.max_memory)

    def resolve_layers(self, n_layers: int) -> list[int]:
        """The layers to store of a model that has `n_layers`."""
        if self.layers is None:
            return list(range(n_layers))
        chosen = parse_layers(self.layers)
        if chosen[-1] >= n_layers:
            raise UsageError(
                f"layers={self.layers}: this model has layers 0-{n_layers - 1}. "
                "`nearline sites MODEL` lists what it offers."
            )
        return chosen


def parse(data: Mapping[str, Any]) -> HarvestSettings:
    """Settings from named values; an unknown key or a wrong value is one sentence with what is allowed."""
    return parse_settings(HarvestSettings, data)

"""Where the model of a study is and how it is loaded: fields of every step that visits it again.

In: keyword arguments, a TOML table or flags of the same names. Out: the base that the settings of `measure`
and of `finetune` share. Where a field is left open, the harvest's own is taken. Cost: none; no torch is
loaded.
"""

from typing import Annotated, Final

import pydantic
from pydantic import Field

Count = Annotated[int, Field(ge=1)]

# They say where the model is, never what it computes: its weights and configuration are compared with the
# digests that its stores hold.
PLACE_FIELDS: Final = frozenset({"model", "gguf_file", "adapter", "trust_remote_code", "allow_pickle"})


class LiveModelSettings(pydantic.BaseModel):
    """The part of the settings by which a model is found and loaded."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(
        default=None,
        description="Where the model is: a bundled model, a local folder or a Hub id; default: where the "
        "harvest had it.",
    )
    revision: str | None = Field(
        default=None, description="Commit, branch or tag of a Hub model; default: the store's own."
    )
    gguf_file: str | None = Field(default=None, description="Name of a GGUF file inside the model's folder.")
    adapter: str | None = Field(
        default=None, description="The PEFT adapter that was on the model: a local folder or a Hub id."
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N.")
    attention: str | None = Field(
        default=None, description="Attention implementation; default: that of the harvest."
    )
    trust_remote_code: bool = Field(default=False, description="Run code that ships with the model.")
    allow_pickle: bool = Field(
        default=False, description="Load weights that are not safetensors (this can run code)."
    )
    threads: Count | None = Field(
        default=None, description="Torch's intra-op threads; default: that of the harvest."
    )

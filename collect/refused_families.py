"""Families that can never be harvested, refused by name and in one sentence: why, and what to give instead.

In: a transformers config. Out: nothing, or a UsageError. Cost: a look at the config. What is not refused here
may still have no row in adapters.py; it is traced then, and the start-up proof decides.
"""

from typing import Any

from ..store.errors import UsageError

_DECODER = "Give a decoder-only causal language model whose blocks are attention and MLP."

_RECURRENT = (
    "its layers (all or some) mix tokens by a recurrence or a convolution, so that not every block is "
    "attention and MLP around one residual stream. " + _DECODER
)
_ENCODER = (
    "it is an encoder, whose positions see the tokens after them, so the loss of a next token means nothing. "
    + _DECODER
)
_ENCODER_DECODER = "its decoder attends to an encoder. " + _DECODER
_NO_STREAM = {
    "blt": "it works on patches of bytes that a second model cuts, not on tokens. " + _DECODER,
    "diffusion_gemma": "it fills a whole text in by steps of diffusion and has no next token. " + _DECODER,
    "hrm_text": "it runs the same blocks several times for one token. " + _DECODER,
    "reformer": "its layers are reversible, with two streams in place of one residual. " + _DECODER,
    "xlm": "its default reads tokens on both sides, and languages beside them. " + _DECODER,
    "xlnet": "it predicts tokens in permuted order, in two streams. " + _DECODER,
}
_RECURRENT_FAMILIES = (
    "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lara_mini lfm2 lfm2_moe "
    "lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next "
    "qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2"
).split()
_ENCODERS = (
    "albert bert bert-generation big_bird camembert canine convbert data2vec-text deberta deberta-v2 "
    "distilbert electra ernie esm eurobert flaubert fnet funnel ibert layoutlm longformer megatron-bert "
    "mobilebert modernbert mpnet mra nomic_bert nystromformer rembert roberta roberta-prelayernorm "
    "roc_bert roformer splinter squeezebert xlm-roberta xlm-roberta-xl xmod yoso"
).split()
_ENCODER_DECODERS = (
    "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart "
    "mt5 musicgen_decoder mvp nllb-moe pegasus pegasus_x plbart prophetnet rag seamless_m4t speech_to_text "
    "switch_transformers t5 t5gemma trocr udop umt5 whisper"
).split()

REFUSED: dict[str, str] = {
    **dict.fromkeys(_RECURRENT_FAMILIES, _RECURRENT),
    **dict.fromkeys(_ENCODERS, _ENCODER),
    **dict.fromkeys(_ENCODER_DECODERS, _ENCODER_DECODER),
    **_NO_STREAM,
}
"""What is wrong with a family and what to give instead, by model type."""

# Kinds of layers, as configs list them, that are no attention over the residual stream.
_RECURRENT_KINDS = frozenset({"conv", "linear_attention", "mamba", "recurrent"})


def refuse_family(config: Any) -> None:
    """Raise UsageError for a family that cannot be harvested: encoders, hybrids, wrappers of a text model."""
    reason = REFUSED.get(config.model_type) or _reason(config)
    if reason is not None:
        raise UsageError(f"model family {config.model_type!r} cannot be harvested: {reason}")


def _reason(config: Any) -> str | None:
    """What the config itself says, for families without a name above."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return _ENCODER_DECODER
    text = config.get_text_config()
    if text is not config:
        return f"it takes more than text. Give the language model inside it alone{_class_of(text)}."
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return _RECURRENT if _RECURRENT_KINDS.intersection(kinds) else None


def _class_of(text: Any) -> str:
    """How to load a text model by itself, where transformers has a class for it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if text.model_type in REFUSED or text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ", as a causal language model of its own"
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]
    return f": transformers.{name}, family {text.model_type!r}"

"""Small tokenizers of every make, built in memory."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

TEXTS = [
    "The dog's ball\n    rolled over 12,345 hills.\n\n",
    "naïve 東京 🙂 \x00\t end",
    "a<|endoftext|>b </s>",
]
TRAINING = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 20]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content | trim }}<|im_end|>\n{% endfor %}"
)
SPELLED = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def fast(backend: Tokenizer, **tokens: object) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


def byte_level(vocabulary: int = 400, **tokens: object) -> PreTrainedTokenizerFast:
    """As GPT-2's: BOS and EOS are one token, and it is not added unless asked for."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING, trainer)
    return fast(backend, **(SPELLED | tokens))


def sentencepiece(*, first: bool = False, **tokens: object) -> PreTrainedTokenizerFast:
    """As Llama's and Gemma's: ▁ for spaces, byte fallback, BOS put in front. `first`: a space in front of a
    text, and only there."""
    words = ["▁", "▁the", "▁dog", "e", "t", "h", "o", "d", "g", "s", "▁▁"]
    known = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    backend = Tokenizer(
        models.BPE({token: i for i, token in enumerate(known)}, [], byte_fallback=True, unk_token="<unk>")
    )
    if first:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return fast(backend, **(named | tokens))


def word_pieces() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "walk": 1, "##ing": 2, "▁odd": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return fast(backend, unk_token="[UNK]")


def for_chats(
    tokenizer: PreTrainedTokenizerFast, template: str = CHATML, **flags: bool
) -> PreTrainedTokenizerFast:
    """With control tokens, whose flags may be given, and a template that writes them."""
    controls = [
        AddedToken(one, special=True, normalized=False, **flags) for one in ("<|im_start|>", "<|im_end|>")
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": controls})
    tokenizer.chat_template = template
    return tokenizer

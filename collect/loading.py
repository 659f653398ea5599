"""Model and corpus as settings name them, for every command that runs a model over a corpus.

In: settings. Out: the corpus and the loaded model, or the first thing that is wrong with either, in one
sentence. Cost: reading both; the corpus comes first, because it is refused sooner.
"""

from transformers import PreTrainedTokenizerBase

from ..store.errors import UsageError
from . import corpora, models
from .corpora import Corpus
from .models import LoadedModel
from .ranks import local_device
from .settings import HarvestSettings


def load_both(settings: HarvestSettings) -> tuple[Corpus, LoadedModel]:
    """Corpus and model."""
    corpus = corpora.load(settings.corpus)
    loaded = models.load(
        settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=local_device(settings.device),
        gguf_file=settings.gguf_file,
        attention=settings.attention,
        trust_remote_code=settings.trust_remote_code,
        allow_pickle=settings.allow_pickle,
    )
    return corpus, loaded


def tokenizer_of(loaded: LoadedModel) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that needs one."""
    if loaded.tokenizer is None:
        raise UsageError(f"{loaded.name} comes without a tokenizer, and a corpus of texts needs one.")
    return loaded.tokenizer

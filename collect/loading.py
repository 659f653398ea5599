"""Model and corpus as settings name them, for every command that runs a model over a corpus.

In: settings. Out: the corpus and the loaded model, or the first thing that is wrong with either, in one
sentence. Cost: reading both; the corpus comes first, because it is refused sooner.
"""

from . import corpora, models
from .corpora import Corpus, CorpusOptions
from .models import LoadedModel
from .ranks import local_device
from .settings import HarvestSettings


def load_both(settings: HarvestSettings) -> tuple[Corpus, LoadedModel]:
    """Corpus and model."""
    corpus = corpora.load(settings.corpus, options=CorpusOptions.of(settings))
    loaded = models.load(
        settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        # A map spreads the model over all GPUs, whichever this process's own is.
        device=settings.device if settings.device_map else local_device(settings.device),
        gguf_file=settings.gguf_file,
        adapter=settings.adapter,
        attention=settings.attention,
        device_map=settings.device_map,
        max_memory=settings.max_memory_bytes,
        offload_folder=settings.offload_folder,
        trust_remote_code=settings.trust_remote_code,
        allow_pickle=settings.allow_pickle,
    )
    return corpus, loaded

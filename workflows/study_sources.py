"""What a study harvests from: that models and corpora can be what their names say, and are there.

In: a `Whole`, and which harvests have to run. Out: of each mistake one sentence that names the file and the
table, in the words of the harvest. Cost: a look at files, and the first row of a corpus; no torch is loaded.
"""

from collections.abc import Callable
from pathlib import Path

from ..collect.bundled_models import BUNDLED
from ..store import UsageError
from .mistakes import Mistakes
from .study_paths import corpus_files, model_folder
from .study_settings import StoreJob, Whole


def check_sources(whole: Whole, wanted: Callable[[StoreJob], bool], mistakes: Mistakes) -> None:
    """What harvests that have to run are made from is there. `wanted`: whether one has to."""
    for store in (store for model in whole.models for store in model.stores):
        with mistakes.here():
            if wanted(store):
                _check_files(whole.path, store, mistakes)


def check_corpora(whole: Whole, mistakes: Mistakes) -> None:
    """Corpora that are here and not harvested yet can be. That they are here is not asked."""
    for store in (store for model in whole.models for store in model.stores):
        with mistakes.here():
            if not (store.path / "SEALED").exists():
                _check_corpus(whole.path, store, mistakes)


def _check_files(said: Path, store: StoreJob, mistakes: Mistakes) -> None:
    settings = store.settings
    with mistakes.here(f"{said}, [[models]] {store.model}"):
        if settings.model not in BUNDLED and settings.adapter is None and not _is_adapter(settings.model):
            from ..collect.sources import find, require_weights

            source = find(settings.model, gguf_file=settings.gguf_file)
            require_weights(source, allow_pickle=settings.allow_pickle)
    with mistakes.here(f"{said}, [[corpora]] {store.corpus}"):
        path = corpus_files(settings.corpus)
        if path is not None and not path.exists():
            raise UsageError(f"{path} does not exist")
    _check_corpus(said, store, mistakes)
    for key in ("include", "exclude"):
        with mistakes.here(f"{said}, [collect]"):
            named = getattr(settings, key)
            if named is not None and not Path(named).is_file():
                raise UsageError(f"{key} = {named}: there is no such file")


def check_model(said: Path, store: StoreJob, mistakes: Mistakes) -> None:
    """A name of no folder is one that the Hub could have. A folder may be on the machine that harvests."""
    settings = store.settings
    if model_folder(settings.model) is None:
        from ..collect.sources import find

        with mistakes.here(f"{said}, [[models]] {store.model}"):
            find(settings.model, gguf_file=settings.gguf_file)


def _check_corpus(said: Path, store: StoreJob, mistakes: Mistakes) -> None:
    """What a corpus in files holds is what its harvest will look for."""
    settings = store.settings
    path = corpus_files(settings.corpus)
    if path is None or not path.exists():
        return
    from ..collect.corpora import CorpusOptions, require_readable

    with mistakes.here(f"{said}, [[corpora]] {store.corpus}"):
        require_readable(settings.corpus, CorpusOptions.of(settings))


def _is_adapter(model: str) -> bool:
    folder = model_folder(model)
    return folder is not None and (folder / "adapter_config.json").is_file()

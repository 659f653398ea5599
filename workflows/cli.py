"""The command line: `nearline COMMAND …`.

In: arguments. Out: facts on standard output (text, or JSON with `--json`), progress and messages on
standard error, and an exit code: 0 good, 1 damage or a failed check, 2 usage, 3 incomplete, 4 environment,
70 our bug, 130 interrupted. Cost: what the command costs; torch is loaded only by commands that run a
model. Every command is one function of the library behind a few lines of printing.
"""

import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic
from cyclopts import App, CycloptsError, Parameter

from .. import __version__
from ..analyze.settings import FitSettings
from ..collect.settings import HarvestSettings
from ..store import NearlineError
from ..store.settings import first_problem
from . import show
from .flags import flags_of, given, read_toml
from .progress import progress_for

EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_BUG, EXIT_INTERRUPTED = 2, 4, 70, 130
_ENVIRONMENT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE)

CollectFlags = flags_of(HarvestSettings, leave_out=("model", "corpus"))
FitFlags = flags_of(FitSettings)

Json = Annotated[bool, Parameter(name="--json", help="Print the facts as JSON.", negative="")]
Config = Annotated[Path | None, Parameter(help="TOML file with the same names as the flags; flags win.")]

app = App(
    name="nearline",
    help="Harvest a language model's MLP inputs and outputs once; then measure which are nearly linear.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)


@app.command
def collect(
    model: str,
    corpus: str,
    store: Path,
    /,
    *,
    config: Config = None,
    flags: Annotated[CollectFlags | None, Parameter(name="*")] = None,  # type: ignore[valid-type]
    as_json: Json = False,
) -> None:
    """Harvest a model's MLP inputs and outputs on a corpus into a new store.

    Parameters
    ----------
    model
        A bundled model (tiny-gpt2, tiny-pythia), a local folder or a Hub id.
    corpus
        docs:python, docs:scientific, docs:stdlib, text:PATH or jsonl:PATH[:field].
    store
        The folder to write; it must be new or empty.
    """
    from ..collect.settings import parse

    settings = parse({**read_toml(config), **given(flags), "model": model, "corpus": corpus})
    from ..collect.harvesting import collect as run

    with progress_for() as progress:
        result = run(settings, store, progress)
    show.harvest(result, as_json)


@app.command
def sites(
    model: str, /, *, gguf_file: str | None = None, revision: str | None = None, as_json: Json = False
) -> None:
    """List the tensors that can be harvested from a model, and the modules they come from.

    Parameters
    ----------
    model
        A bundled model, a local folder or a Hub id; its weights are not loaded where the config suffices.
    gguf_file
        Name of a GGUF file inside the model's folder.
    revision
        Commit, branch or tag of a Hub model.
    """
    from ..collect.sites import sites as list_sites

    show.sites(list_sites(model, revision=revision, gguf_file=gguf_file), as_json)


@app.command
def info(store: Path, /, *, as_json: Json = False) -> None:
    """Say what a store holds, and whether it is whole."""
    from ..store import info as facts_of

    show.info(facts_of(store), as_json)


@app.command
def seal(store: Path, /, *, as_json: Json = False) -> None:
    """Seal a store whose blocks are all committed; `collect` does so itself when nothing stops it."""
    from ..store import seal as run

    show.path("seal", run(store), as_json)


@app.command
def fit(
    study: Path,
    /,
    *stores: Path,
    config: Config = None,
    flags: Annotated[FitFlags | None, Parameter(name="*")] = None,  # type: ignore[valid-type]
    as_json: Json = False,
) -> None:
    """Fit a linear surrogate to every MLP and measure each token's need for the nonlinearity.

    Parameters
    ----------
    study
        The folder of results; made when it does not exist.
    stores
        One or more sealed stores of one model.
    """
    from ..analyze.fit import fit as run
    from ..analyze.settings import parse

    settings = parse({**read_toml(config), **given(flags)})
    with progress_for() as progress:
        run(study, list(stores), settings, progress)
    show.study(study, as_json)


@app.command
def report(study: Path, /, *, out: Path | None = None, as_json: Json = False) -> None:
    """Write a study's report: one HTML page that opens without a network.

    Parameters
    ----------
    study
        A study that has been fitted.
    out
        Where to write the page; default: report.html inside the study.
    """
    from ..reports import report as run

    show.path("report", run(study, out), as_json)


@app.command
def quickstart(
    out: Path = Path("nearline-quickstart"), /, *, tokens: int | None = None, as_json: Json = False
) -> None:
    """Collect, fit and report both bundled models on built-in English, in about a minute.

    Parameters
    ----------
    out
        The folder for stores and studies. What is already there and current is not done again.
    tokens
        Token rows per store.
    """
    from .quickstart import quickstart as run

    with progress_for() as progress:
        result = run(out, progress, tokens=tokens)
    show.quickstart(result, as_json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run one command; the exit code. A user's mistake is one sentence, never a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    logging.getLogger("nearline").setLevel(logging.INFO)
    try:
        app(arguments or ["--help"], exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        words = _sentence(error)
        return _fail(f"{words} `nearline {_command(arguments)}--help` lists what is allowed.", EXIT_USAGE)
    except NearlineError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted.", EXIT_INTERRUPTED)
    except MemoryError:
        return _fail("out of memory: lower --batch-tokens, --block or --memory-limit.", EXIT_ENVIRONMENT)
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; Python must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in _ENVIRONMENT_ERRORS:
            return _fail(f"{error.strerror}: {error.filename or 'the output folder'}.", EXIT_ENVIRONMENT)
        return _bug()
    except Exception:
        return _bug()
    return 0


def _sentence(error: CycloptsError) -> str:
    """What is wrong with the arguments; a value that its setting refuses is described by the setting."""
    cause = error.__cause__
    fields = {**CollectFlags.model_fields, **FitFlags.model_fields}
    words = first_problem(cause, fields) if isinstance(cause, pydantic.ValidationError) else str(error)
    return words.strip().rstrip(".") + "."


def _command(arguments: list[str]) -> str:
    known = arguments and arguments[0] in set(app)
    return f"{arguments[0]} " if known else ""


def _fail(message: Any, code: int) -> int:
    print(f"nearline: {message}", file=sys.stderr)
    return code


def _bug() -> int:
    traceback.print_exc()
    return _fail("this is a bug in nearline; please report it with the lines above.", EXIT_BUG)

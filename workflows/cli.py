"""The command line: `nearline COMMAND …`.

In: arguments. Out: facts on standard output (text, or JSON with `--json`), progress and messages on
standard error, and an exit code: 0 good, 1 damage or a failed check, 2 usage, 3 incomplete, 4 environment,
70 our bug, 130 interrupted. Cost: what the command costs; torch is loaded only by commands that run a
model. Every command is one function of the library behind a few lines of printing.
"""

import difflib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import pydantic
from cyclopts import CycloptsError, UnknownCommandError, UnusedCliTokensError

from ..store import NearlineError
from ..store.names import printable
from ..store.settings import first_problem
from . import commands_models, commands_plan, commands_runs, commands_stores, commands_studies
from .app import AnalyzeFlags, CollectFlags, FinetuneFlags, FitFlags, MeasureFlags, app

EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_BUG, EXIT_INTERRUPTED = 2, 4, 70, 130
COMMANDS = (
    commands_stores,
    commands_studies,
    commands_models,
    commands_plan,
    commands_runs,
)  # importing a module of commands registers them
_ENVIRONMENT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE)


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
    except commands_stores.Finished as answer:
        return answer.exit_code
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
    if isinstance(error, UnknownCommandError):
        return _unknown_command(error)
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {' '.join(map(repr, error.unused_tokens or []))}."
    words = _problem(cause) if isinstance(cause, pydantic.ValidationError) else str(error)
    words = words.strip().rstrip(".")
    return words if words.endswith("?") else f"{words}."


def _problem(error: pydantic.ValidationError) -> str:
    """In the words of the command's own settings: others may have a field of the same name."""
    flags = (CollectFlags, FitFlags, AnalyzeFlags, MeasureFlags, FinetuneFlags)
    own = next((one for one in flags if one.__name__ in error.title), None)
    return first_problem(error, {} if own is None else own.model_fields)


def _unknown_command(error: UnknownCommandError) -> str:
    given = error.unused_tokens[0] if error.unused_tokens else ""
    known = [name for name in app if not name.startswith("-")]
    near = difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(known)}."
    return f"there is no command {given!r}; {hint}"


def _command(arguments: list[str]) -> str:
    known = arguments and arguments[0] in set(app)
    return f"{arguments[0]} " if known else ""


def _fail(message: Any, code: int) -> int:
    lines = map(printable, str(message).split("\n"))  # a name from elsewhere must not steer the terminal
    print("nearline: " + "\n".join(lines), file=sys.stderr)
    return code


def _bug() -> int:
    traceback.print_exc()
    return _fail("this is a bug in nearline; please report it with the lines above.", EXIT_BUG)

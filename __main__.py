"""The command line, `nearline` and `python -m nearline`.

In: arguments. Out: the exit code. Signals are taken care of before anything heavy is imported: Ctrl-C,
SIGTERM and a terminal that hangs up end any command with one sentence and code 130. Cost: none.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run one command and exit with its code."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # there is no SIGHUP on Windows
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _interrupt)
    try:
        from .workflows.cli import main as run

        run()
    except KeyboardInterrupt:
        os.write(2, b"nearline: interrupted.\n")
        sys.stdout.flush()
        os._exit(130)  # whatever was being imported is not to be finished or reported


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()

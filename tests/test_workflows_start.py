"""Signals are taken care of before anything heavy is imported: one sentence and 130, never a traceback."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import builtins, os, signal, sys
signal.signal({number}, {before})  # whatever whoever runs the tests has set
from nearline.__main__ import main
real = builtins.__import__

def watched(name, *rest, **more):
    if name.startswith("cyclopts"):
        builtins.__import__ = real
        os.kill(os.getpid(), {number})
    return real(name, *rest, **more)

builtins.__import__ = watched
sys.argv = ["nearline", "info", "nowhere"]
main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_the_program_starts_is_one_sentence(name: str) -> None:
    before = "signal.default_int_handler" if name == "SIGINT" else "signal.SIG_DFL"
    program = PROGRAM.format(number=int(getattr(signal, name)), before=before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "nearline: interrupted.\n")


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    """nohup: the command goes on, and says what it has to say."""
    program = PROGRAM.format(number=int(signal.SIGHUP), before="signal.SIG_IGN")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "does not exist" in done.stderr

"""Every error of the project, with the exit code the command line gives it.

In: one clear message (what, where, what is allowed, what to do next). Out: an exception that is also the
builtin a caller expects. Inner code states the local fact; the public function adds path and context once.
"""


class NearlineError(Exception):
    """Base of all errors that nearline raises on purpose; raised itself only for a bug of ours."""

    exit_code = 70


class UsageError(NearlineError, ValueError):
    """The caller asked for something that cannot be: a wrong value, a wrong name, a folder in use."""

    exit_code = 2


class DamageError(NearlineError, OSError):
    """A file is there but is not what was written: wrong size, wrong checksum, unreadable content."""

    exit_code = 1


class FormatError(DamageError):
    """A JSON file or a table does not have the form that the format prescribes."""


class MissingChunk(DamageError):
    """A chunk object that a block record promises is not on disk."""


class IncompleteError(NearlineError, FileNotFoundError):
    """Something that must exist first does not exist yet."""

    exit_code = 3


class StoreNotFound(UsageError, FileNotFoundError):
    """There is no store at the path that was given."""


class StoreNotSealed(IncompleteError):
    """The store is not whole (yet); the message lists the blocks that are missing."""


class EnvironmentFault(NearlineError, OSError):
    """The machine refused: no space, no permission, no memory, an I/O error."""

    exit_code = 4


class OutOfRange(NearlineError, OverflowError):
    """A finite value is too large for the storage dtype."""

    exit_code = 1


class NotFinite(NearlineError, ArithmeticError):
    """A value is infinite or not a number where the policy is to stop."""

    exit_code = 1


class ProofFailed(NearlineError):
    """The start-up proof found that a captured tensor is not what it is called."""

    exit_code = 1

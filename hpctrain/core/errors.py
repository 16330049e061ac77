"""The errors that users meet: the exit code of the job, and the printed message."""

from __future__ import annotations

from collections.abc import Iterable

from hpctrain.core.printing import printable

MAX_MESSAGE_CHARACTERS = 4_000  #: characters of a message on bad input, which may quote that input


class HpctrainError(Exception):
    """Base of all errors raised on purpose; the job ends with `exit_code`.

    Its text is safe to print, whatever file or command line it quotes.
    """

    exit_code = 1

    def __str__(self) -> str:
        """Return the message, printable."""
        return printable(super().__str__())


class UsageError(HpctrainError, ValueError):
    """A wrong command line, recipe, argument or data set; raised before any training."""

    exit_code = 2

    def __str__(self) -> str:
        """Return the message, printable and of at most MAX_MESSAGE_CHARACTERS."""
        text = super().__str__()
        excess_characters = len(text) - MAX_MESSAGE_CHARACTERS
        return (
            text
            if excess_characters <= 0
            else f"{text[:MAX_MESSAGE_CHARACTERS]}... ({excess_characters:,} more characters)"
        )


class HereError(UsageError):
    """A UsageError specific to this host."""


class OwnRankError(UsageError):
    """A UsageError that other ranks do not share."""


class DataError(UsageError):
    """A value of a data set that is not valid, seen when its sample was read."""


class BadSampleError(HpctrainError):
    """A DataError within a training: of the rank alone that read the sample; needs no traceback."""

    exit_code = 2


class ReadError(HpctrainError):
    """Samples of a training step could not be read; raised on all ranks."""


class BadDataError(ReadError):
    """A ReadError because of a DataError: the same data would fail again."""

    exit_code = 2


class ModelError(UsageError):
    """A model that does not fit the options, or was changed within a run: raised on all ranks."""


class GpuMemoryError(HpctrainError):
    """A GPU has too little memory; names the bytes requested and the bytes free."""


class TransportError(HpctrainError):
    """A message that did not arrive as agreed; names the rank, the peer and both sizes."""


class LostRankError(TransportError):
    """A call did not complete, since a rank was lost; survivors go on, see world/world.py."""


class RankKilled(BaseException):
    """A rank that is a thread ends as if by SIGKILL: it reports nothing and cleans up nothing."""


class SaveError(HpctrainError):
    """A checkpoint could not be written; the checkpoints before it are untouched."""


class TrainingError(HpctrainError):
    """Training failed: a loss or a gradient is not finite."""

    exit_code = 3


class StoppedError(HpctrainError):
    """Training stopped on request; there is a checkpoint to resume from."""

    exit_code = 75


class UnsavedError(StoppedError):
    """Training stopped on request, and nothing was saved: it had no folder."""

    exit_code = 130


class HungError(HpctrainError):
    """A peer was silent for longer than the time limit."""

    exit_code = 86


class JobEndedError(HpctrainError):
    """The job has ended while this rank waited as a spare."""

    def __init__(self, exit_code: int):
        super().__init__(f"the job has ended with exit code {exit_code}")
        self.exit_code = exit_code


class RecoveryError(HpctrainError):
    """The ranks that are left cannot go on: too few, or too little state; raised on each."""


#: Errors that all ranks raise together; any other is raised by a rank alone.
AGREED_ERRORS = (
    UsageError, ReadError, TrainingError, SaveError, StoppedError, JobEndedError, RecoveryError,
)  # fmt: skip


def annotate(error: BaseException, lines: Iterable[str]) -> None:
    """Append `lines` to the message of `error` and to its traceback, as Python 3.11's add_note."""
    error.__notes__ = [*notes(error), *lines]


def notes(error: BaseException) -> list[str]:
    """Return the lines appended to the message of `error`."""
    return [*getattr(error, "__notes__", [])]

"""The errors people meet, each with the exit code its job ends with, and how they are printed."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 4_000  #: characters of a message on bad input, which may repeat what it was given


def printable(text: str) -> str:
    """Return `text` with control characters escaped, which a terminal would obey; lines stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class HpctrainError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the job ends with.

    Its text is safe to print, whatever file or command line it quotes.
    """

    exit_code = 1

    def __str__(self) -> str:
        """Return the message, printable."""
        return printable(super().__str__())


class UsageError(HpctrainError, ValueError):
    """A wrong command line, recipe, argument or data set; said before any training."""

    exit_code = 2

    def __str__(self) -> str:
        """Return the message, printable and not longer than anybody would read."""
        text = super().__str__()
        more = len(text) - LONGEST
        return text if more <= 0 else f"{text[:LONGEST]}... ({more:,} more characters)"


class HereError(UsageError):
    """As above, of what is missing on this host, and perhaps on no other."""


class GpuMemoryError(HpctrainError):
    """A rank found too little memory for its GPU; tells how much was asked for and is free."""


class TransportError(HpctrainError):
    """A message that did not arrive as agreed; names the rank, the peer and both sizes."""


class SaveError(HpctrainError):
    """A checkpoint could not be written; the checkpoints before it are untouched."""


class TrainingError(HpctrainError):
    """Training failed: a loss or a gradient is not finite."""

    exit_code = 3


class Stopped(HpctrainError):
    """Training stopped because it was asked to; there is a checkpoint to resume from."""

    exit_code = 75


class Interrupted(Stopped):
    """Training stopped because it was asked to, and nothing was saved: it had no folder."""

    exit_code = 130


class HungError(HpctrainError):
    """A peer was silent for longer than the time limit."""

    exit_code = 86


def annotate(error: BaseException, lines: Iterable[str]) -> None:
    """Let `lines` follow what `error` says, also below its traceback; as Python 3.11's add_note."""
    error.__notes__ = [*notes(error), *lines]


def notes(error: BaseException) -> list[str]:
    """Return the lines that follow what `error` says."""
    return [*getattr(error, "__notes__", [])]

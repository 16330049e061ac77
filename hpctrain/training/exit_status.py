"""The summary of a run, written on every exit path, including failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from hpctrain.core.errors import (
    BadSampleError,
    DataError,
    HpctrainError,
    LostRankError,
    ModelError,
    RankKilled,
    ReadError,
    SaveError,
    StoppedError,
    TrainingError,
    UsageError,
    annotate,
)  # fmt: skip
from hpctrain.core.run_files import run_folder
from hpctrain.core.run_files.last_lines import last_lines
from hpctrain.core.xp import shortage
from hpctrain.training.journal import Journal
from hpctrain.transport.abort import FIRST_REPORT_S

E = TypeVar("E", bound=BaseException)


@contextmanager
def summary_on_exit(journal: Journal, on_end: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Write summary.json on every exit path, including failures.

    `on_end` gets the summary of a run that was stopped or that failed on all ranks.
    """
    world = journal.segment.world
    world.threads.on_failure = partial(_fail_alone, journal)
    try:
        yield
    except LostRankError as error:
        if world.job is None:
            _fail_alone(journal, error)
            _with_last_lines(error, journal)
        journal.close_bar()
        raise
    except RankKilled:
        raise
    except (StoppedError, TrainingError, SaveError, ReadError, ModelError) as error:  # on all ranks
        status = "stopped" if isinstance(error, StoppedError) else "failed"
        on_end(journal.finish(status, error.exit_code, str(error)))
        _with_last_lines(error, journal)
        raise
    except DataError as error:
        _fail_alone(journal, BadSampleError(str(error)))
        raise _with_last_lines(BadSampleError(str(error)), journal) from None
    except UsageError as error:  # from a user's code, on this rank alone: training has begun
        _fail_alone(journal, error)
        raise _with_last_lines(HpctrainError(str(error)), journal) from error
    except BaseException as error:
        is_first = _fail_alone(journal, error)
        _with_last_lines(error, journal)
        if (shortage_error := shortage(error)) is None:
            raise
        if not is_first:  # ranks are often short of memory together: the first one reports
            time.sleep(FIRST_REPORT_S)
        raise shortage_error from error
    finally:
        world.threads.on_failure = None


def _fail_alone(journal: Journal, error: BaseException) -> bool:
    """Write the summary of a rank that fails alone.

    Returns whether this rank was the first, as far as it can know.
    """
    error, segment = shortage(error) or error, journal.segment
    world, run = segment.world, segment.run
    place = f"rank {world.rank} on {world.host}, step {world.trace.step}"
    reason = f"{place}: {type(error).__name__}: {error}"
    exit_code = error.exit_code if isinstance(error, BadSampleError) else 1
    recipe_name = segment.fit.name
    facts = {"status": "failed", "exit_code": exit_code, "reason": reason, "recipe": recipe_name}
    facts |= journal.end_alone(facts)
    with suppress(OSError):  # a full disk, say: the error itself must still be printed
        return run is None or run_folder.write_first_summary(run, facts)
    return True


def _with_last_lines(error: E, journal: Journal) -> E:
    """Append the run's folder and the command that resumes it to the message of `error`."""
    if journal.segment.run is not None:
        annotate(error, last_lines(journal.segment.run))
    return error

"""How a run ends: whatever happens, its summary tells."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.ends import SPEAK_FIRST_S
from hpctrain.errors import HpctrainError, SaveError, Stopped, TrainingError, UsageError
from hpctrain.journal import Journal
from hpctrain.xp import shortage


@contextmanager
def told(journal: Journal) -> Iterator[None]:
    """See to it that the summary tells how a run ended, also where it ended badly."""
    journal.world.last_words = journal.fail_alone
    try:
        yield
    except Stopped as error:
        journal.finish("stopped", error.exit_code, str(error))
        raise
    except (TrainingError, SaveError) as error:  # raised on all ranks
        journal.finish("failed", error.exit_code, str(error))
        raise
    except UsageError as error:  # out of a user's code, on this rank: the time to refuse is over
        journal.fail_alone(error)
        raise HpctrainError(str(error)) from error
    except BaseException as error:
        first = journal.fail_alone(error)
        if (short := shortage(error)) is None:
            raise
        if not first:  # ranks are often short of memory together: whoever was first speaks
            time.sleep(SPEAK_FIRST_S)
        raise short from error
    finally:
        journal.world.last_words = None

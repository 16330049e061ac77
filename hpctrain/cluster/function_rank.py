"""A rank of `ht.launch`: `python -m hpctrain.cluster.function_rank FOLDER`.

The error of a rank goes to the caller by a file, and is not printed: all ranks may have it.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import sys
import time
import traceback
from pathlib import Path

from hpctrain.cluster.function_call import CALL, RankFailure, dump, load, result_path
from hpctrain.core import atomic, launchers
from hpctrain.core.errors import UsageError
from hpctrain.transport import abort


def main() -> None:
    """Call the function, and leave its result, or its error, which ends the job."""
    folder, rank = Path(sys.argv[1]), launchers.launched(os.environ).rank
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        sys.path[:], call = load(folder / CALL)
        function, args = pickle.loads(call)
        sys.argv[:] = [""]
        atomic.replace(result_path(folder, rank), _dump_result(function(*args)))
    except BaseException as error:
        place = f"rank {rank}, {socket.gethostname()}"
        text = "".join(traceback.format_exception(_without_frame_of_main(error)))
        failure = RankFailure(time.time(), place, text.rstrip(), _dump_error(error))
        atomic.replace(folder / f"error-{rank:05d}", pickle.dumps(failure))
        sys.stdout.flush()
        abort.abort(1)


def _dump_result(result: object) -> bytes:
    try:
        return dump(result)
    except Exception as error:
        kind = type(result).__name__
        text = f"ht.launch: the result, of type {kind}, cannot be sent back: {error}"
        raise UsageError(text) from None


def _dump_error(error: BaseException) -> bytes:
    """Return the pickle of an error; empty if it cannot be sent, and of an exit."""
    try:
        data = dump(error)
        pickle.loads(data)  # an exception may ask for other arguments than it keeps
    except Exception:
        return b""
    return data if isinstance(error, Exception) else b""


def _without_frame_of_main(error: BaseException) -> BaseException:
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        return error.with_traceback(error.__traceback__.tb_next)
    return error


if __name__ == "__main__":
    main()

"""`hpctrain` and `python -m hpctrain`: import the command line, and run it."""

import signal
import sys


def main() -> None:
    """Run the command line; a Ctrl-C during its import ends the process without a traceback."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:  # a shell's background job ignores it, and goes on to
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hpctrain import cli

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


def horovodrun() -> None:
    """Run `hpctrain horovodrun`: the program `hpctrain-horovodrun`."""
    sys.argv.insert(1, "horovodrun")
    main()


if __name__ == "__main__":
    main()

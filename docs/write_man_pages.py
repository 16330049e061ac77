"""Writes a man page of every command, from the text that its --help prints.

    python docs/write_man_pages.py man/man1

`make man` runs it, and `make dist` packs the pages. They are in no commit: each change of a help
text would change them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from hpctrain import __version__
from hpctrain.cli import hpctrain

WHOLE = 1000  #: characters, more than any first sentence of a help text
VERBATIM = "\b\n"  #: begins a paragraph whose lines click keeps as they are
ESCAPES = str.maketrans({"\\": r"\(rs", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha"})


class Roff(click.HelpFormatter):
    """A formatter of help that writes the sections of a man page."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write_heading("Synopsis")
        self.write(f".B {escape(prog)}\n{escape(args)}\n")
        self.write_heading("Description")

    def write_heading(self, heading: str) -> None:
        self.write(f".SH {heading.upper()}\n")

    def write_paragraph(self) -> None:
        """Write nothing: sections have headings here, and paragraphs begin in `write_text`."""

    def write_text(self, text: str) -> None:
        for paragraph in re.split(r"\n{2,}", text):
            if paragraph.startswith(f"{VERBATIM}Examples:\n"):
                self.write_heading("Examples")
                paragraph = VERBATIM + paragraph.partition("\n")[2].partition("\n")[2]
            elif ".SH OPTIONS\n" in self.buffer and ".SH NOTES\n" not in self.buffer:
                self.write_heading("Notes")
            if paragraph.startswith(VERBATIM):
                lines = paragraph.removeprefix(VERBATIM).splitlines()
                self.write(".PP\n.nf\n" + "".join(f"{escape(x)}\n" for x in lines) + ".fi\n")
            else:
                self.write(f".PP\n{escape(' '.join(paragraph.split()))}\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: object, **options: object) -> None:
        for term, text in rows:
            self.write(f".TP\n.B {escape(term)}\n{escape(' '.join(text.split()))}\n")


def escape(text: str) -> str:
    """Return a line of text as roff, in which nothing is a request."""
    return re.sub(r"^(?=\.)", r"\\&", text.translate(ESCAPES))


def commands(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[click.Context]:
    """Yield a context of `command`, and of every command below it."""
    context = click.Context(command, info_name=name, parent=parent)
    yield context
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from commands(command.get_command(context, below), below, context)  # type: ignore[arg-type]


def page_name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def man_page(context: click.Context) -> str:
    """Return the page of a command: its help between its name and the pages beside it."""
    command, name, formatter = context.command, page_name(context), Roff()
    summary = escape(command.get_short_help_str(WHOLE).removesuffix("."))
    formatter.write(f'.TH {escape(name.upper())} 1 "" "hpctrain {__version__}" "User Commands"\n')
    formatter.write(".nh\n.ad l\n")  # a name is cut at no hyphen
    formatter.write(f".SH NAME\n{escape(name)} \\- {summary}\n")
    command.format_help(context, formatter)
    subcommands = getattr(command, "list_commands", lambda _: [])(context)
    related = [page_name(context.parent)] if context.parent else []
    related += [f"{name}-{subcommand}" for subcommand in subcommands]
    if related:
        formatter.write_heading("See also")
        formatter.write(",\n".join(f".BR {escape(page)} (1)" for page in related) + "\n")
    return formatter.getvalue()


def man_pages() -> dict[str, str]:
    """Return the pages by name, such as `hpctrain-slurm-submit`."""
    return {page_name(item): man_page(item) for item in commands(hpctrain, "hpctrain")}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in man_pages().items():
        (folder / f"{name}.1").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Groups of the same commands for several schedulers, with help in the words of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from hpctrain.cluster.schedulers.scheduler import Scheduler
from hpctrain.commands import _options
from hpctrain.commands._lazy import WholeGroup

#: The function of a command, its epilog, its arguments and options.
CommandParts = tuple[Callable[..., None], str, Sequence[_options.Decorator]]


def make_group(scheduler: Scheduler, epilog: str, commands: Sequence[CommandParts]) -> click.Group:
    """Return the commands for the jobs of a scheduler.

    A function is called with the scheduler, click's context and the values of the options.
    """
    group = WholeGroup(
        scheduler.name,
        epilog=_adapt_epilog(epilog, scheduler),
        help=f"Render, submit, watch and cancel jobs of {scheduler.title}{scheduler.note}.",
    )
    for parts in commands:
        group.add_command(_make_command(scheduler, *parts))
    return group


def _make_command(
    scheduler: Scheduler,
    run: Callable[..., None],
    epilog: str,
    options: Sequence[_options.Decorator],
) -> click.Command:
    @click.pass_context
    def call(context: click.Context, /, **values: Any) -> None:
        run(scheduler, context, **values)

    text = _adapt(run.__doc__ or "", scheduler)
    has_subject = _options.recipe_argument in options
    cls = _options.ProgramCommand if has_subject else click.Command
    decorate = click.command(run.__name__, cls, epilog=_adapt_epilog(epilog, scheduler), help=text)
    command: click.Command = decorate(_options.add_options(*options)(call))
    for option in command.params:
        if isinstance(option, click.Option) and option.help:
            refusal = " Refused: Slurm alone." * (option.name in scheduler.refused)
            option.help = _adapt(option.help, scheduler) + refusal
    return command


def _adapt_epilog(text: str, scheduler: Scheduler) -> str:
    """Return an epilog in the words of a scheduler, without examples that it refuses."""
    names = "|".join(name.replace("_", "-") for name in scheduler.refused)
    refused = re.compile(rf"--(?:{names})\b|--on slurm" if names else "(?!)")
    lines = [line for line in text.splitlines(keepends=True) if not refused.search(line)]
    return _adapt("".join(lines), scheduler)


def _adapt(text: str, scheduler: Scheduler) -> str:
    """Return a text on Slurm in the words of a scheduler."""
    if not scheduler.refused:
        return text
    for words, own_words in (
        ("hpctrain slurm", f"hpctrain {scheduler.name}"),
        ("`sbatch`", f"`{scheduler.submit_command}`"),
        ("an array with a task for", "a job for"),
        ("option of sbatch", f"option of {scheduler.submit_command}"),
        ("Before its time limit a job is stopped and requeued, and it",
         "Before its time limit a job is stopped and submits itself again; the new job"),
    ):  # fmt: skip
        text = text.replace(words, own_words)
    return text

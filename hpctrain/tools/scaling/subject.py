"""What a study trains: a recipe, or a user's script; both make trials of one form.

A script is ended after the last step of a trial. In its arguments `{batch}` stands for the batch of
a rank. Its ranks write the rows: see hpctrain/torch/script_steps.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpctrain.cluster.slurm.job import Job, job_name
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.gradients.precision import master_dtype
from hpctrain.tools.scaling import trial_recipe
from hpctrain.tools.scaling.study import Study, StudyFolder
from hpctrain.tools.scaling.trial_recipe import Size, Timing
from hpctrain.training import recipe, runs
from hpctrain.training.recipe import Recipe

BATCH = "{batch}"  #: in the arguments of a script
Command = tuple[list[str], dict[str, str]]  #: arguments of `hpctrain`, and variables


class Subject(Protocol):
    """What a study trains."""

    @property
    def name(self) -> str:
        """The name in titles and folders."""

    @property
    def tables(self) -> dict[str, Any]:
        """What identifies it in study.json."""

    def measure(self, mode: str, sizes: list[Size]) -> tuple[int, int]:
        """Return the batch of a study and the bytes of gradients; raise UsageError."""

    def command(
        self, folder: StudyFolder, study: Study, size: Size, out: Path, timing: Timing
    ) -> Command:
        """Return the command of a trial of `size` into `out`."""

    def pilot_facts(self, study: Study, pilots: Mapping[Size, Path]) -> dict[str, Any]:
        """Return the fields of the study that its pilots have shown; raise UsageError."""

    def deviations(self, study: Study) -> Iterator[str]:
        """Yield one sentence for each way in which a trial differs from the whole training."""


@dataclass(frozen=True)
class RecipeSubject:
    """A recipe."""

    spec: Recipe

    @property
    def name(self) -> str:
        return self.spec.run.name

    @property
    def tables(self) -> dict[str, Any]:
        return self.spec.tables

    def measure(self, mode: str, sizes: list[Size]) -> tuple[int, int]:
        spec = self.spec
        batch = trial_recipe.choose_batch(spec, mode, sizes)
        trial_recipe.check_divisible(spec, mode, batch, sizes)
        model = runs.build_model(spec, spec.data.load(spec.run.seed))
        itemsize = master_dtype(spec.run.precision).itemsize
        return batch, int(model.parameter_count * itemsize)

    def command(
        self, folder: StudyFolder, study: Study, size: Size, out: Path, timing: Timing
    ) -> Command:
        timed = trial_recipe.make_trial_recipe(self.spec, study.mode, study.batch, size, timing)
        file = folder.recipe(size, timed.toml()).absolute()
        return ["train", str(file), "--out", str(out.absolute())], {}

    def pilot_facts(self, study: Study, pilots: Mapping[Size, Path]) -> dict[str, Any]:
        return {}

    def deviations(self, study: Study) -> Iterator[str]:
        yield from trial_recipe.describe_deviations(
            self.spec, study.mode, study.batch, study.timing, study.threads
        )


@dataclass(frozen=True)
class ScriptSubject:
    """A script of PyTorch; `samples` of a step in strong scaling, of a rank in weak scaling."""

    program: tuple[str, ...]
    samples: int | None

    @property
    def name(self) -> str:
        return job_name(Job(program=self.program))

    @property
    def tables(self) -> dict[str, Any]:
        samples = {} if self.samples is None else {"samples_per_step": self.samples}
        return {"program": [*self.program], **samples}

    def measure(self, mode: str, sizes: list[Size]) -> tuple[int, int]:
        """Return the batch, 1 if pilots show it, and 0 bytes, which pilots show."""
        samples = self.samples
        if samples is None:
            if any(BATCH in word for word in self.program):
                raise UsageError(f"{BATCH} in the arguments of a script: add --samples-per-step N")
            return 1, 0
        if samples < 1:
            raise UsageError(f"--samples-per-step: expected 1 or more, seen {samples}")
        uneven = [size.text for size in sizes if mode == "strong" and samples % size.ranks]
        if uneven:
            raise UsageError(f"{uneven[0]}: cannot share --samples-per-step {samples} evenly")
        return samples, 0

    def command(
        self, folder: StudyFolder, study: Study, size: Size, out: Path, timing: Timing
    ) -> Command:
        samples, ranks = self.samples, size.ranks
        own = None if samples is None else samples // ranks if study.mode == "strong" else samples
        trial = {
            "out": str(out.absolute()), "interval": timing.interval, "total": timing.total,
            "samples": None if own is None else own * ranks,
        }  # fmt: skip
        folder.make_folders_of(out / run_folder.SUMMARY)
        words = [word.replace(BATCH, str(own)) for word in self.program]
        return ["--", *words], {"HPCTRAIN_TRIAL": json.dumps(trial)}

    def pilot_facts(self, study: Study, pilots: Mapping[Size, Path]) -> dict[str, Any]:
        summaries = {size: run_folder.read_summary(out) or {} for size, out in pilots.items()}
        shares = {
            size: summary["samples_per_step"] / (1 if study.mode == "strong" else size.ranks)
            for size, summary in summaries.items()
            if summary.get("status") == "done"
        }
        if len({*shares.values()}) > 1:
            seen = ", ".join(f"{share:g} on {size.text}" for size, share in shares.items())
            whose = "of a step" if study.mode == "strong" else "of a rank"
            raise UsageError(
                f"--mode {study.mode}: expected the same samples {whose} at every size, seen "
                f"{seen}: write {BATCH} for the batch of a rank among the arguments of the script, "
                "with --samples-per-step N, or take the other mode"
            )
        if not shares:
            return {}
        size, share = next(iter(shares.items()))
        return {"batch": round(share), "gradient_bytes": summaries[size]["gradient_bytes"]}

    def deviations(self, study: Study) -> Iterator[str]:
        timing = study.timing
        yield (
            f"the script is ended after {timing.total} steps of its first optimizer: "
            f"{timing.first} to warm up, {timing.last - timing.first} timed, 1 behind them"
        )
        yield "what it does between steps, such as evaluation and checkpoints, is timed with them"
        if study.threads is not None:
            yield f"OMP_NUM_THREADS={study.threads} at every size"


def make_subject(options: Mapping[str, Any]) -> Subject:
    """Return the subject that the options of a command ask for; raise UsageError."""
    program: Sequence[str] = options["program"]
    if not program:
        if options["samples_per_step"] is not None:
            raise UsageError("--samples-per-step is of a script; a recipe has its batch")
        return RecipeSubject(recipe.load(options["recipe"], options["sets"]))
    if options["sets"]:
        raise UsageError("--set changes a recipe; seen a program after `--`")
    if options["on"] == "slurm":
        raise UsageError("--on slurm: expected a recipe, seen a program after `--`")
    return ScriptSubject(tuple(program), options["samples_per_step"])

"""The facts of a run in the manifest of a checkpoint: types, ranges, agreement.

A manifest may have been written by another program, or by hand, with a correct hash. So all entries
that are read again are checked here, against each other and against the arrays; a caller may keep
further ones beside them. A missing entry is one that an older hpctrain did not write.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, Field

from hpctrain.core.files import brief
from hpctrain.core.metrics import Direction
from hpctrain.core.run_files import schemas
from hpctrain.core.run_files.schemas import first_fault

Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
MAX_NESTING = 32  #: of dicts and lists around a shape
MetricName = Annotated[str, Field(pattern=r"^(train|test)_.")]
IntegerName = Annotated[str, Field(pattern=r"^(bool|u?int(8|16|32|64))$")]
INTEGER_CHUNKS = 4  #: numbers of the code of an integer of more than 16 bits
_STRICT = pydantic.ConfigDict(strict=True, extra="forbid", defer_build=True)


def _must_be_shapes(shapes: Any) -> Any:
    """Return `shapes` if they are a shape, or lists or dicts of shapes; raise ValueError if not."""
    level = [shapes]
    for _ in range(MAX_NESTING):
        inner = [x for x in level if not _is_shape(x)]
        if not all(isinstance(x, list | dict) and x for x in inner):
            break
        level = [y for x in inner for y in (x.values() if isinstance(x, dict) else x)]
        if not level:
            return shapes
    raise ValueError(f"expected a list of numbers from 1 on, or up to {MAX_NESTING} lists or "
                     "dicts of such around it")  # fmt: skip


def _is_shape(x: Any) -> bool:
    return isinstance(x, list) and all(type(n) is int and 0 < n < 2**63 for n in x)


class TensorPlace(pydantic.BaseModel):
    """A tensor's place in a plane of the arena."""

    model_config = _STRICT
    shape: list[Count]
    offset: Count

    @property
    def span(self) -> tuple[int, int]:
        return self.offset, self.offset + prod(self.shape)


class ModelFacts(pydantic.BaseModel):
    """The shape of samples, or a tree of shapes, and the outputs that the model was built for."""

    model_config = _STRICT
    input_shape: Annotated[Any, AfterValidator(_must_be_shapes)]
    outputs: Positive | None


class ScaleFacts(pydantic.BaseModel):
    """The scale of the samples; see data/scaling.py."""

    model_config = _STRICT
    rule: Literal["auto", "standard", "minmax", "none"]
    shift: list[Finite] = []
    divisor: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = []


class BestFacts(pydantic.BaseModel):
    """The metric by which the best checkpoint is kept."""

    model_config = _STRICT
    metric: MetricName
    direction: Direction


class OpenRow(pydantic.BaseModel):
    """The sums of an interval whose row is not due yet."""

    model_config = _STRICT
    since_step: Count
    sums: dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]]


class StalenessFacts(pydantic.BaseModel):
    """The counts of stale gradients since the first step."""

    model_config = _STRICT
    histogram: dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], Count]
    clock_gap_max: Count | None
    dropped: Count


class CallbackFacts(pydantic.BaseModel):
    """The name and the state of rank 0's callbacks by their numbers, before the row of `step`."""

    model_config = _STRICT
    step: Count = 0
    states: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]] = {}


class CheckpointFacts(pydantic.BaseModel):
    """The entries that a resumed run reads."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow", defer_build=True)
    step: Count = 0
    epoch: Count = 0
    sample_index: Count = 0
    open_row: OpenRow | None = None
    rows_due: list[Annotated[dict[str, Any], AfterValidator(schemas.row)]] = []
    world_size: Positive | None = None
    batch: Positive | None = None
    chunk_rows: Positive | None = None
    window_chunks: Positive | None = None
    seed: Count = 0
    versions: dict[str, Any] = {}
    updates_per_step: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    staleness: StalenessFacts | None = None
    steps_redone: Count = 0
    intervals: Count | None = None
    skipped_steps: Count = 0
    skipped_in_a_row: Count = 0
    dropped_not_finite: Count = 0
    recipe: str | None = None
    recipe_sha256: str | None = None
    model: ModelFacts | None = None
    scale: ScaleFacts | None = None
    metrics: dict[MetricName, float | None] = {}
    keep_best: BestFacts | None = None
    callbacks: CallbackFacts = CallbackFacts()
    weights: dict[str, dict[str, TensorPlace]] = {}
    integers: dict[str, IntegerName] = {}
    ties: dict[str, str] = {}


def find_fault(about: Mapping[str, Any], step: int, sizes: Mapping[str, int]) -> str:
    """Return the first fault of `about` in a checkpoint, empty for none.

    `step` is the step of the checkpoint, `sizes` the elements of each array.
    """
    try:
        entries = CheckpointFacts.model_validate(dict(about))
    except pydantic.ValidationError as error:
        return first_fault(error, "about")
    rate, ranks = entries.updates_per_step, entries.world_size
    if "step" in about and entries.step != step:
        return f"'about.step': expected {step}, seen {entries.step}"
    if ranks is not None and rate > ranks:  # more than the ranks that send gradients
        return f"'about.updates_per_step': expected at most {ranks}, seen {rate}"
    return (
        _position_fault(entries, step, about.keys())
        or _placement_fault(entries.weights, sizes)
        or _name_fault(entries)
        or _scale_fault(entries.scale)
    )


def _position_fault(about: CheckpointFacts, step: int, given_keys: Any) -> str:
    """Return the fault in the positions of the next sample, of rows due and of the open row."""
    due_steps = [due_row["step"] for due_row in about.rows_due]
    if due_steps != sorted({n for n in due_steps if n <= step}):
        return f"'about.rows_due': expected growing steps up to {step}, seen {brief(due_steps)}"
    open_row = about.open_row
    if open_row is not None and not open_row.since_step < step:
        return f"'about.open_row.since_step': expected less than {step}, seen {open_row.since_step}"
    if about.batch is None or not {"epoch", "sample_index"} <= given_keys:
        return ""
    epoch_step, remainder = divmod(about.sample_index, about.batch)
    steps, uneven = divmod(step - epoch_step, about.epoch or 1)
    # `epoch` epochs of as many steps each, and `epoch_step` steps more of the next.
    fits = steps == 0 if about.epoch == 0 else steps > epoch_step and not uneven
    if remainder or not fits:
        place = f"sample {about.sample_index} of epoch {about.epoch}"
        return f"'about.sample_index': {place} cannot be that of step {step}"
    return ""


def _placement_fault(
    weights: Mapping[str, Mapping[str, TensorPlace]], sizes: Mapping[str, int]
) -> str:
    for plane, places in weights.items():
        spans = sorted(place.span for place in places.values() if prod(place.shape))
        if spans and spans[-1][1] > sizes.get(plane, 0):
            return f"'about.weights.{brief(plane)[1:-1]}': tensors reach beyond the array"
        if any(before[1] > after[0] for before, after in pairwise(spans)):
            return f"'about.weights.{brief(plane)[1:-1]}': tensors overlap"
    return ""


def _name_fault(about: CheckpointFacts) -> str:
    """Return the fault of names of tensors that are not there, or are no code of integers."""
    places = {name: place for plane in about.weights.values() for name, place in plane.items()}
    for name, dtype in about.integers.items():
        is_wide = not dtype.endswith(("bool", "int8", "int16"))
        if name not in places or (is_wide and places[name].shape[-1:] != [INTEGER_CHUNKS]):
            return f"'about.integers': expected a tensor of integers, seen {brief(name)}"
    if unknown_names := sorted(set(about.ties.values()) - places.keys()):
        return f"'about.ties': expected the name of a tensor, seen {brief(unknown_names[0])}"
    return ""


def _scale_fault(scale: ScaleFacts | None) -> str:
    """Return the fault of a scale with numbers that do not fit the rule."""
    if scale is None:
        return ""
    has_numbers = scale.rule in ("standard", "minmax")
    if has_numbers == bool(scale.shift) and len(scale.shift) == len(scale.divisor):
        return ""
    return (
        f"'about.scale': expected as many numbers in 'shift' and 'divisor' as {scale.rule} needs, "
        f"seen {len(scale.shift)} and {len(scale.divisor)}"
    )

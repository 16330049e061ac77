"""The data of a recipe: each rank loads the samples, and every rank scales them alike."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import checkpoint, nn
from hpctrain.core import trees
from hpctrain.core.errors import UsageError
from hpctrain.data import (
    Samples,
    Split,
    checks_as_read,
    count_labels,
    resize_training_set,
    unwrap,
)
from hpctrain.data.scaling import BLOCKS, Rule, Scale, block_moments, scale_from
from hpctrain.engines.engine import sum_over
from hpctrain.nn.losses import balanced_class_weights
from hpctrain.training.recipe import Recipe
from hpctrain.world import World

log = logging.getLogger(__name__)
SPREAD_ROWS = 16  #: samples that are read before a training, the first and the last among them
CHANNELS = (1, 3, 4)  #: of images whose layout may have been mistaken


def load_raw(spec: Recipe) -> Split:
    """Return the sets of a recipe, not scaled; the training set has the length of an epoch.

    Values that are not finite are an error unless `[run] not_finite` is "skip".
    """
    source = replace(spec.data, scale="none") if hasattr(spec.data, "scale") else spec.data
    split = source.load(spec.run.seed, finite=spec.run.not_finite != "skip")
    return resize_training_set(split, spec.run.epoch_samples)


def spread_rows(samples: Samples) -> tuple[Any, Any]:
    """Return (x, y) of up to SPREAD_ROWS samples, spread over the set from its first to its last.

    Raises UsageError for a value or a label that a training would refuse.
    """
    return samples.rows(np.unique(np.linspace(0, len(samples) - 1, SPREAD_ROWS).astype(np.int64)))


def count_unread(samples: Samples) -> int:
    """Return the samples in files whose values nobody reads before a training but `spread_rows`."""
    return max(0, len(samples) - SPREAD_ROWS) if checks_as_read(samples) else 0


def fingerprint(samples: Samples) -> str:
    """Return a hash of a few samples, spread over the set: all ranks must have the same."""
    array_bytes = (array.tobytes() for _, array in trees.arrays(spread_rows(samples)))
    return hashlib.sha256(b"".join(array_bytes)).hexdigest()[:16]


def recorded_scale(about: Mapping[str, Any], spec: Recipe) -> Scale:
    """Return the scale of a run from the facts of its checkpoint.

    A checkpoint without the entry is older: then uint8 samples of IDX files alone were scaled.
    """
    if (table := about.get("scale")) is not None:
        return Scale.from_json(table)
    return Scale("auto" if spec.tables["data"]["kind"] == "idx" else "none")


def read_begun(spec: Recipe, world: World, out: Path | None) -> tuple[bool, Scale | None]:
    """Return whether the run in `out` has checkpoints, and the scale of its data; collective."""

    def read() -> tuple[bool, dict[str, Any] | None]:
        saved_checkpoints = checkpoint.listing(out) if out is not None else []
        facts = [entry.about for entry in saved_checkpoints if entry.about and not entry.set_aside]
        scale = recorded_scale(facts[-1], spec).as_json() if facts else None
        return bool(saved_checkpoints), scale

    has_begun, scale_table = world.from_first(read)
    return has_begun, Scale.from_json(scale_table) if scale_table else None


def choose_scale(
    spec: Recipe, split: Split, model: Any, world: World, recorded: Scale | None
) -> Scale:
    """Return the scale of the samples of `split`, and announce it; collective.

    `recorded`: of the run that is resumed. Raises UsageError if the recipe has another one.
    """
    if not hasattr(spec.data, "scale"):
        return Scale()
    train, rule = unwrap(split.train), _scale_rule(spec, model)
    if recorded is None and rule in ("auto", "none"):
        recorded = Scale(rule)
    if recorded is None:
        own_blocks = range(world.link.rank, BLOCKS, world.link.size)
        moments = world.on_all_ranks(lambda: block_moments(train, own_blocks))
        recorded = scale_from(sum_over(world.main, moments.ravel()).reshape(moments.shape), rule)
    if recorded.rule != rule and "scale" in spec.tables["data"]:
        raise UsageError(
            f"[data] scale: expected '{recorded.rule}', with which this run began, seen '{rule}'; "
            "leave it out, or begin another run"
        )
    if world.rank == 0 and (spec.data.PATHS or "scale" in spec.tables["data"]):
        _announce_scale(recorded, train, model)
    return recorded.must_fit(train.sample_shape, "[data] scale")


def choose_class_weights(
    spec: Recipe, split: Split, outputs: int | None, world: World
) -> tuple[float, ...] | None:
    """Return the weights of `[loss] class_weights`, None without; "balanced" ones are announced.

    These are counted over the whole training set, of which each rank counts a part; collective.
    """
    if spec.loss is None or spec.loss.class_weights is None:
        return None
    if spec.loss.class_weights != "balanced":
        return tuple(map(float, spec.loss.class_weights))

    def count() -> np.ndarray:
        if outputs is None:
            raise UsageError("[loss] class_weights: 'balanced' needs the number of classes")
        return count_labels(split.train, outputs, world.link.rank, world.link.size)

    counts = sum_over(world.main, world.on_all_ranks(count))
    weights = balanced_class_weights(counts)
    if world.rank == 0:
        log.info("[loss] class_weights: %s", ", ".join(f"{weight:.4g}" for weight in weights))
    return weights


def _scale_rule(spec: Recipe, model: Any) -> Rule:
    """Return the rule of a recipe; by "auto" the rows of an Embedding's table are not scaled."""
    rule: Rule = spec.data.scale
    layers = list(model.layers.values()) if isinstance(model, nn.Model) else []
    return "none" if rule == "auto" and layers and isinstance(layers[0], nn.Embedding) else rule


def _announce_scale(scale: Scale, train: Any, model: Any) -> None:
    log.info("[data] scale: %s", scale.describe(train.x.dtype, len(train)))
    shape = train.sample_shape
    looks_like_images = len(shape) == 3 and shape[0] in CHANNELS and shape[-1] not in CHANNELS
    if looks_like_images and isinstance(model, nn.Model):
        log.warning(
            "[data] samples of shape %s look like images (channels, h, w); expected (h, w, "
            "channels), as numpy.moveaxis(x, 1, -1) makes them", shape,
        )  # fmt: skip

"""Results of a run that is done that suggest a fault of its data or its options."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np

from hpctrain.collectives.tree import broadcast_first
from hpctrain.data import Dataset, Samples, has_known_targets, known_targets, unwrap
from hpctrain.data.stored import StoredSamples
from hpctrain.training.callbacks import Row
from hpctrain.training.fit import FitSegment

SAMPLES = 64  #: of the test set whose outputs are compared
SAME = 1e-6  #: outputs differ by less, relative to the largest
LARGE = 30.0  #: samples beyond are seldom learned without a scale


def find_suspicions(segment: FitSegment, first_row: Row, row: Row) -> list[str]:
    """Return sentences about the last `row` of metrics if it seems wrong; collective.

    Suspicious are a training loss above the first row's, an accuracy not above the share of the
    most frequent class, an r2 of 0 or less, and then the same outputs for different samples.
    """
    texts, test, mesh = list[str](), segment.test, segment.mesh
    if segment.engine.worker == 0:
        first_loss, last_loss = first_row.get("train_loss"), row.get("train_loss")
        if first_loss is not None and last_loss is not None and last_loss > first_loss:
            texts += [
                f"the training loss grew from {first_loss:.4g} to {last_loss:.4g}: lower the rate"
            ]
        texts += _test_texts(test, row)
        if texts and test is not None and mesh.pipe is mesh.everyone:
            texts += _output_texts(segment.replica, test)
    payload = json.dumps(texts).encode() if texts else None
    first = broadcast_first(mesh.everyone.link, payload, limit=1)
    return next(map(json.loads, first.values()), [])


def _test_texts(test: Samples | None, row: Row) -> list[str]:
    accuracy, r2 = row.get("test_accuracy"), row.get("test_r2")
    if accuracy is not None and test is not None and has_known_targets(test):
        labels = known_targets(test)
        class_share = np.unique(labels, return_counts=True)[1].max() / labels.size
        if accuracy <= class_share:
            return [
                f"the test accuracy of {accuracy:.4f} is not above {class_share:.4f}, the share "
                "of the most frequent class"
            ]
    if r2 is not None and r2 <= 0:
        return [f"the test r2 of {r2:.4f} is not above 0: as good as the mean of the targets"]
    return []


def _output_texts(replica: Any, test: Samples) -> list[str]:
    base, texts = unwrap(test), list[str]()
    if not isinstance(base, Dataset | StoredSamples):
        return texts
    x, _ = test.rows(np.arange(min(SAMPLES, len(test))))
    if not isinstance(x, np.ndarray):
        return texts
    with suppress(Exception):  # of a user's model: the run is done
        outputs = np.asarray(replica.predict(x))
        if np.ptp(x, axis=0).any() and np.ptp(outputs, axis=0).max() <= SAME * abs(outputs).max():
            texts += [f"the outputs for {len(x)} different test samples are the same"]
    largest = abs(x.astype(np.float64)).max()
    if x.dtype.kind == "f" and largest > LARGE:
        texts += [f"samples reach {largest:.4g}: scale them, as [data] scale = 'standard' does"]
    return texts

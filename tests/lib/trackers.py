"""The files of trackers, opened by the trackers' own readers: values by name, and configuration."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("csv", "tensorboard", "wandb", "mlflow")


class Contents(NamedTuple):
    """What a tracker's reader returns of a run."""

    values: dict[str, list[tuple[int, float]]]  #: by name: (step, value), in the reader's order
    config: dict[str, Any]  #: leaves by their dotted names, as text
    summary: dict[str, Any]  #: as text, where the tracker knows no more


def read(kind: str, run: Path) -> Contents:
    """Return the contents of the folder of tracker `kind` in `run`."""
    return {"csv": of_csv, "tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}[
        kind
    ](run / kind)


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a table of JSON as text."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def of_csv(folder: Path) -> Contents:
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    values: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, text in row.items():
            if name != "step" and text:
                values.setdefault(name, []).append((int(row["step"]), float(text)))
    about = json.loads((folder / "about.json").read_text())
    return Contents(values, dict(leaves(about["config"])), about["summary"])


def of_tensorboard(folder: Path) -> Contents:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    values = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]
    }
    texts = {
        tag: json.loads(events.Tensors(tag)[-1].tensor_proto.string_val[0])
        for tag in ("config", "summary")
        if tag in tags["tensors"]
    }
    return Contents(values, dict(leaves(texts["config"])), texts.get("summary", {}))


def of_mlflow(folder: Path) -> Contents:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([item.experiment_id for item in client.search_experiments()])
    values = {
        name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    summary = {
        name.removeprefix("summary."): value
        for name, value in run.data.tags.items()
        if name.startswith("summary.")
    }
    return Contents(values, _as_json(run.data.params), summary)


def _as_json(params: dict[str, str]) -> dict[str, str]:
    """Return parameters with Python's words as JSON's."""
    words = {"True": "true", "False": "false", "None": "null"}
    return {name: words.get(value, value) for name, value in params.items()}


def of_wandb(folder: Path) -> Contents:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("offline-run-*/run-*.wandb")  # one curve is one file
    records = [Record.FromString(data) for data in wandb_records(file)]
    values: dict[str, list[tuple[int, float]]] = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for record in records:
        for item in record.run.config.update:
            config[item.key] = json.loads(item.value_json)
        for item in record.summary.update:
            summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        for item in record.history.item:
            name = item.key or ".".join(item.nested_key)
            if not name.startswith("_"):
                step = record.history.step.num
                values.setdefault(name, []).append((step, json.loads(item.value_json)))
    config.pop("_wandb", None)
    return Contents(values, dict(leaves(config)), summary)


def wandb_records(file: Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file: a log of LevelDB with a header of 7 bytes.

    W&B's own reader of these files is a part of `wandb-core`, which Python cannot call.
    """
    block, data, parts = 32768, file.read_bytes(), b""
    assert data[:4] == b":W&B"
    at = 7
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            break
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""

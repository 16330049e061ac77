"""Objects of Hugging Face's `datasets`: runs on them are those on their arrays, read in place."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from ranks import run_on

import hpctrain as ht
from hpctrain.core.errors import DataError, HpctrainError
from hpctrain.data.formats import arrow
from hpctrain.training.arguments import as_samples

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

N = 60
NUMBERS = np.random.default_rng(0)
X = NUMBERS.normal(size=(N, 4)).astype(np.float32)
Y = np.arange(N) % 3
ORDER = NUMBERS.permutation(N)
LISTS = datasets.Sequence(datasets.Value("float32"), length=4)
LABELS = datasets.ClassLabel(names=["a", "b", "c"])


def make(batches=3, **columns):
    """Return the data set of X and Y in record batches; `columns`: others, lists of N values."""
    features = {"label": LABELS, "pixels": LISTS}
    features |= {name: datasets.Value("float32") for name in columns}
    parts = [
        datasets.Dataset.from_dict(
            {"label": Y[rows], "pixels": X[rows].tolist()}
            | {name: values[rows] for name, values in columns.items()},
            datasets.Features(features),
        )
        for rows in np.array_split(np.arange(N), batches)
    ]
    return datasets.concatenate_datasets(parts)


def by_columns():
    columns = [f"c{i}" for i in range(4)]
    data = make(**dict(zip(columns, X.T, strict=True)))
    return ht.data.HuggingFaceSamples(data, x=columns, y="label")


def ragged():
    lists = [[0.0]] * 2 + X.tolist()
    data = datasets.Dataset.from_dict({"pixels": lists, "target": [0, 0, *Y]})
    data = data.cast_column("pixels", datasets.Sequence(datasets.Value("float32")))
    return data.filter(lambda row: len(row["pixels"]) == 4)


#: way to a data set -> (it, the rows of X and Y that it has)
SETS = {
    "one batch": (lambda: make(1), slice(None)),
    "batches": (make, slice(None)),
    "shuffled": (lambda: make().select(ORDER), ORDER),
    "selected twice": (lambda: make().select(ORDER).select(range(50, 5, -1)), ORDER[50:5:-1]),
    "filtered": (ragged, slice(None)),
    "columns of a format": (
        lambda: make(age=Y).with_format("numpy", columns=["pixels", "label"]),
        slice(None),
    ),
    "columns side by side": (by_columns, slice(None)),
}


def no_item(*_):
    raise AssertionError("an item was read by the library")


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", SETS)
def test_a_run_is_that_on_its_arrays(monkeypatch, name, ranks):
    make_set, rows = SETS[name]
    data, arrays = make_set(), (X[rows], Y[rows])
    for method in ("__getitem__", "__getitems__", "__iter__", "with_format"):
        monkeypatch.setattr(datasets.Dataset, method, no_item)

    def body(world):
        ends = []
        for samples in (data, arrays):
            model = ht.nn.Model([ht.nn.Linear(3)], input_shape=4)
            with ht.Trainer(model, ht.optim.sgd(rate=0.1), world=world) as trainer:
                summary = trainer.fit(samples, epochs=2, batch=7, evaluate=samples)
                loss = trainer.evaluate(samples)["loss"]
            ends.append((summary["params_sha256"], summary["test_loss"], loss))
        return ends

    for on_data, on_arrays in run_on("threads", ranks, body):
        assert on_data == on_arrays


def test_rows_are_new_and_classes_those_of_the_label():
    samples = as_samples(make().select(ORDER), "fit")
    indexes = np.array([3, 59, 3, 0])
    x, y = samples.rows(indexes)
    assert samples.classes == 3 and y.dtype == np.int64 and np.array_equal(y, Y[ORDER][indexes])
    x[...] = 0
    again = pickle.loads(pickle.dumps(samples))
    assert np.array_equal(again.rows(indexes)[0], X[ORDER][indexes])


@pytest.mark.parametrize("in_place", [True, False])
def test_adjacent_rows_stay_in_place(in_place):
    batches = make().data.table.to_batches()
    rows = np.arange(25, 35) if in_place else np.arange(25, 35, 2)
    table = arrow.take_rows(batches, np.array([20, 40, 60]), rows)
    parts = (*table.to_batches(), batches[1])
    taken, stored = (part.column("label").buffers()[1] for part in parts)
    assert (taken.address == stored.address) == in_place
    assert np.array_equal(table.column("label").to_numpy(), Y[rows])


def test_values_that_are_not_finite_are_left_to_a_run_that_skips_them():
    ages = np.where(Y == 2, np.nan, Y).astype(np.float32)
    data = make(age=ages).select_columns(["age", "label"])
    rows = np.arange(N)
    options = {"x": ["age"], "y": "label"}
    x, _ = ht.data.HuggingFaceSamples(data, **options, finite=False).rows(rows)
    assert np.array_equal(x[:, 0], ages, equal_nan=True)
    with pytest.raises(DataError, match="row 2 of data set: age"):
        ht.data.HuggingFaceSamples(data, **options).rows(rows)
    two = data.map(lambda row: {"age": [row["age"]]})
    assert np.isnan(as_samples(two, "fit", finite=False).rows(rows)[0]).any()


def missing():
    lists = [*X.tolist()]
    lists[ORDER[5]] = None
    return datasets.Dataset.from_dict({"pixels": lists, "y": Y}).select(ORDER)


def named(x, y, data=make):
    return lambda: ht.data.HuggingFaceSamples(data(), x, y)


REFUSALS = {
    "splits": (lambda: datasets.DatasetDict(test=make()), r"give dataset\['test'\]"),
    "splits of streams": (
        lambda: datasets.IterableDatasetDict(train=make().to_iterable_dataset()),
        r"seen IterableDatasetDict of train; give dataset\['train'\]",
    ),
    "a stream": (lambda: make().to_iterable_dataset(), "load it without streaming=True"),
    "a transform": (lambda: make().with_transform(dict), "apply it once by dataset.map"),
    "a format's dtype": (
        lambda: make().with_format("numpy", dtype=np.float16),
        "seen dtype=<class 'numpy.float16'>; change the dtype of a column by dataset.cast_column",
    ),
    "three columns": (
        lambda: make(age=Y),
        r"seen label, pixels, age; name them: ht.data.HuggingFaceSamples",
    ),
    "columns beside a format's": (
        lambda: make(age=Y).with_format("numpy", ["pixels", "label"], output_all_columns=True),
        "seen label, pixels, age; name them",
    ),
    "no targets": (
        lambda: make().rename_column("label", "kind").cast_column("kind", datasets.Value("int64")),
        "one of class labels or with the name y, label, labels, target or targets, seen",
    ),
    "a column that a format hides": (
        named("age", "label", lambda: make(age=Y).with_format("numpy", ["pixels", "label"])),
        "'age'",
    ),
    "a wrong name": (named("pixel", "label"), "did you mean 'pixels'"),
    "a stream with names": (named("a", "b", lambda: make().to_iterable_dataset()), "a stream"),
    "arrays with names": (named("a", "b", lambda: X), "expected a datasets.Dataset, seen ndarray"),
    "no rows": (lambda: make().select([]), "expected rows, seen none"),
    "text": (
        lambda: datasets.Dataset.from_dict({"text": ["a"], "label": [0]}),
        "data set: text: expected numbers, lists of numbers or images, seen string",
    ),
    "a null": (missing, f"before its select, shuffle or filter: pixels: .* row {ORDER[5]};"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    make_set, message = REFUSALS[name]

    def body(world):
        model = ht.nn.Model([ht.nn.Linear(3)], input_shape=4)
        with ht.Trainer(model, ht.optim.sgd(rate=0.1), world=world) as trainer:
            trainer.fit(make_set(), epochs=1, batch=N)

    with pytest.raises(HpctrainError, match=message):
        run_on("threads", 2, body)

"""Augmentation: a function of (seed, epoch, index), independent of the reading rank."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain import data
from hpctrain.core.errors import UsageError
from hpctrain.data import augment
from hpctrain.data.augment import AugmentedSamples

N = 400
X = np.random.default_rng(0).standard_normal((N, 6, 5))
COLOUR = np.random.default_rng(0).standard_normal((N, 6, 5, 3))
Y = np.arange(N) % 7
GOLDEN = [16286985422583188647, 12714937816434013447, 9744721139647532428]


def moved(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """Return an image moved pixel by pixel."""
    out = np.zeros_like(image)
    for i in range(image.shape[0]):
        for j in range(image.shape[1]):
            if 0 <= i - down < image.shape[0] and 0 <= j - right < image.shape[1]:
                out[i, j] = image[i - down, j - right]
    return out


def result(observed: np.ndarray, image: np.ndarray, shift: int) -> tuple[int, int, bool]:
    """Return the one way in which `image` became `seen`."""
    ways = [
        (down, right, flip)
        for down in range(-shift, shift + 1)
        for right in range(-shift, shift + 1)
        for flip in (False, True)
        if np.array_equal(moved(image, down, right)[:, :: -1 if flip else 1], observed)
    ]
    (way,) = ways
    return way


@pytest.mark.parametrize("x", [X, COLOUR], ids=["grey", "colour"])
@pytest.mark.parametrize(("shift", "flip"), [(2, False), (0, True), (1, True)])
def test_each_image_is_moved_and_mirrored_its_own_way(x, shift, flip):
    samples = AugmentedSamples(data.Dataset(x, Y), seed=3, shift=shift, flip=flip)
    assert (len(samples), samples.sample_shape) == (N, x.shape[1:])
    observed, y = samples.rows(np.arange(N), epoch=5)
    ways = [result(observed[i], x[i], shift) for i in range(N)]
    assert np.array_equal(y, Y) and observed.dtype == x.dtype
    downs, rights, flips = (np.array(column) for column in zip(*ways, strict=True))
    for moves in (downs, rights):
        expected = N / (2 * shift + 1)
        counts = np.bincount(moves + shift, minlength=2 * shift + 1)
        assert len(counts) == 2 * shift + 1
        assert np.abs(counts - expected).max() <= 5 * expected**0.5 * (shift > 0)
    assert abs(flips.mean() - 0.5) < 0.125 if flip else not flips.any()
    assert len(set(ways)) == (2 * shift + 1) ** 2 * (2 if flip else 1)  # independent of each other


def test_what_happens_depends_on_seed_epoch_and_index_alone():
    def read(seed=0, epoch=0, order=None, before=()):
        samples = AugmentedSamples(data.Dataset(X, Y), seed, 2, True)
        for other in before:
            samples.rows(np.arange(3), other)
        order = np.arange(N) if order is None else order
        parts = [samples.rows(part, epoch)[0] for part in np.array_split(order, 7)]
        out = np.empty_like(X)
        out[order] = np.concatenate(parts)
        return out.tobytes()

    mixed = np.random.default_rng(1).permutation(N)
    assert read() == read(order=mixed) == read(before=(4, 0, 9))
    assert len({read(), read(seed=1), read(epoch=1), read(seed=1, epoch=1)}) == 4


def test_the_words_stay_the_same_for_good():
    # Or a resumed run would see other images than the run it goes on with.
    assert augment.draw_words(3, 5, 3).tolist() == GOLDEN


def test_the_samples_themselves_stay_as_they_are():
    before = X.copy()
    AugmentedSamples(data.Dataset(X, Y), 0, 2, True).rows(np.arange(N))
    assert np.array_equal(X, before)


def test_the_keys_of_a_recipe_change_training_images_alone():
    plain = data.read({"kind": "digits"}).load(seed=0)
    split = data.read({"kind": "digits", "shift": 1, "flip": True}).load(seed=0)
    everything = np.arange(len(plain.train))
    assert np.array_equal(split.test.x, plain.test.x) and split.classes == 10
    assert not np.array_equal(split.train.rows(everything)[0], plain.train.x)
    assert np.array_equal(split.train.samples.x, plain.train.x)


def test_vectors_cannot_be_moved(tmp_path):
    np.savez(tmp_path / "d.npz", x=X[:, 0], y=Y)
    with pytest.raises(UsageError, match=r"expected images .* seen samples \(5,\)"):
        data.read({"kind": "npz", "path": str(tmp_path / "d.npz"), "shift": 1}).load(0)

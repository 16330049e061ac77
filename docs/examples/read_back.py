"""Read a finished run back and predict with it; that part needs no MPI.

`python read_back.py DIR` reads DIR, the output folder of `hpctrain train`. Without DIR three epochs
of digits are trained first, on as many ranks as were started.
"""

import sys
import time
from pathlib import Path

import hpctrain as ht
from hpctrain.training import recipe, runs


def train_briefly():
    """Train digits on all ranks that were started; return the folder on rank 0, end the others."""
    world = ht.init()
    name = world.from_first(lambda: time.strftime("read-back-%Y%m%d-%H%M%S"))  # rank 0's clock
    folder = Path("runs") / name
    runs.train(recipe.load("digits", ["run.epochs=3"]), world, folder, resume=False)
    return folder if world.rank == 0 else sys.exit()


folder = Path(sys.argv[1]) if len(sys.argv) > 1 else train_briefly()
model = ht.load(folder)  # with the weights of the newest good checkpoint
test = ht.data.DigitsOptions().load(seed=0).test

accuracy = model.evaluate((test.x, test.y))["accuracy"]
print(f"{folder}: {accuracy:.1%} of {len(test)} test images right")

predicted = model.predict(test.x).argmax(axis=1)  # of logits, (360, 10)
for i in range(5):
    print(f"image {i}: a {test.y[i]}, taken for a {predicted[i]}")
assert (predicted == test.y).mean() == accuracy > 0.8

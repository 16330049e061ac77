"""A model split over all ranks that are started: `hpctrain launch -n 2 -- python pipeline.py`."""

import numpy as np

import hpctrain as ht

rng = np.random.default_rng(0)
x = rng.normal(size=(256, 16))
y = (x @ rng.normal(size=16) > 0).astype(int)

layers = [layer for _ in range(4) for layer in (ht.nn.Linear(64), ht.nn.ReLU())]
model = ht.nn.Model([*layers, ht.nn.Linear(2)], 16)

world = ht.init()
mesh = ht.parallel.MeshOptions(pipe=world.size)
pipeline = ht.parallel.PipelineOptions(schedule="zb-h1" if world.size > 1 else "1f1b")
with ht.Trainer(model, ht.optim.sgd(rate=0.1), mesh=mesh, pipeline=pipeline) as trainer:
    summary = trainer.fit((x, y), steps=50, batch=64, micro_batches=4)
if world.rank == 0:
    print(f"{world.size} stages: loss {summary['train_loss']:.3f}, {summary['params_sha256'][:12]}")

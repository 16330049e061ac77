"""Losses of torch.nn, each row with another argument: the loss, targets and a module."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from guests.torch_training import make_module
from torch import nn
from torch.nn import functional as F

N, BATCH, STEPS, CLASSES = 23, 8, 5, 3
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(N, 4))
LABELS = GENERATOR.integers(CLASSES, size=N)
MASKED = np.where(GENERATOR.random(N) < 0.4, -100, LABELS)
MASKED[:2] = 1
PROBABILITIES = GENERATOR.dirichlet(np.ones(CLASSES), size=N)
REALS = GENERATOR.normal(size=(N, CLASSES))
BITS = GENERATOR.integers(2, size=(N, CLASSES)).astype(float)
SIGNS = 2 * BITS - 1
COUNTS = GENERATOR.poisson(2, size=(N, CLASSES)).astype(float)
PLACES = np.where(GENERATOR.random((N, 2)) < 0.3, 2, GENERATOR.integers(2, size=(N, 2)))
TAGS = np.stack([LABELS, -np.ones(N, int), -np.ones(N, int)], axis=1)
W = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


class Places(nn.Module):
    """Outputs (n, 3, 2): classes in axis 1, as losses of PyTorch take them."""

    def __init__(self):
        super().__init__()
        self.body = make_module(6)

    def forward(self, x):
        return self.body(x).unflatten(1, (3, 2))


class LogSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_module()

    def forward(self, x):
        return self.body(x).log_softmax(1)


class Sigmoid(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_module()

    def forward(self, x):
        return self.body(x).sigmoid()


CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss
#: loss, targets, module; the first row of each loss has the defaults
ROWS = {
    "CrossEntropyLoss": (CE(), LABELS, make_module),
    "CrossEntropyLoss, weight": (CE(weight=W), LABELS, make_module),
    "CrossEntropyLoss, ignored labels": (CE(), MASKED, make_module),
    "CrossEntropyLoss, ignore_index": (CE(ignore_index=2), LABELS, make_module),
    "CrossEntropyLoss, weight, ignore_index": (CE(W, ignore_index=1), LABELS, make_module),
    "CrossEntropyLoss, label_smoothing": (CE(label_smoothing=0.2), LABELS, make_module),
    "CrossEntropyLoss, weight, label_smoothing": (
        CE(W, label_smoothing=0.2, ignore_index=0), LABELS, make_module,
    ),
    "CrossEntropyLoss, probabilities": (CE(), PROBABILITIES, make_module),
    "CrossEntropyLoss, weight, probabilities": (CE(weight=W), PROBABILITIES, make_module),
    "CrossEntropyLoss, reduction": (CE(weight=W, reduction="sum"), LABELS, make_module),
    "CrossEntropyLoss, size_average": (CE(size_average=False), LABELS, make_module),
    "CrossEntropyLoss, places": (CE(weight=W, ignore_index=1), PLACES, Places),
    "NLLLoss": (nn.NLLLoss(), LABELS, LogSoftmax),
    "NLLLoss, weight": (nn.NLLLoss(weight=W), LABELS, LogSoftmax),
    "NLLLoss, ignore_index": (nn.NLLLoss(ignore_index=0), LABELS, LogSoftmax),
    "NLLLoss, reduction": (nn.NLLLoss(reduction="sum"), LABELS, LogSoftmax),
    "BCEWithLogitsLoss": (BCE(), BITS, make_module),
    "BCEWithLogitsLoss, weight": (BCE(weight=W), BITS, make_module),
    "BCEWithLogitsLoss, pos_weight": (BCE(pos_weight=W), BITS, make_module),
    "BCEWithLogitsLoss, reduction": (BCE(reduction="sum"), BITS, make_module),
    "BCELoss": (nn.BCELoss(), BITS, Sigmoid),
    "BCELoss, weight": (nn.BCELoss(weight=W), BITS, Sigmoid),
    "BCELoss, reduction": (nn.BCELoss(reduction="sum"), BITS, Sigmoid),
    "MSELoss": (nn.MSELoss(), REALS, make_module),
    "MSELoss, reduction": (nn.MSELoss(reduction="sum"), REALS, make_module),
    "L1Loss": (nn.L1Loss(), REALS, make_module),
    "L1Loss, reduction": (nn.L1Loss(reduction="sum"), REALS, make_module),
    "SmoothL1Loss": (nn.SmoothL1Loss(), REALS, make_module),
    "SmoothL1Loss, beta": (nn.SmoothL1Loss(beta=0.3), REALS, make_module),
    "SmoothL1Loss, reduction": (nn.SmoothL1Loss(reduction="sum"), REALS, make_module),
    "HuberLoss": (nn.HuberLoss(), REALS, make_module),
    "HuberLoss, delta": (nn.HuberLoss(delta=0.3), REALS, make_module),
    "HuberLoss, reduction": (nn.HuberLoss(reduction="sum"), REALS, make_module),
    "KLDivLoss": (nn.KLDivLoss(), PROBABILITIES, LogSoftmax),
    "KLDivLoss, reduction": (nn.KLDivLoss(reduction="batchmean"), PROBABILITIES, LogSoftmax),
    "KLDivLoss, log_target": (
        nn.KLDivLoss(log_target=True), np.log(PROBABILITIES[::-1].copy()), LogSoftmax,
    ),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(), COUNTS, make_module),
    "PoissonNLLLoss, log_input": (nn.PoissonNLLLoss(log_input=False), COUNTS, Sigmoid),
    "PoissonNLLLoss, full": (nn.PoissonNLLLoss(full=True, reduction="mean"), COUNTS, make_module),
    "PoissonNLLLoss, eps": (nn.PoissonNLLLoss(log_input=False, eps=0.1), COUNTS, Sigmoid),
    "PoissonNLLLoss, reduction": (nn.PoissonNLLLoss(reduction="sum"), COUNTS, make_module),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(), SIGNS, make_module),
    "HingeEmbeddingLoss, margin": (nn.HingeEmbeddingLoss(margin=0.1), SIGNS, make_module),
    "HingeEmbeddingLoss, reduction": (nn.HingeEmbeddingLoss(reduction="sum"), SIGNS, make_module),
    "SoftMarginLoss": (nn.SoftMarginLoss(), SIGNS, make_module),
    "SoftMarginLoss, reduction": (nn.SoftMarginLoss(reduction="sum"), SIGNS, make_module),
    "MultiMarginLoss": (nn.MultiMarginLoss(), LABELS, make_module),
    "MultiMarginLoss, p": (nn.MultiMarginLoss(p=2), LABELS, make_module),
    "MultiMarginLoss, margin": (nn.MultiMarginLoss(margin=0.1), LABELS, make_module),
    "MultiMarginLoss, weight": (nn.MultiMarginLoss(weight=W), LABELS, make_module),
    "MultiMarginLoss, reduction": (nn.MultiMarginLoss(reduction="sum"), LABELS, make_module),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), TAGS, make_module),
    "MultiLabelMarginLoss, reduction": (
        nn.MultiLabelMarginLoss(reduction="sum"), TAGS, make_module,
    ),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), BITS, make_module),
    "MultiLabelSoftMarginLoss, weight": (
        nn.MultiLabelSoftMarginLoss(weight=W), BITS, make_module,
    ),
    "MultiLabelSoftMarginLoss, reduction": (
        nn.MultiLabelSoftMarginLoss(reduction="sum"), BITS, make_module,
    ),
    "cross_entropy of functional": (F.cross_entropy, MASKED, make_module),
    "cross_entropy of functional, weight": (
        partial(F.cross_entropy, weight=W), LABELS, make_module,
    ),
    "a mean over samples": (
        lambda z, y: F.cross_entropy(z, y, label_smoothing=0.4), LABELS, make_module,
    ),
}  # fmt: skip
#: losses with other arguments, given as functions: their means are over samples or elements
FUNCTIONS = {
    "GaussianNLLLoss": lambda z, y: nn.GaussianNLLLoss()(z, y, z.exp()),
    "CosineEmbeddingLoss": lambda z, y: nn.CosineEmbeddingLoss(margin=0.1)(z, y, y[:, 0].sign()),
    "MarginRankingLoss": lambda z, y: nn.MarginRankingLoss()(z[:, 0], z[:, 1], y[:, 0].sign()),
    "TripletMarginLoss": lambda z, y: nn.TripletMarginLoss()(z, y, -y),
    "CTCLoss": lambda z, y: nn.CTCLoss()(
        z.unflatten(1, (1, 3)).expand(-1, 4, -1).transpose(0, 1).log_softmax(2),
        torch.ones(len(z), 1, dtype=torch.long),
        torch.full((len(z),), 4), torch.full((len(z),), 1),
    ),
}  # fmt: skip
ROWS |= {f"{name} as a function": (f, REALS, make_module) for name, f in FUNCTIONS.items()}

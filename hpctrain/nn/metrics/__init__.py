"""Metrics of a test set beside its loss; their values are exact on any number of ranks.

The files:

    metric.py   sums of a set, and a metric of the user's own    counts.py   F1, confusion, top-k
    auc.py      the area under the ROC curve                     scores.py   outputs as scores
    bound.py    metrics by name, bound to a model's task
"""

from __future__ import annotations

from hpctrain.nn.metrics.bound import BoundMetrics, bind, check_metrics, is_name
from hpctrain.nn.metrics.metric import Metric, UndefinedError

__all__ = ["BoundMetrics", "Metric", "UndefinedError", "bind", "check_metrics", "is_name"]

"""Horovod's names on the MPI of the user: its scripts run with one import changed.

    import hpctrain.horovod.torch as hvd        in place of `import horovod.torch as hvd`

`python -m hpctrain.horovod SCRIPT` runs a script as it is, and `hpctrain-horovodrun -np 4 python
train.py` takes the options of horovodrun. Nothing is imported here: neither MPI nor PyTorch. See
docs/horovod.md.
"""

__version__ = "0.28.1"  #: of the Horovod whose names these are, which scripts compare

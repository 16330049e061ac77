"""Horovod for Keras is not here: the import says what to do."""

from hpctrain.horovod.absent import refusal

raise refusal(__name__)

"""`horovod.run`, which starts ranks within a script, is not here: the import says what to do."""

from hpctrain.horovod.absent import refusal

raise refusal(__name__)

"""The package `horovod` of a script that is run as it is: its import returns hpctrain.horovod."""

from hpctrain.horovod import alias

alias.install()

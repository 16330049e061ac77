"""`hvd.elastic`: training that goes on when ranks are lost, under `hpctrain launch --elastic`."""

from hpctrain.horovod.torch.elastic.loop import HostsUpdatedInterrupt, run
from hpctrain.horovod.torch.elastic.sampler import ElasticSampler
from hpctrain.horovod.torch.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]

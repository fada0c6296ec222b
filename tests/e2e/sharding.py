"""FSDP 2 in CPU processes. accelerate has FSDP for accelerators only, and takes each of these processes for one."""

from types import SimpleNamespace

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor

from qerl_trl.support.names import full_tensor

TOKENS = torch.arange(40).reshape(2, 20) + 5
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",  # as `accelerate config` proposes
}
TRAINING = {"padding_free": True, "aqn_scope": "policy", "gradient_checkpointing": None}
TRAINING["gradient_accumulation_steps"] = 4


def as_accelerators():
    original = PartialState.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init


def parameters_as_torch_2_11():
    """It makes each part with a gradient first, which bytes cannot have."""

    def with_gradient_first(data, requires_grad=True):
        if isinstance(data, DTensor):
            return nn.Parameter(data).requires_grad_(requires_grad)
        return nn.Parameter(data, requires_grad)

    _fsdp_param.nn = SimpleNamespace(Parameter=with_gradient_first, Module=nn.Module)


def trained(trainer) -> dict[str, torch.Tensor]:
    return {n: full_tensor(p) for n, p in trainer.model.named_parameters() if p.requires_grad}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS, use_cache=False).logits


def close(some: dict, others: dict, **tolerance) -> None:
    assert some.keys() == others.keys()
    for name in some:
        torch.testing.assert_close(some[name], others[name], **tolerance)

"""A model in evaluation mode, or cast, for the time of a measurement: restored afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside. Not `model.train()` afterwards: parts of a model may have been in evaluation mode before."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Around an evaluation that casts the model in place (`bf16_full_eval`): it has the tensors of before again afterwards."""
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module._buffers, module._buffers.copy()) for module in model.modules()]
    try:
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for now, before in buffers:
            now.update(before)

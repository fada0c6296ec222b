"""A model in evaluation mode for the time of a measurement, each module's own training flag restored after."""

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

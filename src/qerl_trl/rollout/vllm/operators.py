"""One call that makes a function an operator of PyTorch, which torch.compile keeps whole and CUDA graphs record."""

from collections.abc import Callable

import torch

_LIBRARIES: dict[str, torch.library.Library] = {}


def register_operator(schema: str, implementation: Callable, fake: Callable) -> None:
    """Register `implementation` for CPU and CUDA under `schema`, which is `namespace::name(arguments) -> result`.

    Args:
        fake: has the same arguments and gives empty results of the right shape and dtype, for tracing.
    """
    namespace, _, definition = schema.partition("::")
    name = definition.partition("(")[0]
    library = _LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    library.define(definition)
    for device in ("CPU", "CUDA"):
        library.impl(name, implementation, device)
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)

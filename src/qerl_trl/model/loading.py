"""Loading of sealed folders with verification, of ready-made adapters, and of packed bytes under FSDP 2.

For a folder with a manifest, [`begin`] compares file names, sizes and the content of all small files (configuration,
tokenizer, index) at once and hashes the weights in a thread; [`finish`] waits for the thread and raises, at the end of
[`from_pretrained`] or before training. Without a manifest nothing is compared. A Hub model is compared with its
published manifest after the download ([`begin_loaded`]).
"""

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..checkpoint import seal
from ..nvfp4 import config, fused
from ..nvfp4.headers import check_finite_module, weight_files
from ..nvfp4.linear import NVFP4Linear
from ..support.files import beside, hub_commit, note_commit, reads_for_its_machine

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: files up to this size are hashed before loading starts
_AT_ONCE_BYTES = 1 << 24


class _Hashing(threading.Thread):
    """Hash a whole sealed folder in a thread."""

    def __init__(self, folder: Path, partial: bool = False) -> None:
        super().__init__(name=f"hashing {folder}", daemon=True)
        self.folder, self.partial = folder, partial
        self.problems: list[str] = []

    def run(self) -> None:
        try:
            self.problems = seal.problems(self.folder, partial=self.partial)
        except OSError as error:
            self.problems = [str(error)]
        if self.problems:
            logger.error("%s", _message(self.folder, self.problems))


#: key: folder and the state of its files
_begun: dict[tuple, _Hashing] = {}


def begin(model: str | os.PathLike) -> None:
    """Start comparing the folder `model` with its manifest, weights in a thread. Does nothing for a Hub id."""
    folder = Path(model)
    if folder.is_dir():
        weight_files(folder)
    if not (folder / seal.MANIFEST_NAME).is_file() or not reads_for_its_machine():
        return
    _compare(folder, partial=hub_commit(folder) is not None, closed=True)


def begin_loaded(model: nn.Module, **source: Any) -> None:
    """[`begin`] for a loaded model. `source`: its `revision` and `cache_dir`."""
    config = cast(PretrainedConfig, model.config)
    note_commit(config, **source)
    if not reads_for_its_machine() or (manifest := beside(config, seal.MANIFEST_NAME)) is None:
        return
    folder, here = manifest.parent, os.path.isdir(config.name_or_path or "")
    _compare(folder, partial=not here or hub_commit(folder) is not None, closed=here)


def _compare(folder: Path, partial: bool, closed: bool) -> None:
    """Compare the small files of a sealed folder now, and start hashing the rest, once.

    Args:
        partial: files may be missing.
        closed: no file that affects the model may have been added.
    """
    if (key := _key(folder)) in _begun:
        return
    wrong = seal.problems(folder, _AT_ONCE_BYTES, partial)
    if closed and not wrong:
        wrong = seal.added(folder)
    if wrong:
        raise ValueError(_message(folder, wrong))
    _begun[key] = _Hashing(folder, partial)
    _begun[key].start()


def _key(folder: Path) -> tuple:
    stamps = ((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file())
    return (str(folder.resolve()), *sorted(stamps))


def finish(model: nn.Module | None = None, **source: Any) -> None:
    """Wait for the hashing started by [`begin`]; check every value of `model`. `source`: see [`begin_loaded`]."""
    if model is not None:
        begin_loaded(model, **source)
    for key, hashing in list(_begun.items()):
        hashing.join()
        if hashing.problems:
            del _begun[key]
            raise ValueError(_message(hashing.folder, hashing.problems))
    if model is not None:
        name = cast(PretrainedConfig, model.config).name_or_path or type(model).__name__
        check_finite_module(model, lambda _: name)


def _message(folder: Path, wrong: list[str]) -> str:
    return (
        f"{folder} differs from its manifest: {'; '.join(wrong)}. Export or download it again. If you meant the "
        f"change, remove {seal.MANIFEST_NAME} there: it is loaded unverified then."
    )


def _of_sealed(load: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `load`, called with a folder or Hub id first, to verify that folder before."""

    @functools.wraps(load)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        begin(str(args[0] if args else kwargs["model_id"]))
        return load(*args, **kwargs)

    return checked


load_config = _of_sealed(config.load_config)
pretrained_kwargs = _of_sealed(config.pretrained_kwargs)


@functools.wraps(config.from_pretrained)
def from_pretrained(model_id: str | os.PathLike, *args: Any, **kwargs: Any) -> PreTrainedModel:
    begin(model_id)
    model = config.from_pretrained(model_id, *args, **kwargs)
    begin_loaded(model)
    finish()
    return model


# --- FSDP 2 -----------------------------------------------------------------------------------------------------------

#: accelerate's name for whole tensors in a checkpoint
FULL = "FULL_STATE_DICT"


class BytesWithoutGradient(TorchFunctionMode):
    """Context in which `requires_grad` on an integer tensor is ignored instead of raising."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.requires_grad_ and not (args[0].is_floating_point() or args[0].is_complex()):
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def loaded_everywhere(wanted: bool = True) -> Iterator[None]:
    """Make every process read weights, even with `fsdp_cpu_ram_efficient_loading` (zeros on all ranks but 0)."""
    name, before = "FSDP_CPU_RAM_EFFICIENT_LOADING", os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING")
    if not wanted or before is None:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ[name] = before


def save_whole_tensors(accelerator: Accelerator) -> None:
    """Under FSDP, save full tensors whatever accelerate's configuration, so that PEFT can read the adapter."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or (now := plugin.state_dict_type.name) == FULL:
        return
    logger.warning(
        "fsdp_state_dict_type is %s, with which checkpoints and output_dir would have no adapter_model.safetensors. "
        "This run uses %s; write `fsdp_state_dict_type: %s` into accelerate's configuration.",
        now,
        FULL,
        FULL,
    )
    plugin.state_dict_config = plugin.optim_state_dict_config = None  # they were for shards; accelerate makes new ones
    plugin.set_state_dict_type(FULL)


def matrices_of_checkpoint(model_id: str | os.PathLike, **kwargs: Any) -> list[fused.Matrix]:
    """List the packed matrices of a folder or Hub id, from its configuration; `kwargs` as for `load_config`."""
    found = config.load_config(model_id, **kwargs)
    stored = config.quantization_of(found)
    quantization = config.NVFP4Config() if stored is None else config.NVFP4Config.from_dict(stored)
    if stored is not None:
        del found.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(found)
    for name, linear in quantization.linears_to_quantize(model).items():
        packed = NVFP4Linear(linear.in_features, linear.out_features, linear.bias is not None, "meta")
        model.set_submodule(name, packed)
    return fused.packed_matrices(model)

"""The engine in the trainer's process: vLLM on the same GPU, by default on the same weights."""

import functools
import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import MODEL_MAPPING, AutoModel, PretrainedConfig
from vllm import LLM, SamplingParams
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.model_executor.models import ModelRegistry
from vllm.outputs import CompletionOutput, RequestOutput

from ...noise.hooks import NoiseDraw
from ...nvfp4.checkpoints import METHOD
from ...nvfp4.fused import fuse_storage
from ...support.distributed import gathered
from ...support.names import canonical_name
from ..engine import BATCH_INVARIANT, AdapterTensors, Completion, Contents, Engine, RolloutError, Sampling
from ..spec import EngineSpec
from . import loader
from .loader import base_model
from .state import RolloutState


class SharedLLM(LLM):
    """vLLM's `LLM` as one shard of an engine over the processes of `group`; None: a whole engine in this process."""

    def __init__(self, *args: Any, group: "torch.distributed.ProcessGroup | None" = None, **kwargs: Any) -> None:
        self._group = group
        #: most likely tokens and their log-probabilities at this process's latest tokens, with `flat_logprobs`
        self.top: list[tuple[np.ndarray, np.ndarray]] = []
        super().__init__(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        with self._asking():
            outputs = super().generate(*args, **kwargs)
        top = [_take(each) for output in outputs for each in output.outputs if isinstance(each.logprobs, FlatLogprobs)]
        rank, size = (torch.distributed.get_rank(self._group), self._group.size()) if self._group else (0, 1)
        self.top = top[rank * len(top) // size : (rank + 1) * len(top) // size]
        return outputs

    def chat(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        with self._asking():
            return super().chat(*args, **kwargs)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Abort all requests after an error (a timeout, Ctrl-C): vLLM would return them from the next call."""
        try:
            with same_generator(self._group):
                yield
        except BaseException:
            with suppress(Exception):  # a dead engine; its own error is re-raised
                self.llm_engine.abort_request(list(self.llm_engine.output_processor.request_states), internal=True)
                self.reset_prefix_cache(reset_connector=True)
            raise


@contextmanager
def same_generator(group: "torch.distributed.ProcessGroup | None") -> Iterator[None]:
    """Share the first process's RNG state in `group`: each shard samples the whole batch from its process's generator,
    and dropout and reward models make them diverge. Collective."""
    if group is None:
        yield
        return
    device: Any = torch.cuda if torch.cuda.is_available() else torch
    own = device.get_rng_state()
    device.set_rng_state(gathered(own, group)[0])
    try:
        yield
    finally:
        if torch.distributed.get_rank(group=group) != 0:
            device.set_rng_state(own)


class InProcessEngine(Engine):
    """vLLM's `LLM` in this process, built from the trainer's `model`.

    Args:
        share: let vLLM read the trainer's tensors instead of a copy.
        sleeps: `sleep` frees the GPU memory of the KV cache and, unless `share`, of vLLM's copy of the weights.
        group: processes sharing one engine (tensor parallelism); each calls it with its own prompts.
        arguments: further arguments of `LLM`: for memory, for placement, and those of the user.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: EngineSpec,
        share: bool,
        sleeps: bool,
        group: torch.distributed.ProcessGroup | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.sleeps, self.group = sleeps, group
        self.asleep = False
        self._slept: dict[str, int] = {}  # sums of all weights before sleep
        if share:
            fuse_storage(model)
        if spec.batch_invariant:
            os.environ[BATCH_INVARIANT] = "1"  # vLLM reads it at construction
        loader.publish(model, alias=share)
        try:
            own = {"enable_sleep_mode": sleeps, **isolation_arguments(model, spec, arguments or {})}
            gc.freeze()  # vLLM collects garbage six times at start, 4 s in all, and then freezes too
            self.llm: SharedLLM | None = SharedLLM(group=group, **{**spec.llm_arguments(), **own, **(arguments or {})})
        except BaseException:
            gc.unfreeze()  # else the memory of a failed engine stays allocated
            raise
        finally:
            loader.publish(None)
        if sleeps and share:
            use_kv_only_sleep(self.llm)
        known = set(map(canonical_name, dict(model.named_modules())))
        quantization: Any = self.llm.llm_engine.vllm_config.quant_config  # QeRLQuantizationConfig
        self.state = RolloutState(engine_model(self.llm), quantization.renaming, known)

    @property
    def _running(self) -> SharedLLM:
        assert self.llm is not None, "the engine was closed"
        return self.llm

    def put_adapter(self, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor]) -> None:
        self.state.load_adapter(adapter, norms)

    def put_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.state.load_weights(weights)

    def set_noise(self, norms: Sequence[str], draw: NoiseDraw) -> float | None:
        self.state.declare_noisy(norms)
        self.state.set_noise(draw)
        return self.state.sigma_effective()

    def contents(self) -> Contents:
        return self.state.contents()

    def reset_prefix_cache(self) -> None:
        if not self._running.reset_prefix_cache(reset_connector=True):
            raise RolloutError(
                "vLLM refused to reset its prefix cache (requests are still running), so the next rollout would use "
                "attention states of the old adapter. Do not call generate() from several threads."
            )
        self._running.llm_engine.reset_encoder_cache()  # the tower for pictures may be trained

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        asked, own = [list(prompt) for prompt in prompts], 0
        ranks = [asked]
        if self.group is not None:
            own, ranks = torch.distributed.get_rank(group=self.group), gathered(asked, self.group)
        start = sum(map(len, ranks[:own]))
        everyone = [prompt for rank in ranks for prompt in rank]
        outputs = self._running.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in everyone],
            [_parameters(sampling, index) for index in range(len(everyone))],
            use_tqdm=False,
        )
        return [_completion(output) for output in outputs[start : start + len(prompts)]]

    def trl_attributes(self) -> dict[str, Any]:
        return {"llm": self.llm}

    def sleep(self) -> None:
        if self.sleeps and not self.asleep:
            self._slept = self.state.sums()
            # level 1 restores every byte at its address: weights, adapter and noisy norms; level 2 drops them
            self._running.sleep(level=1)
            self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            torch.cuda.empty_cache()
            # without tags (our backend wakes only the KV cache): after a partial wake vLLM stays paused
            self._running.wake_up()
            self.asleep = False
            wrong = [name for name, value in self.state.sums().items() if value != self._slept[name]]
            if wrong:
                raise RolloutError(
                    f"vLLM woke up with other weights than it went to sleep with, in {len(wrong)} tensors "
                    f"({', '.join(wrong[:4])}). Set vllm_enable_sleep_mode=False and resume from the last checkpoint."
                )

    def close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            del self.state
            llm.llm_engine.engine_core.shutdown()


def engine_model(llm: LLM) -> nn.Module:
    """Return vLLM's model in this process."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.get_model()


def _take(completion: CompletionOutput) -> tuple[np.ndarray, np.ndarray]:
    """Return the most likely tokens and their log-probabilities, (T, K) each; leave TRL the first, sampled one."""
    flat: Any = completion.logprobs
    tokens, logps = (np.array(values).reshape(len(flat), -1) for values in (flat.token_ids, flat.logprobs))
    sampled = zip(tokens[:, 0].tolist(), logps[:, 0].tolist(), strict=True)
    completion.logprobs = [{token: Logprob(logp, rank=1)} for token, logp in sampled]
    return tokens[:, 1:], logps[:, 1:]


def _parameters(sampling: Sampling, index: int) -> SamplingParams:
    seed = None if sampling.seed is None else sampling.seed + index
    own = vars(sampling) | {"seed": seed, "stop_token_ids": list(sampling.stop_token_ids)}
    return SamplingParams(**own, logprobs=0, detokenize=False)


def _completion(output: RequestOutput) -> Completion:
    (sequence,) = output.outputs
    # logprobs=0: of the sampled token only
    tokens, logps = list(sequence.token_ids), cast(Sequence[Any], sequence.logprobs or ())
    return Completion(tokens, [step[token].logprob for step, token in zip(logps, tokens, strict=True)])


def isolation_arguments(model: nn.Module, spec: EngineSpec, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `LLM` to isolate it from the trainer's model class; none if vLLM has its own class."""
    config: Any = base_model(model).config
    model_impl = chosen.get("model_impl", spec.model_impl)
    known = [ModelRegistry.models.get(name) for name in config.architectures or ()]
    theirs = all(getattr(each, "module_name", ".transformers").endswith(".transformers") for each in known)
    if not (theirs if model_impl == "auto" else model_impl == "transformers"):
        return {}
    if chosen.get("hf_overrides"):
        raise ValueError(
            f"vllm_engine_kwargs has hf_overrides={chosen['hf_overrides']!r}, but {config.architectures} runs with "
            "transformers' code in vLLM. Change the model's config.json instead, or use use_vllm=False."
        )
    return {"hf_overrides": isolated}


def isolated(config: PretrainedConfig) -> PretrainedConfig:
    """Return `config` with a type for which `AutoModel` builds a subclass: vLLM's Transformers backend decorates the
    class in place for torch.compile, and the trainer in this process uses the same class."""
    text = config.get_text_config()
    # vLLM may call it twice, and with a configuration without a model class
    if type(text) in MODEL_MAPPING and type(text).__module__ != __name__:
        theirs: Any = type(text)
        text.__class__ = _config_class(theirs)
        if getattr(config, "quantization_config", None) is None:
            # vLLM before 0.31 looks up a missing quantization_config in `hf_overrides`, and fails on a function
            config.quantization_config = {"quant_method": METHOD}
    return config


@functools.cache
def _config_class(theirs: type[PretrainedConfig]) -> type[PretrainedConfig]:
    model: Any = MODEL_MAPPING[theirs]
    config = type(f"{theirs.__name__}InVLLM", (theirs,), {"__module__": __name__})
    AutoModel.register(config, type(model.__name__, (model,), {"__module__": __name__, "config_class": config}))
    return config


BACKEND = "qerl_kv_only"
_TAG = "kv_cache"


class KVOnlyBackend(CuMemBackend):
    """Unmaps only the KV cache. vLLM's own levels unmap every allocation, even the trainer's shared tensors."""

    def suspend(self, level: int = 1) -> None:
        from vllm.device_allocator import get_mem_allocator_instance

        allocator: Any = get_mem_allocator_instance()  # its interface differs between versions
        self._state = "SUSPENDED"
        if hasattr(allocator, "discard"):
            allocator.discard((_TAG,))
        else:  # before vLLM 0.28
            from vllm.device_allocator.cumem import unmap_and_release

            for data in allocator.pointer_to_data.values():
                if data.tag == _TAG and not data.is_asleep:
                    torch.cuda.synchronize(data.handle[0])
                    unmap_and_release(data.handle)
                    data.is_asleep = True
        gc.collect()
        torch.cuda.empty_cache()

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume([_TAG])  # only this tag: 0.25's allocator would map the rest a second time


def use_kv_only_sleep(llm) -> None:
    """Make `llm.sleep()` and `llm.wake_up()` free and remap the KV cache only. Call before the first sleep."""
    if BACKEND not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(BACKEND, __name__, KVOnlyBackend.__name__)
    llm.llm_engine.vllm_config.model_config.sleep_mode_backend = BACKEND
    llm.llm_engine.model_executor.driver_worker.vllm_config.model_config.sleep_mode_backend = BACKEND

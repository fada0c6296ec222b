"""Rollouts in vLLM: TRL's `VLLMGeneration`, with the weights shared and nothing merged.

What differs from the parent, method by method:

| method | why |
|---|---|
| `_init_vllm` | vLLM reads the trainer's own tensors (vllm_loader.py) and gets buffers for the adapter; then it is probed |
| `sync_weights` | copies the adapter into those buffers; never merges, never streams the base |
| `generate` | brings adapter and noise up to date first; sleeps as `_sleep` says afterwards; reports a dead engine as such |

A base that our method cannot hold (bitsandbytes) or a run without adapter (`base_format="full"`) uses the parent as it is.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import ensure_master_addr_port

from .linear import compute_dtype
from .norm_noise import NoiseDraw
from .rollout_plan import current_memory, frozen_bytes, plan_kv_cache
from .rollout_policy import (
    active_adapter,
    adapter_room,
    check_servable,
    check_sharding,
    full_tensor,
    has_bitsandbytes,
    is_sharded,
    rollout_layers,
    trained_norms,
)
from .rollout_probe import probe

logger = logging.getLogger(__name__)

#: tokens that one engine step may process; TRL's own value
MAX_BATCHED_TOKENS = 4096


class RolloutError(RuntimeError):
    """The engine died, hung, or holds something else than the trainer. Training cannot go on; resume from a checkpoint."""


class QeRLVLLMGeneration(VLLMGeneration):
    """Generation in vLLM for a QeRL trainer; built in place of TRL's `VLLMGeneration`, with the same arguments.

    Args:
        trainer: the trainer; read for `args`, `aqn` and `state`.
    """

    def __init__(self, *args, trainer: Any, **kwargs) -> None:
        self.trainer = trainer
        self._stamp: tuple | None = None
        self._draw: NoiseDraw | None = None
        self._norm_names: tuple[str, ...] = ()
        self.state = None
        self.server = None
        self.kv_sleeps = self._asleep = False
        super().__init__(*args, **kwargs)

    # ------------------------------------------------------------------ start

    def _init_vllm(self) -> None:
        self.stock = not is_peft_model(self.model) or has_bitsandbytes(self.model)
        if self.stock:
            if getattr(self.trainer.args, "aqn", False):
                raise ValueError(
                    f"base_format={self.trainer.args.base_format!r} rolls out through TRL's own vLLM path, which cannot carry "
                    "noise on the norms. Pass aqn=False, or use_vllm=False, or base_format='bf16' or 'nvfp4' with an adapter."
                )
            super()._init_vllm()
            return
        check_sharding(self._dist.zero_stage, self._dist.fsdp_version)
        check_servable(self.model)
        # found once: wrappers such as DDP and FSDP come later and keep these modules
        self._adapter = active_adapter(self.model)
        self._layers = {
            name: (layer, layer.lora_A[self._adapter], layer.lora_B[self._adapter])
            for name, layer in rollout_layers(self.model).items()
        }
        self._trained_norms = trained_norms(self.model)
        if self.mode == "server":
            from .rollout_server import ServerLink

            if self.accelerator.is_main_process:
                self.server = ServerLink(self)
                self.vllm_client = self.server.client
        elif self.mode == "colocate":
            self._start_colocated()
        else:
            raise ValueError(f"vllm_mode must be 'server' or 'colocate', got {self.mode!r}.")
        self.accelerator.wait_for_everyone()
        self.probe_result = probe(self)
        logger.info("Rollout probe: %s", self.probe_result)
        self._sleep()

    def _start_colocated(self) -> None:
        from vllm import LLM

        from . import vllm_loader
        from .vllm_state import RolloutState

        accelerator, tp = self.accelerator, self.tensor_parallel_size
        if accelerator.num_processes % tp:
            raise ValueError(
                f"vllm_tensor_parallel_size={tp} must divide the number of processes, {accelerator.num_processes}."
            )
        if tp > 1:
            groups = [list(range(i, i + tp)) for i in range(0, accelerator.num_processes, tp)]
            self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
        os.environ["RANK"] = str(accelerator.process_index)
        os.environ["LOCAL_RANK"] = str(accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(accelerator.num_processes)
        ensure_master_addr_port()
        self.shared = self.trainer.args.share_weights and tp == 1 and not is_sharded(self.model)
        if self.trainer.args.share_weights and not self.shared:
            logger.warning(
                "share_weights=True needs one unsharded process an engine; with vllm_tensor_parallel_size=%d%s vLLM gets a copy.",
                tp,
                " and sharded parameters" if is_sharded(self.model) else "",
            )
        if self.shared:
            from .fused import fuse_storage

            fuse_storage(self.model)
        self.kv_sleeps, self.enable_sleep_mode = self.enable_sleep_mode, False  # the parent would sleep at level 2
        vllm_loader.publish(self.model, alias=self.shared)
        try:
            self.llm = LLM(**self.engine_arguments())
        finally:
            vllm_loader.publish(None)
        if self.kv_sleeps and self.shared:
            from .vllm_sleep import use_kv_only_sleep

            use_kv_only_sleep(self.llm)
        self.state = RolloutState(engine_model(self.llm))

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`: TRL's, and ours."""
        arguments: dict[str, Any] = {
            "model": self.model.name_or_path,
            "dtype": compute_dtype(self.model),
            "quantization": "qerl_nvfp4",
            "load_format": "qerl_trainer",
            "additional_config": {"qerl": {"adapter": adapter_room(self.model)}},
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_model_len": self.max_model_length,
            "max_num_seqs": self.max_num_seqs,
            "enable_sleep_mode": self.kv_sleeps,
            "model_impl": self.model_impl,
            "distributed_executor_backend": "external_launcher",
            # the same seed in a tensor-parallel group, so that its ranks sample the same tokens
            "seed": self.accelerator.process_index // self.tensor_parallel_size,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "logprobs_mode": "processed_logprobs",
            "trust_remote_code": self.trust_remote_code,
        }
        if self.gpu_memory_utilization is not None:
            arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        elif self.accelerator.device.type == "cuda":
            arguments |= self._planned_memory()
        return arguments | (getattr(self.trainer.args, "vllm_engine_kwargs", None) or {})

    def _planned_memory(self) -> dict[str, Any]:
        args, device = self.trainer.args, self.accelerator.device
        torch.cuda.empty_cache()
        free, total = current_memory(device)
        length = self.max_model_length or self.model.config.get_text_config().max_position_embeddings
        plan = plan_kv_cache(
            self.model,
            free,
            total,
            max_sequences=self.max_num_seqs,
            max_length=length,
            train_tokens=args.per_device_train_batch_size * length,
            engine_tokens=MAX_BATCHED_TOKENS,
            kv_sleeps=self.kv_sleeps,
            copy=0 if self.shared else frozen_bytes(self.model) // self.tensor_parallel_size,
            gradient_checkpointing=args.gradient_checkpointing,
            tensor_parallel_size=self.tensor_parallel_size,
        )
        logger.warning("%s", plan)
        # vLLM checks this share against what is free, then takes exactly kv_cache_memory_bytes
        return {"kv_cache_memory_bytes": plan.kv, "gpu_memory_utilization": max(0.01, round(0.95 * free / total, 3))}

    # ------------------------------------------------------------------ sync

    def sync_weights(self) -> None:
        """Copy the adapter into vLLM's buffers and reset the prefix cache. Collective where parameters are sharded."""
        if self.stock:
            super().sync_weights()
            return
        from .vllm_state import AdapterTensors

        self._wake()  # the buffers are part of what sleeps where vLLM has a copy of the weights
        trained = {name: module.weight for name, module in self._trained_norms.items()}
        pairs = [(down.weight, up.weight) for _, down, up in self._layers.values()]
        with self._dist.gather_params([*(p for pair in pairs for p in pair), *trained.values()]):
            adapter = {
                name: AdapterTensors(full_tensor(a), full_tensor(b), layer.scaling[self._adapter])
                for (name, (layer, *_)), (a, b) in zip(self._layers.items(), pairs, strict=True)
            }
            norms = {name: full_tensor(p) for name, p in trained.items()}
            if self.server is not None:
                self.server.push_adapter(adapter, norms)
            elif self.state is not None:
                self.state.load_adapter(adapter)
                if norms:
                    self.state.update_clean(norms)
        self._reset_prefix_cache()
        self._stamp = self._adapter_stamp()

    def _adapter_stamp(self) -> tuple:
        """Changes whenever the adapter may have changed: the step, and the in-place counters of its tensors."""
        versions = sum(down.weight._version + up.weight._version for _, down, up in self._layers.values())
        return self.trainer.state.global_step, versions

    def _sync_noise(self) -> None:
        aqn = self.trainer.aqn
        if aqn is None:
            return
        draw = aqn.draw or NoiseDraw(0.0, 0, 0, 0)
        if draw == self._draw or (self._draw is None and draw.sigma == 0 and not self._norm_names):
            return
        if self._norm_names != aqn.norms and aqn.norms:
            self._norm_names = aqn.norms
            (self.server or self.state).remember_clean(aqn.norms) if self._here else None
        if self._here:
            effective = (self.server or self.state).set_noise(draw)
            if draw.sigma > 0:
                aqn.sigma_effective = effective if effective is not None else self.state.sigma_effective()
            self._reset_prefix_cache()
        self._draw = draw

    @property
    def _here(self) -> bool:
        """Whether this process talks to an engine."""
        return self.server is not None or self.state is not None

    def _reset_prefix_cache(self) -> None:
        if self.server is not None:
            done = self.server.reset_prefix_cache()
        elif self.state is not None:
            done = self.llm.reset_prefix_cache()
        else:
            return
        if not done:
            raise RolloutError(
                "vLLM refused to reset its prefix cache (requests are still running), so the next rollout would mix the new "
                "adapter with attention states of the old one. Do not call generate() from several threads."
            )

    # ------------------------------------------------------------------ generate

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """As the parent's, with the adapter and the noise of this very moment.

        Raises:
            [`RolloutError`]: the engine failed, or took longer than `rollout_timeout`.
        """
        if self.stock:
            return super().generate(prompts, images, num_generations, profiler)
        with self._engine_errors():
            self._wake()
            if self._stamp != self._adapter_stamp():
                self.sync_weights()
            self._sync_noise()
            try:
                return super().generate(prompts, images, num_generations, profiler)
            finally:
                self._sleep()

    @contextlib.contextmanager
    def _engine_errors(self) -> Iterator[None]:
        timeout = getattr(self.trainer.args, "rollout_timeout", None)
        try:
            with _deadline(timeout):
                yield
        except RolloutError as error:
            error.add_note(self._rescue())
            raise
        except Exception as error:
            # TRL's client raises plain Exception; anything narrower of another kind is a bug to show as it is
            if type(error) is not Exception and not isinstance(error, RuntimeError | OSError | AssertionError):
                raise
            raise RolloutError(
                f"The rollout failed in vLLM ({self.mode} mode) at step {self.trainer.state.global_step}: "
                f"{type(error).__name__}: {error}. {self._rescue()}"
            ) from error

    def _rescue(self) -> str:
        """Save a checkpoint of the step that has ended, where that is safe; says what to resume from.

        A rollout begins between two updates, so the trainer's state is whole. With several processes the others wait elsewhere
        and a save would hang.
        """
        trainer, step = self.trainer, self.trainer.state.global_step
        resume = "resume from the last checkpoint (resume_from_checkpoint=True) once the cause is gone"
        wanted = getattr(trainer.args, "save_strategy", "no") != "no" and step > 0 and trainer.model.training
        if wanted and self.accelerator.num_processes == 1:
            try:
                trainer._save_checkpoint(trainer.model, None)
            except OSError as error:
                return f"Saving step {step} failed too ({error}); {resume}."
            return f"Step {step} is saved; {resume}."
        return f"The trainer's own state is intact; {resume}."

    def _wake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()
            self.llm.wake_up()  # everything by name, which our backend narrows to the KV cache; a partial wake stays paused
            self._asleep = False

    def _sleep(self) -> None:
        """Give the KV cache's memory to the training; where vLLM has a copy of the weights, that goes to host memory as well."""
        if self.kv_sleeps and not self._asleep:
            # level 1 brings every byte back at its address: weights, adapter and noisy norms. Level 2 would lose them
            self.llm.sleep(level=1)
            self._asleep = True

    def shutdown(self) -> None:
        """Stop the engine and give its memory back. Safe to call twice."""
        llm, self.llm, self.state = getattr(self, "llm", None), None, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        if self.server is not None:
            self.server.close()


def engine_model(llm) -> nn.Module:
    """vLLM's model in this process."""
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    return runner.get_model() if hasattr(runner, "get_model") else runner.model


@contextlib.contextmanager
def _deadline(seconds: float | None) -> Iterator[None]:
    """Raise `RolloutError` in the main thread when the body takes longer than `seconds`."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(signum, frame):
        raise RolloutError(
            f"vLLM did not finish a rollout within rollout_timeout={seconds:g} s. The engine hangs, or the limit is too short for "
            "these lengths. The trainer's own state is intact: resume from the last checkpoint (resume_from_checkpoint=True)."
        )

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

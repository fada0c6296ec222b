"""QeRL as a delta on TRL's trainers: a 4-bit frozen base, LoRA, noisy rollouts, and checks. Nothing of TRL is copied.

[`QeRLMixin`] goes in front of any TRL trainer with TRL 1.16's `_generate(prompts)` and `VLLMGeneration`. What differs:

| method | why |
|---|---|
| `__init__` | quantizes the base while it loads, registers LoRA for it, attaches noise and checks, replaces the vLLM glue |
| `train` | says what was planned and what differs from TRL (`run/banner.py`); resumes from whole checkpoints of the same settings only; leaves a model that computes clean |
| `set_initial_training_values` | a run that has ended takes no further step |
| `_maybe_log_save_evaluate` | what a callback of one process asks for, all processes do |
| `evaluation_loop` | `bf16_full_eval` casts the model for the evaluation only |
| `_prepare_for_training` | FSDP 2 of older torch shards bytes too (`model/sharding.py`) |
| `_get_train_sampler` | a run resumed in a later epoch sees that epoch's order of prompts, not the first one's again |
| `_generate` | draws the noise of this rollout and keeps the engine up to date (covers tools and rollout functions alike) |
| `_generate`, `_compute_loss` | what transformers sampled under noise is importance-corrected as vLLM's rollouts are (`rollout/mismatch.py`) |
| `_calculate_rewards` | refuses infinite rewards; an error of one process is raised in all |
| `_generate_and_score_completions` | measures and watches the rollout/trainer mismatch (`rollout/mismatch.py`); saves the step before where it fails |
| `_get_per_token_logps_and_entropies`, `_prepare_inputs` | [`PackingMixin`]: no work on padding, equal prompts once |
| `_compute_loss`, `_get_per_token_logps_and_entropies` | on-policy the update's own log-probabilities are the old ones (`update/one_pass.py`) |
| `training_step` | refuses a non-finite loss or gradient before the optimizer sees it |
| `_load_from_checkpoint` | the trained adapter comes back also where TRL keeps a second one as reference |
| `_save_checkpoint`, `_push_from_checkpoint`, `save_model` | seals what was written, then rotates older checkpoints and pushes |
| `log` | feeds the signal monitor; adds the peak of memory and the seconds of each phase (`support/phases.py`) |
| `push_to_hub`, `create_model_card`, `init_hf_repo`, `_finalize_training` | [`PublishingMixin`]: private, whole or not at all, with our card; no way past it |

New: `to_resume` ([`SavingMixin`]), `save_adapter`, `save_merged` and `save_base`. `VLLMGeneration` has no factory hook, so its name in TRL's trainer
module is rebound during `super().__init__` (the only rebind in this package; `tests/test_contracts.py` fails if TRL moves it).
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput

from .checkpoint import fingerprint
from .checkpoint.sources import digests, rewards_of, rollouts_of
from .checks import environment, rewards
from .checks.learning import SignalMonitor
from .config import QeRLArguments, QeRLConfig, QeRLRLOOConfig
from .memory.of_trainer import plan_trainer
from .memory.plan import MemoryPlan
from .memory.workload import check_rollout
from .model import loading
from .model.lora import changes_base, check_adapter, prepare_trainable, warn_of_dropout, warn_of_low_precision
from .model.ready import given_model
from .model.sharding import BytesWithoutGradient, save_whole_tensors
from .noise.callback import AQNCallback
from .nvfp4.linear import has_nvfp4
from .publish.mixin import warn_of_exports
from .rollout import mismatch
from .rollout.sampling import of_the_model_alone, settle_ends
from .rollout.supported import check_run, checked_rollout_func
from .run import banner, disk, folder, shortage
from .run.arguments import by_name, with_reward_models
from .run.base import adapter_config, model_init, source_of
from .run.resume import SavingMixin
from .support import secrets
from .support.distributed import keep_buckets, rewards_of_all
from .support.evaluation_mode import as_it_was
from .support.phases import PhaseTimer
from .update.one_pass import OnePass
from .update.packing import PackingMixin
from .update.prepare import prepare

with environment.naming_vllm():
    from trl import GRPOTrainer, RLOOTrainer


class QeRLMixin(SavingMixin, PackingMixin):
    """Adds QeRL to a TRL trainer. Put it before the trainer in the bases and set `_config_class`.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            A name or folder is loaded in `args.base_format`: bf16 weights are quantized tensor by tensor while they load,
            NVFP4 checkpoints (compressed-tensors, ModelOpt) are read as they are. An instance is taken as it is.
        quantization_config ([`NVFP4Config`] or `BitsAndBytesConfig`, *optional*):
            Overrides what `args.base_format` and `args.scale_rule` stand for.
        peft_config (`LoraConfig`, *optional*):
            Defaults to rank 32, alpha 64 on all linear layers, unless `base_format="full"`.

    All other arguments are the parent's.
    """

    _config_class: type[QeRLConfig] | type[QeRLRLOOConfig]
    #: noise of the rollouts, `None` with `aqn=False`
    aqn: AQNCallback | None = None
    #: what this process takes of its GPU, planned before an engine starts
    memory_plan: MemoryPlan | None = None
    #: where the old log-probabilities come from
    _passes: OnePass
    #: whether what was there after the first micro-batch is kept from Python's garbage collector
    _frozen: bool = False

    @cached_property
    def _timer(self) -> PhaseTimer:
        return PhaseTimer("rollout", "reward", "update")

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Any = None,
        args: QeRLConfig | QeRLRLOOConfig | None = None,
        *positional: Any,
        **kwargs: Any,
    ) -> None:
        # wherever the parent keeps them: its later arguments may come by position too
        given = by_name(super().__init__, model, reward_funcs, args, *positional, **kwargs)
        if args is None:
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
            args = self._config_class(f"{name.split('/')[-1]}-{self._name}")
        if not isinstance(args, QeRLArguments):
            raise TypeError(
                f"{type(self).__name__} needs args of type {self._config_class.__name__}, got {type(args).__name__}. It takes "
                f"the same fields: replace {type(args).__name__}(...) by {self._config_class.__name__}(...)."
            )
        keep_buckets(args)
        secrets.check_places({**given, **vars(args)})
        environment.check(args)
        check_run(args, given)
        folder.lock_for(args)
        given["model"] = model = given_model(model)
        given["args"], given["peft_config"] = args, adapter_config(model, args, given.get("peft_config"))
        given["reward_funcs"] = with_reward_models(given.get("reward_funcs"), args)
        initial = model_init(model, args, given.pop("quantization_config", None))
        with initial as quantization_config, self._own_vllm_generation(), shortage.naming(self):
            super().__init__(**given, quantization_config=quantization_config)
        settle_ends(self)
        plan_trainer(self)
        disk.check(self)
        trained = self.accelerator.unwrap_model(self.model)
        loading.begin_loaded(trained, **source_of(model, args))
        self.base_sha256 = fingerprint.shared_base_sha256(trained, not self.is_fsdp_enabled)  # before training
        if is_peft_model(trained):
            check_adapter(trained)
            self.base_sha256 = None if changes_base(trained) else self.base_sha256
        else:
            warn_of_low_precision(trained)
        warn_of_dropout(trained)
        warn_of_exports(trained, self.processing_class)
        self._monitor = SignalMonitor(args.zero_advantage_patience)
        self._mismatch = mismatch.MismatchWatch(args.rollout_mismatch_threshold)
        self._passes = OnePass(self)
        self.reward_funcs = rewards.checked_rewards(self)
        if getattr(self, "rollout_func", None) is not None:
            self.rollout_func = checked_rollout_func(self.rollout_func)
        self.note_what_was_taken()
        prepare_trainable(trained)
        if args.aqn:
            self.aqn = AQNCallback.from_args(args)
            self.aqn.attach(trained, seed=args.seed)
            self.add_callback(self.aqn)
            if args.use_vllm:
                self.vllm_generation.probe_noise()
        self._tag_names = [*type(self)._tag_names, "qerl", *(["nvfp4"] if has_nvfp4(trained) else [])]
        self.model.add_model_tags(self._tag_names)
        prepare(self)
        self.sources = {"rewards_sha256": digests(rewards_of(self)), "rollouts_sha256": digests(rollouts_of(self))}

    @contextmanager
    def _own_vllm_generation(self) -> Iterator[None]:
        """Let the parent's `__init__` build our `VLLMGeneration`; see the module docstring."""

        def build(*args, **kwargs):
            from .rollout.generation import QeRLVLLMGeneration

            settle_ends(self)
            kwargs["max_model_length"] = plan_trainer(self).max_model_len  # of this run, not the model's largest
            return QeRLVLLMGeneration(*args, trainer=self, **kwargs)

        with ExitStack() as stack:
            for name in {cls.__module__ for cls in type(self).__mro__ if cls.__module__.startswith("trl.")}:
                module = sys.modules[name]
                if "VLLMGeneration" in vars(module):
                    stack.callback(setattr, module, "VLLMGeneration", vars(module)["VLLMGeneration"])
                    vars(module)["VLLMGeneration"] = build
            yield

    # ------------------------------------------------------------------------------------------------------- rollout

    def _generate(self, prompts: list) -> Any:
        training = self.model.training
        noise = self.aqn.generation() if self.aqn is not None else nullcontext()
        engine = self.vllm_generation.rollout() if self.use_vllm else of_the_model_alone(self.model)
        with self._timer.phase("rollout", counts=training):
            with noise, engine:
                output = super()._generate(prompts)
            check_rollout(self, output[0], output[1])
            if training:
                output = mismatch.with_logps(self, self.aqn, output)
        self._passes.generated()
        if training and self.aqn is not None:
            self._metrics["train"]["aqn/sigma"].append(self.aqn.sigma)
            self._metrics["train"]["aqn/sigma_effective"].append(self.aqn.sigma_effective)
        return output

    def _calculate_rewards(self, inputs: Any, prompts: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = partial(super()._calculate_rewards, inputs, prompts, *args, **kwargs)
        with (
            self._timer.phase("reward", counts=self.model.training),
            rewards.reward_limit(self),
            self.failing_together(),
        ):
            self._rewards = rewards_of_all(self.accelerator, own, len(prompts), len(self.reward_funcs))
            rewards.check_reward_tensor(self._rewards, self.reward_func_names, self.reward_weights)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with self.rescued():
            with mismatch.corrected(self), self._passes.scoring():
                output = super()._generate_and_score_completions(inputs)
            if self.model.training:
                self._monitor.scored(self, self._rewards)
            self._passes.scored(output)
        return output

    # -------------------------------------------------------------------------------------------------------- update

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        with mismatch.corrected(self, inputs), self._passes.own(inputs) as batch:
            return super()._compute_loss(model, batch)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return self._passes.logps(super()._get_per_token_logps_and_entropies, *args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        save_whole_tensors(self.accelerator)
        with BytesWithoutGradient():
            prepared = super()._prepare_for_training(*args, **kwargs)
        for module in self.model.modules():
            vars(module).pop("unread", None)  # it has the first process's weights now, and should be compiled as there
        return prepared

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        with self._timer.phase("update"):
            loss = super().training_step(model, inputs, num_items_in_batch)
            rewards.check_loss(loss, self.state.global_step)
            if self.is_deepspeed_enabled:
                rewards.check_step_taken(self.accelerator, model, self.state.global_step)
            elif self.accelerator.sync_gradients and getattr(self.accelerator, "scaler", None) is None:
                rewards.check_gradients(model, self.state.global_step, self.optimizer)
        if not self._frozen and self.args.device.type == "cuda":
            self._frozen = True
            gc.collect()
            gc.freeze()  # else Python's collector goes through all that is compiled by now in each rollout: 0.3 to 1.2 s
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        cast = not self.is_in_train and (self.args.bf16_full_eval or self.args.fp16_full_eval)
        with as_it_was(self.model) if cast else nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training:
            if entropies := self._metrics["train"].get("entropy"):
                self._monitor.entropy(sum(entropies) / len(entropies), self.state)
            if "loss" in logs:  # a training log, not the summary at the end
                logs |= {f"seconds/{phase}": seconds for phase, seconds in self._timer.take().items()}
                logs["memory/peak_gib"] = banner.peak_memory_gib(self.args.device)
        super().log(logs, start_time)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        rewards.check_steps(self.args, self.train_dataset)
        banner.announce(self)
        try:
            with shortage.naming(self):
                return super().train(*args, **kwargs)
        finally:
            if self._frozen:
                gc.unfreeze()
                self._frozen = False
            if self.aqn is not None:
                self.aqn.detach()  # an exception in the middle of a step leaves a model that computes clean


class QeRLGRPOTrainer(QeRLMixin, GRPOTrainer):
    """[`trl.GRPOTrainer`] on an NVFP4 base with noisy rollouts. See [`QeRLMixin`] for what differs.

    Example:
        ```python
        from datasets import load_dataset
        from qerl_trl import QeRLConfig, QeRLGRPOTrainer
        from trl.rewards import accuracy_reward

        trainer = QeRLGRPOTrainer(
            model="Qwen/Qwen2.5-3B-Instruct",
            reward_funcs=accuracy_reward,
            args=QeRLConfig(output_dir="qwen-qerl"),
            train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
        )
        trainer.train()
        ```
    """

    _config_class = QeRLConfig
    _name = "QeRL-GRPO"
    _paper = {
        "title": "QeRL: Beyond Efficiency -- Quantization-enhanced Reinforcement Learning for LLMs",
        "id": "2510.11696",
        "citation": "@article{huang2025qerl, title={QeRL: Beyond Efficiency -- Quantization-enhanced Reinforcement Learning for "
        "LLMs}, author={Huang, Wei and others}, journal={arXiv preprint arXiv:2510.11696}, year={2025}}",
    }


class QeRLRLOOTrainer(QeRLMixin, RLOOTrainer):
    """[`trl.RLOOTrainer`] on an NVFP4 base with noisy rollouts. See [`QeRLMixin`] for what differs."""

    _config_class = QeRLRLOOConfig
    _name = "QeRL-RLOO"
    _paper = QeRLGRPOTrainer._paper

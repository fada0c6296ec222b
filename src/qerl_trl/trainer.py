"""QeRL as a delta on TRL's trainers: a 4-bit frozen base, LoRA, noisy rollouts, and checks. Nothing of TRL is copied.

[`QeRLMixin`] goes in front of any TRL trainer with TRL 1.16's `_generate(prompts)` and `VLLMGeneration`. Overridden
methods, the reason, and the hook of TRL or transformers to replace each:

| method | why | hook |
|---|---|---|
| `__init__` | quantizes at load, registers LoRA, rebinds `VLLMGeneration` (the only rebind) | factories for both |
| `train` | banner; resumes only whole checkpoints of equal settings; noise off at the end | check before loading |
| `set_initial_training_values` | a finished run takes no further step | check before the first step |
| `_get_train_sampler` | prompts of a resumed run in its epoch's order | `set_epoch` on TRL's sampler |
| `_load_from_checkpoint` | loads the trained adapter, even if TRL keeps a second one as reference | fix in `Trainer` |
| `_load_best_model` | refuses a damaged best checkpoint | `on_load_best` |
| `_maybe_log_save_evaluate` | a callback's request counts in all processes; saves between rollouts | gathered control |
| `_save_checkpoint`, `_push_from_checkpoint`, `save_model`, `_save` | seal, rotate, push | `on_save` before rotation |
| `evaluate` | restores the training's random state | random state kept in `Trainer` |
| `evaluation_loop` | `bf16_full_eval` casts the model for the evaluation only | copy in `Trainer` |
| `_prepare_for_training` | FSDP 2 of older torch shards bytes too (`model/loading.py`) | torch 2.10 |
| `_generate` | draws noise, syncs the engine (for rollout functions too) | `on_rollout_begin`, `on_rollout_end` |
| `_generate`, `_compute_loss` | corrects noisy rollouts of transformers (`mismatch.py`) | sampled log-probabilities |
| `_calculate_rewards` | refuses infinite rewards; raises a rank's error in all ranks | hook on the gathered rewards |
| `_generate_and_score_completions` | measures the mismatch; saves the last step on failure | `on_rollout_end` |
| `_get_per_token_logps_and_entropies`, `_prepare_inputs` | no padding, equal prompts once (`packing.py`) | in TRL |
| the same, `_compute_loss` | no second pass on-policy, score centering (`one_pass.py`) | in TRL |
| `training_step` | refuses a non-finite loss or gradient | `on_pre_optimizer_step` with the loss |
| `log` | feeds the signal monitor; adds peak memory and seconds per phase | callback with write access |
| `push_to_hub`, `create_model_card`, `init_hf_repo`, `_finalize_training` | private, atomic, our card | uploader |

New: `to_resume`, `save_adapter`, `save_merged`, `save_base`. `tests/test_contracts.py` covers all used parts of TRL.
"""

from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput

from .checkpoint import fingerprint
from .checkpoint.settings import sources_of
from .checks import environment, rewards
from .checks.learning import SignalMonitor
from .config import QeRLConfig, QeRLRLOOConfig
from .memory.of_trainer import OutOfMemory, plan_trainer, prepare_updates
from .memory.plan import MemoryPlan
from .memory.workload import check_rollout
from .model import loading
from .model.loading import BytesWithoutGradient, save_whole_tensors
from .model.lora import changes_base, check_adapter, prepare_trainable, warn_of_dropout, warn_of_low_precision
from .noise.callback import AQNCallback
from .nvfp4.architectures import delta_net_layers
from .nvfp4.linear import has_nvfp4, set_compute
from .rollout import mismatch
from .rollout.engine import RolloutError
from .rollout.sampling import of_the_model_alone, settle_ends
from .rollout.supported import checked_rollout_func
from .run import banner, base, folder
from .run.exits import Rescue
from .run.publishing import Uploads, warn_of_exports
from .run.resume import RunRecord, SaveBetweenRollouts, SavingMixin
from .support.distributed import rewards_of_all
from .support.phases import Collector, PhaseTimer, as_it_was
from .update.one_pass import OnePass, ScoreCentering
from .update.packing import Packing

with environment.naming_vllm():
    from trl import GRPOTrainer, RLOOTrainer


def attach(trainer: Any) -> None:
    """Attach noise, checks and the fast update to a constructed TRL trainer."""
    args = trainer.args
    settle_ends(trainer)
    set_compute(trainer.model, args.compute)
    plan_trainer(trainer)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    folder.check_disk(args, trained)
    if delta_net_layers(trained.config):
        environment.tell(environment.delta_nets())
    trainer.base_sha256 = fingerprint.shared_base_sha256(trained, not trainer.is_fsdp_enabled)  # before training
    if is_peft_model(trained):
        check_adapter(trained)
        trainer.base_sha256 = None if changes_base(trained) else trainer.base_sha256
    else:
        warn_of_low_precision(trained)
    warn_of_dropout(trained)
    warn_of_exports(trained, trainer.processing_class)
    trainer._monitor = SignalMonitor(args.zero_advantage_patience)
    trainer._mismatch = mismatch.MismatchWatch(args.rollout_mismatch_threshold, args.compute == "w4a8")
    trainer._passes, trainer._centering = OnePass(trainer), ScoreCentering(trainer)
    trainer.reward_funcs = rewards.checked_rewards(trainer.reward_funcs, trainer.reward_func_names, args.reward_timeout)
    if getattr(trainer, "rollout_func", None) is not None:  # GRPO only
        trainer.rollout_func = checked_rollout_func(trainer.rollout_func)
    prepare_trainable(trained)
    if args.aqn:
        trainer.aqn = AQNCallback.from_args(args)
        trainer.aqn.attach(trained, seed=args.seed)
        trainer.add_callback(trainer.aqn)
        if args.use_vllm:
            trainer.vllm_generation.probe_noise()
    trainer._tag_names = [*type(trainer)._tag_names, "qerl", *(["nvfp4"] if has_nvfp4(trained) else [])]
    trainer.model.add_model_tags(trainer._tag_names)
    prepare_updates(trainer)


class QeRLMixin(SavingMixin):
    """Adds QeRL to a TRL trainer. Put it before the trainer in the bases and set `_config_class`.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            A name or folder is loaded in `args.base_format`: bf16 weights are quantized tensor by tensor at load, NVFP4
            checkpoints (compressed-tensors, ModelOpt) are read unchanged. An instance is used unchanged.
        quantization_config ([`NVFP4Config`] or `BitsAndBytesConfig`, *optional*):
            Overrides `args.base_format` and `args.scale_rule`.
        peft_config (`LoraConfig`, *optional*):
            Defaults to rank 32, alpha 64 on all linear layers, unless `base_format="full"`.

    All other arguments are those of the parent trainer.
    """

    _config_class: type[QeRLConfig] | type[QeRLRLOOConfig]
    #: noise of the rollouts, `None` with `aqn=False`
    aqn: AQNCallback | None = None
    #: this process's GPU memory, planned before an engine starts
    memory_plan: MemoryPlan | None = None
    #: source of the old log-probabilities
    _passes: OnePass
    _centering: ScoreCentering  # a term of the loss
    #: whether the run still learns
    _monitor: SignalMonitor
    #: whether the banner was printed
    _announced = False
    #: computes log-probabilities without padding
    _packing: Packing | None = None

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Any = None,
        args: QeRLConfig | QeRLRLOOConfig | None = None,
        *positional: Any,
        **kwargs: Any,
    ) -> None:
        # later arguments of the parent may be positional too
        given = base.by_name(super().__init__, model, reward_funcs, args, *positional, **kwargs)
        given = base.before(type(self), given)
        self._uploads, self._record, self.rescue = Uploads(self), RunRecord(self), Rescue(self)
        self._saves, self._collector = SaveBetweenRollouts(self), Collector()
        self.given_optimizers: dict[str, str] = {}
        self._padded_logps = super()._get_per_token_logps_and_entropies
        initial = base.model_init(given["model"], given["args"], given.pop("quantization_config", None))
        try:
            with initial as quantization_config, base.own_vllm_generation(self):
                super().__init__(**given, quantization_config=quantization_config)
        except (RuntimeError, ValueError) as error:
            OutOfMemory(self).explain(error, RolloutError)
        loading.begin_loaded(self.accelerator.unwrap_model(self.model), **base.source_of(given["model"], self.args))
        attach(self)

    @cached_property
    def _timer(self) -> PhaseTimer:
        return PhaseTimer("rollout", "reward", "update")

    @cached_property
    def sources(self) -> dict[str, dict[str, str]]:
        return sources_of(self)

    def _generate(self, prompts: list) -> Any:
        training = self.model.training
        noise = self.aqn.generation() if self.aqn is not None else nullcontext()
        engine = self.vllm_generation.rollout() if self.use_vllm else of_the_model_alone(self.model)
        with self._timer.phase("rollout", counts=training):
            with noise, engine:
                output = super()._generate(prompts)
            check_rollout(self.model, output[0], output[1])
            if training:
                output = mismatch.with_logps(self, self.aqn, output)
        self._passes.generated()
        if training and self.aqn is not None:
            for name, value in self.aqn.values().items():
                self._metrics["train"][name].append(value)
        return output

    def _calculate_rewards(self, inputs: Any, prompts: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = partial(super()._calculate_rewards, inputs, prompts, *args, **kwargs)
        timed = self._timer.phase("reward", counts=self.model.training)
        limit = rewards.reward_limit(self.reward_funcs, self.reward_func_names, self.args.reward_timeout)
        with timed, limit, self.rescue.failing_together():
            self._rewards = rewards_of_all(self.accelerator, own, len(prompts), len(self.reward_funcs))
            rewards.check_reward_tensor(self._rewards, self.reward_func_names, self.reward_weights)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        used = self.use_vllm
        with self.rescue.around():
            try:
                self._passes.scoring = True
                output = super()._generate_and_score_completions(inputs)
            finally:
                self._passes.scoring, self.use_vllm = False, used  # `mismatch.with_logps` may set `use_vllm`
            if self.model.training:
                self._monitor.scored(self, self._rewards)
            self._passes.scored(output)
            if self.model.training and self._centering.count:
                output |= mismatch.top_of_engine(self, self._centering.count, output["completion_ids"])
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        trainer: Any = self  # each TRL trainer types its buffer differently
        before = trainer._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        made = trainer._buffered_inputs
        if self._packing is None or not self._packing.on or not self.model.training or made is before:
            return inputs
        trainer._buffered_inputs = self._packing.dealt(made)
        return trainer._buffered_inputs[self._step % self.args.steps_per_generation]

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        with self._passes.own(inputs) as batch:
            return self._centering.loss(partial(super()._compute_loss, model), batch)

    def _get_per_token_logps_and_entropies(self, model, input_ids, *args: Any, **kwargs: Any) -> Any:
        own = super()._get_per_token_logps_and_entropies
        compute = own if self._packing is None else partial(self._packing.logps, own)
        return self._passes.logps(partial(self._centering.logps, compute), model, input_ids, *args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        save_whole_tensors(self.accelerator)
        with BytesWithoutGradient():
            prepared = super()._prepare_for_training(*args, **kwargs)
        for module in self.model.modules():
            vars(module).pop("unread", None)  # weights came from rank 0: compile the layer as there
        return prepared

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        with self._timer.phase("update"):
            loss = super().training_step(model, inputs, num_items_in_batch)
            if self._packing is not None:
                self._packing.budget.stepped()
            rewards.check_loss(loss, self.state.global_step)
            if self.is_deepspeed_enabled:
                rewards.check_step_taken(self.accelerator, model, self.state.global_step)
            elif self.accelerator.sync_gradients and self.accelerator.scaler is None:
                rewards.check_gradients(model, self.state.global_step, self.optimizer)
        if self.args.device.type == "cuda":
            self._collector.freeze()
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
        if start_time is not None:  # a log by Trainer itself, on every rank
            self._saves.agree()

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        rewards.check_steps(self.args, self.train_dataset)
        banner.announce(self)
        try:
            return super().train(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            OutOfMemory(self).explain(error, RolloutError)
        finally:
            self._collector.unfreeze()
            if self.aqn is not None:
                self.aqn.detach()  # noise off after an exception in the middle of a step


class QeRLGRPOTrainer(QeRLMixin, GRPOTrainer):
    """[`trl.GRPOTrainer`] on an NVFP4 base with noisy rollouts. See [`QeRLMixin`] for the differences.

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
        "citation": "@article{huang2025qerl, title={QeRL: Beyond Efficiency -- Quantization-enhanced Reinforcement "
        "Learning for LLMs}, author={Huang, Wei and others}, journal={arXiv preprint arXiv:2510.11696}, year={2025}}",
    }


class QeRLRLOOTrainer(QeRLMixin, RLOOTrainer):
    """[`trl.RLOOTrainer`] on an NVFP4 base with noisy rollouts. See [`QeRLMixin`] for the differences."""

    _config_class = QeRLRLOOConfig
    _name = "QeRL-RLOO"
    _paper = QeRLGRPOTrainer._paper

"""QeRL as a delta on TRL's trainers: a 4-bit frozen base, LoRA, noisy rollouts, and checks. Nothing of TRL is copied.

[`QeRLMixin`] goes in front of any TRL trainer with TRL 1.16's layout of `_generate(prompts)` and `VLLMGeneration`. What
differs from the parent, method by method:

| method | why |
|---|---|
| `__init__` | quantizes the base while it loads, registers LoRA for it, attaches noise and checks, replaces the vLLM glue |
| `train` | resumes from whole checkpoints only |
| `_get_train_sampler` | a run resumed in a later epoch sees that epoch's order of prompts, not the first one's again |
| `_generate` | draws the noise of this rollout (covers vLLM, transformers, tools and rollout functions alike) |
| `_calculate_rewards` | times rewards and refuses infinite ones |
| `_generate_and_score_completions` | measures the rollout/trainer mismatch |
| `training_step` | refuses a non-finite loss or gradient before the optimizer sees it |
| `_load_from_checkpoint` | the trained adapter comes back also where TRL keeps a second one as reference |
| `_save_checkpoint`, `_push_from_checkpoint` | seals the checkpoint, then rotates older ones and pushes |
| `log` | feeds the signal monitor |
| `push_to_hub`, `create_model_card`, `init_hf_repo` | [`HubMixin`]: private, whole or not at all, with our card; and `save_merged`, `save_base` |

`VLLMGeneration` has no factory hook, so its module-level name in TRL's trainer module is rebound for the duration of
`super().__init__` (the only rebind in this package; `tests/test_contracts.py` fails with a clear message if TRL moves it).
"""

import inspect
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from accelerate.utils import is_peft_model
from peft.utils import CONFIG_NAME as PEFT_CONFIG_NAME
from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOTrainer, RLOOTrainer

from . import checkpoint, guards, report
from .config import QeRLArguments, QeRLConfig, QeRLRLOOConfig
from .hub import HubMixin
from .linear import compute_dtype, has_nvfp4
from .loading import adapter_config, model_init
from .lora import check_adapter, prepare_trainable_norms, warn_of_low_precision
from .noise import AQNCallback

logger = logging.getLogger(__name__)

#: sequences of a rollout on which the mismatch is estimated when generation returns no log-probabilities
_MISMATCH_SAMPLE = 8


class QeRLMixin(HubMixin):
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

    _config_class: type[QeRLArguments]
    #: noise of the rollouts, `None` with `aqn=False`
    aqn: AQNCallback | None = None
    _epochs_done = 0

    def __init__(
        self,
        model: "str | PreTrainedModel | nn.Module",
        reward_funcs=None,
        args: QeRLArguments | None = None,
        *positional,
        **kwargs,
    ):
        # by name, wherever the parent keeps them: its later arguments may come by position too
        signature = inspect.signature(super().__init__)
        given = signature.bind_partial(model, reward_funcs, args, *positional, **kwargs).arguments
        if args is None:
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
            args = self._config_class(f"{name.split('/')[-1]}-{self._name}")
        if not isinstance(args, QeRLArguments):
            raise TypeError(
                f"{type(self).__name__} needs args of type {self._config_class.__name__}, got {type(args).__name__}. It takes "
                f"the same fields: replace {type(args).__name__}(...) by {self._config_class.__name__}(...)."
            )
        given["args"], given["peft_config"] = args, adapter_config(model, args, given.get("peft_config"))
        loading = model_init(model, args, given.pop("quantization_config", None))
        with loading as quantization_config, self._own_vllm_generation():
            super().__init__(**given, quantization_config=quantization_config)
        policy = self.accelerator.unwrap_model(self.model)
        if is_peft_model(policy):
            check_adapter(policy)
        else:
            warn_of_low_precision(policy)
        self._monitor = guards.SignalMonitor(args.zero_advantage_patience, args.rollout_mismatch_threshold)
        self._seconds = {"rollout": 0.0, "reward": 0.0}
        self.reward_funcs = [
            function if isinstance(function, nn.Module) else guards.checked_reward(function, name)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        self.add_callback(checkpoint.SaveBetweenRollouts(self))
        prepare_trainable_norms(policy)
        if args.aqn:
            self.aqn = AQNCallback.from_args(args)
            self.aqn.attach(policy, seed=args.seed)
            self.add_callback(self.aqn)
        self._tag_names = [*type(self)._tag_names, "qerl", *(["nvfp4"] if self._is_nvfp4() else [])]
        self.model.add_model_tags(self._tag_names)

    def _is_nvfp4(self) -> bool:
        return has_nvfp4(self.accelerator.unwrap_model(self.model))

    @contextmanager
    def _own_vllm_generation(self) -> Iterator[None]:
        """Let the parent's `__init__` build our `VLLMGeneration`; see the module docstring."""

        def build(*args, **kwargs):
            from .rollout import QeRLVLLMGeneration

            return QeRLVLLMGeneration(*args, trainer=self, **kwargs)

        with ExitStack() as stack:
            for name in {cls.__module__ for cls in type(self).__mro__ if cls.__module__.startswith("trl.")}:
                module = sys.modules[name]
                if "VLLMGeneration" in vars(module):
                    stack.callback(setattr, module, "VLLMGeneration", module.VLLMGeneration)
                    module.VLLMGeneration = build
            yield

    # ------------------------------------------------------------------------------------------------------- rollout

    def _generate(self, prompts: list):
        started = time.perf_counter()
        training = self.model.training
        with self.aqn.generation() if self.aqn is not None else nullcontext():
            output = super()._generate(prompts)
        if training:
            self._seconds["rollout"] += time.perf_counter() - started
            if self.aqn is not None:
                self._metrics["train"]["aqn/sigma"].append(self.aqn.sigma)
                self._metrics["train"]["aqn/sigma_effective"].append(self.aqn.sigma_effective)
        return output

    def _calculate_rewards(self, *args, **kwargs) -> torch.Tensor:
        started = time.perf_counter()
        rewards = super()._calculate_rewards(*args, **kwargs)
        guards.check_reward_tensor(rewards, self.reward_func_names)
        if self.model.training:
            self._seconds["reward"] += time.perf_counter() - started
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            metrics = self._metrics["train"]
            self._monitor.advantages(metrics["frac_reward_zero_std"][-1], metrics["reward"][-1], self.state.global_step)
            self._log_mismatch(output)
        return output

    @torch.no_grad()
    def _log_mismatch(self, output: dict) -> None:
        """Log KL(rollout || trainer) in nats a token, by the estimator exp(d) - 1 - d with d = log(trainer / rollout).

        With vLLM both log-probabilities are at hand. transformers generation returns none, so with noise in the rollout only
        they are computed on the first few sequences, clean and noisy (of text: pictures are not fed again).
        """
        mask = output["completion_mask"].bool()
        if "tool_mask" in output:
            mask &= output["tool_mask"].bool()
        rollout, trainer = output.get("sampling_per_token_logps"), output.get("old_per_token_logps")
        if rollout is None or trainer is None:
            if self.aqn is None or self.aqn.scope != "rollout" or self.aqn.sigma == 0 or "pixel_values" in output:
                return
            n = min(_MISMATCH_SAMPLE, len(mask))
            mask = mask[:n]
            trainer = self._sequence_logps(output, n)
            with self.aqn.noisy():
                rollout = self._sequence_logps(output, n)
        d = (trainer - rollout).float()[mask]
        d = d[~d.isnan()]  # vLLM could not score the token
        kl = (torch.expm1(d) - d).mean() if d.numel() else d.new_zeros(())
        kl = self.accelerator.gather(kl).mean().item()
        self._metrics["train"]["rollout/mismatch_kl"].append(kl)
        self._monitor.mismatch(kl, self.state.global_step)
        ratio = output.get("importance_sampling_ratio")
        if ratio is not None:
            mode = self.args.vllm_importance_sampling_mode
            low, high = self.args.vllm_importance_sampling_clip_min, self.args.vllm_importance_sampling_clip_max
            cut = ratio == 0  # how the mask modes mark it
            if mode.endswith("truncate"):
                cut = (ratio <= (-math.inf if low is None else low)) | (ratio >= (math.inf if high is None else high))
            cut = cut[mask] if cut.shape == mask.shape else cut.flatten()
            fraction = cut.float().mean() if cut.numel() else cut.new_zeros((), dtype=torch.float32)
            self._metrics["train"]["rollout/truncated_fraction"].append(self.accelerator.gather(fraction).mean().item())

    def _sequence_logps(self, output: dict, n: int) -> torch.Tensor:
        """Log-probabilities (n, T) of the first n completions under the model as it is now."""
        ids = torch.cat([output["prompt_ids"][:n], output["completion_ids"][:n]], dim=1)
        mask = torch.cat([output["prompt_mask"][:n], output["completion_mask"][:n]], dim=1)
        length = output["completion_ids"].size(1)
        # as many at a time as TRL takes: logits of long completions over a large vocabulary are gigabytes a sequence
        batch_size = self.args.per_device_train_batch_size
        return self._get_per_token_logps_and_entropies(self.model, ids, mask, length, batch_size=batch_size)[0]

    # -------------------------------------------------------------------------------------------------------- update

    def training_step(self, model: nn.Module, inputs, num_items_in_batch=None) -> torch.Tensor:
        started = time.perf_counter()
        before = sum(self._seconds.values())
        loss = super().training_step(model, inputs, num_items_in_batch)
        guards.check_loss(loss, self.state.global_step)
        if self.accelerator.sync_gradients and getattr(self.accelerator, "scaler", None) is None:
            guards.check_gradients(model, self.state.global_step)
        elsewhere = sum(self._seconds.values()) - before
        self._seconds["update"] = self._seconds.get("update", 0.0) + time.perf_counter() - started - elsewhere
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training:
            metrics = self._metrics["train"]
            if metrics.get("entropy"):
                self._monitor.entropy(sum(metrics["entropy"]) / len(metrics["entropy"]), self.state.global_step)
            if "loss" in logs:  # a training log, not the summary at the end
                for phase in self._seconds:
                    logs[f"seconds/{phase}"] = self._seconds[phase]
                    self._seconds[phase] = 0.0
                logs["memory/peak_gib"] = report.peak_memory_gib(self.args.device)
        super().log(logs, start_time)

    # --------------------------------------------------------------------------------------------------- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """As `Trainer.train`. `True` takes the newest whole checkpoint of `output_dir`; a damaged one is never loaded."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = checkpoint.last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"resume_from_checkpoint=True, but {self.args.output_dir} holds no whole checkpoint. Start without it, or "
                    "give the path of a checkpoint."
                )
        elif resume_from_checkpoint:
            checkpoint.verify(resume_from_checkpoint)
        self._epochs_done = 0
        if resume_from_checkpoint:
            for difference in checkpoint.run_differences(resume_from_checkpoint, self._run_settings()):
                logger.warning("Resuming %s with other settings: %s", resume_from_checkpoint, difference)
            state = TrainerState.load_from_json(os.path.join(resume_from_checkpoint, TRAINER_STATE_NAME))
            self._epochs_done = int(state.epoch or 0)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            if self.aqn is not None:
                self.aqn.detach()  # an exception in the middle of a step leaves a model that computes clean

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        # each epoch's order is drawn from one generator, when its first index is asked for
        for _ in range(self._epochs_done):
            next(iter(sampler))
        return sampler

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        policy = self.accelerator.unwrap_model(self.model if model is None else model)
        beside = os.path.isfile(os.path.join(resume_from_checkpoint, PEFT_CONFIG_NAME))
        if is_peft_model(policy) and len(policy.peft_config) > 1 and beside and not self.is_fsdp_enabled:
            # Trainer loads the adapters in subfolders (TRL's "ref", with a PeftModel and beta > 0) and then forgets the one
            # beside them, which is the trained one
            policy.load_adapter(resume_from_checkpoint, policy.active_adapter, is_trainable=True)

    def _save_checkpoint(self, model, trial) -> None:
        run_dir = self._get_output_dir(trial=trial)
        folder = os.path.join(run_dir, f"checkpoint-{self.state.global_step}")
        if self.args.should_save:
            checkpoint.discard(folder)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # rotate only once the new one is sealed
        self._unpushed = None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            # again: the limit was cleared when it was written
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))
            checkpoint.seal(folder, self._run_settings())
            rotate_checkpoints(
                output_dir=run_dir, save_total_limit=limit, best_model_checkpoint=self.state.best_model_checkpoint
            )
        if self._unpushed is not None:
            super()._push_from_checkpoint(self._unpushed)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._unpushed = checkpoint_folder  # the parent would push it before it is sealed

    def _run_settings(self) -> dict:
        """What must agree for a resumed run to continue the same trajectory."""
        names = """base_format scale_rule aqn aqn_schedule aqn_sigma_start aqn_sigma_end aqn_num_stages aqn_scope aqn_seed
            aqn_entropy_target seed data_seed learning_rate max_steps num_train_epochs per_device_train_batch_size
            gradient_accumulation_steps num_generations steps_per_generation num_iterations temperature max_completion_length
            loss_type beta world_size modules_to_not_convert""".split()
        settings = {name: value for name in names if (value := getattr(self.args, name, None)) is not None}
        policy = self.accelerator.unwrap_model(self.model)
        settings |= {
            "model": getattr(policy.config, "_name_or_path", ""),
            "dtype": str(compute_dtype(policy)).removeprefix("torch."),
        }
        if is_peft_model(policy):
            lora = policy.peft_config[policy.active_adapter]
            targets = lora.target_modules  # a string is a regular expression
            targets = targets if isinstance(targets, str) else sorted(targets)
            settings["lora"] = {"r": lora.r, "alpha": lora.lora_alpha, "targets": targets}
        settings["versions"] = report.versions()
        return settings


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

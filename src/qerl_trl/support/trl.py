"""Declare the members of TRL's `GRPOTrainer`, `RLOOTrainer` and configs that this package uses, for type checkers.

`QeRLMixin` precedes either of them in the bases, so it cannot name one as its base. For the type checker its base
is [`OnlineTrainer`], compared with the real classes in `QeRLGRPOTrainer` and `QeRLRLOOTrainer`;
`tests/test_contracts.py` compares the rest. At run time it is `object`. [`OnlineConfig`]: the same for `QeRLArguments`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import defaultdict

    import torch
    from accelerate import Accelerator
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from trl.trainer.base_trainer import _BaseTrainer

    class OnlineTrainer(_BaseTrainer):
        _name: str
        _tag_names: list[str]
        args: Any  # QeRLConfig or QeRLRLOOConfig
        model: Any  # a PeftModel or a PreTrainedModel, perhaps wrapped by accelerate
        accelerator: Accelerator
        state: TrainerState
        control: TrainerControl
        is_fsdp_enabled: bool
        hub_model_id: Any  # None until transformers knows the name
        push_in_progress: Any  # None at first, too
        reward_funcs: Any
        reward_func_names: Any
        reward_weights: torch.Tensor
        num_generations: Any
        rollout_func: Any  # of GRPO
        ref_model: Any  # if every weight is trained, and beta is not 0
        vllm_generation: Any  # with vLLM: rollout.generation.QeRLVLLMGeneration
        _step: int
        use_vllm: bool
        pad_to_multiple_of: Any
        _tokenizer: Any
        base_sha256: str | None  # set by QeRLMixin
        memory_plan: Any  # set by QeRLMixin: a MemoryPlan, or None
        _padded_logps: Any  # set by QeRLMixin: TRL's `_get_per_token_logps_and_entropies`
        #: prompt and completion in tokens, by `plan_trainer`; None if no prompt was counted
        longest_sequence: int | None
        given_optimizers: dict[str, str]  # set by QeRLMixin: the user's classes of optimizer and scheduler
        optimizer: Any
        lr_scheduler: Any
        processing_class: Any
        eos_token_ids: list[int]  # in GRPO; for RLOO set by sampling.settle_ends
        _metrics: dict[str, defaultdict[Any, list[Any]]]
        _logs: dict[str, Any]

        def __init__(self, *positional: Any, **kwargs: Any) -> None: ...
        @property
        def sources(self) -> dict[str, dict[str, str]]: ...  # of QeRLMixin: digests of the user's functions
        def _generate(self, prompts: list) -> Any: ...
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Any: ...
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]: ...
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, batch_size=None
        ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]: ...
        def _compute_loss(self, model, inputs) -> torch.Tensor: ...
        def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint) -> Any: ...
        def _get_train_sampler(self, dataset=None) -> Any: ...
        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None: ...

    class OnlineConfig(TrainingArguments):
        use_transformers_continuous_batching: bool
        generation_batch_size: int | None
        steps_per_generation: int | None
        num_generations: int

else:
    OnlineTrainer = OnlineConfig = object

"""Rollouts in vLLM: TRL's `VLLMGeneration`, with the weights shared and nothing merged.

Differences from the parent:

| method | why |
|---|---|
| `_init_vllm` | builds one of our engines (engine.py) and probes it |
| `start` (new) | does so when training starts, if accelerate moves and shards the model then (supported.py) |
| `sync_weights` | syncs the trained weights (weights.py): the adapter, never merged; every weight with `full` |
| `generate` | syncs adapter and noise first; puts the engine to sleep afterwards; reports a dead engine |
| `rollout` (new) | context manager around the trainer's whole `_generate` |

It serves every `base_format`; supported.py lists their limits.
"""

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from transformers import TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import ensure_master_addr_port

from ..memory.plan import MemoryPlan
from ..noise.hooks import NoiseDraw
from ..nvfp4.linear import compute_dtype
from ..support.distributed import gathered
from ..support.names import is_sharded
from ..support.phases import deadline
from .engine import Completion, Engine, RankWithoutEngine, RolloutError, Sampling, Seeds
from .probe import Probe, ProbeResult, check_contents, report, run_prompts
from .spec import MOST_SERVED, EngineSpec, check_vocabulary, pictures_may_come
from .supported import placed_in_training
from .weights import DTYPES, Trained, TrainedAdapter, TrainedWeights

logger = logging.getLogger(__name__)
#: failures of an engine; other exceptions are bugs and pass through
_OF_ENGINE: tuple[type[Exception], ...] = (RuntimeError, OSError, AssertionError)
NO_NOISE = NoiseDraw(0.0, 0, -1, 0)  # step -1: equals no rollout's draw


class QeRLVLLMGeneration(VLLMGeneration):
    """Generation in vLLM for a QeRL trainer: TRL's `VLLMGeneration` with an extra argument `trainer`."""

    engine: Engine
    llm: Any  # in colocate mode: vllm.engine.SharedLLM
    noise_result: ProbeResult | None

    def __init__(self, *args: Any, trainer: Any, **kwargs: Any) -> None:
        self.trainer = trainer
        self._stamp: tuple[int, str] | None = None  # step and stamp of the trained weights at the latest sync
        self._put: str | None = None  # fingerprint of these weights
        self._draw: NoiseDraw | None = None
        self._noisy: tuple[str, ...] = ()
        self._inside = False
        self._calls: dict[tuple[int, bool], int] = {}  # calls of `generate` in this step
        self._probed = 0  # step of the latest probe
        self.shared = False
        self.waits = False  # until accelerate has placed the model
        # log-probabilities of the latest rollout; TRL's RLOO drops them
        self.sampled_logps: list[list[float | None]] | None = None
        # ids and log-probabilities, (T, K) each, of the most likely tokens at its positions
        self.sampled_top: list[tuple[Any, Any]] = []
        # TRL never reads the text, and decoding takes as long as a GPU step; only vLLM's `stop` needs it
        chosen = dict(kwargs.get("generation_kwargs") or {})
        chosen.pop("eos_token_id", None)
        if not chosen.get("stop") and kwargs.get("mode") == "colocate":
            chosen.setdefault("detokenize", False)
        if not chosen.get("ignore_eos"):
            chosen["stop_token_ids"] = trainer.eos_token_ids
        given = {**kwargs, "logprobs": kwargs.get("logprobs") or 0, "generation_kwargs": chosen}
        super().__init__(*args, **given)

    def _init_vllm(self) -> None:
        check_vocabulary(self.model)
        self.trained: Trained = TrainedAdapter(self.model) if is_peft_model(self.model) else TrainedWeights(self.model)
        self.waits = placed_in_training(self.accelerator)
        if self.waits and self.mode == "colocate":
            memory_arguments(self)  # raises early if it does not fit
            self.engine = RankWithoutEngine()
        else:
            self._open()
        if self.waits:
            self.trainer.add_callback(StartsEngine(self))
        else:
            self.run_probe()
            self.engine.sleep()

    def _open(self) -> None:
        self.engine = self._build_engine()
        vars(self).update(self.engine.trl_attributes())
        self.accelerator.wait_for_everyone()

    def start(self) -> None:
        """Build and probe an engine that waited for accelerate to place the model. Call it in every process, after
        `accelerator.prepare`. Safe to call twice."""
        if not self.waits:
            return
        if self.mode == "colocate":
            self._open()
        self.waits = False
        self.run_probe()
        self.engine.sleep()
        if self.trainer.aqn is not None:
            self.probe_noise()

    def begin(self, checkpoint: str | None) -> None:
        """Count calls of `generate` from 0 at the start of a training, so that a resumed run draws the same seeds."""
        self._calls = {}

    def run_probe(self) -> None:
        """Compare the engine with the trainer (probe.py). Call it in every process.
        Raises [`RolloutError`] with `rollout_probe="refuse"`."""
        self.probe_result, self.noise_result, self._clean = None, None, None
        if self.trainer.args.rollout_probe == "off":
            return
        prompts = run_prompts(self.trainer, self.processing_class, self.max_model_length)
        dtype = DTYPES[self.spec.dtype]
        self._probe = Probe(self.engine, self.model, prompts, self.accelerator.device, dtype)
        self.probe_result, self._clean = self._probe.adapter(self.sync_weights)
        self._clean_stamp = self.trained.stamp()
        self._report(self.probe_result, "Rollout probe")

    def probe_noise(self) -> None:
        """Compare under noise, unless the probe found a fault. Call it in every process, once `trainer.aqn` knows the
        norms. Raises [`RolloutError`] with `rollout_probe="refuse"`, `ValueError` if a norm cannot carry noise."""
        if self.waits or self.probe_result is None or self.probe_result.fault:
            return  # `start` calls it later, the probe is off, or it has found a fault
        self.engine.wake()
        same = all(gather_object([self._clean_stamp == self.trained.stamp()]))  # weights unchanged since the probe
        known, under = (self._clean if same else None), self.trainer.aqn.under
        self.noise_result = result = self._probe.noise(self.sync_noise, under, known)
        self._check()
        self._report(result, "Noise probe")
        self.engine.sleep()

    def _report(self, result: ProbeResult, name: str, remedy: str = "Use use_vllm=False and report the model") -> None:
        report(result, name, self.trainer.args.rollout_probe, remedy)

    def _probe_if_due(self) -> None:
        """Every `rollout_probe_steps` training steps, compare log-probabilities again, with the current adapter."""
        step, every = self.trainer.state.global_step, self.trainer.args.rollout_probe_steps
        # a rollout lasts for several steps, so not every multiple starts one
        due = every and step // every != self._probed // every
        if not due or self.probe_result is None or not self.trainer.model.training:
            return
        draw = self._draw
        self.sync_noise(NO_NOISE)
        result = self._probe.again(self.probe_result.rounding)
        self._report(result, f"Rollout probe at step {step}", "Resume from the last checkpoint with a new engine")
        self.sync_noise(draw or NO_NOISE)
        self._probed = step

    def _check_started(self) -> None:
        if self.waits:
            raise RolloutError(
                "There is no engine yet: under FSDP and DeepSpeed it is built when training starts. Call train() "
                "first; eval_on_start=True evaluates before the first step."
            )

    def _build_engine(self) -> Engine:
        args, trainer = self.trainer.args, self.trainer
        held_out = trainer.eval_dataset
        data = [trainer.train_dataset, *(held_out.values() if isinstance(held_out, dict) else [held_out])]
        # RLOO trainers have none of these attributes
        plays = any(map(vars(trainer).get, ("tools", "environments", "rollout_func")))
        self.spec = EngineSpec.of(
            self.model,
            scale_rule=args.scale_rule,
            dtype=self._compute_dtype(),
            revision=(args.model_init_kwargs or {}).get("revision"),
            pictures=pictures_may_come(self.processing_class, data, plays),
            max_model_len=self.max_model_length,
            max_num_seqs=min(args.generation_batch_size, MOST_SERVED) if self.mode == "server" else self.max_num_seqs,
            model_impl=self.model_impl,
            trust_remote_code=self.trust_remote_code,
            batch_invariant=args.vllm_batch_invariant,
        )
        if self.mode == "colocate":
            return self._in_process()
        if self.mode != "server":
            raise ValueError(f"vllm_mode must be 'server' or 'colocate', got {self.mode!r}.")
        if not self.accelerator.is_main_process:
            return RankWithoutEngine()
        from .server import ServerEngine

        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        return ServerEngine(url, self.spec, self.model, self.server_timeout)

    def _compute_dtype(self) -> torch.dtype:
        """Return the trainer's compute dtype: 16 bits for float32 weights under autocast."""
        args = self.trainer.args
        if isinstance(self.trained, TrainedWeights) and (args.bf16 or args.fp16):
            return torch.bfloat16 if args.bf16 else torch.float16
        return compute_dtype(self.model)

    def _in_process(self) -> Engine:
        from .vllm.engine import InProcessEngine

        accelerator, tp, args = self.accelerator, self.tensor_parallel_size, self.trainer.args
        if accelerator.num_processes % tp:
            raise ValueError(
                f"vllm_tensor_parallel_size={tp} must divide the number of processes, {accelerator.num_processes}."
            )
        self.tp_group = None
        if tp > 1:
            groups = [list(range(i, i + tp)) for i in range(0, accelerator.num_processes, tp)]
            self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
        os.environ["RANK"] = str(accelerator.process_index)
        os.environ["LOCAL_RANK"] = str(accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(accelerator.num_processes)
        ensure_master_addr_port()
        # trained weights change between syncs and are mostly float32, so only a frozen base can be shared
        wanted = args.share_weights and isinstance(self.trained, TrainedAdapter)
        self.shared = wanted and tp == 1 and not is_sharded(self.model)
        if wanted and not self.shared:
            logger.info("The engine has a copy of the weights, because the engine or the trainer is sharded.")
        sleeps, self.enable_sleep_mode = self.enable_sleep_mode, False  # the parent sleeps at level 2
        placement = {
            "tensor_parallel_size": tp,
            "distributed_executor_backend": "external_launcher",
            # one seed per tensor-parallel group: its ranks must sample the same tokens
            "seed": accelerator.process_index // tp,
        }
        arguments = placement | agreed(memory_arguments(self), self.tp_group) | (args.vllm_engine_kwargs or {})
        return InProcessEngine(self.model, self.spec, self.shared, sleeps, self.tp_group, arguments)

    def sync_weights(self, draw: NoiseDraw | None = None) -> None:
        """Sync the trained weights, and the noise of `draw` if given. Collective for sharded parameters."""
        self._check_started()
        self.engine.wake()  # a sleeping engine's copy of the weights cannot be written
        part = None if self.trained.whole() else self.trained.stamp()
        self._put, effective = self.trained.put(self.engine, self._dist.gather_params, self._noisy, draw)
        self._stamp = self.trainer.state.global_step, part or self._put
        if draw is not None:
            self._note_noise(draw, effective)

    def _is_put(self) -> bool:
        """Whether the current weights were synced in this step. Comparing steps first gives all processes one answer: a
        sync of sharded parameters is collective."""
        if self._stamp is None or self._stamp[0] != self.trainer.state.global_step:
            return False
        return self._stamp[1] == self.trained.stamp()

    def sync_noise(self, draw: NoiseDraw | None = None) -> None:
        """Put the noise of `draw` (default: the current `trainer.aqn.draw`) on the engine's norms."""
        due = self._due(draw)
        if due is not None:
            self._note_noise(due, self.engine.put(None, self._noisy, due))

    def _due(self, draw: NoiseDraw | None) -> NoiseDraw | None:
        """Return the noise that `sync_noise` must put; None if the engine has it, or old and new sigma are 0."""
        aqn = self.trainer.aqn
        if aqn is None:
            return None
        draw = draw or aqn.draw or NO_NOISE
        clean = draw.sigma == 0 and (self._draw is None or self._draw.sigma == 0)
        if draw == self._draw or clean:
            return None
        self._noisy = aqn.norms or self._noisy  # empty after the end of training
        return draw

    def _note_noise(self, draw: NoiseDraw, effective: float | None) -> None:
        """Record the engine's noise and its `effective` sigma."""
        if effective is not None:
            draw.check(effective)
            if draw.sigma > 0:
                self.trainer.aqn.sigma_effective = effective
        self._draw = draw

    def rollout(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for the trainer's whole `_generate`: rollout functions, tools, environments and `generate`
        inside share the current weights, one noise draw and one time limit; then the engine sleeps."""
        return self._up_to_date(whole=True)

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """Run the parent's `generate` with current adapter and noise. On a server each prompt gets a seed from run
        seed, step and call, unless the user gave one: a resumed run draws the same completions."""
        training, step = self.trainer.model.training, self.trainer.state.global_step
        number = self._calls.get((step, training), 0)
        self._calls = {key: n for key, n in self._calls.items() if key[0] == step} | {(step, training): number + 1}
        own, self.logprobs = self.generation_kwargs, self.trainer._centering.count if training else 0
        if self.logprobs and self.mode == "colocate":
            self.generation_kwargs = own | {"flat_logprobs": True}
        if self.mode == "server" and "seed" not in own:  # checkpoints lack the server's generator
            self.generation_kwargs = own | {"seed": Seeds((self.trainer.args.seed, step, int(training), number))}
        try:
            with self._up_to_date():
                generated = super().generate(prompts, images, num_generations, profiler)
        finally:
            self.generation_kwargs = own
        if self.logprobs:
            self.sampled_top = generated[3] if self.mode == "server" else self.llm.top
        self.sampled_logps = generated[2] and [[token[0] for token in sequence] for sequence in generated[2]]
        return generated

    def generate_greedily(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Complete this process's prompts (token ids) greedily, with the current adapter and no noise. Returns token
        ids. Call it in every process."""
        return [completion.tokens for completion in self._complete(prompts, Sampling(max_tokens), NO_NOISE)]

    def complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """Complete this process's prompts (token ids), with log-probabilities; under the noise of a surrounding
        training rollout, else without noise. Call it in every process, with any number of prompts."""
        return self._complete(prompts, sampling, None if self._inside and self.trainer.model.training else NO_NOISE)

    def _complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, draw: NoiseDraw | None
    ) -> list[Completion]:
        sampling = sampling if sampling.ignore_eos else replace(sampling, stop_token_ids=self.trainer.eos_token_ids)
        rollout = self.trainer.args.generation_batch_size // self.accelerator.num_processes
        with self._up_to_date(draw, max(1, math.ceil(len(prompts) / rollout))):
            return self.engine.generate(prompts, sampling)

    @contextlib.contextmanager
    def _up_to_date(self, draw: NoiseDraw | None = None, rollouts: int = 1, whole: bool = False) -> Iterator[None]:
        """Keep the engine awake with current weights and the noise of `draw` (default: `trainer.aqn.draw`).

        Re-entrant: the inner block keeps the outer time limit, leaves the engine awake, and restores the outer noise.

        Args:
            rollouts: multiple of `rollout_timeout` for the block.
            whole: the block is the trainer's whole rollout; user code may fail in it too.

        Raises:
            `RolloutError`: the engine failed, or took too long.
        """
        self._check_started()
        outer, before, failures = not self._inside, self._draw, _OF_ENGINE
        try:
            with self._limited(rollouts) if outer else contextlib.nullcontext():
                self._prepare(draw)
                if whole:
                    # else TRL would sync the weights again
                    self.trainer._last_loaded_step = self.trainer.state.global_step
                    self._probe_if_due()
                self._inside, failures = True, (RolloutError,) if whole else _OF_ENGINE
                yield
                failures = _OF_ENGINE
                if outer:
                    self._check()
                    self.engine.sleep()
                else:
                    self.sync_noise(before or NO_NOISE)
        except failures as error:
            failed = error
            if not isinstance(error, RolloutError):
                step, what = self.trainer.state.global_step, f"{type(error).__name__}: {error}"
                failed = RolloutError(f"The rollout failed in vLLM ({self.mode} mode) at step {step}: {what}.")
            if outer:  # outside the time limit, because a save takes long
                failed.args = (f"{failed} {self.trainer.rescue()}",)
            if failed is error:
                raise
            raise failed from error
        finally:
            self._inside = self._inside and not outer

    def _prepare(self, draw: NoiseDraw | None) -> None:
        self.engine.wake()
        if not (self._inside or self._is_put()):
            self.sync_weights(self._due(draw))
        else:
            self.sync_noise(draw)

    def _check(self) -> None:
        contents = self.engine.contents()
        if contents is not None:
            check_contents(contents, self._put, self._draw)

    def _limited(self, rollouts: int) -> contextlib.AbstractContextManager[None]:
        """Limit a block to `rollouts` times `rollout_timeout`."""
        timeout = self.trainer.args.rollout_timeout
        late = (
            "vLLM did not finish a rollout within rollout_timeout={:g} s. If vLLM, a tool or a rollout function hangs, "
            "restart the run; else raise rollout_timeout."
        )
        return deadline(timeout and timeout * rollouts, lambda: RolloutError(late.format(timeout)))

    def shutdown(self) -> None:
        """Stop the engine and give its memory back. Safe to call twice."""
        self.engine.close()
        vars(self).update(self.engine.trl_attributes())


def agreed(arguments: dict[str, Any], group: "torch.distributed.ProcessGroup | None") -> dict[str, Any]:
    """Take the minimum of each number over the processes of one engine: each planned for its own GPU, but their
    schedulers must decide alike. Collective in `group`; None: an engine of one process."""
    if group is None:
        return arguments
    every = gathered(arguments, group)
    names = {name: None for each in every for name in each}  # a plan for less memory has more names
    return {name: min(each[name] for each in every if name in each) for name in names}


def memory_arguments(generation: "QeRLVLLMGeneration") -> dict[str, Any]:
    """Return the memory arguments of `LLM`: the user's share of the GPU, or a planned KV cache."""
    if generation.gpu_memory_utilization is not None:
        return {"gpu_memory_utilization": generation.gpu_memory_utilization}
    plan: MemoryPlan = generation.trainer.memory_plan
    plan.check()
    return plan.engine_arguments()


class StartsEngine(TrainerCallback):
    """Starts the engine between accelerate's preparation of the model and the first step."""

    def __init__(self, generation: "QeRLVLLMGeneration") -> None:
        self._generation = generation

    def on_train_begin(self, args, state, control, **kwargs):
        self._generation.start()

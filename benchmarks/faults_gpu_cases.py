"""The faults that faults_gpu.py injects: where each is put in, and what has to happen. A list; that one runs it."""

import dataclasses
import resource
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Fault:
    """`before` is called before the trainer is built, `at_end_of` with the trainer at the end of step `step`. `words`: the message has them.

    again: whether the same command is run again without the fault. gpu: only a GPU can have it. processes: of the run.
    """

    words: tuple[str, ...]
    before: Callable[[], None] | None = None
    at_end_of: Callable[[Any], None] | None = None
    step: int = 1
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    again: bool = False
    gpu: bool = False
    processes: int = 1
    lora: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether nothing may run beside it: it has all GPUs, or it sleeps, and vLLM compares what its GPU has free before and after."""
        return self.processes > 1 or bool(self.settings.get("vllm_enable_sleep_mode"))


# --- how faults are put in ---------------------------------------------------------------------------------------------------------------


def adapter(change: Callable[[dict], dict]) -> Callable[[], None]:
    """The engine takes the adapter, says so, and computes with another."""

    def inject() -> None:
        from qerl_trl.rollout.engine import update_fingerprint
        from qerl_trl.rollout.vllm.state import RolloutState

        load = RolloutState.load_adapter

        def wrong(self: Any, adapter: Any, norms: Any, received: str | None = None) -> int:
            return load(self, change(dict(adapter)), norms, received or update_fingerprint(adapter, norms))

        RolloutState.load_adapter = wrong

    return inject


# what an engine may make of an adapter that it was given, {layer: its tensors}; in 843f908's record too, for tests/faults


def scaled(factor: float) -> Callable[[dict], dict]:
    return lambda adapter: {name: dataclasses.replace(t, b=t.b * factor) for name, t in adapter.items()}


def without(lost: Callable[[str], Any]) -> Callable[[dict], dict]:
    return lambda adapter: {name: tensors for name, tensors in adapter.items() if not lost(name)}


def exchanged(adapter: dict) -> dict:
    def other(name: str) -> str:
        return name.replace("k_proj", "v_proj") if "k_proj" in name else name.replace("v_proj", "k_proj")

    return {name: adapter[other(name)] for name in adapter}


def serve_unquantized() -> None:
    """vLLM computes with the bf16 weights that the base was quantized from."""
    from qerl_trl.rollout.spec import EngineSpec
    from qerl_trl.rollout.vllm.engine import InProcessEngine

    build = InProcessEngine.__init__

    def wrong(self: Any, model: Any, spec: Any, share: bool, *args: Any, **kwargs: Any) -> None:
        import torch
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        dense = AutoModelForCausalLM.from_pretrained(model.config._name_or_path, dtype=torch.bfloat16)
        policy = get_peft_model(dense.to(model.device), model.peft_config["default"])
        policy.requires_grad_(False)
        spec = EngineSpec.of(policy, dtype=torch.bfloat16, max_model_len=spec.max_model_len)
        build(self, policy, spec, False, *args, **kwargs)

    InProcessEngine.__init__ = wrong


def noise_is_not_written() -> None:
    from qerl_trl.rollout.vllm import state

    state.RolloutState.set_noise = lambda self, draw: setattr(self, "draw", draw)


def noise_stays() -> None:
    from qerl_trl.rollout.vllm.state import RolloutState

    put = RolloutState.set_noise
    RolloutState.set_noise = lambda self, draw: put(self, draw) if draw.sigma else setattr(self, "draw", draw)


def ask_greedily(trainer: Any) -> None:
    """A measurement between steps, which has no noise."""
    trainer.vllm_generation.generate_greedily([[5, 6, 7]], 4)


def refuse_reset(trainer: Any) -> None:
    trainer.vllm_generation.llm.reset_prefix_cache = lambda: False


def memory_taken_at_start() -> None:
    import torch

    from qerl_trl.rollout.generation import QeRLVLLMGeneration

    build = QeRLVLLMGeneration._in_process

    def short(self: Any) -> Any:
        take_the_memory()
        return build(self)

    assert torch.cuda.is_available()
    QeRLVLLMGeneration._in_process = short


def take_the_memory(trainer: Any = None) -> None:
    """Nothing more than the allocator has now."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    )


def dies(trainer: Any) -> None:
    def generate(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("EngineCore encountered a fatal error")

    trainer.vllm_generation.llm.generate = generate


def hangs(trainer: Any) -> None:
    trainer.vllm_generation.llm.generate = lambda *args, **kwargs: time.sleep(100)


def of_answers(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """`change` is made to the first sequence of every answer of the engine."""

    def inject(trainer: Any) -> None:
        llm = trainer.vllm_generation.llm
        generate = llm.generate

        def changed(*args: Any, **kwargs: Any) -> Any:
            outputs = generate(*args, **kwargs)
            for output in outputs:
                change(output.outputs[0])
            return outputs

        llm.generate = changed

    return inject


def nan_logps(sequence: Any) -> None:
    for step in sequence.logprobs:
        for entry in step.values():
            entry.logprob = float("nan")


def shifted_logps(sequence: Any) -> None:
    for step in sequence.logprobs:
        for entry in step.values():
            entry.logprob -= 1.0


def damage(trainer: Any) -> None:
    """One element of one weight of the engine's."""
    from qerl_trl.rollout.vllm.engine import engine_model

    layer = engine_model(trainer.vllm_generation.llm).model.layers[3].mlp.down_proj
    layer.weight_packed.data[7, 11] += 1


def wake_wrong(what: Callable[[Any], None]) -> Callable[[Any], None]:
    """The engine sleeps after every rollout; when it next wakes, something is not as it was."""

    def inject(trainer: Any) -> None:
        llm = trainer.vllm_generation.llm
        wake = llm.wake_up

        def wrong() -> None:
            wake()
            what(trainer)

        llm.wake_up = wrong

    return inject


def other_norm(trainer: Any) -> None:
    """A norm without noise, which the engine has of its own; an adapter that is lost so is put anew in every step."""
    from qerl_trl.rollout.vllm.engine import engine_model

    engine_model(trainer.vllm_generation.llm).model.norm.weight.data.mul_(1.5)


def full_disk(trainer: Any) -> None:
    """The file system refuses what is longer, as a full one does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))


def reward_hangs(trainer: Any) -> None:
    REWARD["hook"] = lambda: time.sleep(100)


def rank_dies(trainer: Any) -> None:
    if trainer.accelerator.process_index == 1:

        def lost() -> None:
            raise KeyError("answer")

        REWARD["hook"] = lost


def huge_adapter(trainer: Any) -> None:
    """A step that diverged."""
    import torch

    with torch.no_grad():
        next(p for n, p in trainer.model.named_parameters() if "lora_B" in n)[0, 0] = float("inf")


REWARD: dict[str, Any] = {"hook": None}

PROBE = ("the adapter ", "nats")
FAULTS = {
    "healthy": Fault(()),
    "adapter doubled": Fault(PROBE, adapter(scaled(2.0))),
    "adapter halved": Fault(PROBE, adapter(scaled(0.5))),
    "half of the layers lost": Fault(PROBE, adapter(without(lambda name: int(name.split(".")[2]) % 2))),
    "all MLPs lost": Fault(PROBE, adapter(without(lambda name: ".mlp." in name))),
    "k and v exchanged": Fault(PROBE, adapter(exchanged)),
    "adapter ignored": Fault(("the adapter acts otherwise",), adapter(scaled(0.0))),
    "adapter on the embeddings unsent": Fault(
        ("embed_tokens", "use_vllm=False"), lora={"target_modules": ["q_proj", "embed_tokens"]}
    ),
    "unquantized weights served": Fault(("clean log-probabilities differ",), serve_unquantized),
    "noise absent": Fault(("noise", "sigma"), noise_is_not_written, settings={"aqn_num_stages": 2}),
    "noise left on": Fault(("noise",), noise_stays, ask_greedily, step=3),
    "prefix cache refuses to be reset": Fault(("prefix cache",), at_end_of=refuse_reset, again=True),
    "awake with a damaged weight": Fault(
        ("woke up with other weights", "vllm_enable_sleep_mode=False"), at_end_of=wake_wrong(damage), again=True, gpu=True,
        settings={"share_weights": False, "vllm_enable_sleep_mode": True},
    ),
    "awake with another norm": Fault(
        ("woke up with other weights",), at_end_of=wake_wrong(other_norm), gpu=True, settings={"vllm_enable_sleep_mode": True}
    ),
    "out of memory at start": Fault(("Out of memory when the engine started",), memory_taken_at_start, gpu=True),
    "out of memory in a step": Fault(("memory", "step"), at_end_of=take_the_memory, again=True, gpu=True),
    "engine dead": Fault(("The rollout failed in vLLM", "fatal error"), at_end_of=dies, again=True),
    "engine hangs": Fault(("rollout_timeout=20",), at_end_of=hangs, settings={"rollout_timeout": 20.0}),
    "log-probabilities NaN": Fault(("are not finite",), at_end_of=of_answers(nan_logps), again=True),
    "log-probabilities shifted by 1 nat": Fault(("not those its tokens were drawn with",), at_end_of=of_answers(shifted_logps), step=1,
                                                settings={"max_steps": 6}),
    "adapter infinite": Fault(("trained parameters are not finite", "lower learning_rate"), at_end_of=huge_adapter),
    "reward hangs": Fault(("reward_timeout",), at_end_of=reward_hangs, settings={"reward_timeout": 5.0}, again=True),
    "disk full": Fault(("no room to write",), at_end_of=full_disk, step=2, again=True),
    "one process of two fails": Fault(("raised KeyError", "resume"), at_end_of=rank_dies, processes=2, settings={"use_vllm": False}, again=True),
}  # fmt: skip

"""Engines, models and trainers for the tests of this folder, without an import of vLLM."""

import functools
import json
import multiprocessing
import os
import runpy
import shlex
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.config import NVFP4Config, load_config
from tests.tiny_models import make_tiny_config, randomize_vectors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: a small cache: every sync visits its blocks. In bytes on a GPU, because several files share it
MEMORY = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 2**28}
if DEVICE == "cpu":
    MEMORY = {"gpu_memory_utilization": 0.05, "num_gpu_blocks_override": 256}
PROMPTS = [[10 + i, 20, 30, 40, 50, 60 + i] for i in range(4)]
NEW = 12
#: log-probabilities in float32 differ by about 1e-5; a missing adapter, noise or scale moves them by 0.1 to 10
EXACT = 1e-4
_ALIVE = []  # garbage collection of an engine destroys the process groups of all others


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_model(folder: Path, family: str = "qwen2", **overrides) -> str:
    """A tiny random checkpoint with a tokenizer; weights large enough that greedy tokens depend on them."""
    path = folder / f"{family}-{'-'.join(f'{k}{v}' for k, v in overrides.items())}"
    done = path / "complete"
    while not done.exists() and os.environ.get("RANK", "0") != "0":
        time.sleep(0.1)  # the first rank writes
    if done.exists():
        return str(path)
    config = make_tiny_config(family, **{"initializer_range": 0.2, "bos_token_id": 2, **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randomize_vectors(model, bias=0.1)
    model.save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    done.touch()
    return str(path)


def engine(model: str, **arguments):
    from vllm import LLM

    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "seed": 0, "enforce_eager": True}
    llm = LLM(model=model, **settings | {"logprobs_mode": "processed_logprobs"} | MEMORY | arguments)
    _ALIVE.append(llm)
    return llm


def greedy(llm, lora_request=None):
    """(tokens, log-probabilities (n, T)) of the four prompts."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=NEW, logprobs=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    outputs = llm.generate(prompts, parameters, use_tqdm=False, lora_request=lora_request)
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    logps = [
        [s[t].logprob for s, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)] for o in outputs
    ]
    return tokens, torch.tensor(logps)


@torch.no_grad()
def transformers_logps(model, tokens) -> torch.Tensor:
    ids = torch.tensor([p + t for p, t in zip(PROMPTS, tokens, strict=True)], device=DEVICE)
    logits = model(input_ids=ids, use_cache=False).logits[:, len(PROMPTS[0]) - 1 : -1].float().log_softmax(-1)
    return logits.gather(-1, ids[:, len(PROMPTS[0]) :, None]).squeeze(-1).cpu()


@torch.no_grad()
def transformers_greedy(model) -> list[list[int]]:
    ids = torch.tensor(PROMPTS, device=DEVICE)
    for _ in range(NEW):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[:, len(PROMPTS[0]) :].tolist()


def gap(model, llm, lora_request=None) -> float:
    """Largest |log-probability difference| over the engine's own greedy tokens."""
    tokens, logps = greedy(llm, lora_request)
    return (transformers_logps(model, tokens) - logps).abs().max().item()


def packed(path: str, scale_rule: str = "rtn", dtype: str = "float32", **config):
    """The trainer's side: quantized while it loads."""
    quantization = NVFP4Config(scale_rule=scale_rule, compute_dtype=dtype, **config)
    own = load_config(path, quantization)
    stored = getattr(own, "quantization_config", None) is not None
    given = {"config": own} if stored else {"quantization_config": quantization}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **given)
    return model.to(DEVICE).eval().requires_grad_(False)


def dense(path: str, dtype: torch.dtype = torch.float32):
    """The bf16 arm's base."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE).requires_grad_(False)


def adapter_on(model, rank: int = 8, alpha: float = 24, adapter_name: str = "default", **config):
    """A PEFT model with a random adapter; alpha/r = 3 by default, which is no power of two."""
    settings = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    lora = register_nvfp4_lora(LoraConfig(r=rank, lora_alpha=alpha, **settings))
    policy = get_peft_model(model, lora, adapter_name=adapter_name)
    randomize(policy)
    return policy


@torch.no_grad()
def randomize(policy, seed: int = 0, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * scale).to(parameter.device))


def stub_generation(policy, *, share=True, aqn=True, engine=None, **arguments):
    """A `QeRLVLLMGeneration` outside of a trainer."""
    from qerl_trl.noise.norms import find_noisy_norms
    from qerl_trl.rollout.generation import QeRLVLLMGeneration

    schedule = SimpleNamespace(ever_noisy=True)
    noise = SimpleNamespace(norms=tuple(find_noisy_norms(policy)), draw=None, sigma_effective=0.0, schedule=schedule)
    options = {"aqn": aqn, "share_weights": share, "rollout_timeout": None, "rollout_probe": "refuse", "bf16": False}
    options |= {"vllm_batch_invariant": False, "model_init_kwargs": None, "base_format": "nvfp4", "scale_rule": "rtn"}
    options |= {"vllm_engine_kwargs": {"enforce_eager": True, **MEMORY, **(engine or {})}, "fp16": False}
    options |= {"per_device_train_batch_size": 4, "generation_batch_size": 4, "gradient_checkpointing": False}
    state = {"aqn": noise if aqn else None, "model": policy, "state": SimpleNamespace(global_step=0)}
    state |= {"eos_token_ids": [], "rescue": lambda: "resume", "train_dataset": [], "eval_dataset": None}
    state |= {"_is_vlm": False, "_centering": SimpleNamespace(count=0)}
    trainer = SimpleNamespace(args=SimpleNamespace(**options), **state)
    settings = {"mode": "colocate", "max_model_length": 256, "max_num_seqs": 8, "max_completion_length": NEW}
    settings |= {"processing_class": None, "gpu_memory_utilization": MEMORY["gpu_memory_utilization"]}
    accelerator = Accelerator(cpu=DEVICE == "cpu")
    generation = QeRLVLLMGeneration(model=policy, accelerator=accelerator, trainer=trainer, **settings | arguments)
    _ALIVE.append(generation)
    return generation


def as_mixed_modelopt(source: str, dense: str, target: Path) -> str:
    """A compressed-tensors folder in ModelOpt's layout, with FP8 attention of the folder `dense`, and another tensor
    scale for up_proj than for gate_proj."""
    shutil.copytree(dense, target)  # for its tokenizer
    shutil.copytree(source, target, dirs_exist_ok=True)
    stored, weights = load_file(target / "model.safetensors"), load_file(Path(dense) / "model.safetensors")
    tensors, layers = {}, {}
    for name, tensor in stored.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight_packed" and "self_attn" in layer:
            weight = weights[f"{layer}.weight"].float()
            tensors[f"{layer}.weight_scale"] = scale = weight.abs().max() / 448
            tensors[f"{layer}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
            layers[layer] = {"quant_algo": "FP8"}
        elif kind == "weight_packed":
            tensors[f"{layer}.weight"] = tensor
            layers[layer] = {"quant_algo": "NVFP4", "group_size": 16}
        elif kind == "weight_global_scale" and "self_attn" not in layer:
            divisor = tensor * 0.3 if "up_proj" in layer else tensor  # no power of two: other weights, on purpose
            tensors[f"{layer}.weight_scale_2"] = (1.0 / divisor).reshape(())
            tensors[f"{layer}.input_scale"] = torch.tensor(0.01)
        elif kind == "weight" or "self_attn" not in layer or kind == "bias":
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]}
    config["quantization_config"] = quantization | {"quantized_layers": layers}
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


def trainer_of(folder: Path, model: str, trainer_class=None, peft_config=None, callbacks=None, **settings):
    """A GRPO trainer of two steps in float32 with colocated vLLM, noise on the norms in the second."""
    from qerl_trl import QeRLConfig, QeRLGRPOTrainer, QeRLRLOOConfig, QeRLRLOOTrainer

    prompts = Dataset.from_dict({"prompt": ["the quick brown fox", "what is 1 + 2", "0 1 2 3", "lazy dog"] * 8})
    given = {"train_dataset": prompts, "eval_dataset": None, "processing_class": None}
    given = {name: settings.pop(name, value) for name, value in given.items()}
    options = {"output_dir": str(folder / "run"), "per_device_train_batch_size": 8, "num_generations": 4}
    options |= {"max_completion_length": 16, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "bf16": False}
    options |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128, "use_cpu": DEVICE == "cpu"}
    options |= {"vllm_gpu_memory_utilization": MEMORY["gpu_memory_utilization"], "report_to": [], "disable_tqdm": True}
    options |= {"vllm_engine_kwargs": {"enforce_eager": True, **MEMORY}, "save_strategy": "no", "aqn_num_stages": 2}
    options |= {"gradient_checkpointing": False, "model_init_kwargs": {"dtype": "float32"}}
    options |= {"aqn_sigma_start": 2e-2, "aqn_sigma_end": 1e-2}
    lora = LoraConfig(r=8, lora_alpha=24, target_modules="all-linear")
    config = QeRLConfig if trainer_class is not QeRLRLOOTrainer else QeRLRLOOConfig
    trainer = (trainer_class or QeRLGRPOTrainer)(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(str(c)))) for c in completions],
        args=config(**{**options, **settings}),
        peft_config=None if settings.get("base_format") == "full" else peft_config or lora,
        callbacks=callbacks,
        **given,
    )
    _ALIVE.append(trainer)
    return trainer


def logs_of(trainer) -> list[dict]:
    return [log for log in trainer.state.log_history if "loss" in log]


def _serve(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    os.setsid()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for standard in (1, 2):
        os.dup2(sys.stdout.fileno(), standard)
    os.environ.clear()
    os.environ.update(environment)
    # the CPU build's own `vllm serve` looks for a distribution called vllm
    sys.argv = ["api_server", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


class Server:
    """A server started with the command of `EngineSpec` on a free loopback port; forked on a CPU, to import nothing."""

    def __init__(self, spec, folder: Path) -> None:
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "server.log"
        vllm, serve, model, *options = shlex.split(spec.serve_command())
        assert (vllm, serve) == ("vllm", "serve")
        environment = dict(os.environ, VLLM_SERVER_DEV_MODE="1")  # strangers may ask for its paths
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING"):
            environment.pop(key, None)
        start = "fork" if DEVICE == "cpu" else "spawn"
        environment["VLLM_WORKER_MULTIPROCESSING_METHOD"] = start
        options += ["--model", model, "--port", str(port), "--enforce-eager", "--max-num-seqs", "8"]
        options += [part for key, value in MEMORY.items() for part in ("--" + key.replace("_", "-"), str(value))]
        serving = multiprocessing.get_context(start).Process(target=_serve, args=(options, environment, self.log))
        serving.start()
        self.process = serving

    def wait(self, seconds: float = 300) -> None:
        import requests

        deadline = time.time() + seconds
        while time.time() < deadline:
            if not self.process.is_alive():
                break
            try:
                if requests.get(self.url + "/health", timeout=2).status_code == 200:
                    return
            except requests.RequestException:
                time.sleep(0.5)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.is_alive():
                os.killpg(self.process.pid, number)
                self.process.join(20)


def register_once() -> None:
    """vLLM's CPU build searches its Triton kernels for replacements at every engine's start: do it once."""
    from vllm.platforms import current_platform

    platform, name = type(current_platform), "register_triton_kernel_overrides"
    if hasattr(platform, name):
        setattr(platform, name, staticmethod(functools.cache(getattr(platform, name))))

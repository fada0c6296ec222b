"""Runs one scenario with the real vLLM engine and prints what it measured as JSON. The tests start it: one engine process each.

    python scenarios.py NAME FOLDER

vLLM reads its environment at import and an engine never quite leaves a process, so scenarios don't run inside pytest.
"""

# ruff: noqa: E402  (the environment must be set before torch and vLLM are imported)

import contextlib
import dataclasses
import functools
import json
import logging
import os
import sys
import time
from pathlib import Path
from unittest import mock

DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "QERL_SERVER_SECRET": "shared by the servers and trainers of these scenarios",
    "TRITON_F32_DEFAULT": "ieee",  # vLLM's attention in float32 would round to tf32 on a GPU
}
if sys.argv[1:] and sys.argv[1].startswith(("compiled", "graphs")):
    DEFAULTS["TORCHDYNAMO_DISABLE"] = "0"
if "pytest" not in sys.modules:  # which imports names from here, and computes in an environment of its own
    for _key, _value in DEFAULTS.items():
        os.environ.setdefault(_key, _value)
if Path(sys.path[0]) == Path(__file__).parent:
    del sys.path[0]  # the folder of a script comes first, and tests/rollout/vllm would be taken for vLLM

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: the cache is small: a GiB takes a second to make and each of its blocks is visited by every sync. On a GPU it is given in bytes, because
#: several scenarios share the GPU and measure nothing while others come and go
MEMORY = {"gpu_memory_utilization": 0.05, "num_gpu_blocks_override": 256} if DEVICE == "cpu" else {
    "gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 2**28,
}  # fmt: skip
PROMPTS = [[10 + i, 20, 30, 40, 50, 60 + i] for i in range(4)]
NEW = 12
SCENARIOS = {}
_ALIVE = []  # a collected engine takes the process groups of all others with it


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


# ---------------------------------------------------------------------------------------------------------------- helpers


def write_model(folder: Path, family: str = "qwen2", **overrides) -> str:
    """A tiny random checkpoint with a tokenizer; weights large enough that greedy tokens depend on them."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from tests.tiny_models import make_tiny_config, randomize_vectors

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
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(path)
    done.touch()
    return str(path)


def engine(model: str, **arguments):
    from vllm import LLM

    settings = {
        "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "seed": 0, "logprobs_mode": "processed_logprobs",
        "enforce_eager": True, **MEMORY,
    }  # fmt: skip
    llm = LLM(model=model, **settings | arguments)
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
    from transformers import AutoModelForCausalLM

    from qerl_trl.nvfp4.config import NVFP4Config, load_config

    quantization = NVFP4Config(scale_rule=scale_rule, compute_dtype=dtype, **config)
    own = load_config(path, quantization)
    kwargs = (
        {"config": own}
        if getattr(own, "quantization_config", None) is not None
        else {"quantization_config": quantization}
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **kwargs)
    return model.to(DEVICE).eval().requires_grad_(False)


def adapter_on(model, rank: int = 8, alpha: float = 24, adapter_name: str = "default", **config):
    """A PEFT model with a random adapter; alpha/r = 3 by default, which is no power of two."""
    from peft import LoraConfig, get_peft_model

    from qerl_trl.model.lora import register_nvfp4_lora

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
    from types import SimpleNamespace

    from accelerate import Accelerator

    from qerl_trl.noise.norms import find_noisy_norms
    from qerl_trl.rollout.generation import QeRLVLLMGeneration

    schedule = SimpleNamespace(ever_noisy=True)
    noise = SimpleNamespace(norms=tuple(find_noisy_norms(policy)), draw=None, sigma_effective=0.0, schedule=schedule)
    args = SimpleNamespace(
        aqn=aqn, share_weights=share, rollout_timeout=None, vllm_batch_invariant=False, model_init_kwargs=None, vllm_engine_kwargs={"enforce_eager": True, **MEMORY, **(engine or {})},
        base_format="nvfp4", scale_rule="rtn", per_device_train_batch_size=4, gradient_checkpointing=False,
        generation_batch_size=4, bf16=False, fp16=False, rollout_probe="refuse",
    )  # fmt: skip
    trainer = SimpleNamespace(
        args=args, eos_token_ids=[], aqn=noise if aqn else None, model=policy, state=SimpleNamespace(global_step=0), rescue=lambda: "resume", train_dataset=[], eval_dataset=None, _is_vlm=False
    )  # fmt: skip
    settings = {"mode": "colocate", "max_model_length": 256, "max_num_seqs": 8, "max_completion_length": NEW}
    generation = QeRLVLLMGeneration(
        model=policy, accelerator=Accelerator(cpu=DEVICE == "cpu"), processing_class=None, trainer=trainer,
        gpu_memory_utilization=MEMORY["gpu_memory_utilization"], **settings | arguments,
    )  # fmt: skip
    _ALIVE.append(generation)
    return generation


# -------------------------------------------------------------------------------------------------------------- scenarios


@scenario
def checkpoints(folder: Path) -> dict:
    """Every way weights reach vLLM from a folder, against transformers on the same folder."""
    from qerl_trl.rollout.vllm.engine import engine_model

    results = {}

    def stock() -> tuple[dict, torch.Tensor, object]:
        llm = engine(write_model(folder, "qwen2"))
        model = engine_model(llm)
        method = model.model.layers[0].self_attn.qkv_proj.quant_method
        norm = model.model.norm
        seen = {"norm": type(norm).__name__, "dtype": str(norm.weight.dtype), "linear": type(method).__name__}
        return seen, greedy(llm)[1], model

    results["stock before"], before, _ = stock()
    for family in ("qwen2", "qwen3", "llama"):
        path = write_model(folder, family)
        model = packed(path)
        llm = engine(path, quantization="qerl_nvfp4")
        results[f"online {family}"] = gap(model, llm)
        layers = engine_model(llm).model.layers[0]
        mine = model.model.layers[0].self_attn
        fused = torch.cat([layer.weight_packed for layer in (mine.q_proj, mine.k_proj, mine.v_proj)])
        results[f"online bytes equal {family}"] = torch.equal(fused, layers.self_attn.qkv_proj.weight_packed)
    path = write_model(folder, "qwen2")
    saved = str(folder / "saved")
    packed(path, "four_over_six").save_pretrained(saved)
    results["saved config"] = json.loads((Path(saved) / "config.json").read_text())["quantization_config"][
        "quant_method"
    ]
    results["offline compressed-tensors"] = gap(packed(saved), engine(saved, quantization="qerl_nvfp4", tokenizer=path))
    options = {"qerl": {"scale_rule": "four_over_six"}}
    results["online four_over_six"] = gap(
        packed(saved), engine(path, quantization="qerl_nvfp4", additional_config=options)
    )
    foreign = separate_scales(saved, folder / "separate")
    llm = engine(foreign, quantization="qerl_nvfp4", tokenizer=path)
    results["separate scales"] = gap(packed(foreign), llm)
    results["separate scales rows"] = engine_model(llm).model.layers[0].self_attn.qkv_proj.weight_global_scale.numel()
    modelopt = as_modelopt(foreign, folder / "modelopt")
    results["offline modelopt"] = gap(packed(foreign), engine(modelopt, quantization="qerl_nvfp4", tokenizer=path))
    mixed = as_mixed(modelopt, path, folder / "mixed")
    model, llm = packed(mixed), engine(mixed, quantization="qerl_nvfp4", tokenizer=path)
    results["offline modelopt mixed"] = gap(model, llm)
    mine, theirs = (m.model.layers[0].self_attn for m in (model, engine_model(llm)))
    results["mixed bytes equal"] = torch.equal(mine.o_proj.weight, theirs.o_proj.weight)
    skip = ["re:.*layers\\.1\\.mlp\\..*", "layers.0.self_attn.o_proj"]
    llm = engine(path, quantization="qerl_nvfp4", additional_config={"qerl": {"ignore": ["lm_head", *skip]}})
    results["skipped layers"] = sorted(
        n
        for n, m in engine_model(llm).named_modules()
        if type(getattr(m, "quant_method", None)).__name__ == "DenseMethod"
    )
    results["stock after"], after, model = stock()
    results["stock after noisy"] = sum(getattr(m, "noisy", False) for m in model.modules())
    results["stock same output"] = torch.equal(before, after)
    return results


def write_moe(folder: Path) -> str:
    """A tiny mixture-of-experts configuration; it is refused before any weight is read."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=1, num_experts=4,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, decoder_sparse_step=1,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder / "moe")
    return str(folder / "moe")


def separate_scales(source: str, target: Path) -> str:
    """The same weights with a tensor scale of its own for v_proj and up_proj: scale bytes doubled, divisor doubled."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    for name in list(tensors):
        if name.endswith(("v_proj.weight_scale", "up_proj.weight_scale")):
            doubled = tensors[name].float() * 0.5
            tensors[name] = doubled.to(torch.float8_e4m3fn)
            divisor = name.replace("weight_scale", "weight_global_scale")
            tensors[divisor] = tensors[divisor] * 0.3  # another scale, and no power of two: other weights, on purpose
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def as_modelopt(source: str, target: Path) -> str:
    """A compressed-tensors folder in ModelOpt's layout: other names, and a tensor scale that multiplies."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = {}
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        if name.endswith(".weight_packed"):
            tensors[name.replace("weight_packed", "weight")] = tensor
        elif name.endswith(".weight_global_scale"):
            tensors[name.replace("weight_global_scale", "weight_scale_2")] = (1.0 / tensor).reshape(())
            tensors[name.replace("weight_global_scale", "input_scale")] = torch.tensor(0.01)
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


def as_mixed(source: str, dense: str, target: Path) -> str:
    """A ModelOpt folder whose attention is FP8, of the weights of the folder `dense`."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(dense, target, dirs_exist_ok=True)  # for its tokenizer
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors, weights = load_file(target / "model.safetensors"), load_file(Path(dense) / "model.safetensors")
    layers = {}
    for name in (key.removesuffix(".weight_scale_2") for key in list(tensors) if key.endswith(".weight_scale_2")):
        layers[name] = {"quant_algo": "NVFP4", "group_size": 16}
        if "self_attn" in name:
            layers[name] = {"quant_algo": "FP8"}
            weight = weights[f"{name}.weight"].float()
            tensors[f"{name}.weight_scale"] = scale = weight.abs().max() / 448
            tensors[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
            del tensors[f"{name}.weight_scale_2"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


@scenario
def live(folder: Path) -> dict:
    """One shared engine: adapter updates, noise on and off, stale caches, storage, the probe."""
    from qerl_trl.noise.hooks import NoiseDraw, NormNoise
    from qerl_trl.noise.norms import find_noisy_norms
    from qerl_trl.rollout.vllm import compile_ahead
    from qerl_trl.rollout.vllm.engine import engine_model

    path = write_model(folder)
    policy = adapter_on(packed(path), rank=6, alpha=18)
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    with mock.patch.object(compile_ahead, "precompile", wraps=compile_ahead.precompile) as precompile:
        g = stub_generation(policy)
    results = {"probe": vars(g.probe_result)}
    results["compiled ahead"] = [sorted(call.args[0]) for call in precompile.call_args_list]
    results["norms compiled ahead"] = [sorted(call.kwargs["norms"]) for call in precompile.call_args_list]
    results["dtypes compiled ahead"] = [str(call.kwargs["dtype"]) for call in precompile.call_args_list]
    results["probe restored the adapter"] = all(torch.equal(before[n], p) for n, p in policy.named_parameters())
    inner, vllm_model = policy.get_base_model().model, engine_model(g.llm)
    pairs = {
        "qkv": (inner.layers[1].self_attn.q_proj.base_layer.weight_packed, vllm_model.model.layers[1].self_attn.qkv_proj.weight_packed),
        "down": (inner.layers[1].mlp.down_proj.base_layer.weight_packed, vllm_model.model.layers[1].mlp.down_proj.weight_packed),
        "scales": (inner.layers[0].mlp.gate_proj.base_layer.weight_scale, vllm_model.model.layers[0].mlp.gate_up_proj.weight_scale),
        "embeddings": (inner.embed_tokens.weight, vllm_model.model.embed_tokens.weight),
        "head": (policy.get_base_model().lm_head.weight, vllm_model.lm_head.weight),
    }  # fmt: skip
    results["same storage"] = {name: a.data_ptr() == b.data_ptr() for name, (a, b) in pairs.items()}
    results["adapter"] = []
    addresses = [slot.layer.adapter_a.data_ptr() for slot in g.engine.state.slots.values()]
    for seed in range(1, 4):
        randomize(policy, seed)
        g.sync_weights()
        results["adapter"].append(gap(policy, g.llm))
    results["buffers stay"] = addresses == [slot.layer.adapter_a.data_ptr() for slot in g.engine.state.slots.values()]
    with policy.disable_adapter():
        results["adapter ignored"] = gap(policy, g.llm)

    g.engine.reset_prefix_cache()  # with cached prefixes the prefill would have another shape
    clean = greedy(g.llm)
    noise = NormNoise(find_noisy_norms(policy))
    g.trainer.aqn.draw = NoiseDraw(5e-2, 7, 3, 1)
    noise.set(g.trainer.aqn.draw)
    g.sync_noise()
    with noise.active():
        results["noisy"] = gap(policy, g.llm)
    results["noise ignored"] = gap(policy, g.llm)
    results["sigma effective"] = g.trainer.aqn.sigma_effective
    weights = {n: g.engine.state.norms[n].weight.detach().clone() for n in g.trainer.aqn.norms}
    expected = {n: noise.norms[n].weight.float() + noise._noise[n].to(DEVICE) for n in g.trainer.aqn.norms}
    results["noisy weights bit-equal"] = all(torch.equal(weights[n], expected[n]) for n in weights)
    g.trainer.aqn.draw = NoiseDraw(5e-2, 7, 4, 0)
    g.sync_noise()
    results["a new draw is another noise"] = all(
        not torch.equal(weights[n], g.engine.state.norms[n].weight) for n in weights
    )
    g.trainer.aqn.draw = NoiseDraw(5e-2, 7, 3, 1)
    g.sync_noise()
    results["the same draw is the same noise"] = all(
        torch.equal(weights[n], g.engine.state.norms[n].weight) for n in weights
    )
    g.trainer.aqn.draw = None
    g.sync_noise()
    again = greedy(g.llm)
    results["restored"] = clean[0] == again[0] and torch.equal(clean[1], again[1])

    randomize(policy, 9)  # no sync: the engine must be stale now, and generate() must notice by itself
    results["stale"] = gap(policy, g.llm)
    g.generate(PROMPTS, None, 1)
    results["generate syncs by itself"] = gap(policy, g.llm)
    import resource

    for seed in range(20):
        randomize(policy, seed)
        g.sync_weights()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        g.sync_weights()
    results["growth of 200 syncs, MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024
    results["still same storage"] = all(a.data_ptr() == b.data_ptr() for a, b in pairs.values())

    g.llm.reset_prefix_cache = lambda **_: False
    results["refused reset"] = error_of(g.sync_weights)
    del g.llm.reset_prefix_cache

    def dies(*args, **kwargs):
        raise RuntimeError("EngineCore died")

    g.llm.generate = dies
    results["dead engine"] = error_of(lambda: g.generate(PROMPTS, None, 1))
    import time

    g.llm.generate = lambda *args, **kwargs: time.sleep(20)
    g.trainer.args.rollout_timeout = 0.5
    results["hanging engine"] = error_of(lambda: g.generate(PROMPTS, None, 1))
    return results


def error_of(function) -> str:
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@scenario
def bases(folder: Path) -> dict:
    """Other bases and adapters: bf16 in the same engine, copies instead of sharing, rank patterns, refusals."""
    from qerl_trl.noise.hooks import NoiseDraw
    from qerl_trl.rollout.engine import RolloutError
    from qerl_trl.rollout.vllm.engine import engine_model

    path = write_model(folder, tie_word_embeddings=False)
    # first, because vLLM makes the expert group with the first engine of a process
    results = {
        "experts": error_of(lambda: engine(write_moe(folder), quantization="qerl_nvfp4", skip_tokenizer_init=True))
    }
    policy = adapter_on(dense(path), rank=4, alpha=8, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"])
    g = stub_generation(policy)
    results["dense base"] = g.probe_result.difference
    results["dense shared"] = (
        engine_model(g.llm).model.layers[0].self_attn.qkv_proj.weight.data_ptr()
        == policy.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.data_ptr()
    )
    g.sync_weights()
    results["dense adapter"] = gap(policy, g.llm)
    results["only targets have buffers"] = sorted({n.rpartition(".")[2] for n in g.engine.state.slots})

    saved = str(folder / "saved")
    packed(path).save_pretrained(saved)
    policy = adapter_on(packed(as_mixed(as_modelopt(saved, folder / "modelopt"), path, folder / "mixed")))
    g = stub_generation(policy)
    results["mixed base"] = gap(policy, g.llm)
    mine, theirs = (m.model.layers[0].self_attn for m in (policy.get_base_model(), engine_model(g.llm)))
    pairs = ((mine.q_proj, theirs.qkv_proj), (mine.o_proj, theirs.o_proj))
    results["mixed in one copy"] = [m.base_layer.weight.data_ptr() == t.weight.data_ptr() for m, t in pairs]

    patterns = {"rank_pattern": {"o_proj": 20}, "alpha_pattern": {"up_proj": 7}}
    policy = adapter_on(packed(path), rank=4, alpha=4, adapter_name="student", **patterns)
    results["copied adapter"] = policy.active_adapter
    copied = stub_generation(policy, share=False)
    copied.sync_weights()
    results["copied base"] = gap(policy, copied.llm)
    results["copied shared"] = (
        engine_model(copied.llm).model.embed_tokens.weight.data_ptr()
        == policy.get_base_model().model.embed_tokens.weight.data_ptr()
    )

    trained = adapter_on(packed(path), rank=4, alpha=4, modules_to_save=["input_layernorm"], adapter_name="student")
    g = stub_generation(trained)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.3)
    g.trainer.aqn.draw = NoiseDraw(0.0, 0, 0, 0)
    g.sync_weights()
    g.sync_noise()
    results["trained norms"] = gap(trained, g.llm)
    g.trainer.aqn.draw = NoiseDraw(3e-2, 0, 0, 0)
    g.sync_noise()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.1)
    g.sync_weights()
    g.trainer.aqn.draw = None
    g.sync_noise()
    results["trained norms under noise"] = gap(trained, g.llm)

    results["dora"] = error_of(lambda: stub_generation(adapter_on(packed(path), use_dora=True)))
    results["trained head"] = error_of(lambda: stub_generation(adapter_on(packed(path), modules_to_save=["lm_head"])))
    results["adapter on the head"] = error_of(
        lambda: stub_generation(adapter_on(packed(path), target_modules=["q_proj", "lm_head"]))
    )
    policy = adapter_on(packed(path))
    g = stub_generation(policy)
    engine_model(g.llm).model.layers[0].mlp.down_proj.weight_global_scale.mul_(3)  # an engine with other weights
    results["probe finds other weights"] = error_of(g.run_probe)
    engine_model(g.llm).model.layers[0].mlp.down_proj.weight_global_scale.div_(3)
    g.sync_weights()
    g.engine.state.load_adapter = lambda adapter, norms: len(adapter)  # an adapter that lands nowhere
    results["probe finds a stale adapter"] = error_of(g.run_probe)
    for slot in g.engine.state.slots.values():
        slot.b_NR.zero_()
    results["probe finds a lost adapter"] = error_of(g.run_probe)
    assert issubclass(RolloutError, RuntimeError)
    return results


@scenario
def bfloat16(folder: Path) -> dict:
    """The probe in bf16, where rounding is what it has to see through: a right engine, and faults put into it."""
    path, results = write_model(folder), {}
    for name, base in (("nvfp4", packed(path, dtype="bfloat16")), ("dense", dense(path, torch.bfloat16))):
        policy = adapter_on(base)
        g = stub_generation(policy, share=name == "nvfp4")
        results[name] = vars(g.probe_result)
        put_adapter = g.engine.put_adapter

        def faulty(adapter, norms, put_adapter=put_adapter):
            put_adapter({n: dataclasses.replace(t, scaling=t.scaling * 0.5) for n, t in adapter.items()}, norms)

        g.engine.put_adapter = faulty
        results[f"{name} halved"] = error_of(g.run_probe)
    return results


@scenario
def compiled(folder: Path) -> dict:
    """torch.compile of the whole model: what was traced must read the buffers, not remember them."""
    from qerl_trl.noise.hooks import NoiseDraw, NormNoise
    from qerl_trl.noise.norms import find_noisy_norms

    policy = adapter_on(packed(write_model(folder, num_hidden_layers=1)))
    # no CUDA graphs: in float32 the kernels' plain PyTorch path copies a table to the GPU
    g = stub_generation(policy, engine={"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}})
    results = {"adapter": []}
    for seed in range(2):
        randomize(policy, seed)
        g.sync_weights()
        results["adapter"].append(gap(policy, g.llm))
    g.engine.reset_prefix_cache()  # with cached prefixes the prefill would have another shape
    clean = greedy(g.llm)
    noise = NormNoise(find_noisy_norms(policy))
    g.trainer.aqn.draw = NoiseDraw(5e-2, 7, 3, 1)
    noise.set(g.trainer.aqn.draw)
    g.sync_noise()
    with noise.active():
        results["noisy"] = gap(policy, g.llm)
    results["noise ignored"] = gap(policy, g.llm)
    g.trainer.aqn.draw = None
    g.sync_noise()
    results["restored"] = torch.equal(clean[1], greedy(g.llm)[1])
    return results


def train(folder: Path, trainer_class, config_class, path: str, callbacks=None, resume=None, **settings):
    from datasets import Dataset
    from peft import LoraConfig

    prompts = Dataset.from_dict({"prompt": ["the quick brown fox", "what is 1 + 2", "0 1 2 3", "lazy dog"] * 8})
    aqn = {"aqn_sigma_start": 2e-2, "aqn_sigma_end": 1e-3}
    args = config_class(
        **{
            "output_dir": str(folder / "run"), "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16,
            "max_steps": 5, "learning_rate": 1e-2, "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128,
            "vllm_gpu_memory_utilization": MEMORY["gpu_memory_utilization"], "vllm_engine_kwargs": {"enforce_eager": True, **MEMORY},
            "bf16": False, "report_to": [], "logging_steps": 1, "use_cpu": DEVICE == "cpu", "save_strategy": "no", "gradient_checkpointing": False,
            "model_init_kwargs": {"dtype": "float32"}, "disable_tqdm": True, **aqn, **settings,
        }
    )  # fmt: skip
    trainer = trainer_class(
        model=path,
        reward_funcs=lambda completions, **kwargs: [float(len(set(c))) for c in completions],
        args=args,
        train_dataset=prompts,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        callbacks=callbacks,
    )
    _ALIVE.append(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [log for log in trainer.state.log_history if "loss" in log]


@contextlib.contextmanager
def warnings_of(name: str):
    """Messages of a logger in the block."""
    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    yield told
    logging.getLogger(name).removeHandler(handler)


def rescue(folder: Path, path: str) -> dict:
    """An engine that dies after two steps: the run must end with the cause and leave a checkpoint that continues."""
    from transformers import TrainerCallback

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer, last_checkpoint

    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                _ALIVE[-1].vllm_generation.llm.generate = self.dies

        def dies(self, *args, **kwargs):
            raise RuntimeError("EngineCore died")

    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 100, "output_dir": str(folder / "broken")}
    results = {
        "error": error_of(lambda: train(folder, QeRLGRPOTrainer, QeRLConfig, path, callbacks=[Breaks()], **settings))
    }
    saved = last_checkpoint(str(folder / "broken"))
    results["saved"] = Path(saved).name if saved else None
    trainer, _ = train(folder, QeRLGRPOTrainer, QeRLConfig, path, resume=True, **settings)
    results["steps after resuming"] = trainer.state.global_step
    return results


@scenario
def trainers(folder: Path) -> dict:
    """Five GRPO steps and two RLOO steps through colocated vLLM."""
    from qerl_trl import QeRLConfig, QeRLGRPOTrainer, QeRLRLOOConfig, QeRLRLOOTrainer
    from qerl_trl.rollout.vllm.engine import engine_model

    path = write_model(folder)
    trainer, logs = train(folder, QeRLGRPOTrainer, QeRLConfig, path)
    keys = (
        "reward",
        "aqn/sigma",
        "aqn/sigma_effective",
        "rollout/mismatch_kl",
        "sampling/sampling_logp_difference/max",
        "grad_norm",
    )
    g = trainer.vllm_generation
    policy = trainer.accelerator.unwrap_model(trainer.model)
    results = {"logs": [{k: log.get(k) for k in keys} for log in logs], "probe": vars(g.probe_result)}
    results["shared at the end"] = (
        policy.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight_packed.untyped_storage().data_ptr()
        == engine_model(g.llm).model.layers[1].mlp.gate_up_proj.weight_packed.untyped_storage().data_ptr()
    )
    g.sync_weights()
    g.sync_noise()
    results["clean at the end"] = gap(policy.eval(), g.llm)
    results["rescue"] = rescue(folder, path)
    trainer, logs = train(folder, QeRLGRPOTrainer, QeRLConfig, path, aqn=False, max_steps=2)
    results["without noise"] = [log["sampling/sampling_logp_difference/max"] for log in logs]
    with warnings_of("qerl_trl.rollout.mismatch") as told:
        grammar = {"vllm_structured_outputs_regex": "[0-9]{4}", "top_k": 8}
        trainer, logs = train(folder, QeRLGRPOTrainer, QeRLConfig, path, aqn=False, max_steps=4, **grammar)
    results["grammar"] = {
        "kl": [log["rollout/mismatch_kl"] for log in logs], "told": told, "texts": list(trainer._logs["completion"])
    }  # fmt: skip
    trainer, logs = train(folder, QeRLRLOOTrainer, QeRLRLOOConfig, path, max_steps=2)
    results["rloo"] = [log["aqn/sigma_effective"] for log in logs]
    results["rloo steps"] = trainer.state.global_step
    return results


class Server:
    """A server started with the command that `EngineSpec` prints, on a free loopback port."""

    def __init__(self, spec, folder: Path, tensor_parallel: int = 1) -> None:
        import shlex
        import socket
        import subprocess

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        vllm, serve, model, *options = shlex.split(spec.serve_command())
        assert (vllm, serve) == ("vllm", "serve")
        # the development mode is on, for what the endpoint says to strangers who ask for it
        environment = dict(os.environ, VLLM_SERVER_DEV_MODE="1")
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING"):
            environment.pop(key, None)
        if tensor_parallel > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tensor_parallel)))
        # the CPU build's own `vllm serve` looks for a distribution called vllm
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
        command += ["--port", str(self.port), "--enforce-eager", "--max-num-seqs", "8"]
        command += ["--tensor-parallel-size", str(tensor_parallel)]
        command += [part for key, value in MEMORY.items() for part in ("--" + key.replace("_", "-"), str(value))]
        self.log = folder / f"server-{self.port}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, seconds: float = 300) -> None:
        import time

        import requests

        deadline = time.time() + seconds
        while time.time() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if requests.get(self.url + "/health", timeout=2).status_code == 200:
                    return
            except requests.RequestException:
                time.sleep(0.5)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        import signal
        import subprocess

        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


def serve(folder: Path, tensor_parallel: int) -> dict:
    """Three GRPO steps through a server, then exact checks of adapter, noise, refusals and a server that dies."""
    import time

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer
    from qerl_trl.noise.hooks import NoiseDraw, NormNoise
    from qerl_trl.noise.norms import find_noisy_norms
    from qerl_trl.rollout.server import ServerEngine
    from qerl_trl.rollout.spec import EngineSpec
    from qerl_trl.rollout.weights import UpdateLayout

    path = write_model(folder)
    server = Server(EngineSpec.of(adapter_on(packed(path)), max_model_len=256), folder, tensor_parallel)
    try:
        server.wait()
        mode = {"vllm_mode": "server", "vllm_server_base_url": server.url, "max_steps": 3}
        trainer, logs = train(folder, QeRLGRPOTrainer, QeRLConfig, path, **mode)
        g, policy = trainer.vllm_generation, trainer.accelerator.unwrap_model(trainer.model).eval()
        results = {"probe": vars(g.probe_result), "first": logs[0]["sampling/sampling_logp_difference/max"]}
        results["sigma"] = [(log["aqn/sigma"], log["aqn/sigma_effective"]) for log in logs]

        def gap_now() -> float:
            output = g.vllm_client.generate(
                PROMPTS, n=1, temperature=0.0, max_tokens=NEW, logprobs=0, generation_kwargs={"ignore_eos": True}
            )
            logps = torch.tensor([[step[0] for step in sequence] for sequence in output["logprobs"]])
            return (transformers_logps(policy, output["completion_ids"]) - logps).abs().max().item()

        g.sync_noise()  # training has ended, and so has its noise
        results["adapter"] = []
        for seed in range(2):
            randomize(policy, seed)
            started = time.perf_counter()
            g.sync_weights()
            results["sync seconds"] = time.perf_counter() - started
            results["adapter"].append(gap_now())
        results["shared memory"] = g.engine._local
        g.engine._local, g.engine._layout = False, UpdateLayout(())  # as between two hosts
        for seed in (7, 8):
            randomize(policy, seed)
            g.sync_weights()
            results["adapter"].append(gap_now())
        calls = dict(g._calls)

        def drawn() -> list[list[int]]:
            return g.generate(PROMPTS, None, 1)[1]

        first, other = drawn(), drawn()
        g._calls = calls  # as in a run that goes on from here, on a server that has sampled more meanwhile
        results["draws"] = {"again": drawn() == first, "another": other != first}
        noise = NormNoise(find_noisy_norms(policy))
        draw = NoiseDraw(5e-2, 1, 2, 3)
        noise.set(draw)
        results["sigma effective"] = g.engine.put(None, tuple(noise.norms), draw)
        results["noise ignored"] = gap_now()
        with noise.active():
            results["noisy"] = gap_now()
        update = g.engine._deliver(g.trained._update(g.trained.parameters())) | {"checksum": "another"}
        results["damaged"] = error_of(lambda: g.engine.client.call("qerl_put", json.dumps(
            {"update": update, "noisy": [], "draw": None})))  # fmt: skip
        with noise.active():
            results["still as before"] = gap_now()
        other = adapter_on(packed(path, "four_over_six"))
        results["strangers"] = strangers(server.url)
        with noise.active():
            results["after the strangers"] = gap_now()
        results["other weights"] = error_of(lambda: ServerEngine(server.url, EngineSpec.of(other), other, timeout=10))
        results["bf16 arm"] = error_of(
            lambda: train(folder, QeRLGRPOTrainer, QeRLConfig, path, base_format="bf16", **mode)
        )
    finally:
        server.stop()
    g.trainer.args.rollout_timeout = 60
    g.vllm_client.session.adapters.clear()  # no retries: they only delay the answer
    from requests.adapters import HTTPAdapter

    g.vllm_client.session.mount("http://", HTTPAdapter())
    results["dead server"] = error_of(lambda: g.generate(PROMPTS, None, 1))
    return results


@scenario
def dense_server(folder: Path) -> dict:
    """The bf16 control arm on a server, started with the command that is printed for it."""
    from qerl_trl import QeRLConfig, QeRLGRPOTrainer
    from qerl_trl.rollout.server import ServerEngine
    from qerl_trl.rollout.spec import EngineSpec

    path = write_model(folder)
    server = Server(EngineSpec.of(adapter_on(dense(path)), max_model_len=256), folder)
    try:
        server.wait()
        mode = {"vllm_mode": "server", "vllm_server_base_url": server.url, "max_steps": 2}
        trainer, logs = train(folder, QeRLGRPOTrainer, QeRLConfig, path, base_format="bf16", aqn=False, **mode)
        policy = adapter_on(packed(path))
        return {
            "probe": vars(trainer.vllm_generation.probe_result),
            "differences": [log["sampling/sampling_logp_difference/max"] for log in logs],
            "nvfp4 trainer": error_of(lambda: ServerEngine(server.url, EngineSpec.of(policy), policy, timeout=10)),
        }
    finally:
        server.stop()


def dense(path: str, dtype: torch.dtype = torch.float32):
    """The bf16 arm's base."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE).requires_grad_(False)


@scenario
def handshake(folder: Path) -> dict:
    """What engines that were built as a server would build them answer, and what the trainer says to it."""
    from qerl_trl.rollout.server import differences
    from qerl_trl.rollout.spec import EngineSpec
    from qerl_trl.rollout.vllm.engine import engine_model
    from qerl_trl.rollout.vllm.state import RolloutState
    from qerl_trl.rollout.vllm.worker import describe

    path = write_model(folder)
    results, policy = {}, adapter_on(packed(path), rank=20, alpha=20)
    spec = EngineSpec.of(policy)

    def built(told, model: str = path, **changed):
        options = {"qerl": told.options()["qerl"] | changed}
        return engine(model, quantization="qerl_nvfp4", additional_config=options, tokenizer=path)

    def compare(llm, model=policy, told=spec) -> list[str]:
        state = RolloutState(engine_model(llm))
        answer = json.loads(json.dumps(describe(state, llm.llm_engine.vllm_config)))  # as it travels
        return differences(told, model, [answer])

    right = built(spec)
    results["right"] = compare(right)
    results["scale rule"] = compare(built(spec, scale_rule="four_over_six"))
    results["dense there"] = compare(built(spec, ignore=[*spec.ignore, "model.layers.0.mlp.down_proj"]))
    skipped = adapter_on(packed(path, modules_to_not_convert=["model.layers.1.self_attn.o_proj"]), rank=20, alpha=20)
    told = EngineSpec.of(skipped)
    results["NVFP4 there"] = compare(right, skipped, told)
    results["skipped, as told"] = compare(built(told), skipped, told)
    results["small adapter"] = compare(built(spec, adapter={"rank": 8, "targets": spec.adapter["targets"]}))
    results["missing targets"] = compare(built(spec, adapter={"rank": 20, "targets": ["q_proj", "k_proj", "v_proj"]}))
    results["other checkpoint"] = compare(built(spec, write_model(folder, initializer_range=0.21)))
    plain = adapter_on(dense(path), rank=20, alpha=20)
    told = EngineSpec.of(plain)
    results["bf16 arm, NVFP4 server"] = compare(right, plain, told)
    results["bf16 arm, as told"] = compare(built(told), plain, told)
    saved = str(folder / "saved")
    packed(path, "four_over_six").save_pretrained(saved)
    loaded = adapter_on(packed(saved), rank=20, alpha=20)
    told = EngineSpec.of(loaded)
    results["packed checkpoint, as told"] = compare(built(told, saved), loaded, told)
    with torch.no_grad():
        engine_model(right).model.layers[1].input_layernorm.weight.add_(0.1)
        engine_model(right).model.layers[0].self_attn.qkv_proj.bias.mul_(2)
    results["norm and bias"] = compare(right)
    return results


def strangers(url: str) -> dict[str, int]:
    """What a server answers to requests without its secret."""
    import requests

    noise = {"method": "qerl_put", "args": ['{"update": null, "noisy": [], "draw": [0.5, 1, 2, 3]}'], "reset": False}
    asked = {
        "call": ("/qerl/call", noise),
        "completions": ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        "collective_rpc": ("/collective_rpc", noise),
        "sleep": ("/sleep", {}),
    }
    answers = {
        name: requests.post(url + path, json=body, timeout=60).status_code for name, (path, body) in asked.items()
    }
    return {"open": requests.get(url + "/health", timeout=60).status_code, **answers}


@scenario
def server(folder: Path) -> dict:
    """Two tensor-parallel ranks where there are two devices (the CPU counts as two)."""
    return serve(folder, 1 if torch.cuda.device_count() == 1 else 2)


@scenario
def tensor_parallel(folder: Path) -> dict:
    """Two processes, one engine of two shards (under torchrun)."""
    from accelerate.utils import gather_object
    from vllm import SamplingParams

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer

    path = write_model(folder)
    trainer, logs = train(folder, QeRLGRPOTrainer, QeRLConfig, path, vllm_tensor_parallel_size=2, max_steps=2)
    g, policy = trainer.vllm_generation, trainer.accelerator.unwrap_model(trainer.model).eval()
    results = {
        "probe": vars(g.probe_result),
        "first": logs[0]["sampling/sampling_logp_difference/max"],
        "shared": g.shared,
    }
    randomize(policy, 5)
    g.sync_weights()
    g.sync_noise()
    results["adapter"] = gap(policy, g.llm)
    results["sigma"] = [(log["aqn/sigma"], log["aqn/sigma_effective"]) for log in logs]
    # as dropout on batches of other lengths, or a reward model, moves the generators of the processes
    torch.manual_seed(trainer.accelerator.process_index)
    state = torch.cuda.get_rng_state if DEVICE == "cuda" else torch.get_rng_state
    before, prompt = state(), {"prompt_token_ids": PROMPTS[0]}
    (drawn,) = g.llm.generate([prompt], SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    results["drawn"] = gather_object([list(drawn.outputs[0].token_ids)])
    results["generator was moved"] = gather_object([not torch.equal(before, state())])
    return results


@scenario
def sharded(folder: Path) -> dict:
    """Two processes with an engine each, built once accelerate has sharded the trainer by FSDP 2 (under torchrun)."""
    return trained_sharded(folder)


@scenario
def sharded_tensor_parallel(folder: Path) -> dict:
    """The same with one engine of both processes: each holds a half of the trainer's base, and a half of the engine's."""
    return trained_sharded(folder, vllm_tensor_parallel_size=2)


@scenario
def sharded_server(folder: Path) -> dict:
    """Two processes that FSDP 2 shards the trainer for, and a real server, which only the first one talks to (under torchrun)."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from accelerate.utils import broadcast_object_list

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer
    from qerl_trl.rollout.spec import EngineSpec
    from qerl_trl.support.names import is_sharded
    from tests.test_sharded import FSDP, as_accelerators

    path, told, first = write_model(folder), folder / "url", os.environ["RANK"] == "0"
    server = Server(EngineSpec.of(adapter_on(packed(path)), max_model_len=256), folder) if first else None
    try:
        if server is not None:
            server.wait()
            told.with_suffix(".partial").write_text(server.url)
            told.with_suffix(".partial").rename(told)
        while not told.exists():
            time.sleep(0.1)
        os.environ |= FSDP
        as_accelerators()
        mode = {"vllm_mode": "server", "vllm_server_base_url": told.read_text(), "max_steps": 2}
        trainer, logs = train(folder, QeRLGRPOTrainer, QeRLConfig, path, per_device_train_batch_size=4, **mode)
        g, policy = trainer.vllm_generation, trainer.model.eval()
        results = {
            "probe": vars(g.probe_result),
            "is sharded": is_sharded(policy),
            "first": logs[0]["sampling/sampling_logp_difference/max"],
            "sigma": [(log["aqn/sigma"], log["aqn/sigma_effective"]) for log in logs],
            "adapter": [],
        }
        g.sync_noise()  # training has ended, and so has its noise
        for seed in range(1, 3):
            random_adapter(policy, seed)
            g.sync_weights()
            said = [None]
            if first:
                greedy = {"n": 1, "temperature": 0.0, "max_tokens": NEW, "logprobs": 0}
                said = [g.vllm_client.generate(PROMPTS, generation_kwargs={"ignore_eos": True}, **greedy)]
            (output,) = broadcast_object_list(said)
            logps = torch.tensor([[step[0] for step in sequence] for sequence in output["logprobs"]])
            results["adapter"].append((transformers_logps(policy, output["completion_ids"]) - logps).abs().max().item())
        return results
    finally:
        if server is not None:
            server.stop()


def trained_sharded(folder: Path, **options) -> dict:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from qerl_trl import QeRLConfig, QeRLGRPOTrainer
    from qerl_trl.support.names import is_sharded
    from tests.test_sharded import FSDP, as_accelerators

    path = write_model(folder)
    os.environ |= FSDP
    as_accelerators()
    trainer, logs = train(
        folder, QeRLGRPOTrainer, QeRLConfig, path, max_steps=2, per_device_train_batch_size=4, **options
    )
    g, policy = trainer.vllm_generation, trainer.model.eval()
    _, down, _ = next(iter(g.trained.layers.values()))
    results = {
        "probe": vars(g.probe_result),
        "noise": vars(g.noise_result),
        "shared": g.shared,
        "is sharded": is_sharded(policy),
        "engine's part": engine_part(g.llm),
        "sharded adapter": type(down.weight).__name__,
        "first": logs[0]["sampling/sampling_logp_difference/max"],
        "sigma": [(log["aqn/sigma"], log["aqn/sigma_effective"]) for log in logs],
        "adapter": [],
    }
    for seed in range(1, 3):
        random_adapter(policy, seed)
        g.sync_weights()
        g.sync_noise()
        results["adapter"].append(gap(policy, g.llm))
    return results


def random_adapter(policy, seed: int) -> None:
    """The same in every process, which may hold a part of each parameter only."""
    from qerl_trl.support.names import set_whole

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            set_whole(parameter, torch.randn(parameter.shape, generator=generator) * 0.1)


def engine_part(llm) -> float:
    """Share of the model's packed bytes that are in this process's engine."""
    from qerl_trl.rollout.vllm.engine import engine_model

    model, config = engine_model(llm), llm.llm_engine.vllm_config.model_config.hf_config
    packed = sum(p.numel() for name, p in model.named_parameters() if name.endswith("weight_packed"))
    hidden, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    rows = 2 * hidden + 2 * config.num_key_value_heads * head  # of q, o, k and v
    return packed / (config.num_hidden_layers * (rows + 3 * config.intermediate_size) * hidden / 2)


def sleep(folder: Path, share: bool) -> dict:
    """An engine on a GPU through sleep, a sync while it sleeps, and a rollout. vLLM allows one engine per process that can sleep."""
    from qerl_trl.noise.hooks import NoiseDraw

    # large enough that its bytes stand out from what the allocator rounds and keeps
    large = {"hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 8, "initializer_range": 0.05}
    policy = adapter_on(packed(write_model(folder, **large)), adapter_name="student")
    frozen = sum(p.numel() * p.element_size() for p in policy.parameters() if not p.requires_grad)
    g = stub_generation(policy, share=share, enable_sleep_mode=True)
    results = {"asleep at the start": g.engine.asleep, "frozen MiB": frozen / 2**20}
    randomize(policy, 3)
    g.sync_weights()
    g.engine.wake()
    results["adapter"] = gap(policy, g.llm)
    g.trainer.aqn.draw = NoiseDraw(5e-2, 7, 3, 1)
    g.sync_noise()
    before = greedy(g.llm)
    torch.cuda.empty_cache()
    awake = torch.cuda.mem_get_info()[0]
    g.engine.sleep()
    results["freed MiB"] = (torch.cuda.mem_get_info()[0] - awake) / 2**20
    g.engine.wake()
    g.engine.reset_prefix_cache()  # with cached prefixes the prefill would have another shape
    after = greedy(g.llm)
    results["same output"] = before[0] == after[0] and torch.equal(before[1], after[1])
    g.engine.sleep()
    g.generate(PROMPTS, None, 1)
    results["asleep after generate"] = g.engine.asleep
    return results


@scenario
def sleeping_shared(folder: Path) -> dict:
    """Shared weights stay where they are: only the KV cache is freed."""
    return sleep(folder, True)


@scenario
def sleeping_copy(folder: Path) -> dict:
    """vLLM's copy of the weights goes to host memory, with the adapter and the noise in it."""
    return sleep(folder, False)


def register_once() -> None:
    """vLLM's CPU build looks through all modules for Triton kernels to replace whenever an engine starts; the first one finds them all."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if hasattr(platform, "register_triton_kernel_overrides"):
        platform.register_triton_kernel_overrides = staticmethod(
            functools.cache(platform.register_triton_kernel_overrides)
        )


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    if DEVICE == "cpu":
        register_once()
    results = SCENARIOS[name](folder)
    if os.environ.get("RANK", "0") == "0":
        print("RESULTS " + json.dumps(results), flush=True)
    os._exit(0)  # vLLM's own shutdown takes seconds and tests nothing of ours


if __name__ == "__main__":
    main()

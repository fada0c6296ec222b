"""Correctness, sync time and memory of the colocated rollout, on random weights in the Qwen2.5 shapes.

    python rollout_check.py --out FILE size ...      one process a case; see CASES
    python rollout_check.py --case CASE --out FILE   one case here

Every case appends one JSON line. `graphs`, `compiled`, `eager` run the same checks under full CUDA graphs, torch.compile and
neither; `agree-7b` puts our packed 7B and stock bf16 vLLM side by side; `drain-7b` lets a batch of 256 drain through
every number of sequences, under CUDA graphs of every multiple of 8, and says which kernels that ran; `sync-7b` and `sync-32b` time the sync and add up memory; `serve` saves a small model with `save_pretrained`
and asks two `vllm serve` processes, one with our method and one without, for log-probabilities of the same tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("MASTER_PORT", "0")  # TRL then picks a free one

import torch

sys.path.insert(0, str(Path(__file__).parent))
import about
from rollout_models import folder, generation, packed_model, policy, randomize, seconds, time_syncs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
ENGINES = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": DECODE_GRAPHS},
    "compiled": {"compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8]}},
}  # fmt: skip
#: how the 7B and 32B cases run
ENGINE = os.environ.get("ROLLOUT_ENGINE", "graphs")
CASES = (*ENGINES, "agree-7b", "agree-7b-stock", "drain-7b", "sync-7b", "sync-32b", "serve")
DRAINING = 256  # sequences at the start


def prompts(n: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(1000, 100000, (n, length), generator=generator).tolist()


def sample(llm, ids: list[list[int]], new_tokens: int, temperature: float = 1.0):
    """Sampled tokens (n, T) and the engine's log-probabilities of them."""
    tokens, logps = sample_ragged(llm, ids, [new_tokens] * len(ids), temperature)
    return tokens, torch.tensor(logps)


def sample_ragged(llm, ids: list[list[int]], new_tokens: list[int], temperature: float = 1.0):
    """The same as lists, each prompt with its own number of tokens."""
    from vllm import SamplingParams

    parameters = [
        SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
        for n in new_tokens
    ]
    outputs = llm.generate([{"prompt_token_ids": i} for i in ids], parameters, use_tqdm=False)
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    logps = [
        [s[t].logprob for s, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)] for o in outputs
    ]
    return tokens, logps


@torch.no_grad()
def trainer_logps(model, ids: list[list[int]], tokens: list[list[int]], autocast: bool = True) -> torch.Tensor:
    """What transformers says about the same tokens, one sequence at a time, as TRL's trainer computes it (bf16 autocast)."""
    rows = []
    for prompt, completion in zip(ids, tokens, strict=True):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            logits = model(input_ids=torch.tensor([prompt + completion], device=DEVICE), use_cache=False).logits
        logits = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        rows.append(logits.gather(-1, torch.tensor(completion, device=DEVICE)[:, None]).squeeze(-1).cpu())
    return torch.stack(rows)


def difference(model, llm, ids, new_tokens: int) -> float:
    tokens, logps = sample(llm, ids, new_tokens)
    return (trainer_logps(model, ids, tokens) - logps).abs().mean().item()


def packed_linears(llm):
    from qerl_trl.rollout.vllm.engine import engine_model

    return {n: m for n, m in engine_model(llm).named_modules() if hasattr(m, "weight_packed")}


@torch.no_grad()
def compare_weights(model, llm) -> dict:
    """Dequantized weights of both sides: bit-identical, and the same memory."""
    import qerl_nvfp4
    from qerl_trl.rollout.vllm.loader import Published

    trainer, identical, same_storage = Published(model, True), 0, 0
    layers = packed_linears(llm)
    for layer in layers.values():
        mine = torch.cat([trainer.module(name).dequantize() for name in layer.quant_method.names])
        theirs = qerl_nvfp4.dequantize(layer.weight_packed, layer.weight_scale, layer.weight_global_scale)
        identical += torch.equal(mine, theirs)
        same_storage += (
            layer.weight_packed.data_ptr() == trainer.module(layer.quant_method.names[0]).weight_packed.data_ptr()
        )
    return {"layers": len(layers), "dequantized_identical": identical, "same_storage": same_storage}


def check(case: str) -> dict:
    """Adapter and noise through a live engine, under eager, CUDA graphs or torch.compile."""
    from qerl_trl.noise.hooks import NoiseDraw, NormNoise
    from qerl_trl.noise.norms import find_noisy_norms

    model = policy("tiny", device=DEVICE)
    g = generation(model, max_sequences=8, max_length=256, skip_tokenizer_init=True, **ENGINES[case])
    ids = prompts(8, 32)
    result = compare_weights(model, g.llm)
    result["probe"] = str(g.probe_result)
    result["adapter_updates"] = []
    for _ in range(3):
        randomize(model, 0.05)
        g.sync_weights()
        result["adapter_updates"].append(difference(model, g.llm, ids, 32))
    g.engine.reset_prefix_cache()  # with cached prefixes the prefill would have another shape, and other rounding
    clean = sample(g.llm, ids, 16, 0.0)
    noise = NormNoise(find_noisy_norms(model))
    g.trainer.aqn.draw = NoiseDraw(1e-2, 0, 3, 1)
    noise.set(g.trainer.aqn.draw)
    g.sync_noise()
    tokens, logps = sample(g.llm, ids, 16, 0.0)
    with noise.active():
        result["noisy_difference"] = (trainer_logps(model, ids, tokens) - logps).abs().mean().item()
    result["noise_ignored_difference"] = (trainer_logps(model, ids, tokens) - logps).abs().mean().item()
    result["sigma_effective"] = g.trainer.aqn.sigma_effective
    state = g.engine.state
    names = list(g.trainer.aqn.norms)
    bits = [
        torch.equal(state.norms[n].weight.cpu(), noise.norms[n].weight.float().cpu() + noise._noise[n].cpu())
        for n in names
    ]
    result["noisy_norms_bit_equal_to_trainers"] = f"{sum(bits)}/{len(bits)}"
    g.trainer.aqn.draw = NoiseDraw(0.0, 0, 3, 1)
    g.sync_noise()
    again = sample(g.llm, ids, 16, 0.0)
    result["restored_bit_exact"] = clean[0] == again[0] and torch.equal(clean[1], again[1])
    result["weights_after"] = compare_weights(model, g.llm)
    return result


def agree_7b() -> dict:
    """Our packed 7B with a LoRA adapter against its own transformers model."""
    model = policy("7b")
    g = generation(model, max_sequences=16, max_length=512, skip_tokenizer_init=True, **ENGINES[ENGINE])
    ids = prompts(8, 64)
    randomize(model, 0.01)
    g.sync_weights()
    result = {**compare_weights(model, g.llm), "with_adapter": difference(model, g.llm, ids, 128)}
    randomize(model, 0.0)
    g.sync_weights()
    return {**result, "mean_abs_logp_difference": difference(model, g.llm, ids, 128)}


@torch.no_grad()
def agree_7b_stock() -> dict:
    """Stock vLLM bf16 against transformers bf16 on the same weights: our random NVFP4 ones, dequantized. No adapter."""
    from vllm import LLM

    from qerl_trl.rollout.vllm.engine import engine_model

    arguments = {"skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": 16, "gpu_memory_utilization": 0.3}
    llm = LLM(folder("7b"), load_format="dummy", logprobs_mode="processed_logprobs", dtype="bfloat16", seed=0,
              max_num_batched_tokens=4096, **arguments, **ENGINES[ENGINE])  # fmt: skip
    source = dict(engine_model(llm).named_parameters())
    model = packed_model("7b")
    shards = {
        "q_proj": "qkv_proj",
        "k_proj": "qkv_proj",
        "v_proj": "qkv_proj",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
    }
    rows = dict.fromkeys(source, 0)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "weight_packed"):
                linear = torch.nn.Linear(
                    child.in_features, child.out_features, bias=child.bias is not None, device="meta"
                )
                linear.weight = torch.nn.Parameter(child.dequantize(torch.bfloat16), requires_grad=False)
                linear.bias = child.bias
                setattr(parent, name, linear)
    for name, parameter in model.named_parameters():  # stock vLLM gets the dequantized weights of our own random model
        module, _, key = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        target = f"{parent}.{shards.get(leaf, leaf)}.{key}" if parent else name
        source[target][rows[target] : rows[target] + parameter.shape[0]].copy_(parameter)
        rows[target] += parameter.shape[0]
    if any(rows[name] != parameter.shape[0] for name, parameter in source.items()):
        raise RuntimeError("not every parameter of vLLM's model was written")
    return {"mean_abs_logp_difference": difference(model, llm, prompts(8, 64), 128)}


def drain(size: str) -> dict:
    """A batch of `DRAINING` sequences of 8 to 135 tokens: every number of sequences in flight, each by a CUDA graph of the next multiple of 8."""
    import qerl_nvfp4

    captured = [1, 2, 4, *range(8, DRAINING + 1, 8)]
    graphs = DECODE_GRAPHS | {"cudagraph_capture_sizes": captured}
    model = policy(size)
    engine = {"skip_tokenizer_init": True, "compilation_config": graphs, "enable_prefix_caching": False}
    g = generation(model, max_sequences=DRAINING, max_length=256, **engine)
    ids, lengths = prompts(DRAINING, 32), [8 + i // 2 for i in range(DRAINING)]
    rollouts = []
    for _ in range(3):
        randomize(model, 0.01)
        g.sync_weights()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        tokens, logps = sample_ragged(g.llm, ids, lengths)
        rollouts.append({"seconds": round(time.perf_counter() - begin, 3)})
        apart = []
        for i in range(0, DRAINING, 8):
            mine = trainer_logps(model, [ids[i]], [tokens[i]])[0]
            apart.append((mine - torch.tensor(logps[i])).abs().mean().item())
        rollouts[-1] |= {"mean_abs_logp_difference": statistics.mean(apart), "worst_sequence": max(apart)}
    kernels: dict[str, set[str]] = {}
    for layer in packed_linears(g.llm).values():
        (N, half), rank = layer.weight_packed.shape, layer.adapter_b.shape[1]
        for M in captured:
            place = N, 2 * half, M, torch.cuda.current_device(), True
            chosen = qerl_nvfp4.select.choose(*place, rank, len(layer.qerl_splits))
            kernels.setdefault(str(M), set()).add(chosen["kernel"])
    return {
        **compare_weights(model, g.llm),
        "probe": str(g.probe_result),
        "rollouts": rollouts,
        "kernels": {M: sorted(names) for M, names in kernels.items()},
    }


def unique_bytes(*models) -> int:
    """Bytes of all distinct storages of parameters and buffers."""
    storages = {}
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def sync_case(size: str) -> dict:
    """Seconds of a sync of adapter and all norms, memory of one copy, and that 200 syncs allocate nothing."""
    from qerl_trl.noise.hooks import NoiseDraw
    from qerl_trl.rollout.vllm.engine import engine_model

    model = policy(size)
    adapter = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "lora_" in n)
    trainer_only = unique_bytes(model)
    before = torch.cuda.memory_allocated()
    g = generation(model, max_sequences=32, max_length=1024, sleep=True, skip_tokenizer_init=True, **ENGINES[ENGINE])
    engine = engine_model(g.llm)
    buffers = sum(b.numel() * b.element_size() for n, b in engine.named_buffers() if "adapter_" in n)
    both = unique_bytes(model, engine)
    g.engine.wake()
    awake = torch.cuda.mem_get_info()[0]
    times = time_syncs(g)
    torch.cuda.synchronize()
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    peak_before = torch.cuda.memory_reserved()
    for step in range(100, 300):
        g.sync_weights()
        g.trainer.aqn.draw = NoiseDraw(1e-2, 0, step, 0)
        g.sync_noise()
    torch.cuda.synchronize()
    flat = {
        "allocated_growth_bytes": torch.cuda.memory_allocated() - allocated,
        "reserved_growth_bytes": torch.cuda.memory_reserved() - peak_before,
        "device_growth_bytes": free - torch.cuda.mem_get_info()[0],
    }
    ids = prompts(4, 64)
    asleep_difference = [difference(model, g.llm, ids, 16)]
    g.trainer.aqn.draw = NoiseDraw(0.0, 0, 0, 0)
    g.sync_noise()
    asleep_difference = [difference(model, g.llm, ids, 16)]
    g.engine.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    slept = seconds(lambda: (g.engine.wake(), g.engine.sleep()))
    g.engine.wake()
    asleep_difference.append(difference(model, g.llm, ids, 16))
    gib = 2**30
    return {
        "sync_ms": times,
        "sync_ms_median": {k: statistics.median(v) for k, v in times.items()},
        "after_200_syncs": flat,
        "weights_GiB": {
            "trainer_without_adapter": (trainer_only - adapter) / gib,
            "trainer_and_engine_without_adapter_buffers": (both - adapter - buffers) / gib,
            "adapter_fp32_trainer": adapter / gib,
            "adapter_buffers_engine": buffers / gib,
        },
        "allocated_by_trainer_GiB": before / gib,
        "sleep": {
            "freed_GiB": (asleep - awake) / gib, "wake_and_sleep_s": slept, "difference_before_and_after": asleep_difference,
        },
        **compare_weights(model, g.llm),
    }  # fmt: skip


def serve_case() -> dict:
    """A folder saved by us, in `vllm serve` with and without our method, against transformers."""
    import socket
    import tempfile

    import requests
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from qerl_trl.nvfp4.config import NVFP4Config

    root = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.05,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "bf16")
    model = AutoModelForCausalLM.from_pretrained(root / "bf16", quantization_config=NVFP4Config(), dtype=torch.bfloat16)
    model.save_pretrained(root / "nvfp4")
    vocabulary = {f"w{i}": i for i in range(2048)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2").save_pretrained(root / "nvfp4")
    servers = {}
    for name, arguments in {"without": [], "with": ["--quantization", "qerl_nvfp4"]}.items():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(root / "nvfp4"), "--host", "127.0.0.1", "--port",
                   str(port), "--enforce-eager", "--max-model-len", "256", "--gpu-memory-utilization", "0.1", *arguments]  # fmt: skip
        environment = {
            k: v for k, v in os.environ.items() if k not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "MASTER_PORT")
        }
        log = open(root / f"{name}.log", "w")  # noqa: SIM115  (lives as long as the server)
        servers[name] = (
            port,
            subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT),
            root / f"{name}.log",
        )
    prompt = list(range(100, 132))
    result = {
        "quantization_config": json.loads((root / "nvfp4/config.json").read_text())["quantization_config"]["format"]
    }
    model = model.to(DEVICE)
    for name, (port, process, log) in servers.items():
        deadline = time.time() + 120
        while time.time() < deadline and process.poll() is None:
            try:
                if requests.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                    break
            except requests.RequestException:
                time.sleep(1)
        body = {"model": str(root / "nvfp4"), "prompt": prompt, "max_tokens": 64, "temperature": 0.0, "logprobs": 1,
                "return_tokens_as_token_ids": True, "ignore_eos": True}  # fmt: skip
        try:
            answer = requests.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()["choices"][
                0
            ]["logprobs"]
        except (requests.RequestException, KeyError) as error:
            result[name] = f"failed: {error}: {log.read_text()[-1500:]}"
            continue
        tokens = [int(token.removeprefix("token_id:")) for token in answer["tokens"]]
        mine = trainer_logps(model, [prompt], [tokens], autocast=False)[0]
        result[name] = {"mean_abs_logp_difference": (mine - torch.tensor(answer["token_logprobs"])).abs().mean().item()}
        process.terminate()
    return result


def run_case(case: str) -> dict:
    if case == "serve":
        return serve_case()
    if case in ENGINES:
        return check(case)
    if case == "agree-7b":
        return agree_7b()
    if case == "agree-7b-stock":
        return agree_7b_stock()
    if case.startswith("drain-"):
        return drain(case.removeprefix("drain-"))
    return sync_case(case.removeprefix("sync-"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--case")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timeout", type=float, default=170)
    args = parser.parse_args()
    if args.case:
        started = time.time()
        result = {"case": args.case, **about.head(DEVICE), **run_case(args.case)}
        result["seconds"] = round(time.time() - started, 1)
        with open(args.out, "a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
        os._exit(0)  # engines of several versions hang in their own shutdown
    for case in args.cases:
        command = [sys.executable, __file__, "--case", case, "--out", str(args.out)]
        try:
            code = subprocess.run(command, timeout=args.timeout).returncode
        except subprocess.TimeoutExpired:
            code = "timeout"
        if code:
            print(f"CASE {case} FAILED: {code}", flush=True)


if __name__ == "__main__":
    main()

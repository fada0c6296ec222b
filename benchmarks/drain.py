"""A batch of 256 sequences drains through every number of sequences: which kernels run, and do the engine's log-probabilities agree with the trainer's?

python benchmarks/drain.py 7b 0.5b --out drain_h200.json     # random weights in the Qwen2.5 shapes, one process a size
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import common
import torch
from models import generation, policy, randomize, seconds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAINING = 256  # sequences at the start


@torch.no_grad()
def trainer_logps(model, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """What transformers says about the same tokens, as TRL's trainer computes it (bf16 autocast)."""
    with torch.autocast(DEVICE, torch.bfloat16):
        logits = model(input_ids=torch.tensor([prompt + completion], device=DEVICE), use_cache=False).logits
    logits = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logits.gather(-1, torch.tensor(completion, device=DEVICE)[:, None]).squeeze(-1).cpu()


def drain(size: str) -> dict[str, Any]:
    """A batch of `DRAINING` sequences of 8 to 135 tokens: every number of sequences in flight, each by a CUDA graph of the next multiple of 8."""
    from vllm import SamplingParams

    import qerl_nvfp4
    from qerl_trl.rollout.vllm.engine import engine_model

    captured = [1, 2, 4, *range(8, DRAINING + 1, 8)]
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": captured}
    model = policy(size)
    engine = {"skip_tokenizer_init": True, "compilation_config": graphs, "enable_prefix_caching": False}
    g = generation(model, max_sequences=DRAINING, max_length=256, **engine)
    draw = torch.Generator().manual_seed(DRAINING)
    ids = torch.randint(1000, 100000, (DRAINING, 32), generator=draw).tolist()
    parameters = [
        SamplingParams(temperature=1.0, max_tokens=8 + i // 2, ignore_eos=True, logprobs=0, detokenize=False)
        for i in range(DRAINING)
    ]
    rollouts = []
    for _ in range(3):
        randomize(model, 0.01)
        g.sync_weights()
        found: list[Any] = []
        took = seconds(lambda found=found: found.extend(g.llm.generate([{"prompt_token_ids": i} for i in ids], parameters, use_tqdm=False)))  # fmt: skip
        apart = []
        for prompt, output in list(zip(ids, found, strict=True))[::8]:
            tokens = list(output.outputs[0].token_ids)
            logps = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
            apart.append((trainer_logps(model, prompt, tokens) - torch.tensor(logps)).abs().mean().item())
        rollouts.append({"seconds": round(took, 3), "mean_abs_logp_difference": statistics.mean(apart), "worst_sequence": max(apart)})  # fmt: skip
    kernels: dict[str, set[str]] = {}
    layers = [m for m in engine_model(g.llm).modules() if hasattr(m, "weight_packed")]
    for layer in layers:
        (N, half), rank = layer.weight_packed.shape, layer.adapter_b.shape[1]
        for M in captured:
            place = N, 2 * half, M, torch.cuda.current_device(), True
            chosen = qerl_nvfp4.select.choose(*place, rank, len(layer.qerl_splits))
            kernels.setdefault(str(M), set()).add(chosen["kernel"])
    return {
        "layers": len(layers),
        "probe": str(g.probe_result),
        "rollouts": rollouts,
        "kernels": {M: sorted(names) for M, names in kernels.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=["7b", "0.5b"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        common.give(drain(options.worker))
    record: dict[str, Any] = {
        "what": f"a batch of {DRAINING} sequences of 8 to 135 tokens drains through every number of sequences in flight; CUDA graphs of every multiple of 8; "
        "mean absolute difference of the engine's log-probabilities from the trainer's, of every eighth sequence",
        "cases": [],
    }

    def start(size: str) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, __file__, "--worker", size], common.ENVIRONMENT | {"MASTER_PORT": "0"}

    for size, row in common.results_of(list(options.sizes), start, limit=170):
        record["cases"].append({"case": f"drain-{size}", **common.head(DEVICE), **row})
        print(json.dumps(record["cases"][-1]), flush=True)
        common.save(record, options.out)


if __name__ == "__main__":
    main()

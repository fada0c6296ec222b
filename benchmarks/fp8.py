"""Gradients of a LoRA adapter with compute="w4a8", compared with w4a16 and with a bf16 base: cosines.

    python benchmarks/fp8.py --model NAME FOLDER --model ... --out results/fp8_h200.json
    python benchmarks/fp8.py --batch 2 64 --device cpu                          # dry run, only the random models

A policy gradient of one micro-batch as in the trainer (fused LoRA layers, rank 32, bf16 autocast), of README.md cut
into sequences with advantages of +1 and -1; random models, of 4 layers, read random tokens. All three have the same
adapter. `worst`: the smallest cosine of a single tensor. `rounding_kl`: what rounding alone moves the policy by.
"""

import argparse
import functools
import tempfile
from pathlib import Path
from typing import Any

import common
import torch
from models import randomize  # also puts the root on sys.path
from peft import LoraConfig, get_peft_model
from tests import architectures
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.config import NVFP4Config, from_pretrained
from qerl_trl.nvfp4.linear import set_compute
from qerl_trl.update import lora_linear

RANK, RANDOM = 32, ("qwen3", "gemma")
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 2048,
}  # fmt: skip


def policy(folder: str, device: str, packed: bool) -> nn.Module:
    load = from_pretrained if packed else AutoModelForCausalLM.from_pretrained
    base = load(folder, *[NVFP4Config()] * packed, dtype=torch.bfloat16, device_map=device)
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, register_nvfp4_lora(config) if packed else config).train()
    torch.manual_seed(0)
    randomize(model)
    assert lora_linear.fuse(model), "no layer could be fused"
    return model


def gradients(model: nn.Module, ids: torch.Tensor, compute: str | None = None) -> dict[str, torch.Tensor]:
    """Gradients of the adapter's tensors, float32, for token ids (B, T)."""
    if compute is not None:
        set_compute(model, compute)
    model.zero_grad(set_to_none=True)
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids).logits[:, :-1]
    logps = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    advantages = torch.tensor([1.0, -1.0], device=ids.device).repeat(len(ids))[: len(ids), None]
    (-advantages * logps).mean().backward()
    return {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}


def compared(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Cosine of all tensors together and of the worst one, and the ratio of the norms."""
    pairs = {name: (grad.double().flatten(), expected[name].double().flatten()) for name, grad in found.items()}
    one, other = (torch.cat(side) for side in zip(*pairs.values(), strict=True))
    cosine = functools.partial(torch.cosine_similarity, dim=0, eps=1e-30)
    cosines = {name: cosine(*pair).item() for name, pair in pairs.items()}
    worst = min(cosines, key=cosines.__getitem__)
    row = {"cosine": cosine(one, other).item(), "norms": (one.norm() / other.norm()).item(), "worst": cosines[worst]}
    return row | {"worst_tensor": worst.removeprefix("base_model.model."), "tensors": len(pairs)}


@torch.no_grad()
def rounding_kl(model: nn.Module, ids: torch.Tensor, compute: str) -> float:
    """KL, nats per token, between the model with two implementations of attention, equal but for rounding."""
    set_compute(model, compute)
    found = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.autocast(ids.device.type, torch.bfloat16):
            found.append(model(input_ids=ids).logits.float().log_softmax(-1))
    return (found[0].exp() * (found[0] - found[1])).sum(-1).mean().item()


def measure(folder: str, ids: torch.Tensor) -> dict[str, Any]:
    model = policy(folder, ids.device.type, packed=True)
    of = {compute: gradients(model, ids, compute) for compute in ("w4a16", "w4a8")}
    rounding = {compute: rounding_kl(model, ids, compute) for compute in ("w4a16", "w4a8")}
    del model
    of["bf16"] = gradients(policy(folder, ids.device.type, packed=False), ids)
    if all(torch.equal(grad, of["w4a16"][name]) for name, grad in of["w4a8"].items()):
        raise SystemExit('The layers ignored compute="w4a8".')
    pairs = ("w4a8", "w4a16"), ("w4a8", "bf16"), ("w4a16", "bf16")
    return {f"{one} from {other}": compared(of[one], of[other]) for one, other in pairs} | {"rounding_kl": rounding}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=2, action="append", metavar=("NAME", "FOLDER"), default=[])
    parser.add_argument("--batch", nargs=2, type=int, default=(8, 512), help="sequences, and tokens of each")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {**common.head(args.device), "batch": list(args.batch), "gradients": {}}
    text = (common.ROOT / "README.md").read_text()
    with tempfile.TemporaryDirectory() as place:
        for name in RANDOM:
            architectures.dense_model(name, **SHAPE).save_pretrained(f"{place}/{name}")
        for name, folder in [*args.model, *((f"random {name}", f"{place}/{name}") for name in RANDOM)]:
            ids = torch.randint(2, 320, args.batch)
            if not folder.startswith(place):
                read = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
                ids = read.repeat(-(-ids.numel() // len(read)))[: ids.numel()].view_as(ids)
            record["gradients"][name] = measure(folder, ids.to(args.device))
            print(name, record["gradients"][name], flush=True)
            common.save(record, args.out)


if __name__ == "__main__":
    main()

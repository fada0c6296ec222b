"""PEFT's tuners on packed layers, as plain PEFT applies them, each beside the same model dequantized, with the same seed.

    forward   logits of the adapted model
    gradient  of every adapter tensor
    merge     logits after merge_adapter() and after merge_and_unload()
    unmerge   logits after merge_adapter(), unmerge_adapter()

"equal": the same bits as on the dequantized model. "PEFT cannot: ...": it refuses the dense model too.

`python -m tests.peft_tuners` writes docs/peft.json, which the documentation shows; tests/test_peft_tuners.py holds it to what it says.
"""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.tiny_models import make_tiny_model

_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CELLS = ("forward", "gradient", "merge", "unmerge")
RESULT = Path(__file__).resolve().parents[1] / "docs" / "peft.json"
_IDS = torch.arange(3, 19)[None]

#: name -> configuration
TUNERS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lambda: peft.LoraConfig(target_modules=_ALL, r=4),
    "LoRA, all-linear": lambda: peft.LoraConfig(target_modules="all-linear", r=4),
    "rsLoRA": lambda: peft.LoraConfig(target_modules=_ALL, r=4, use_rslora=True),
    "DoRA": lambda: peft.LoraConfig(target_modules=_ALL, r=4, use_dora=True),
    "PiSSA": lambda: peft.LoraConfig(target_modules=_ALL, r=4, init_lora_weights="pissa"),
    "OLoRA": lambda: peft.LoraConfig(target_modules=_ALL, r=4, init_lora_weights="olora"),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=_ALL, init_r=4, target_r=2, total_step=10),
    "LoHa": lambda: peft.LoHaConfig(target_modules=_ALL, r=4),
    "LoKr": lambda: peft.LoKrConfig(target_modules=_ALL, r=4),
    "OFT": lambda: peft.OFTConfig(target_modules=_ALL, oft_block_size=16, r=0, use_cayley_neumann=False),
    "BOFT": lambda: peft.BOFTConfig(target_modules=_ALL, boft_block_size=4),
    "HRA": lambda: peft.HRAConfig(target_modules=_ALL, r=4),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": lambda: peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=4),
    "VBLoRA": lambda: peft.VBLoRAConfig(
        target_modules=["q_proj", "o_proj"], r=2, num_vectors=8, vector_length=8, topk=2
    ),
    "FourierFT": lambda: peft.FourierFTConfig(target_modules=_ALL, n_frequency=16),
    "RandLora": lambda: peft.RandLoraConfig(target_modules=["q_proj", "o_proj"], r=4),
    "SHiRA": lambda: peft.ShiraConfig(target_modules=_ALL, r=2),
    "C3A": lambda: peft.C3AConfig(target_modules=_ALL, block_size=16),
    "RoAd": lambda: peft.RoadConfig(target_modules=_ALL, group_size=16),
    "MiSS": lambda: peft.MissConfig(target_modules=_ALL, r=4),
    "MiSS, bat": lambda: peft.MissConfig(target_modules=_ALL, r=16, init_weights="bat"),
    "GraLoRA": lambda: peft.GraloraConfig(target_modules=_ALL, r=4, gralora_k=2),
    "DeLoRA": lambda: peft.DeloraConfig(target_modules=_ALL, r=4),
    "WaveFT": lambda: peft.WaveFTConfig(target_modules=_ALL, n_frequency=16),
    "OSF": lambda: peft.OSFConfig(target_modules=_ALL, effective_rank=8),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]),
    "Prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "P-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=32),
    "Prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def packed_model() -> nn.Module:
    model = make_tiny_model("qwen2", tie_word_embeddings=False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            model.set_submodule(name, NVFP4Linear.from_linear(module))
    return model.requires_grad_(False)


def dequantized(model: nn.Module) -> nn.Module:
    dense = copy.deepcopy(model)
    for name, module in list(dense.named_modules()):
        if isinstance(module, NVFP4Linear):
            dense.set_submodule(name, module.to_dense())
    return dense


def adapted(model: nn.Module, config: peft.PeftConfig) -> peft.PeftModel:
    """The adapter with parameters that matter, the same for the same seed."""
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                torch.manual_seed(sum(map(ord, name)) % 1000)
                parameter.add_(torch.randn_like(parameter) * 0.03)
    return wrapped.eval()


@torch.no_grad()
def _logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=_IDS, use_cache=False).logits


def _forward(model: Any) -> list[torch.Tensor]:
    return [_logits(model)]


def _gradient(model: Any) -> list[torch.Tensor]:
    model(input_ids=_IDS, labels=_IDS, use_cache=False).loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    assert gradients, "nothing is trained"
    return gradients


def _merge(model: Any) -> list[torch.Tensor]:
    model.merge_adapter()
    merged = _logits(model)
    model.unmerge_adapter()
    return [merged, _logits(model.merge_and_unload())]


def _unmerge(model: Any) -> list[torch.Tensor]:
    model.merge_adapter()
    model.unmerge_adapter()
    return [_logits(model)]


_CELLS = {"forward": _forward, "gradient": _gradient, "merge": _merge, "unmerge": _unmerge}


def _outcome(model: nn.Module, config: peft.PeftConfig, cell: str) -> list[torch.Tensor] | Exception:
    try:
        return _CELLS[cell](adapted(model, config))
    except Exception as error:  # whatever it is, it is compared with what the dense model gives
        return error


def cells(name: str) -> dict[str, str]:
    warnings.filterwarnings("ignore")
    found = {}
    for cell in CELLS:
        packed = packed_model()
        dense = dequantized(packed)
        here, there = _outcome(packed, TUNERS[name](), cell), _outcome(dense, TUNERS[name](), cell)
        if isinstance(here, Exception) and isinstance(there, Exception):
            found[cell] = "PEFT cannot: " + _first_line(there)
        elif isinstance(here, Exception):
            found[cell] = f"refused: {type(here).__name__}: {_first_line(here)}"
        elif isinstance(there, Exception):
            found[cell] = "works"
        else:
            same = len(here) == len(there) and all(map(torch.equal, here, there))
            far = max(
                (a.float() - b.float()).norm() / b.float().norm() for a, b in zip(here, there, strict=True)
            ).item()
            found[cell] = "equal" if same else f"differs by {far:.2g}"
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


if __name__ == "__main__":
    found = {}
    for name in TUNERS:
        found[name] = cells(name)
        print(name, found[name], flush=True)
    versions = {"torch": torch.__version__.partition("+")[0], "peft": peft.__version__}
    content = {"command": "python -m tests.peft_tuners", "versions": versions, "tuners": found}
    RESULT.write_text(json.dumps(content, indent=2) + "\n")

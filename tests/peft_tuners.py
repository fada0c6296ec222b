"""PEFT's tuners on packed layers, unmodified, compared with the same model dequantized, with the same seed.

    forward   logits of the adapted model
    gradient  of every adapter tensor
    merge     logits after merge_adapter() and after merge_and_unload()
    unmerge   logits after merge_adapter(), unmerge_adapter()

"equal": the same bits. "PEFT cannot: ...": the dense model is refused too. "refused: ...": an error message, PEFT's or
this package's; the dense model works. `python -m tests.peft_tuners [NAME ...]` writes docs/peft.json for the docs.
"""

import atexit
import copy
import functools
import importlib.util
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora.config import KasaConfig, VeloraConfig
from torch import nn

from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.commit import commits
from tests.tiny_models import make_tiny_model

_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CELLS = ("forward", "gradient", "merge", "unmerge")
RESULT = Path(__file__).resolve().parents[1] / "docs" / "peft.json"
_IDS = torch.arange(3, 19)[None]

_lora = functools.partial(peft.LoraConfig, target_modules=_ALL, r=4)
_virtual = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
#: name -> configuration
TUNERS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": _lora,
    "LoRA, all-linear": lambda: peft.LoraConfig(target_modules="all-linear", r=4),
    "rsLoRA": functools.partial(_lora, use_rslora=True),
    "LoRA, orthogonal": functools.partial(_lora, init_lora_weights="orthogonal"),
    "LoRA, MiCA": functools.partial(_lora, init_lora_weights="mica"),
    "LoRA, EVA": functools.partial(_lora, init_lora_weights="eva"),
    "LoRA, bias": functools.partial(_lora, lora_bias=True),
    "LoRA, tokens": functools.partial(_lora, trainable_token_indices=[3, 4]),
    "aLoRA": functools.partial(_lora, alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"),
    "QA-LoRA": functools.partial(_lora, use_qalora=True),
    "KaSA": lambda: _lora(kasa_config=KasaConfig()),
    "VeLoRA": lambda: _lora(velora_config=VeloraConfig()),
    "DoRA": functools.partial(_lora, use_dora=True),
    "PiSSA": functools.partial(_lora, init_lora_weights="pissa"),
    "OLoRA": functools.partial(_lora, init_lora_weights="olora"),
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
    "AdaMSS": lambda: peft.AdamssConfig(target_modules=_ALL, r=8, num_subspaces=2),
    "BEFT": lambda: peft.BeftConfig(target_modules=["q_proj", "k_proj", "v_proj"]),
    "DEFT": lambda: peft.DeftConfig(target_modules=_ALL, r=4),
    "FRoD": lambda: peft.FrodConfig(target_modules=["q_proj", "o_proj"], progressbar=False),
    "GLoRA": lambda: peft.GloraConfig(target_modules=_ALL, r=4),
    "HiRA": lambda: peft.HiraConfig(target_modules=_ALL, r=4),
    "Lily": lambda: peft.LilyConfig(target_modules=_ALL, r=4),
    "PEANuT": lambda: peft.PeanutConfig(target_modules=_ALL, r=4),
    "Poly": lambda: peft.PolyConfig(target_modules=_ALL, r=4, n_tasks=2, task_type="CAUSAL_LM"),
    "PSOFT": lambda: peft.PsoftConfig(target_modules=_ALL, r=4, psoft_alpha=4),
    "PVeRA": lambda: peft.PveraConfig(target_modules=["q_proj", "o_proj"], r=4),
    "ShadowPEFT": lambda: peft.ShadowConfig(r=4, task_type="CAUSAL_LM"),
    "Supertuning": lambda: peft.SupertuningConfig(target_modules=_ALL, sparsity=0.9),
    "TinyLoRA": lambda: peft.TinyLoraConfig(target_modules=_ALL, r=2, u=8),
    "UniLoRA": lambda: peft.UniLoraConfig(target_modules=_ALL, r=4, theta_d_length=32),
    "X-LoRA": lambda: peft.XLoraConfig(hidden_size=128, adapters={"0": _saved_lora()}, xlora_dropout_p=0.0),
    "MiSS": lambda: peft.MissConfig(target_modules=_ALL, r=4),
    "MiSS, bat": lambda: peft.MissConfig(target_modules=_ALL, r=16, init_weights="bat"),
    "GraLoRA": lambda: peft.GraloraConfig(target_modules=_ALL, r=4, gralora_k=2),
    "DeLoRA": lambda: peft.DeloraConfig(target_modules=_ALL, r=4),
    "WaveFT": lambda: peft.WaveFTConfig(target_modules=_ALL, n_frequency=16),
    "OSF": lambda: peft.OSFConfig(target_modules=_ALL, effective_rank=8),
    "Trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 4], target_modules=["embed_tokens"]),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]),
    "Prompt tuning": lambda: peft.PromptTuningConfig(**_virtual),
    "P-tuning": lambda: peft.PromptEncoderConfig(**_virtual, encoder_hidden_size=32),
    "Prefix tuning": lambda: peft.PrefixTuningConfig(**_virtual),
    "Multitask prompt tuning": lambda: peft.MultitaskPromptTuningConfig(**_virtual, num_tasks=2),
    "CPT": lambda: peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[3, 4, 5, 6], cpt_mask=[1] * 4, cpt_tokens_type_mask=[1, 2, 3, 4]
    ),
    "Cartridge": lambda: peft.CartridgeConfig(**_virtual),
    "LLaMA-Adapter": lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1),
}
#: tuners of one family only
FAMILY = {"LLaMA-Adapter": "llama"}
#: packages that PEFT imports for one tuner only; its row is not repeated without them
NEEDS = {"AdaMSS": "sklearn"}
#: inputs of a tuner at every forward
INPUTS = {name: {"task_ids": torch.tensor([1])} for name in ("Poly", "Multitask prompt tuning")}


def packed_model(family: str = "qwen2") -> nn.Module:
    model = make_tiny_model(family, tie_word_embeddings=False)
    model.config.use_cache = False  # for X-LoRA
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            model.set_submodule(name, NVFP4Linear.from_linear(module))
    return model.requires_grad_(False)


@functools.cache
def _saved_lora() -> str:
    """Folder of an adapter for X-LoRA."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    adapted(make_tiny_model("qwen2", tie_word_embeddings=False), TUNERS["LoRA"]()).save_pretrained(folder)
    return folder


def dequantized(model: nn.Module) -> nn.Module:
    dense = copy.deepcopy(model)
    for name, module in list(dense.named_modules()):
        if isinstance(module, NVFP4Linear):
            dense.set_submodule(name, module.to_dense())
    return dense


def adapted(model: nn.Module, config: peft.PeftConfig) -> peft.PeftModel:
    """An adapter with an effect, the same on both models."""
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, config)
    if getattr(config, "init_lora_weights", None) == "eva":
        peft.initialize_lora_eva_weights(wrapped, [{"input_ids": _IDS}] * 4, show_progress_bar=False)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                torch.manual_seed(sum(map(ord, name)) % 1000)
                parameter.add_(torch.randn_like(parameter) * 0.03)
    return wrapped.eval()


@torch.no_grad()
def _logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=_IDS, use_cache=False, **inputs).logits


def _forward(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [_logits(model, inputs)]


def _gradient(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model(input_ids=_IDS, labels=_IDS, use_cache=False, **inputs).loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    assert gradients, "nothing is trained"
    return gradients


def _merge(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.merge_adapter()
    merged = _logits(model, inputs)
    model.unmerge_adapter()
    return [merged, _logits(model.merge_and_unload(), inputs)]


def _unmerge(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.merge_adapter()
    model.unmerge_adapter()
    return [_logits(model, inputs)]


_CELLS = {"forward": _forward, "gradient": _gradient, "merge": _merge, "unmerge": _unmerge}


def _outcome(model: nn.Module, name: str, cell: str) -> list[torch.Tensor] | Exception:
    try:
        return _CELLS[cell](adapted(model, TUNERS[name]()), INPUTS.get(name, {}))
    except Exception as error:  # compared with the dense model's
        return error


def cells(name: str) -> dict[str, str]:
    warnings.filterwarnings("ignore")
    found = {}
    for cell in CELLS:
        packed = packed_model(FAMILY.get(name, "qwen2"))
        dense = dequantized(packed)
        here, there = _outcome(packed, name, cell), _outcome(dense, name, cell)
        if isinstance(here, Exception) and isinstance(there, Exception):
            found[cell] = "PEFT cannot: " + _first_line(there)
        elif isinstance(here, Exception):
            found[cell] = f"refused: {type(here).__name__}: {_first_line(here)}"
        elif isinstance(there, Exception):
            found[cell] = "works"
        else:
            same = len(here) == len(there) and all(map(torch.equal, here, there))
            pairs = [(a.float(), b.float()) for a, b in zip(here, there, strict=True)]
            far = max((a - b).norm() / b.norm() for a, b in pairs).item()
            found[cell] = "equal" if same else f"differs by {far:.2g}"
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def to_try(names: list[str]) -> list[str]:
    """Names with their packages installed: without them both models fail, and the row would be "PEFT cannot"."""
    return [name for name in names if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]


def main() -> None:
    record, some = json.loads(RESULT.read_text()), sys.argv[1:]
    tried, known = to_try(some or list(TUNERS)), record["tuners"]
    of = commits(record["commits"], whole=len(tried) == len(TUNERS))
    for name in tried:
        known[name] = cells(name)
        print(name, known[name], flush=True)
    versions = {"torch": torch.__version__.partition("+")[0], "peft": peft.__version__}
    tuners = {name: known[name] for name in TUNERS if name in known}
    content = {"command": "python -m tests.peft_tuners", "commits": of, "versions": versions, "tuners": tuners}
    RESULT.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

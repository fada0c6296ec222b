"""Random models in the Qwen2.5 shapes, for the rollout benchmarks: nothing is downloaded, nothing is written but config.json.

`packed_policy(size)` builds what a trainer would hold: a transformers model whose linear layers are NVFP4, q|k|v and gate|up in
one storage each, with a LoRA adapter. `dense_config(size)` is the folder that stock vLLM loads with random bf16 weights.
"""

import json
import tempfile
from pathlib import Path

import random_checkpoint
import torch
from torch import nn

VOCAB = 152064
SHAPES = {
    "dry": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0,
    },
    "tiny": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
    "3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    "14b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8},
    "70b": random_checkpoint.SHAPES["70b"] | {"bos_token_id": 0, "eos_token_id": 0},
}  # fmt: skip
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: packed codes drawn uniformly have rms 2.9; scales of 100 to 400 over this divisor give weights of about 0.02
DIVISOR = 2.0**15


def model_config(size: str) -> dict:
    """config.json of Qwen2.5 in the given size."""
    fixed = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": VOCAB,
    }  # fmt: skip
    return fixed | SHAPES[size]


def folder(size: str) -> str:
    """A folder with nothing but config.json."""
    path = Path(tempfile.gettempdir()) / f"qwen-shape-{size}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(model_config(size)))
    return str(path)


def _packed(rows: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scale = (torch.rand(rows, columns // 16, device=device) * 300 + 100).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scale


@torch.no_grad()
def packed_model(size: str, device: str = "cuda", dense: bool = False) -> nn.Module:
    """A transformers Qwen2 with random NVFP4 linear layers (or dense bf16 ones), fused storage, frozen."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qerl_trl.nvfp4.linear import NVFP4Linear

    config = {k: v for k, v in model_config(size).items() if k not in ("architectures", "model_type", "dtype")}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**config)).to(torch.bfloat16)
    model.name_or_path = folder(size)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or name == "lm_head" or dense:
                continue
            group = next((g for g in FUSED if name in g), (name,))
            if name != group[0]:
                continue
            layers = [getattr(parent, member) for member in group]
            codes, scale = _packed(sum(layer.out_features for layer in layers), layers[0].in_features, device)
            row = 0
            for member, layer in zip(group, layers, strict=True):
                rows = slice(row, row + layer.out_features)
                row = rows.stop
                packed = NVFP4Linear.from_nvfp4(
                    (codes[rows], scale[rows], torch.tensor([DIVISOR], device=device)),
                    bias=None
                    if layer.bias is None
                    else torch.randn(layer.out_features, device=device).bfloat16() * 0.02,
                )
                packed.fused_rows = codes.shape[0] if len(group) > 1 else None
                setattr(parent, member, packed)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                value.fill_(1.0) if parameter.ndim == 1 and "norm" in type(module).__name__.lower() else value.normal_(
                    0, 0.02
                )
                setattr(module, name, nn.Parameter(value, requires_grad=False))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    return model.requires_grad_(False).eval()


def policy(size: str, rank: int = 32, device: str = "cuda", dense: bool = False) -> nn.Module:
    """`packed_model` with a random rank-`rank` LoRA adapter on all seven projections, in float32 as in training."""
    from peft import LoraConfig, get_peft_model

    from qerl_trl.lora import register_nvfp4_lora

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(packed_model(size, device, dense), config if dense else register_nvfp4_lora(config))
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: nn.Module, scale: float = 0.01) -> None:
    """New random values in the adapter, in place."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, scale)


class _Noise:
    """Stands in for the trainer's AQNCallback: holds a draw."""

    def __init__(self, model: nn.Module) -> None:
        from qerl_trl.noise.norms import find_noisy_norms

        self.norms = tuple(find_noisy_norms(model))
        self.draw = None
        self.sigma_effective = 0.0


def generation(
    model: nn.Module, *, max_sequences: int, max_length: int, sleep: bool = False, share: bool = True, **engine
):
    """A started `QeRLVLLMGeneration` on `model`, outside of a trainer. `engine`: further arguments of `vllm.LLM`."""
    from types import SimpleNamespace

    from accelerate import Accelerator

    from qerl_trl.memory.formulas import model_bytes, shape_of
    from qerl_trl.memory.plan import Gpu, plan_run
    from qerl_trl.memory.workload import Workload
    from qerl_trl.rollout.generation import QeRLVLLMGeneration

    work = Workload(
        batch=8, prompt_length=max_length - 16, completion_length=16, completions=max_sequences, rollout="colocate",
        share_weights=share, sleep=sleep,
    )  # fmt: skip
    gpu = Gpu.current(torch.device("cuda")) if torch.cuda.is_available() else None
    args = SimpleNamespace(
        aqn=True, share_weights=share, rollout_timeout=None, vllm_engine_kwargs=engine, base_format="nvfp4", scale_rule="rtn",
        per_device_train_batch_size=8, gradient_checkpointing=True, generation_batch_size=8, bf16=True, fp16=False,
        vllm_batch_invariant=False,
    )  # fmt: skip
    trainer = SimpleNamespace(
        args=args, aqn=_Noise(model), state=SimpleNamespace(global_step=0), rescue=lambda: "",
        memory_plan=plan_run(shape_of(model.config), work, gpu, model_bytes(model)),
    )  # fmt: skip
    share_of_gpu = engine.pop("gpu_memory_utilization", None if torch.cuda.is_available() else 0.05)
    return QeRLVLLMGeneration(
        model=model, accelerator=Accelerator(), processing_class=None, trainer=trainer, mode="colocate",
        gpu_memory_utilization=share_of_gpu, max_model_length=max_length, max_num_seqs=max_sequences,
        enable_sleep_mode=sleep, max_completion_length=16,
    )  # fmt: skip


def time_syncs(generation, count: int = 10) -> dict[str, list[float]]:
    """Wall milliseconds of syncs with fresh values: adapter, a new draw for every noisy norm, both."""
    from qerl_trl.noise.hooks import NoiseDraw

    times: dict[str, list[float]] = {"adapter": [], "norms_new_draw": [], "both": []}

    def new_draw(step: int) -> None:
        generation.trainer.aqn.draw = NoiseDraw(1e-2, 0, step, 0)
        generation.sync_noise()

    def both(step: int) -> None:
        generation.sync_weights()
        new_draw(step)

    for step in range(count):
        randomize(generation.model)
        times["adapter"].append(seconds(generation.sync_weights))
        times["norms_new_draw"].append(seconds(lambda step=step: new_draw(1000 + step)))
        times["both"].append(seconds(lambda step=step: both(step)))
    generation.trainer.aqn.draw = NoiseDraw(0.0, 0, 0, 0)
    generation.sync_noise()
    return {name: [round(1e3 * t, 2) for t in values] for name, values in times.items()}


def seconds(function, device: str = "cuda") -> float:
    """Wall time of one call, with the device idle before and after."""
    import time

    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started

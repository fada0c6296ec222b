"""Random models in real shapes, for the rollout benchmarks: nothing is downloaded, nothing is written but config.json.

`packed_model(size)` builds what a trainer would hold: a transformers model whose linear layers are NVFP4, q|k|v and gate|up in
one storage each; `policy(size)` is that with a LoRA adapter. `folder(size)` is what stock vLLM loads with random bf16 weights. All
of them are of the one `model_config(size)`.
"""

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import random_checkpoint
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 152064
QWEN2 = ("0.5b", "1.5b", "3b", "7b", "14b", "32b")


def _fields(config: PretrainedConfig, **instead) -> dict:
    """What config.json of a model says of its shape, with some fields replaced."""
    names = (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    )  # fmt: skip
    return {name: getattr(config, name) for name in names} | instead


#: fields of config.json; what one leaves out is Qwen2.5's
SHAPES = {
    "dry": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0,
    },
    "tiny": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
    **{size: random_checkpoint.SHAPES[size] for size in QWEN2},
    "70b": random_checkpoint.SHAPES["70b"] | {"bos_token_id": 0, "eos_token_id": 0},
    "llama-3-8b": _fields(  # 3.1 has its shape, with positions stretched
        random_checkpoint.RECIPES["llama3.1-8b"], rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        max_position_embeddings=8192, bos_token_id=128000, eos_token_id=128001,
    ),
    "qwen3-8b": _fields(random_checkpoint.RECIPES["qwen3-8b"]),
}  # fmt: skip
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: packed codes drawn uniformly have rms 2.9; scales of 100 to 400 over this divisor give weights of about 0.02
DIVISOR = 2.0**15


def model_config(size: str) -> dict:
    """config.json of the model in the given size."""
    shape = SHAPES[size]
    kind = shape.get("model_type", "qwen2")
    common = {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], "model_type": kind, "hidden_act": "silu", "dtype": "bfloat16",
        "bos_token_id": 151643, "eos_token_id": 151645,
    }  # fmt: skip
    if kind == "qwen2":
        common |= {
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "use_sliding_window": False,
            "vocab_size": VOCAB,
        }  # fmt: skip
    return common | shape


def head_dim(config: dict) -> int:
    """Of a config.json: queries and keys of a head, which need not add up to the hidden width."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def linear_shapes(size: str) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the seven projections of a decoder layer, by their names within it."""
    c = model_config(size)
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], head_dim(c)
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip


def kv_bytes(size: str) -> int:
    """Of keys and values of one token in bf16."""
    c = model_config(size)
    return 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * head_dim(c) * 2


def folder(size: str) -> str:
    """A folder with nothing but config.json. Several processes may ask for it at the same time."""
    path = Path(tempfile.gettempdir()) / f"shape-{size}"
    path.mkdir(exist_ok=True)
    beside = path / f"config.json.{os.getpid()}"
    beside.write_text(json.dumps(model_config(size)))
    beside.replace(path / "config.json")
    return str(path)


def _packed(rows: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scale = (torch.rand(rows, columns // 16, device=device) * 300 + 100).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scale


@torch.no_grad()
def packed_model(size: str, device: str = "cuda", dense: bool = False) -> nn.Module:
    """A transformers model with random NVFP4 linear layers (or dense bf16 ones), fused storage, frozen."""
    from qerl_trl.nvfp4.linear import NVFP4Linear

    config = {k: v for k, v in model_config(size).items() if k not in ("architectures", "model_type", "dtype")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_config(size)["model_type"]](**config))
        model = model.to(torch.bfloat16)
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

    from qerl_trl.model.lora import register_nvfp4_lora

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
        self.schedule = SimpleNamespace(ever_noisy=True)


def generation(
    model: nn.Module, *, max_sequences: int, max_length: int, sleep: bool = False, share: bool = True, **engine
):
    """A started `QeRLVLLMGeneration` on `model`, outside of a trainer. `engine`: further arguments of `vllm.LLM`."""
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
        model_init_kwargs=None,
    )  # fmt: skip
    trainer = SimpleNamespace(
        args=args, aqn=_Noise(model), model=model, state=SimpleNamespace(global_step=0), rescue=lambda: "", train_dataset=None, eval_dataset=None,
        memory_plan=plan_run(shape_of(model.config), work, gpu, model_bytes(model)),
    )  # fmt: skip
    share_of_gpu = engine.pop("gpu_memory_utilization", None if torch.cuda.is_available() else 0.2)
    return QeRLVLLMGeneration(
        model=model, accelerator=Accelerator(), processing_class=None, trainer=trainer, mode="colocate",
        gpu_memory_utilization=share_of_gpu, max_model_length=max_length, max_num_seqs=max_sequences,
        enable_sleep_mode=sleep, max_completion_length=16,
    )  # fmt: skip


def time_syncs(generation, count: int = 10, device: str = "cuda") -> dict[str, list[float]]:
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
        times["adapter"].append(seconds(generation.sync_weights, device))
        times["norms_new_draw"].append(seconds(lambda step=step: new_draw(1000 + step), device))
        times["both"].append(seconds(lambda step=step: both(step), device))
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

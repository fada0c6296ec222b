"""Tiny models, tokenizers and checkpoints that the tests build: random weights, real structure."""

import copy
import json
from pathlib import Path

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

#: family -> (transformers model_type, settings beyond the common ones)
FAMILIES: dict[str, tuple[str, dict]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "mistral": ("mistral", {"head_dim": 32, "tie_word_embeddings": False}),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 64, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 64, "tie_word_embeddings": True}),
    "phi3": ("phi3", {"tie_word_embeddings": False, "pad_token_id": 0}),
}


def make_tiny_config(family: str, **overrides) -> PretrainedConfig:
    """Configuration of a tiny model: 2 layers of 128, MLP 256, 4 heads, 2 key/value heads, vocabulary 320."""
    model_type, extra = FAMILIES[family]
    common = {
        "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None,
        "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    return CONFIG_MAPPING[model_type](**{**common, **extra, **overrides})


def make_tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides):
    """Random model of `family`, norms and biases included (zeros and ones would hide mistakes)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_tiny_config(family, **overrides), dtype=dtype)
        randomize_vectors(model)
    return model.eval()


@torch.no_grad()
def randomize_vectors(model: torch.nn.Module, bias: float = 0.02) -> None:
    """Random norms, and biases with standard deviation `bias`."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0.0, bias)
        elif "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)


def make_tiny_tokenizer():
    """Byte-level tokenizer without merges for the tiny models (vocabulary below 320), with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '<eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    )
    return fast


def write_packed_checkpoint(folder: Path, family: str, layout: str, shared_scales: bool = True) -> None:
    """An NVFP4 checkpoint by compressed-tensors' own compressor, in its layout or in ModelOpt's, with all-zero blocks.

    `shared_scales`: one global scale for q/k/v and for gate/up, like llm-compressor and ModelOpt.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from safetensors.torch import save_file

    model = make_tiny_model(family)
    scheme = QuantizationScheme(targets=["Linear"], format="nvfp4-pack-quantized", **NVFP4A16)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="frozen")
    apply_quantization_config(model, config)
    linears = {name: module for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    for module in linears.values():
        module.weight.data[0] = 0
        module.weight_global_scale.data = generate_gparam(module.weight.min(), module.weight.max())
    for name, module in linears.items():
        group = next((g for g in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if name.endswith(g)), None)
        if shared_scales and group:
            parent = name.rpartition(".")[0]
            weights = [linears[f"{parent}.{part}"].weight for part in group]
            scales = [generate_gparam(weight.min(), weight.max()) for weight in weights]
            module.weight_global_scale.data = torch.stack(scales).amin(0)
        blocks = module.weight.float().view(module.out_features, -1, 16)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, module.weight_global_scale)
        module.weight_scale.data = scale
    with torch.compiler.set_stance("force_eager"):  # its rounding is under torch.compile, which needs a C++ compiler
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    quantization = json.loads(compressor.quantization_config.model_dump_json())
    if layout == "modelopt":
        for name in linears:
            state[f"{name}.weight"] = state.pop(f"{name}.weight_packed")
            state[f"{name}.weight_scale_2"] = (1 / state.pop(f"{name}.weight_global_scale")).reshape(())
            state[f"{name}.input_scale"] = torch.tensor(0.01)
        part = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        quantization = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"input_activations": part, "weights": part, "targets": ["Linear"]}},
            "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.39.0"},
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": quantization}))


def gathered(module: nn.Module, dtype: torch.dtype, whole_numbers: bool = True) -> nn.Module:
    """A copy with its parameters cast like by FSDP 2 of torch 2.11 under mixed precision: whole numbers too."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if whole_numbers or parameter.is_floating_point():
                setattr(part, name, nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad))
    return twin

"""Local stand-ins for the tiny models and data sets of TRL's tests, in a Hub cache of their own.

NVFP4 needs wider models than TRL's (8, a block is 16), and the vocabulary is small: `small_id` translates the ids of
Qwen's vocabulary in TRL's tests (tool calls, mostly) to ids of the same text here.
"""

import json
from pathlib import Path

import torch
import trl
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

_OWNER = "trl-internal-testing"
VOCABULARY = 2048
_QWENS = 151936
_SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
_MARKERS = {"<tool_call>": 14, "</tool_call>": 15, "<tool_response>": 22, "</tool_response>": 23}
_MARKERS |= {"<think>": 24, "</think>": 25}
#: where the special tokens are, from the end of the vocabulary
_FIRST_SPECIAL = 151643 - _QWENS
#: text of the ids in the tool calls of TRL's tests; single characters have GPT-2's ids
_PIECES = {
    330: ' "', 411: "out", 450: "dec", 497: '",', 606: "name", 788: '":', 894: " any", 927: "sh", 944: "'t",
    1318: "text", 1414: " know", 1513: " don", 2765: " won", 4913: '{"', 5212: ' {"', 5392: " tool", 6023: "hi",
    7692: "async", 9520: "step", 11248: "}}\n", 13477: "rement", 16252: " increment", 16370: "arguments",
    17453: "Done", 22785: "ly_tool", 35744: "increment", 64648: "multip", 93054: "_multip", 95642: '"}}\n',
}  # fmt: skip
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 4096}
_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}
_MAMBA |= {"layers_block_type": ["mamba", "attention", "moe"], "ssm_state_size": 16, "use_mamba_kernels": False}
_MAMBA |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA |= {"moe_shared_expert_intermediate_size": 32}
_GLM = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}
_GLM |= {"use_qk_norm": True, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
#: name -> (model type, settings beyond the common ones, TRL's chat template, number of labels of a classifier)
MODELS: dict[str, tuple[str, dict, str, int | None]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", {}, "qwen2_5", None),
    "tiny-Qwen3ForCausalLM": ("qwen3", {"tie_word_embeddings": False}, "qwen3", None),
    "tiny-Qwen3MoeForCausalLM": ("qwen3_moe", _EXPERTS, "qwen3", None),
    "tiny-LlamaForCausalLM-3.2": ("llama", {"tie_word_embeddings": True}, "llama3_2", None),
    "tiny-MistralForCausalLM-0.2": ("mistral", {}, "qwen2_5", None),
    "tiny-Gemma2ForCausalLM": ("gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}, "gemma", None),
    "tiny-Cohere2ForCausalLM": ("cohere2", {"logit_scale": 1.0, "tie_word_embeddings": True}, "cohere2", None),
    "tiny-Glm4MoeForCausalLM": ("glm4_moe", _GLM, "glm4moe", None),
    "tiny-GptOssForCausalLM": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "gptoss", None),
    "tiny-NemotronHForCausalLM-nano": ("nemotron_h", _MAMBA, "nemotron_3_nano", None),
    "tiny-Qwen2ForSequenceClassification-2.5": ("qwen2", {}, "qwen2_5", 1),
    "tiny-Qwen3ForSequenceClassification": ("qwen3", {}, "qwen3", 1),
    "tiny-LlamaForSequenceClassification-3.2": ("llama", {}, "llama3_2", 1),
}


def write(home: Path) -> None:
    """Fill `home` so that it serves as HF_HOME, offline."""
    for name in MODELS:
        write_model(snapshot(home, name), name)
    remote = snapshot(home, "tiny-RemoteForCausalLM")
    write_model(remote, "tiny-Qwen2ForCausalLM-2.5")
    add_code(remote, "remote")


def write_model(folder: Path, name: str) -> None:
    """A model of `MODELS` with its tokenizer."""
    model_type, settings, template, labels = MODELS[name]
    ids = {name: VOCABULARY + _FIRST_SPECIAL + index for name, index in (_SPECIAL | _MARKERS).items()}
    end, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": pad, "eos_token_id": end, "pad_token_id": pad}
    _tokenizer(template, ids).save_pretrained(folder)
    _model(model_type, sizes | settings, labels).save_pretrained(folder)
    if labels is None:
        GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=True).save_pretrained(folder)


def small_id(index: int) -> int:
    """Of an id of Qwen's vocabulary the one here; the same below `VOCABULARY`."""
    if index < VOCABULARY:
        return index
    if index in _PIECES:
        return VOCABULARY - len(_PIECES) + list(_PIECES).index(index)
    return VOCABULARY + index - _QWENS


def snapshot(home: Path, name: str, owner: str = _OWNER) -> Path:
    """The folder in which `home`, as HF_HOME, has the model `owner/name`."""
    repository = home / "hub" / f"models--{owner}--{name}"
    commit = "0" * 40
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return folder


def _model(model_type: str, settings: dict, labels: int | None) -> torch.nn.Module:
    config = CONFIG_MAPPING[model_type](**{**_SIZES, **settings, **({"num_labels": labels} if labels else {})})
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.02)
            elif parameter.ndim > 1 and "embed" not in name and "lm_head" not in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def _letters() -> dict[int, str]:
    """GPT-2's printable character of each byte, in the order of its ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def _tokenizer(template: str, special: dict[str, int]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = _letters()
    by_id = dict(enumerate(letters.values()))
    by_id |= {small_id(index): "".join(letters[byte] for byte in text.encode()) for index, text in _PIECES.items()}
    by_id |= {index: text for text, index in special.items()}
    vocabulary = {by_id.get(index, f"{letters[32]}w{index}"): index for index in range(VOCABULARY)}
    assert len(vocabulary) == VOCABULARY, "two ids of one text"
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(_MARKERS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    return fast


def add_code(folder: Path, name: str) -> None:
    """Make of a Qwen 2 a model whose classes come with the folder, called by `name`."""
    classes = name.capitalize()
    (folder / f"configuration_{name}.py").write_text(
        f"from transformers import Qwen2Config\n\n\nclass {classes}Config(Qwen2Config):\n    model_type = {name!r}\n"
    )
    (folder / f"modeling_{name}.py").write_text(
        f"from transformers import Qwen2ForCausalLM\n\nfrom .configuration_{name} import {classes}Config\n\n\n"
        f"class {classes}ForCausalLM(Qwen2ForCausalLM):\n    config_class = {classes}Config\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["model_type"], config["architectures"] = name, [f"{classes}ForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": f"configuration_{name}.{classes}Config",
        "AutoModelForCausalLM": f"modeling_{name}.{classes}ForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))

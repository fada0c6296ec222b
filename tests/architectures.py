"""Supported features of each architecture, at a tiny size, tested at the product.

`python -m tests.architectures` writes docs/architectures.json, which the documentation shows; e2e/test_architectures.py
compares. Rollouts in vLLM are in tests/e2e/engine/architectures.py.

    load      a dense folder loads as NVFP4; towers, routers, small gates and the head stay dense
    forward   logits equal those of the same model dequantized, bit for bit
    noise     norms before a linear layer are found, and noise on them moves the logits
    train     the default adapter: every one of its tensors gets a gradient
    adapter   saved and loaded again, it gives the same logits
    merged    saved merged, stock transformers computes the trained policy
    base      saved as NVFP4, stock transformers computes the same
"""

import copy
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from qerl_trl.model.lora import default_lora_config, keep_to_the_decoder, load_adapter, register_nvfp4_lora
from qerl_trl.noise.hooks import NoiseDraw, NormNoise
from qerl_trl.noise.norms import find_noisy_norms
from qerl_trl.nvfp4.config import NVFP4Config, from_pretrained
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.publish import export
from tests.commit import commits
from tests.tiny_models import randomize_vectors

RESULT = Path(__file__).resolve().parents[1] / "docs" / "architectures.json"
CELLS = ("load", "forward", "noise", "train", "adapter", "merged", "base")

_COMMON = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 1,
    "pad_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip
_DELTA_NET = {
    "hidden_size": 256,  # not a head's size: no noise on the norm of a delta net's heads
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_ssm": 256, "mamba_d_state": 16, "mamba_n_groups": 1}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WINDOW = {"sliding_window": 32}
_PER_LAYER = {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 16, "global_head_dim": 32}


def _plain(names: str) -> dict[str, dict]:
    return {name: {} for name in names.split()}


#: model_type -> settings beyond the common ones
TEXT: dict[str, dict] = {
    **_plain("llama mistral ministral3 qwen2 qwen3 gemma"),
    "gemma2": _WINDOW,
    "gemma3_text": _WINDOW,
    "phi": {"num_key_value_heads": 4, "intermediate_size": 512},
    **_plain("phi3 olmo olmo2 olmo3 smollm3 granite glm glm4 cohere cohere2"),
    **_plain("starcoder2 stablelm gpt_neox nemotron exaone4 hunyuan_v1_dense"),
    "seed_oss": {"residual_dropout": 0.0, "attention_dropout": 0.0},
    **_plain("ernie4_5 arcee helium apertus"),
    "lfm2": {
        "conv_dim": 128, "block_dim": 128, "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "minicpm3": _LATENT | {"num_key_value_heads": 4},
    "qwen3_5_text": _DELTA_NET,
    "falcon_h1": _MAMBA,
    "gemma4_text": _WINDOW | _PER_LAYER | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": _EXPERTS,
    "mixtral": _EXPERTS,
    "gpt_oss": _EXPERTS,
    "qwen3_next": _DELTA_NET | _EXPERTS | {"shared_expert_intermediate_size": 32},
}  # fmt: skip
#: common settings of a decoder inside a wrapper
TINY_TEXT = {key: value for key, value in _COMMON.items() if key != "dtype"}
_TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128, "patch_size": 14,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_MROPE = {"rope_scaling": _MROPE, "rope_parameters": _MROPE}
_QWEN3_TOWER = _QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
#: wrappers with a vision tower: model_type -> (tower, text, further)
VISION: dict[str, tuple[dict, dict, dict]] = {
    "qwen2_5_vl": (_QWEN_TOWER | {"fullatt_block_indexes": [0]}, _MROPE, {}),
    "qwen3_vl": (_QWEN3_TOWER, _MROPE, {}),
    "gemma3": (_TOWER, _WINDOW, {"mm_tokens_per_image": 4}),
    "llava": (_TOWER, {"model_type": "llama"}, {}),
    "mistral3": (_TOWER | {"head_dim": 16}, {"model_type": "mistral"}, {}),
    "internvl": (_TOWER | {"image_size": [28, 28], "patch_size": [14, 14]}, {"model_type": "qwen2"}, {}),
}
#: mixtures with dense experts, as the refusal at load advises
DENSE_EXPERTS = {f"{name}, experts dense": name for name in ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next")}
ALL = (*TEXT, *VISION, *DENSE_EXPERTS)


class Refused(Exception):
    """Refused by the package with a message."""


def config_of(name: str, **settings: Any) -> PretrainedConfig:
    if name in TEXT:
        return CONFIG_MAPPING[name](**_COMMON | TEXT[name] | settings)
    tower, text, further = VISION[name]
    text = TINY_TEXT | text | settings
    return CONFIG_MAPPING[name](vision_config=tower, text_config=text, dtype="bfloat16", **further)


def auto_class(name: str) -> type:
    return AutoModelForCausalLM if name in TEXT else AutoModelForImageTextToText


def dense_model(name: str, **settings: Any) -> nn.Module:
    """Random weights, norms and biases. `settings`: of the (text) configuration, besides those of the table."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class(name).from_config(config_of(name, **settings), dtype=torch.bfloat16).eval()
        randomize_vectors(model)
    return model


_IDS = torch.arange(3, 19)[None]


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=_IDS, use_cache=False).logits.float()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative to the variation of the logits."""
    return ((a - b).norm() / (b - b.mean()).norm()).item()


def every_expert(model: nn.Module) -> nn.Module:
    """`model` with all experts for each token: no choice between two depends on rounding."""
    for module in model.modules():
        if hasattr(module, "top_k") and hasattr(module, "num_experts"):
            module.top_k = module.num_experts
    return model


class Trial:
    """One architecture, cell by cell; later cells use the models of earlier ones."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = DENSE_EXPERTS.get(name, name), folder
        self.auto, self.left_out = auto_class(self.name), ["experts"] if name in DENSE_EXPERTS else None

    def packed(self) -> nn.Module:
        config = NVFP4Config(modules_to_not_convert=self.left_out)
        return from_pretrained(self.folder / "dense", config, model_class=self.auto).eval()

    def load(self) -> None:
        dense = dense_model(self.name)
        dense.save_pretrained(self.folder / "dense")
        try:
            self.model = self.packed()
        except ValueError as error:
            raise Refused(str(error)) from error
        packed = [name for name, module in self.model.named_modules() if isinstance(module, NVFP4Linear)]
        assert packed and not [name for name in packed if "visual" in name or "vision" in name or "projector" in name]
        assert type(self.model.get_output_embeddings()) is nn.Linear

    def forward(self) -> None:
        dense = copy.deepcopy(self.model).dequantize()
        assert not any(isinstance(module, NVFP4Linear) for module in dense.modules())
        found, expected = logits(self.model), logits(dense)
        assert torch.isfinite(found).all() and torch.equal(found, expected), difference(found, expected)

    def noise(self) -> None:
        before = logits(self.model)
        try:
            noise = NormNoise(find_noisy_norms(self.model))
        except ValueError as error:
            raise Refused(str(error)) from error
        noise.set(NoiseDraw(0.05, seed=0, step=0, generation=0))
        with noise.active():
            during = logits(self.model)
        noise.remove()
        assert torch.equal(logits(self.model), before) and not torch.equal(during, before)

    def train(self) -> None:
        config = keep_to_the_decoder(default_lora_config(), self.model.config)
        self.trained = get_peft_model(self.model, register_nvfp4_lora(config), autocast_adapter_dtype=True)
        adapter = {name: p for name, p in self.trained.named_parameters() if p.requires_grad}
        assert adapter and not [name for name in adapter if "vis" in name or "projector" in name]
        with torch.no_grad():
            for name, parameter in adapter.items():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.05)
        self.trained.train()
        loss = self.trained(input_ids=_IDS, labels=_IDS, use_cache=False).loss
        loss.backward()
        self.trained.eval()
        gradients = {name: p.grad for name, p in adapter.items()}
        still = [name for name, g in gradients.items() if g is None or not g.isfinite().all() or not g.any()]
        assert not still, f"{len(still)} of {len(adapter)} adapter tensors get no gradient, e.g. {still[0]}"

    def adapter(self) -> None:
        self.trained.save_pretrained(self.folder / "adapter")
        again = load_adapter(self.packed(), str(self.folder / "adapter")).eval()
        assert torch.equal(logits(again), logits(self.trained))

    def merged(self) -> None:
        try:
            export.save_merged(self.trained, self.folder / "merged")
        except ValueError as error:
            raise Refused(str(error)) from error
        stock = self.auto.from_pretrained(self.folder / "merged", dtype=torch.bfloat16).eval()
        assert not getattr(stock, "hf_quantizer", None)
        far = difference(logits(every_expert(stock)), logits(every_expert(self.trained)))
        assert far < 0.05, far

    def base(self) -> None:
        base = self.trained.unload()
        try:
            base.save_pretrained(self.folder / "base")
        except RuntimeError as error:
            raise Refused(str(error)) from error
        stock = self.auto.from_pretrained(self.folder / "base", dtype=torch.bfloat16).eval()
        far = difference(logits(every_expert(stock)), logits(base))
        assert far < 0.02, far


@contextmanager
def trial(name: str) -> Iterator[Trial]:
    with tempfile.TemporaryDirectory() as folder:
        yield Trial(name, Path(folder))


def attempt(cell: Callable[[], None]) -> str:
    """ "works", or "refused: " and the message. A failure of any other kind is raised."""
    try:
        cell()
    except Refused as refusal:
        return f"refused: {refusal}"
    return "works"


def cells(name: str) -> dict[str, str]:
    """Cell -> outcome; only "load" if the model is refused there."""
    found: dict[str, str] = {}
    with trial(name) as one:
        for cell in CELLS:
            found[cell] = attempt(getattr(one, cell))
            if cell == "load" and found[cell] != "works":
                break
    return found


def recorded() -> dict[str, Any]:
    """The content of docs/architectures.json."""
    return json.loads(RESULT.read_text())


def write(record: dict[str, Any]) -> None:
    known = record["architectures"]
    record["architectures"] = {name: known[name] for name in ALL if name in known}
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    import transformers

    warnings.filterwarnings("ignore")
    record, some = recorded(), sys.argv[1:]
    record["commits"] = commits(record.get("commits", []), whole=not some)
    for name in some or list(ALL):
        others = {cell: value for cell, value in record["architectures"].get(name, {}).items() if cell not in CELLS}
        record["architectures"][name] = cells(name) | others
        print(name, record["architectures"][name], flush=True)
    record["versions"] = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    write(record)


if __name__ == "__main__":
    main()

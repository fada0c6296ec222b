"""What an engine is told: one record, three forms of it; and what it may be told of the model, its adapter and its
data."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.config import NVFP4Config, load_config
from qerl_trl.rollout import spec as specs
from qerl_trl.rollout.engine import batch_invariant
from qerl_trl.rollout.generation import QeRLVLLMGeneration
from qerl_trl.rollout.server import ServerEngine
from qerl_trl.rollout.spec import (
    EngineSpec,
    adapter_buffers,
    check_servable,
    check_vocabulary,
    linear_layers,
    rollout_layers,
)
from tests.architectures import dense_model
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    make_tiny_model("qwen2").to(torch.bfloat16).save_pretrained(tmp_path / "a model")
    return str(tmp_path / "a model")


def policy(folder, quantized=True, **config):
    from transformers import AutoModelForCausalLM

    kwargs = {"quantization_config": NVFP4Config(**config)} if quantized else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kwargs)
    lora = LoraConfig(r=20, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, register_nvfp4_lora(lora) if quantized else lora)


LEAVES = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def parsed(command: str) -> tuple[list[str], dict[str, str]]:
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"] and "DEV_MODE" not in command and "SECRET" not in command
    start = next(i for i, word in enumerate(words) if word.startswith("--"))
    return words[:start], dict(zip(words[start::2], words[start + 1 :: 2], strict=True))


def test_command_of_an_nvfp4_model(folder):
    skip = ["model.layers.1.mlp.down_proj"]
    model = policy(folder, scale_rule="four_over_six", modules_to_not_convert=skip)
    spec = EngineSpec.of(model, revision="v1.0", max_model_len=512, max_num_seqs=64)
    words, options = parsed(spec.serve_command())
    assert words == ["vllm", "serve", folder]  # quoted: it has a space
    assert json.loads(options.pop("--additional-config")) == {
        "qerl": {
            "adapter": {"rank": 20, "targets": LEAVES},
            "base": "nvfp4",
            "scale_rule": "four_over_six",
            "ignore": [*skip, "lm_head"],
        }
    }
    assert options == {
        "--revision": "v1.0",
        "--tokenizer-revision": "v1.0",
        "--host": "127.0.0.1",
        "--dtype": "bfloat16",
        "--quantization": "qerl_nvfp4",
        "--worker-extension-cls": "qerl_trl.rollout.vllm.worker.QeRLWorkerExtension",
        "--middleware": "qerl_trl.rollout.vllm.worker.RolloutEndpoint",
        "--max-model-len": "512",
        "--max-num-seqs": "64",
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": "-1",
        "--config-format": "hf",
        "--tokenizer-mode": "hf",
    }


def test_the_bf16_arm_is_told_to_stay_dense(folder):
    spec = EngineSpec.of(policy(folder, quantized=False))
    _, options = parsed(spec.serve_command())
    told = json.loads(options["--additional-config"])["qerl"]
    assert told == {"adapter": {"rank": 20, "targets": LEAVES}, "base": "dense"}


def test_a_packed_checkpoint_says_itself_what_stays_dense(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    saved = str(tmp_path / "packed")
    config = NVFP4Config(scale_rule="neighbor_sweep")
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16).save_pretrained(
        saved
    )
    model = AutoModelForCausalLM.from_pretrained(saved, config=load_config(saved), dtype=torch.bfloat16)
    spec = EngineSpec.of(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))
    assert (spec.base, spec.scale_rule, spec.ignore) == ("nvfp4", None, None)


def test_arguments_of_llm_and_the_command_say_the_same(folder):
    spec = EngineSpec.of(policy(folder), max_model_len=256, max_num_seqs=8, trust_remote_code=True)
    arguments, command = spec.llm_arguments(), spec.serve_command()
    assert command.endswith(" --trust-remote-code")
    _, options = parsed(command.removesuffix(" --trust-remote-code"))
    for name, text in options.items():
        name = name.removeprefix("--").replace("-", "_")
        if name == "additional_config":
            held = arguments[name]["qerl"].pop("holds")  # a server reads the checkpoint itself
            assert held == spec.holds and json.loads(text) == arguments[name]
        elif name in arguments:
            assert text == str(arguments[name])


def test_an_engine_of_a_model_that_sees_is_told_where_no_pictures_come(folder, tmp_path):
    """Else vLLM loads the tower once more, and computes the largest pictures that may come at its start, in memory
    that nobody planned."""

    dense_model("gemma3").save_pretrained(tmp_path / "seeing")
    seeing = AutoModelForImageTextToText.from_pretrained(tmp_path / "seeing", dtype=torch.bfloat16)
    text = EngineSpec.of(seeing, pictures=False)
    assert text.llm_arguments()["language_model_only"] is True and "--language-model-only" in text.serve_command()
    words = Dataset.from_dict({"prompt": ["What is 2 + 2?"]})
    assert spec_of_a_run(seeing, data=words).text_only, "with a processor, it was built with its tower"
    for spec in (
        EngineSpec.of(seeing),
        spec_of_a_run(seeing, data=words.add_column("image", [None])),
        EngineSpec.of(policy(folder), pictures=False),
    ):
        assert "language_model_only" not in spec.llm_arguments() and "language-model" not in spec.serve_command()


def test_short_convolutions_are_refused_before_an_engine_starts(tmp_path):
    """On a GPU vLLM 0.25.1 ended in an AttributeError of its own loader."""
    from transformers import AutoModelForCausalLM

    dense_model("lfm2").save_pretrained(tmp_path / "lfm2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "lfm2")
    with pytest.raises(
        ValueError, match=r"Lfm2ForCausalLM cannot roll out in vLLM: .*short convolutions.*use_vllm=False"
    ):
        EngineSpec.of(model)


def test_delta_nets_are_computed_with_what_needs_no_compiler(folder, tmp_path):
    dense_model("qwen3_5_text").save_pretrained(tmp_path / "delta net")
    from transformers import AutoModelForCausalLM

    spec = EngineSpec.of(AutoModelForCausalLM.from_pretrained(tmp_path / "delta net"))
    assert spec.llm_arguments()["gdn_prefill_backend"] == "triton"
    assert spec.llm_arguments()["enable_prefix_caching"] is False
    assert parsed(spec.serve_command())[1]["--gdn-prefill-backend"] == "triton"
    assert "gdn_prefill_backend" not in EngineSpec.of(policy(folder)).llm_arguments()


def spec_of_a_run(model, mode="colocate", batch=8, data=None):
    """What the engine of a trainer is told that has a processor."""
    args = SimpleNamespace(
        scale_rule="rtn", generation_batch_size=batch, vllm_batch_invariant=False, model_init_kwargs=None, bf16=True
    )
    trainer = SimpleNamespace(args=args, train_dataset=data, eval_dataset=None)
    mine = SimpleNamespace(
        model=model, mode=mode, max_model_length=256, max_num_seqs=24, model_impl="auto", trust_remote_code=False,
        trainer=trainer, trained=None, accelerator=SimpleNamespace(is_main_process=False),
        _compute_dtype=lambda: torch.bfloat16, _in_process=lambda: None,
        processing_class=SimpleNamespace(image_processor=None),
    )  # fmt: skip
    QeRLVLLMGeneration._build_engine(mine)
    return mine.spec


@pytest.mark.parametrize(("mode", "batch", "told"), [("server", 96, 96), ("server", 8192, 1024), ("colocate", 96, 24)])
def test_a_server_is_shared_by_all_processes(folder, mode, batch, told):
    """It captured CUDA graphs for vLLM's default. TRL's number is of an engine in one of, here, four processes."""
    spec = spec_of_a_run(policy(folder), mode, batch)
    assert spec.llm_arguments()["max_num_seqs"] == told
    assert parsed(spec.serve_command())[1]["--max-num-seqs"] == str(told)


def test_engines_whose_layers_hold_their_weights_otherwise_share_no_compiled_graph(folder):
    """vLLM finds graphs on disk by what it was told, and one over dense weights ended in KeyError: 'weight' where
    bitsandbytes' were."""

    def told(model):
        return json.dumps(EngineSpec.of(model).llm_arguments()["additional_config"])

    def hold(model, **state):
        layer = next(layer for name, layer in linear_layers(model).items() if name.endswith("up_proj"))
        layer.weight.quant_state = SimpleNamespace(quant_type="nf4", dtype=torch.bfloat16, **state)
        return model

    dense, again = (policy(folder, quantized=False) for _ in range(2))
    assert told(dense) == told(again)
    seen = {told(dense), told(policy(folder))}
    seen |= {told(hold(again, blocksize=64, nested=nested)) for nested in (False, True)}
    assert len(seen) == 4


def test_the_batch_invariant_mode_is_asked_for(folder, monkeypatch):
    model = policy(folder)
    plain, spec = EngineSpec.of(model), EngineSpec.of(model, batch_invariant=True)
    assert "batch_invariant" not in plain.options()["qerl"] and spec.options()["qerl"]["batch_invariant"] is True
    assert spec.serve_command().startswith("VLLM_BATCH_INVARIANT=1 vllm serve ")
    told = shlex.split(spec.serve_command())
    assert json.loads(told[told.index("--additional-config") + 1]) == spec.options()
    for value, on in (("1", True), ("0", False), (None, False)):
        monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
        if value is not None:
            monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        assert batch_invariant() is on


@pytest.mark.parametrize(
    ("url", "host", "port", "where"),
    [
        ("http://127.0.0.1:8123", "127.0.0.1", "8123", "is started by"),
        ("http://0.0.0.0:8000", "127.0.0.1", "8000", "is started by"),
        ("http://gpu-2:9000", "0.0.0.0", "9000", "is started on gpu-2 by"),
        ("https://inference.example", "0.0.0.0", None, "is started on inference.example by"),
    ],
)
def test_the_command_starts_a_server_where_it_is_looked_for(url, host, port, where, folder):

    engine = ServerEngine.__new__(ServerEngine)
    engine.url, engine.spec = url, EngineSpec.of(policy(folder), max_model_len=64)
    said, _, command = engine._advice().partition("\n")
    _, options = parsed(command)
    assert said.endswith(where) and (options["--host"], options.get("--port")) == (host, port)


# --- the adapter ---


def adapted(*names, target=("q_proj",)) -> nn.Module:
    """A tiny PEFT model with one adapter per name; the first is active."""
    configs = [LoraConfig(r=4 * (i + 1), target_modules=list(target)) for i in range(len(names))]
    model = get_peft_model(make_tiny_model("qwen2"), configs[0], adapter_name=names[0])
    for name, config in zip(names[1:], configs[1:], strict=True):
        model.add_adapter(name, config)
    return model


def test_the_active_adapter_is_rolled_out_whatever_its_name():
    model = adapted("student", "ref")
    check_servable(model)
    assert adapter_buffers(model) == {"rank": 4, "targets": ["q_proj"]}
    assert all("student" in layer.lora_A for layer in rollout_layers(model).values())
    model.set_adapter("ref")
    with pytest.raises(ValueError, match="several adapters"):
        check_servable(model)


def test_two_active_adapters_are_refused():
    model = adapted("student", "ref")
    model.base_model.set_adapter(["student", "ref"])
    with pytest.raises(ValueError, match="student, ref active at once"):
        check_servable(model)


@pytest.mark.parametrize("rows", [304, 321, 358])
def test_resized_embeddings_that_no_engine_would_have_are_refused(rows, tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    check_vocabulary(adapted)
    model.resize_token_embeddings(rows)
    with pytest.raises(ValueError, match=f"{rows} embeddings, and its checkpoint, which vLLM loads, has 320") as said:
        check_vocabulary(adapted)
    assert len(str(said.value)) <= 200


def test_an_adapter_on_a_tower_is_refused_before_an_engine_is_built():
    """The probe's text runs no tower, and without pictures the engine has none."""

    def seeing(**options):
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
        return get_peft_model(dense_model("gemma3"), config)

    with pytest.raises(ValueError, match=r"layers of a tower for pictures .*exclude_modules=") as told:
        check_servable(seeing())
    named = re.search(r"exclude_modules='(.*?)'\)", str(told.value)).group(1).replace("\\\\", "\\")
    check_servable(seeing(exclude_modules=named))


# --- pictures ---

PROCESSOR = SimpleNamespace(image_processor=None)
TEXT = Dataset.from_dict({"prompt": ["What is 2 + 2?"], "answer": ["4"]})
MESSAGES = Dataset.from_dict({"prompt": [[{"role": "user", "content": "What is 2 + 2?"}]]})
PARTS = Dataset.from_dict({"prompt": [[{"role": "user", "content": [{"type": "image", "text": None}]}]]})
SEEN = Dataset.from_dict(
    {"prompt": ["What is it?"], "image": [None]}, Features({"prompt": Value("string"), "image": Image()})
)
LISTED = Dataset.from_dict(
    {"prompt": ["What is it?"], "images": [[]]}, Features({"prompt": Value("string"), "images": List(Image())})
)
CASES = {
    "text": ([TEXT], False),
    "messages": ([MESSAGES, TEXT], False),
    "nothing held out": ([TEXT, None], False),
    "parts of messages": ([PARTS], True),
    "a column": ([SEEN], True),
    "a column of lists": ([LISTED], True),
    "held-out": ([TEXT, SEEN], True),
    "streamed": ([TEXT.to_iterable_dataset()], True),
    "made when read": ([TEXT.with_transform(lambda rows: rows)], True),
    "no prompts": ([TEXT.remove_columns("prompt")], True),
}


@pytest.mark.parametrize(("of", "expected"), CASES.values(), ids=CASES)
def test_where_pictures_may_come(of, expected):
    assert specs.pictures_may_come(PROCESSOR, of, False) is expected
    assert specs.pictures_may_come(PROCESSOR, of, True) is True
    assert specs.pictures_may_come(make_tiny_tokenizer(), of, True) is False

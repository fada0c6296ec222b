"""What an engine is told: one record, three forms of it."""

import json
import shlex
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from qerl_trl.nvfp4.config import NVFP4Config
from qerl_trl.rollout.engine import batch_invariant
from qerl_trl.rollout.generation import QeRLVLLMGeneration
from qerl_trl.rollout.spec import EngineSpec, linear_layers
from tests.architectures import dense_model
from tests.tiny_models import make_tiny_model


@pytest.fixture
def folder(tmp_path):
    make_tiny_model("qwen2").to(torch.bfloat16).save_pretrained(tmp_path / "a model")
    return str(tmp_path / "a model")


def policy(folder, quantized=True, **config):
    from transformers import AutoModelForCausalLM

    from qerl_trl.model.lora import register_nvfp4_lora

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

    from qerl_trl.nvfp4.config import load_config

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
    """Else vLLM loads the tower once more, and computes the largest pictures that may come at its start, in memory that nobody planned."""
    from transformers import AutoModelForImageTextToText

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
        _compute_dtype=lambda: torch.bfloat16, _in_process=lambda: None, processing_class=SimpleNamespace(image_processor=None),
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
    """vLLM finds graphs on disk by what it was told, and one over dense weights ended in KeyError: 'weight' where bitsandbytes' were."""

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


def test_the_engine_reads_what_it_is_told(folder):
    pytest.importorskip("vllm")
    from qerl_trl.rollout.vllm.quantization import EngineOptions

    spec = EngineSpec.of(policy(folder, modules_to_not_convert=["o_proj"]))
    options = EngineOptions(**spec.options()["qerl"])
    assert options.adapter["rank"] == 20 and options.base == "nvfp4" and set(options.ignore) == {"lm_head", "o_proj"}


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
    from qerl_trl.rollout.server import ServerEngine

    engine = ServerEngine.__new__(ServerEngine)
    engine.url, engine.spec = url, EngineSpec.of(policy(folder), max_model_len=64)
    said, _, command = engine._advice().partition("\n")
    _, options = parsed(command)
    assert said.endswith(where) and (options["--host"], options.get("--port")) == (host, port)

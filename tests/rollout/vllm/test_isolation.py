"""vLLM's Transformers backend gets classes of its own, so that the trainer's are left as they are."""

import pytest

pytest.importorskip("vllm")

from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig

from qerl_trl.rollout.spec import EngineSpec
from qerl_trl.rollout.vllm import engine
from tests import architectures

SPEC = EngineSpec("somewhere", None, "bfloat16", "nvfp4", "rtn", (), None)


def model(name):
    built = AutoModelForCausalLM.from_config(architectures.config_of(name))
    built.config.architectures = [type(built).__name__]
    return built


@pytest.mark.parametrize(
    ("name", "isolates"), [("smollm3", True), ("olmo2", True), ("qwen3", False), ("stablelm", False)]
)
def test_only_where_vllm_has_no_class_of_its_own(name, isolates):
    assert ("hf_overrides" in engine.isolation_arguments(model(name), SPEC, {})) == isolates


def test_the_users_choice_of_the_backend_counts():
    assert engine.isolation_arguments(model("qwen3"), SPEC, {"model_impl": "transformers"})
    with pytest.raises(ValueError, match=r"hf_overrides=\{'a': 1\}.*SmolLM3ForCausalLM.*config\.json"):
        engine.isolation_arguments(model("smollm3"), SPEC, {"hf_overrides": {"a": 1}})


@pytest.mark.parametrize("name", ["smollm3", "gemma3"])
def test_the_text_decoder_is_built_from_a_subclass(name):
    mine, theirs = (AutoModel.from_config(config) for config in (architectures.config_of(name), engine.isolated(architectures.config_of(name))))  # fmt: skip
    decoder, other = mine.get_decoder(), theirs.get_decoder()
    assert type(other) is not type(decoder) and isinstance(other, type(decoder))
    assert list(other.state_dict()) == list(decoder.state_dict())
    again = engine.isolated(engine.isolated(architectures.config_of(name)))
    assert type(AutoModel.from_config(again).get_decoder()) is type(other)


def test_a_dense_checkpoint_says_who_quantizes_it():
    """vLLM 0.25 to 0.30 would look for that in `hf_overrides`, and refuse a function."""
    from qerl_trl.rollout.vllm.quantization import QeRLQuantizationConfig

    config = engine.isolated(architectures.config_of("smollm3"))
    assert (
        QeRLQuantizationConfig.from_config(config.quantization_config).selection == QeRLQuantizationConfig().selection
    )
    packed = architectures.config_of("smollm3")
    packed.quantization_config = {"quant_method": "compressed-tensors"}
    assert engine.isolated(packed).quantization_config == {"quant_method": "compressed-tensors"}


def test_a_configuration_of_no_model_is_left_as_it_is():
    config = PretrainedConfig()
    assert type(engine.isolated(config)) is PretrainedConfig

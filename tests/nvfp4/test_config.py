"""`NVFP4Config` as an object, and loading through `from_pretrained`, `pretrained_kwargs` and `load_config`."""

import json
import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from qerl_trl.nvfp4.config import NVFP4Config, from_pretrained, load_config, pretrained_kwargs
from tests.nvfp4.models import nvfp4_layers, same_state


@pytest.mark.parametrize(
    ("options", "message"),
    [({"scale_rule": "best"}, "scale_rule='best'"), ({"modules_to_not_convert": "lm_head"}, "must be a list")],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NVFP4Config(**options)


def test_options_round_trip():
    config = NVFP4Config("four_over_six", ["down_proj"], "float16")
    assert vars(NVFP4Config.from_dict(config.options())) == vars(config)
    assert eval(repr(config), {"NVFP4Config": NVFP4Config}).options() == config.options()


def test_only_compressed_tensors_is_written(quantized):
    """config.json must never carry a method that only this package knows, nor replace transformers' own."""
    written = json.loads(quantized.config.to_json_string())["quantization_config"]
    assert written["quant_method"] == "compressed-tensors" and written["ignore"] == ["lm_head"]
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["qerl_nvfp4"] is NVFP4Config
    assert AUTO_QUANTIZATION_CONFIG_MAPPING.get("nvfp4") is not NVFP4Config


def test_an_entry_that_matches_nothing_gives_a_warning(tiny_model_dir, caplog):
    logger = logging.getLogger("qerl_trl.nvfp4.config")
    logger.addHandler(caplog.handler)
    from_pretrained(tiny_model_dir("qwen2"), NVFP4Config(modules_to_not_convert=["down_projj"]))
    logger.removeHandler(caplog.handler)
    assert "'down_projj' matches no module of Qwen2ForCausalLM" in caplog.text


def test_arguments_for_other_libraries(packed_model_dir, tiny_model_dir):
    packed, dense = packed_model_dir("compressed-tensors"), tiny_model_dir("qwen2")
    for folder, argument in ((packed, "config"), (dense, "quantization_config")):
        options = pretrained_kwargs(folder, NVFP4Config(compute_dtype="float32"))
        assert set(options) == {argument}
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        assert nvfp4_layers(model) and model.dtype == torch.float32
    config = load_config(packed)
    assert config.quantization_config["quant_method"] == "qerl_nvfp4"
    assert same_state(AutoModelForCausalLM.from_pretrained(packed, config=config), from_pretrained(packed))
    assert load_config(dense).to_dict() == AutoConfig.from_pretrained(dense).to_dict()


def test_a_given_config_is_kept(packed_model_dir):
    config = AutoConfig.from_pretrained(packed_model_dir("modelopt"))
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1234.0}
    model = from_pretrained(packed_model_dir("modelopt"), config=config)
    assert nvfp4_layers(model) and model.config.rope_parameters["rope_theta"] == 1234.0


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_settings_of_the_configuration_may_be_given_by_name(packed, tiny_model_dir, packed_model_dir):
    folder = packed_model_dir("compressed-tensors") if packed else tiny_model_dir("qwen2")
    kind = AutoModelForSequenceClassification
    model = from_pretrained(folder, model_class=kind, num_labels=3, rms_norm_eps=0.5)
    assert model.score.weight.shape == (3, 128)  # a new head
    assert model.model.norm.variance_epsilon == 0.5 and nvfp4_layers(model)


def test_the_config_of_another_library_is_refused(tiny_model_dir):
    with pytest.raises(ValueError, match=r"BitsAndBytesConfig; this function takes qerl_trl\.NVFP4Config"):
        from_pretrained(tiny_model_dir("qwen2"), BitsAndBytesConfig(load_in_4bit=True))

"""What is sampled from, whatever wraps the model."""

from types import SimpleNamespace

import pytest
from torch import nn
from transformers import GenerationConfig

from qerl_trl.sampling import of_the_model_alone


@pytest.mark.parametrize(
    "children", [(), ("module",), ("_fsdp_wrapped_module",), ("_orig_mod", "_fsdp_wrapped_module")]
)
def test_the_models_own_file_is_left_out_inside_any_wrapper(children):
    """FSDP's first version leaves its wrapper in `trainer.model`, which has no generation_config of its own."""
    model = nn.Linear(2, 2)
    model.generation_config = own = GenerationConfig(min_p=0.5, eos_token_id=3)
    wrapped = model
    for child in children:
        outer = nn.Module()
        outer.add_module(child, wrapped)
        wrapped = outer
    with of_the_model_alone(wrapped):
        assert (model.generation_config.min_p, model.generation_config.eos_token_id) == (None, 3)
    assert model.generation_config is own and own.min_p == 0.5


def test_what_is_no_module_is_left_alone():
    """As TRL's own tests build trainers."""
    with of_the_model_alone(SimpleNamespace(training=True)):
        pass

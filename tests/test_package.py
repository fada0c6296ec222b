"""The package as a whole: light import, complete lazy names, no side effects on its neighbours."""

import subprocess
import sys

import pytest

import qerl_trl


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_is_light():
    code = "import sys, qerl_trl; print([m for m in ('torch', 'vllm', 'triton', 'transformers', 'trl') if m in sys.modules])"
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize("module", ["trainer", "quantizer", "noise"])
def test_vllm_is_not_imported(module):
    code = f"import sys, importlib; importlib.import_module('qerl_trl.{module}'); print('vllm' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_public_names_are_sorted_and_resolve():
    assert qerl_trl.__all__ == sorted(qerl_trl.__all__)
    for name in qerl_trl.__all__:
        assert getattr(qerl_trl, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'NoSuchThing'"):
        qerl_trl.NoSuchThing  # noqa: B018


def test_installed_but_unused_changes_nothing():
    """Importing the package registers no quantizer and rebinds nothing in transformers or TRL."""
    code = (
        "from transformers.quantizers import auto; import trl.trainer.grpo_trainer as g;"
        "before = (dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING), dict(vars(g)));"
        "import qerl_trl;"
        "after = (dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING), dict(vars(g)));"
        "print(before == after)"
    )
    assert run_python(code).strip() == "True"


def test_training_leaves_the_rebound_name_as_it_was():
    code = (
        "import trl.trainer.grpo_trainer as g; original = g.VLLMGeneration;"
        "from qerl_trl import QeRLGRPOTrainer; mixin = QeRLGRPOTrainer.__new__(QeRLGRPOTrainer);"
        "context = mixin._own_vllm_generation(); context.__enter__(); inside = g.VLLMGeneration is original;"
        "context.__exit__(None, None, None); print(inside, g.VLLMGeneration is original)"
    )
    assert run_python(code).strip() == "False True"

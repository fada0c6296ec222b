"""A model with code of its own."""

import shutil
import sys

import pytest
from transformers import dynamic_module_utils

from tests.peers.stand_ins import add_code

CODE = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@pytest.fixture
def own_code(tiny_model_dir, tmp_path, monkeypatch):
    """A folder with a model with code of its own in the folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # of another folder
    shutil.copytree(tiny_model_dir("qwen2"), tmp_path / "own")
    add_code(tmp_path / "own", "own")
    return tmp_path / "own"

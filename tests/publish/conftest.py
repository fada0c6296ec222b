"""What several files here take: a model with code of its own."""

import json
import shutil
import sys

import pytest
from transformers import dynamic_module_utils

CODE = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@pytest.fixture
def own_code(tiny_model_dir, tmp_path, monkeypatch):
    """A folder with a model whose code lies beside it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # of another folder
    shutil.copytree(tiny_model_dir("qwen2"), tmp_path / "own")
    (tmp_path / "own/configuration_own.py").write_text(
        "from transformers import Qwen2Config\nclass OwnConfig(Qwen2Config):\n    model_type = 'own'\n"
    )
    (tmp_path / "own/modeling_own.py").write_text(
        "from transformers import Qwen2ForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnForCausalLM(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((tmp_path / "own/config.json").read_text())
    (tmp_path / "own/config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": CODE}))
    return tmp_path / "own"

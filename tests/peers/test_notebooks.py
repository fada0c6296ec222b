"""The page shows this list of TRL's notebooks; with a clone of TRL (`QERL_TRL_CHECKOUT`) one of them is executed."""

import json
import os
from pathlib import Path

import pytest

from tests.peers import notebooks

TABLE = json.loads(notebooks.RESULT.read_text())


def test_the_page_is_of_this_list_and_all_of_it_ran():
    outcomes = {name: {"outcome": "passed"} for name in notebooks.NOTEBOOKS}
    assert {key: TABLE[key] for key in ("notebooks", "left out")} == json.loads(json.dumps(notebooks.table(outcomes)))


def test_what_is_executed_is_the_notebook_with_the_lines_changed(tmp_path):
    cells = [
        "!pip install trl",
        "from trl import GRPOConfig\nargs = GRPOConfig(max_steps=500)",
        "from trl import GRPOTrainer\ntrainer = GRPOTrainer(args=args)",
        "print(torch.cuda.memory_reserved())",
        "trainer.save_model('out')\ntrainer.push_to_hub()",
        "raise AssertionError('after the run')",
    ]
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}))
    code = notebooks.program(path, notebooks.Notebook({}, "out"))
    compile(code, "one", "exec")
    assert "QeRLConfig(use_cpu=True, bf16=False,max_steps=2)" in code and "trainer = QeRLGRPOTrainer(args=args)" in code
    assert not any(word in code for word in ("pip", "torch.cuda", "push_to_hub()", "after the run", "GRPOConfig("))
    path.write_text(path.read_text().replace("import GRPOTrainer", "import RLOOTrainer"))
    with pytest.raises(RuntimeError, match="is there 0 times, not once"):
        notebooks.program(path, notebooks.Notebook({}, "out"))


@pytest.mark.skipif("QERL_TRL_CHECKOUT" not in os.environ, reason="needs a clone of TRL (QERL_TRL_CHECKOUT)")
def test_one_of_them():
    assert notebooks.run("grpo_trl_lora_qlora", Path(os.environ["QERL_TRL_CHECKOUT"])) == {"outcome": "passed"}

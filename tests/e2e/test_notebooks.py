"""Each notebook runs from its first cell to the last, with fewer steps."""

import json
import os
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
#: what is written -> what is run
SHORTER = {"STEPS = 30": "STEPS = 2", '"--eval_problems", "100"': '"--eval_problems", "8"', "range(600)": "range(150)"}


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_runs_whole(notebook, warm_training, tmp_path):
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "committed without outputs"
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for written, run in SHORTER.items():
        assert code.count(written) == 1
        code = code.replace(written, run)
    (tmp_path / "notebook.py").write_text(code)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = warm_training.run([str(tmp_path / "notebook.py")], tmp_path, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "before" in done.stdout and "difference" in done.stdout
    assert (tmp_path / "qerl-quickstart" / "adapter_model.safetensors").is_file()

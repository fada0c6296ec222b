from functools import partial

import pytest

from tests.faults.tiny_runs import TinyRuns


@pytest.fixture
def make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path):
    """`make_trainer(**options)`: a trainer of a 2-layer model on the CPU."""
    runs = TinyRuns(tiny_model_dir("qwen2"), tiny_tokenizer)
    return partial(runs.trainer, tmp_path / "run", save_strategy="no")

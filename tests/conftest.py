"""Fixtures of the whole test set: tiny random checkpoints (2 layers, 0.2 M parameters) of every family, and trainers.

The folders are shared: treat them as read-only.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["QERL_NVFP4_TUNED"] = "0"  # tests do not depend on measurements of this machine

import pytest
import torch
from transformers import PretrainedConfig

from tests.tiny_models import make_tiny_config, make_tiny_model, make_tiny_tokenizer, write_packed_checkpoint
from tests.warm import TRAINING, Warm


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """No test writes to the user's cache."""
    os.environ["QERL_NVFP4_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., PretrainedConfig]:
    """`tiny_config(family, **overrides)`: a configuration (see `make_tiny_config`)."""
    return make_tiny_config


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Callable[..., Path]:
    """`tiny_model_dir(family, **overrides)`: folder with a bf16 checkpoint, written once per session, read-only."""
    written: dict[tuple, Path] = {}

    def write(family: str, **overrides) -> Path:
        key = (family, *sorted(overrides.items()))
        if key not in written:
            folder = tmp_path_factory.mktemp(f"tiny-{family}")
            make_tiny_model(family, **overrides).save_pretrained(folder)
            written[key] = folder
        return written[key]

    return write


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """Tokenizer that fits every tiny model: one token a byte, `<pad>` 0, `<eos>` 1."""
    return make_tiny_tokenizer()


@pytest.fixture(scope="session")
def packed_model_dir(tmp_path_factory) -> Callable[..., Path]:
    """`packed_model_dir(layout, family="qwen2", shared_scales=True)`: folder with a foreign NVFP4 checkpoint."""
    pytest.importorskip("compressed_tensors")
    written: dict[tuple, Path] = {}

    def write(layout: str, family: str = "qwen2", shared_scales: bool = True) -> Path:
        key = (layout, family, shared_scales)
        if key not in written:
            written[key] = tmp_path_factory.mktemp(f"packed-{layout}")
            write_packed_checkpoint(written[key], family, layout, shared_scales)
        return written[key]

    return write


@pytest.fixture(scope="module")
def tiny_runs(tiny_model_dir, tiny_tokenizer):
    """Trainers and runs of a 2-layer model, on one thread: bit-identical across processes, and safe in a forked one."""
    from tests.faults.tiny_runs import TinyRuns

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TinyRuns(tiny_model_dir("qwen2"), tiny_tokenizer)
    torch.set_num_threads(threads)


@pytest.fixture
def make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path):
    """`make_trainer(**options)`: a trainer of the tiny model, `tests.trainers.settings` with these options."""
    from qerl_trl import QeRLConfig, QeRLGRPOTrainer, QeRLRLOOConfig, QeRLRLOOTrainer
    from tests.faults.tiny_runs import PROMPTS, spread_reward
    from tests.trainers import settings
    from tests.update.models import LORA

    def make(model=None, trainer_class=QeRLGRPOTrainer, reward=spread_reward, peft_config=LORA, args=None, **options):
        given = {name: options.pop(name, None) for name in ("eval_dataset", "callbacks")}
        config = QeRLRLOOConfig if issubclass(trainer_class, QeRLRLOOTrainer) else QeRLConfig
        return trainer_class(
            model if model is not None else str(tiny_model_dir("qwen2")),
            reward,
            args=args if args is not None else settings(tmp_path, config, **options),
            train_dataset=PROMPTS,
            processing_class=tiny_tokenizer,
            peft_config=peft_config,
            **given,
        )

    return make


@pytest.fixture
def engine_trainer(tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch):
    """`engine_trainer(**options)`: a trainer with the stand-in for vLLM (tests/faults/stand_in.py)."""
    from tests.faults.stand_in import trainers

    model = tiny_model_dir("qwen2", initializer_range=0.1)  # layers of 128 that matter as much as wide ones
    return trainers(model, tiny_tokenizer, tmp_path / "run", monkeypatch)


@pytest.fixture(scope="session")
def warm_training():
    """A `Warm` server for scripts that train on the CPU."""
    server = Warm(TRAINING, {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"})
    yield server
    server.close()


def pytest_collection_modifyitems(items):
    """Skip what this machine cannot run, with the reason in the report (`-ra`)."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("vllm") and not has_vllm:
            item.add_marker(pytest.mark.skip(reason="needs vLLM"))


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A stand-in for the Hub, with a token that it takes."""
    import huggingface_hub
    from huggingface_hub import constants

    from qerl_trl.publish import hub
    from tests.hub_server import TOKEN, StandInHub

    stand_in = StandInHub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in knows LFS only
    monkeypatch.setattr(constants, "ENDPOINT", stand_in.endpoint)
    template = stand_in.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(hub, "get_token", lambda: TOKEN)
    monkeypatch.setattr(hub, "HfApi", lambda token: huggingface_hub.HfApi(endpoint=stand_in.endpoint, token=token))
    monkeypatch.setattr(hub, "_WAIT_SECONDS", 0.01)
    huggingface_hub.close_session()
    yield stand_in
    huggingface_hub.close_session()
    stand_in.close()

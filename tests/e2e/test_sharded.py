"""FSDP 2: two processes with sharded weights compute, train, save and export the same as whole models.

One pair of processes does all of it; a colocated vLLM is in tests/e2e/engine/test_two_processes.py.
"""

import os

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.checkpoint.seal import problems
from qerl_trl.model.loading import from_pretrained
from qerl_trl.nvfp4.config import NVFP4Config
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.publish.load import load_policy
from qerl_trl.support.names import is_sharded
from qerl_trl.update.batches import TokenBudget
from tests.e2e.sharding import FSDP, TOKENS, TRAINING, as_accelerators, close, logits, parameters_as_torch_2_11, trained
from tests.faults.tiny_runs import PROMPTS, spread_reward
from tests.ranks import on_ranks


def again():
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def in_process(tiny_runs, folder, rank) -> dict:
    """Train with plain data parallelism, then sharded, save, export and resume."""
    limits = [(0, 0)]  # tokens of a pass: one micro-batch each, later no limit
    TokenBudget._limits = lambda self: limits[-1]
    found = {"plain": trained(tiny_runs.command(folder / "plain", **TRAINING, save_strategy="no"))}
    os.environ |= FSDP
    as_accelerators()
    parameters_as_torch_2_11()
    again()
    limits.append((10**6, 10**6))
    trainer = tiny_runs.trainer(folder / "run", **TRAINING, optim="adamw_8bit")  # as in the recipes
    packed = [m for m in trainer.model.modules() if isinstance(m, NVFP4Linear)]
    found["read"] = {bool(m.weight_packed.any()) for m in packed}
    trainer.train()
    trainer.save_model()
    packed = [m for m in trainer.model.modules() if isinstance(m, NVFP4Linear)]
    new = {"max_new_tokens": 2 + 4 * rank, "min_new_tokens": 2 + 4 * rank}
    found |= {
        "sharded": trained(trainer),
        "optimizer": trainer.args.optim.value,
        "part": sum(m.weight_packed.to_local().numel() for m in packed) / sum(m.weight_packed.numel() for m in packed),
        "is sharded": is_sharded(trainer.model),
        "passes": trainer._packing.budget._groups,
        "logs": trainer.state.log_history,
        "logits": logits(trainer.model),
        "generated": trainer.model.eval().generate(input_ids=TOKENS, **new),
    }
    for kind in ("adapter", "merged", "base"):
        getattr(trainer, f"save_{kind}")(folder / kind, **({"dtype": torch.float32} if kind == "merged" else {}))
    again()
    other = tiny_runs.trainer(folder / "run", **TRAINING, optim="adamw_8bit")
    other.train(resume_from_checkpoint=str(folder / "run/checkpoint-1"))
    return found | {"resumed": trained(other)}


@pytest.fixture(scope="module")
def both(tiny_runs, tmp_path_factory):
    """Results of the two processes, and their folder."""
    folder = tmp_path_factory.mktemp("sharded")
    outcomes = on_ranks(2, lambda rank: torch.save(in_process(tiny_runs, folder, rank), folder / f"{rank}.pt"), 240)
    assert [outcome.answer for outcome in outcomes] == [None, None], outcomes
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)], folder


def test_each_process_has_half_of_the_base(both):
    first, second = both[0]
    for found in (first, second):
        assert found["is sharded"] and found["part"] == 0.5
        assert found["optimizer"] == "adamw_torch_fused", "bitsandbytes' cannot step sharded parameters"
    assert (first["read"], second["read"]) == ({True}, {False}), "only one reads the files"
    # each forward gathers weights, so a process that has generated everything waits for the other
    assert [found["generated"].shape[1] - TOKENS.shape[1] for found in both[0]] == [2, 6]


def test_it_trains_the_same_as_whole_models(both):
    """With noise in rollout and update, packed rows and our LoRA layers."""
    (first, second), _ = both
    close(first["sharded"], second["sharded"], rtol=0, atol=0)
    close(first["sharded"], first["plain"], rtol=1e-4, atol=1e-6)
    assert first["passes"] == second["passes"] == [(0, 2), (0, 2), (0, 2), (3, 3)]  # those of "plain": one each
    changed = sum((tensor != 0).any().item() for name, tensor in first["sharded"].items() if "lora_B" in name)
    assert changed == 4
    noise = [log["aqn/sigma_effective"] for log in first["logs"] if "loss" in log]
    assert noise == [log["aqn/sigma_effective"] for log in second["logs"] if "loss" in log] and min(noise[1:]) > 0


def test_one_process_computes_the_same_from_the_saved_files(both):
    (first, second), folder = both
    assert torch.equal(first["logits"], second["logits"])
    for saved in ("run", "run/checkpoint-2", "adapter"):
        policy = load_policy(folder / saved)
        torch.testing.assert_close(logits(policy.model), first["logits"], rtol=1e-4, atol=1e-4)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), first["logits"], rtol=1e-3, atol=1e-3)
    with policy.model.disable_adapter():
        base = from_pretrained(str(folder / "base"), NVFP4Config(compute_dtype="float32"), dtype=torch.float32)
        torch.testing.assert_close(logits(base), logits(policy.model), rtol=1e-4, atol=1e-4)


def test_checkpoints_have_a_whole_adapter_and_resume_is_bit_exact(both):
    """transformers writes no shards, although the configuration says SHARDED_STATE_DICT."""
    found, folder = both
    for place in ("run/checkpoint-1", "run/checkpoint-2", "run"):
        assert (folder / place / "adapter_model.safetensors").is_file() and not list((folder / place).glob("*_0"))
        assert not problems(folder / place)
    written = load_file(folder / "run/adapter_model.safetensors")
    close(written, {n.replace(".default", ""): t for n, t in found[0]["sharded"].items()}, rtol=0, atol=0)
    for each in found:
        close(each["resumed"], each["sharded"], rtol=0, atol=0)


def test_a_reference_model_is_whole_in_every_process(tiny_runs, tmp_path):
    """With `cpu_ram_efficient_loading`, the second process once had zeros of it: a KL penalty to half of a model."""

    def work(rank):
        torch.set_num_threads(1)  # a forked process lacks its parent's thread pool
        os.environ |= FSDP | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
        as_accelerators()
        settings = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "max_steps": 1}
        settings |= {"logging_steps": 1, "gradient_checkpointing": False, "aqn": False, "padding_free": True}
        settings |= {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}
        settings |= {"base_format": "full", "beta": 0.5, "model_init_kwargs": {"dtype": "float32"}}
        args = QeRLConfig(output_dir=str(tmp_path), **settings)
        trainer = QeRLGRPOTrainer(tiny_runs.model, spread_reward, args, PROMPTS, processing_class=tiny_runs.tokenizer)
        trainer.train()
        return next(log["kl"] for log in trainer.state.log_history if "loss" in log)

    assert all(outcome.answer < 1e-6 for outcome in on_ranks(2, work))

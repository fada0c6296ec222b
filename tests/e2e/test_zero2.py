"""DeepSpeed ZeRO-2: two processes with half of the optimizer each train, save and export like plain data parallelism.

Run by `make zero2`, with the settings of examples/accelerate/zero2_2.yaml, and in float32 for a close comparison.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands import launch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from transformers import AutoModelForCausalLM, training_args

from qerl_trl.checkpoint import seal
from qerl_trl.publish.load import load_policy
from tests.e2e.sharding import TRAINING, close, logits, trained
from tests.ranks import on_ranks

os.environ["DS_ACCELERATOR"] = "cpu"
deepspeed = pytest.importorskip("deepspeed")

SHIPPED = Path(__file__).parents[2] / "examples/accelerate/zero2_2.yaml"
#: with use_cpu accelerate finds gloo by itself, but leaves DeepSpeed out
ON_CPU = {"use_cpu": False, "ddp_backend": "gloo"}


def launched() -> dict[str, str]:
    """Environment variables of `accelerate launch` for the shipped file."""
    arguments = launch.launch_command_parser().parse_args(
        ["--config_file", str(SHIPPED), "--main_process_port", "0", "train.py"]
    )
    arguments, defaults, _ = launch._validate_launch_command(arguments)
    assert arguments.use_deepspeed
    arguments.deepspeed_fields_from_accelerate_config = ",".join([*defaults.deepspeed_config, "mixed_precision"])
    _, environment = prepare_deepspeed_cmd_env(arguments)
    return {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")}


def as_launched(**others: str) -> None:
    """Makes this forked process like one of the launcher's on a GPU."""
    os.environ |= launched() | others
    training_args.is_torch_bf16_gpu_available = lambda: True
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def share_of_the_optimizer(trainer) -> float:
    """This process's part of Adam's state."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    kept = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    return kept / sum(parameter.numel() for parameter in trained(trainer).values())


def work(rank: int, tiny_runs, folder: Path) -> dict[str, Any]:
    """Trains as plain data parallelism, then with ZeRO-2 in float32 and in bf16, each resumed; exports."""
    found = {"plain": trained(tiny_runs.command(folder / "plain", **TRAINING, save_strategy="no"))}
    for name, of_this in (("float32", {"ACCELERATE_MIXED_PRECISION": "no"}), ("bf16", {})):
        as_launched(**of_this)
        options = TRAINING | ON_CPU | {"bf16": name == "bf16"}
        trainer = tiny_runs.command(folder / name, **options)
        found[name] = {
            "trained": trained(trainer),
            "precision": trainer.accelerator.mixed_precision,
            "stage": trainer.model_wrapped.zero_optimization_stage(),
            "share": share_of_the_optimizer(trainer),
            "logits": logits(trainer.model),
        }
        for kind in ("adapter", "merged") if name == "float32" else ():
            getattr(trainer, f"save_{kind}")(folder / kind, **({"dtype": torch.float32} if kind == "merged" else {}))
        as_launched(**of_this)
        other = tiny_runs.trainer(folder / name, **options)
        other.train(resume_from_checkpoint=str(folder / name / "checkpoint-1"))
        found[name]["resumed"] = trained(other)
    return found


@pytest.fixture(scope="module")
def both(tiny_runs, tmp_path_factory):
    """Results of the two processes, and their folder."""
    folder = tmp_path_factory.mktemp("zero2")

    def saving(rank):
        torch.save(work(rank, tiny_runs, folder), folder / f"{rank}.pt")

    outcomes = on_ranks(2, saving, timeout=300)
    assert [outcome.answer for outcome in outcomes] == [None, None], "\n".join(outcome.stderr for outcome in outcomes)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)], folder


def test_it_trains_like_plain_data_parallelism(both):
    (first, second), _ = both
    close(first["float32"]["trained"], second["float32"]["trained"], rtol=0, atol=0)
    close(first["float32"]["trained"], first["plain"], rtol=1e-4, atol=1e-6)
    assert sum((tensor != 0).any().item() for name, tensor in first["plain"].items() if "lora_B" in name) == 4


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_each_process_has_half_of_the_optimizer_and_resumes_bit_for_bit(both, precision):
    for found in both[0]:
        assert found[precision]["precision"] == {"float32": "no", "bf16": "bf16"}[precision]
        assert found[precision]["stage"] == 2
        assert found[precision]["share"] == pytest.approx(0.5, rel=0.01)
        assert all(tensor.isfinite().all() for tensor in found[precision]["trained"].values())
        close(found[precision]["resumed"], found[precision]["trained"], rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_checkpoint_has_both_parts_of_the_optimizer_and_no_base(both, precision):
    found, folder = both
    for step in (1, 2):
        whole = folder / precision / f"checkpoint-{step}"
        assert seal.problems(whole) == []
        sealed = seal.sealed_files(whole)
        assert sum(name.endswith("optim_states.pt") for name in sealed) == 2
        (weights,) = (name for name in sealed if name.endswith("model_states.pt"))
        others = set(torch.load(whole / weights, weights_only=False)["module"]) - set(found[0][precision]["trained"])
        assert others == {"base_model.model.lm_head.weight"}  # of tied weights DeepSpeed leaves out one name


def test_saved_files_give_the_same_logits_in_one_process(both):
    (first, second), folder = both
    expected = first["float32"]["logits"]
    assert torch.equal(expected, second["float32"]["logits"])
    for saved in ("float32", "float32/checkpoint-2", "adapter"):
        torch.testing.assert_close(logits(load_policy(folder / saved).model), expected, rtol=1e-4, atol=1e-4)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_non_finite_value_in_one_process_ends_both(what, tiny_runs, tmp_path):
    """DeepSpeed's backward pass takes the step too, and skips it if a gradient is not finite."""
    run = tmp_path / "run"

    def failing(rank):
        as_launched()
        trainer = tiny_runs.trainer(run, save_steps=1, max_steps=2, bf16=True, **ON_CPU)
        compute = trainer._compute_loss

        def wrong(*args):
            loss = compute(*args)
            if rank == 0 or trainer.state.global_step == 0:
                return loss
            if what == "gradient":
                loss.register_hook(lambda gradient: gradient * float("nan"))
                return loss
            return loss * float("nan")

        trainer._compute_loss = wrong
        trainer.train()

    other, failed = (outcome.answer for outcome in on_ranks(2, failing))
    if what == "loss":
        assert "RuntimeError: The loss is nan at step 1" in failed
    else:
        assert failed == other
    assert "is not finite at step 1" in other and "The optimizer step was not taken" in other
    assert seal.last_checkpoint(run) == str(run / "checkpoint-1")

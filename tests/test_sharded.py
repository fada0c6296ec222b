"""FSDP 2: two processes that share the weights out compute, train, save and export what whole models do.

accelerate has FSDP for accelerators only, and takes each of these CPU processes for one. One pair of processes does everything that is asked here; with
vLLM it is tests/e2e/engine/test_two_processes.py.
"""

import multiprocessing
import os
import socket
import traceback
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.checkpoint.seal import problems
from qerl_trl.model.loading import from_pretrained
from qerl_trl.nvfp4.config import NVFP4Config
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.publish.load import load_policy
from qerl_trl.rollout.supported import check_given, settle_optimizer
from qerl_trl.support.names import full_tensor, is_sharded
from qerl_trl.update.batches import TokenBudget
from tests.faults.tiny_runs import PROMPTS, spread_reward
from tests.ranks import on_ranks
from tests.tiny_models import make_tiny_config

TOKENS = torch.arange(40).reshape(2, 20) + 5
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",  # what `accelerate config` proposes
}
TRAINING = {
    "padding_free": True,
    "aqn_scope": "policy",
    "gradient_checkpointing": None,
    "gradient_accumulation_steps": 4,
}


def as_accelerators():
    original = PartialState.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init


def parameters_as_torch_2_11():
    """It makes each part with a gradient first, which bytes cannot have, and asks the original then."""

    def with_gradient_first(data, requires_grad=True):
        if isinstance(data, DTensor):
            return nn.Parameter(data).requires_grad_(requires_grad)
        return nn.Parameter(data, requires_grad)

    _fsdp_param.nn = SimpleNamespace(Parameter=with_gradient_first, Module=nn.Module)


def trained(trainer) -> dict[str, torch.Tensor]:
    return {n: full_tensor(p) for n, p in trainer.model.named_parameters() if p.requires_grad}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS, use_cache=False).logits


def in_process(rank, port, tiny_runs, folder):
    """Trains as plain data parallelism, then sharded, resumed and exported; leaves what it found in `folder`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}

    def again():
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()

    again()
    limits = [(0, 0)]  # tokens of a pass: one micro-batch each, then as many as may be
    TokenBudget._limits = lambda self: limits[-1]
    found = {"plain": trained(tiny_runs.command(folder / "plain", **TRAINING, save_strategy="no"))}
    os.environ |= FSDP
    as_accelerators()
    parameters_as_torch_2_11()
    again()
    limits.append((10**6, 10**6))
    trainer = tiny_runs.trainer(folder / "run", **TRAINING, optim="adamw_8bit")  # as the recipes have it
    packed = [m for m in trainer.model.modules() if isinstance(m, NVFP4Linear)]
    found["read"] = {bool(m.weight_packed.any()) for m in packed}
    trainer.train()
    trainer.save_model()
    packed = [m for m in trainer.model.modules() if isinstance(m, NVFP4Linear)]
    found |= {
        "sharded": trained(trainer),
        "optimizer": trainer.args.optim.value,
        "held": sum(m.weight_packed.to_local().numel() for m in packed) / sum(m.weight_packed.numel() for m in packed),
        "is sharded": is_sharded(trainer.model),
        "passes": trainer._packing.budget._groups,
        "logs": trainer.state.log_history,
        "logits": logits(trainer.model),
        "generated": trainer.model.eval().generate(
            input_ids=TOKENS, max_new_tokens=2 + 4 * rank, min_new_tokens=2 + 4 * rank
        ),
    }
    for kind in ("adapter", "merged", "base"):
        getattr(trainer, f"save_{kind}")(folder / kind, **({"dtype": torch.float32} if kind == "merged" else {}))
    again()
    other = tiny_runs.trainer(folder / "run", **TRAINING, optim="adamw_8bit")
    other.train(resume_from_checkpoint=str(folder / "run/checkpoint-1"))
    found["resumed"] = trained(other)
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def both(tiny_runs, tmp_path_factory):
    """What each of the two processes found, and the folder of what they left."""
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def child(rank):
        try:
            in_process(rank, port, tiny_runs, folder)
        except BaseException:
            (folder / f"{rank}.txt").write_text(traceback.format_exc())
            os._exit(1)

    parallel = multiprocessing.get_context("fork")
    processes = [parallel.Process(target=child, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    said = "\n".join(p.read_text() for p in sorted(folder.glob("*.txt")))
    assert not said and (folder / "1.pt").exists(), said or "they hang"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)], folder


def close(some: dict, others: dict, **tolerance) -> None:
    assert some.keys() == others.keys()
    for name in some:
        torch.testing.assert_close(some[name], others[name], **tolerance)


def test_the_base_is_shared_out(both):
    for found in both[0]:
        assert found["is sharded"] and found["held"] == 0.5


def test_an_optimizer_that_cannot_step_what_is_shared_out_is_replaced(both):
    for found in both[0]:
        assert found["optimizer"] == "adamw_torch_fused"


def test_a_process_that_has_generated_all_waits_for_the_others(both):
    """Weights are gathered in every forward, so each has to make as many."""
    assert [found["generated"].shape[1] - TOKENS.shape[1] for found in both[0]] == [2, 6]


def test_one_process_of_a_machine_reads_the_base(both):
    """With `cpu_ram_efficient_loading`; the other gets it from accelerate."""
    assert [found["read"] for found in both[0]] == [{True}, {False}]


def test_it_trains_what_whole_models_train(both):
    """With noise in rollout and update, packed rows, our LoRA layers."""
    (first, second), _ = both
    close(first["sharded"], second["sharded"], rtol=0, atol=0)
    close(first["sharded"], first["plain"], rtol=1e-4, atol=1e-6)
    assert first["passes"] == second["passes"] == [(0, 2), (0, 2), (0, 2), (3, 3)]  # those of "plain": one each
    changed = sum((tensor != 0).any().item() for name, tensor in first["sharded"].items() if "lora_B" in name)
    assert changed == 4
    noise = [log["aqn/sigma_effective"] for log in first["logs"] if "loss" in log]
    assert noise == [log["aqn/sigma_effective"] for log in second["logs"] if "loss" in log] and min(noise[1:]) > 0


def test_one_process_computes_the_same_from_what_was_saved(both):
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


def test_checkpoints_have_the_adapter_whatever_the_configuration_says(both):
    """Of shards transformers writes none, there and at the end."""
    found, folder = both
    for place in ("run/checkpoint-1", "run/checkpoint-2", "run"):
        assert (folder / place / "adapter_model.safetensors").is_file() and not list((folder / place).glob("*_0"))
        assert not problems(folder / place)
    written = load_file(folder / "run/adapter_model.safetensors")
    close(written, {n.replace(".default", ""): t for n, t in found[0]["sharded"].items()}, rtol=0, atol=0)


def test_it_resumes_bit_for_bit(both):
    for found in both[0]:
        close(found["resumed"], found["sharded"], rtol=0, atol=0)


def settings(**options) -> QeRLConfig:
    options = {"output_dir": "unused", **options}
    return QeRLConfig(use_cpu=True, bf16=False, report_to=[], **options)


def test_an_optimizer_that_fsdp_would_stop_is_refused_or_replaced(monkeypatch, caplog):
    """Not without a word, and before anything is loaded."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    args = settings(optim="paged_adamw_8bit")
    settle_optimizer(args)
    assert args.optim.value == "adamw_torch_fused"
    assert "optim='paged_adamw_8bit' is bitsandbytes'" in caplog.text
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    args = settings(optim="adamw_8bit")
    settle_optimizer(args)
    assert args.optim.value == "adamw_8bit"


@pytest.mark.parametrize("name", ["rollout_func", "tools", "environment_factory"])
def test_turns_without_an_engine_are_refused_under_fsdp(monkeypatch, name):
    """Processes take different numbers of them, and each forward gathers weights from all."""
    args = settings(use_vllm=False)
    check_given(args, {name: [print]})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=f"{name} with use_vllm=False cannot work under FSDP"):
        check_given(args, {name: [print]})
    check_given(settings(use_vllm=True), {name: [print]})


@pytest.mark.parametrize("name", ["rollout_func", "tools", "environment_factory"])
def test_turns_without_an_engine_are_refused_under_zero_3(name):
    args = settings(use_vllm=False, base_format="bf16")
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ValueError, match=f"{name} with use_vllm=False cannot work under DeepSpeed ZeRO-3"):
        check_given(args, {name: [print]})
    args.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    check_given(args, {name: [print]})


def sharded_run(tiny_runs, folder, make_reward=lambda: spread_reward, **options):
    """What each of two processes logged under FSDP 2 with `cpu_ram_efficient_loading`, or what ended it."""

    def work(rank):
        torch.set_num_threads(1)  # a pool of the parent's is none of its children
        os.environ |= FSDP | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
        as_accelerators()
        args = settings(
            output_dir=str(folder), per_device_train_batch_size=4, num_generations=4, max_completion_length=4, max_steps=1, disable_tqdm=True,
            logging_steps=1, gradient_checkpointing=False, aqn=False, model_init_kwargs={"dtype": "float32"}, padding_free=True, **options,
        )  # fmt: skip
        lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        trainer = QeRLGRPOTrainer(
            tiny_runs.model, make_reward(), args, PROMPTS,
            processing_class=tiny_runs.tokenizer, peft_config=None if args.base_format == "full" else lora,
        )  # fmt: skip
        trainer.train()
        return next(log for log in trainer.state.log_history if "loss" in log)

    return [outcome.answer for outcome in on_ranks(2, work)]


def test_a_reference_model_is_whole_in_every_process(tiny_runs, tmp_path):
    """All but the first process of a machine had zeros of it, and the penalty was one for leaving half of a model."""
    for log in sharded_run(tiny_runs, tmp_path, base_format="full", beta=0.5):
        assert log["kl"] < 1e-6


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory, tiny_runs):
    folder = tmp_path_factory.mktemp("reward")
    config = make_tiny_config("qwen2")
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_config(config).float().save_pretrained(folder)
    tiny_runs.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("base_format", ["nvfp4", "bf16"])
def test_a_reward_model_that_is_named_is_whole_in_every_process(base_format, reward_model, tiny_runs, tmp_path):
    first, second = sharded_run(tiny_runs, tmp_path, lambda: reward_model, base_format=base_format)
    assert "reward" in first, first
    assert first["reward"] == second["reward"] != 0

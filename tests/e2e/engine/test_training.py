"""GRPO and RLOO with the colocated engine: every arm, a grammar, a dying engine, held-out problems."""

from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback

from qerl_trl import QeRLRLOOTrainer, last_checkpoint
from qerl_trl.nvfp4.linear import set_compute
from qerl_trl.rollout.engine import RolloutError
from qerl_trl.tasks.data import with_prompts
from qerl_trl.tasks.evaluation import HeldOutAccuracy, Measurement, solve
from qerl_trl.tasks.task import Task
from tests.e2e.engine import engines
from tests.e2e.engine.engines import EXACT, MEMORY, gap, greedy, logs_of, randomize, trainer_of, write_model
from tests.faults.tiny_runs import logged

ASSETS = Path(__file__).resolve().parents[3] / "examples" / "assets"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


#: of the bf16 arm, for layers of a fused one with and without an adapter
SOME = LoraConfig(r=8, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"])


def check_arm(folder, path, arm: str) -> tuple:
    """Two steps, with noise in the second; each update reaches the engine. Returns generation and trained tensors."""
    from qerl_trl.rollout.vllm.engine import engine_model

    rate = 1e-3 if arm == "full" else 1e-2
    lora = SOME if arm == "bf16" else None
    options = {"learning_rate": rate, "peft_config": lora, "score_centering_top_k": 5}
    trainer = trainer_of(folder, path, base_format=arm, **options)
    g, policy = trainer.vllm_generation, trainer.accelerator.unwrap_model(trainer.model)
    layer = engine_model(g.llm).model.layers[0].self_attn.qkv_proj
    methods = {"nvfp4": "NVFP4Method", "nf4": "NF4Method"}
    assert type(layer.quant_method).__name__ == methods.get(arm, "DenseMethod")
    assert g.probe_result.base_difference < EXACT
    if arm == "bf16":
        assert {n.rpartition(".")[2] for n in g.engine.state.slots} == {*SOME.target_modules, "k_proj"}
    # before training: in a process's second trainer accelerate's prepare() copies tensors from "cpu" to "cpu:0"
    if arm != "full":
        mine = policy.get_base_model().model.layers[0].self_attn.q_proj.base_layer
        names = {"nvfp4": ("weight_packed",) * 2, "bf16": ("weight",) * 2, "nf4": ("weight", "nf4_0")}[arm]
        assert getattr(mine, names[0]).data_ptr() == getattr(layer, names[1]).data_ptr()
    before = greedy(g.llm)[1]
    trainer.train()
    policy.eval()
    clean, noisy = logs_of(trainer)
    assert clean["aqn/sigma"] == 0 and clean["sampling/sampling_logp_difference/max"] < 1e-3
    assert noisy["aqn/sigma_effective"] == pytest.approx(noisy["aqn/sigma"], rel=0.15)
    assert noisy["sampling/sampling_logp_difference/max"] > 0.1  # the rollout is noisy, the trainer is not
    assert all(log["grad_norm"] > 0 and 0.1 < log["score_centering/head_mass"] < 1 for log in (clean, noisy))
    assert gap(policy, g.llm) > 0.1  # the last update is not in the engine yet, and noise is
    # TRL casts a bitsandbytes model's adapter to bfloat16; in float32 the comparison is exact
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    g.sync_weights()
    g.sync_noise()
    assert gap(policy, g.llm) < EXACT
    assert (greedy(g.llm)[1] - before).abs().max() > 0.1
    changed = [p for n, p in policy.named_parameters() if p.requires_grad and ("lora_B" in n or arm == "full")]
    with torch.no_grad():  # by hand, and generate() must notice
        for parameter in changed:
            parameter.mul_(1.3)
    assert gap(policy, g.llm) > 0.1
    g.generate_greedily([[1, 2, 3]], 1)
    assert gap(policy, g.llm) < EXACT
    return g, changed


@pytest.mark.parametrize("arm", ["nvfp4", "bf16", "nf4", "full"])
def test_every_arm_trains_and_rolls_out_with_its_own_base(arm, path, tmp_path):
    g, changed = check_arm(tmp_path, path, arm)
    if arm != "full":
        return
    g.engine.state.model.load_weights = lambda weights: {name for name, _ in weights}
    with torch.no_grad():
        for parameter in changed:
            parameter.mul_(1.1)
    with pytest.raises(RolloutError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        g.sync_weights()


def test_w4a8_is_one_function_in_rollout_and_update(path, tmp_path):
    """A last bit can move a rounding to FP8, and then one token's log-probability by much: medians are compared."""
    trainer = trainer_of(tmp_path, path, compute="w4a8")
    g, policy = trainer.vllm_generation, trainer.accelerator.unwrap_model(trainer.model)
    assert g.spec.compute == "w4a8" and g.probe_result.fault is None
    trainer.train()
    clean = logs_of(trainer)[0]
    assert clean["sampling/sampling_logp_difference/mean"] < 0.02 and clean["grad_norm"] > 0
    policy.eval()
    g.sync_weights()
    g.sync_noise()
    (tokens, logps), apart = greedy(g.llm), []
    for compute in ("w4a8", "w4a16"):
        set_compute(policy, compute)
        apart.append((engines.transformers_logps(policy, tokens) - logps).abs().median().item())
    assert apart[0] < EXACT and apart[1] > 0.05


def test_w4a8_from_wide_norms_has_the_same_bits(tmp_path, monkeypatch):
    policy, found = engines.adapter_on(engines.packed(write_model(tmp_path, hidden_size=256), dtype="bfloat16")), []
    set_compute(policy, "w4a8")
    for hopper in (False, True):
        monkeypatch.setattr("qerl_trl.rollout.vllm.linear.on_hopper", lambda hopper=hopper: hopper)
        g = engines.stub_generation(policy)
        kinds = [type(module).__name__ for module in g.engine.state.model.modules()]
        assert (kinds.count("WideRMSNorm"), kinds.count("WideSiluAndMul")) == (4 * hopper, 2 * hopper)
        g.sync_weights()
        found.append(greedy(g.llm))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_rloo_continues_from_the_checkpoint_of_a_dying_engine(path, tmp_path):
    def dies(*args, **kwargs):
        raise RuntimeError("EngineCore died")

    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer.vllm_generation.llm.generate = dies

    settings = {"trainer_class": QeRLRLOOTrainer, "max_steps": 3, "aqn_num_stages": 3}
    settings |= {"save_strategy": "steps", "save_steps": 100}
    trainer = trainer_of(tmp_path, path, callbacks=[Breaks()], **settings)
    with pytest.raises(RolloutError, match=r"EngineCore died(.|\n)*Step 2 is saved"):
        trainer.train()
    first, second = (log["aqn/sigma_effective"] for log in logs_of(trainer))
    assert first == 0 and second > 1e-3
    assert Path(last_checkpoint(str(tmp_path / "run"))).name == "checkpoint-2"
    again = trainer_of(tmp_path, path, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


PROBLEMS = 16


def test_held_out_problems_are_answered_as_by_transformers(tmp_path):
    """Before, during and after training, without the noise of the rollouts."""
    embedded = str(ASSETS / "tiny-qwen2")
    rows = load_dataset("json", data_files=str(ASSETS / "test.jsonl"), split="train")
    test = with_prompts(rows).select(range(PROBLEMS))
    tokenizer = AutoTokenizer.from_pretrained(embedded, padding_side="left")
    given = {"processing_class": tokenizer, "train_dataset": test, "eval_dataset": test.select(range(8))}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "num_generations_eval": 1}
    limits = {"vllm_max_model_length": 256, "max_completion_length": 48, "aqn_sigma_start": 0.3, "aqn_sigma_end": 0.2}
    trainer = trainer_of(tmp_path, embedded, **given, **evaluated, **limits)
    g, policy = trainer.vllm_generation, trainer.accelerator.unwrap_model(trainer.model)
    randomize(policy, scale=0.02)
    measurement, noise, during, generate = Measurement(trainer, Task(), test), [], [], g.engine.generate

    def watched(prompts, sampling):
        noise.append((g.engine.state.sigma_effective(), sampling.temperature))
        return generate(prompts, sampling)

    def check_answers():
        mine = measurement.held_out_completions()
        assert mine == solve(policy, trainer.processing_class, test, 48, progress=False)
        assert len(set(mine)) > PROBLEMS // 2

    class Checks(HeldOutAccuracy):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            super().on_evaluate(args, state, control, metrics=metrics, **kwargs)
            check_answers()
            during.append(metrics["eval_held_out_accuracy"])

    g.engine.generate = watched
    check_answers()
    trainer.add_callback(Checks(measurement))
    trainer.train()
    check_answers()
    assert logged(trainer, "eval_held_out_accuracy") == during
    assert len(during) == 2 and set(noise) == {(0.0, 0.0)}
    first, second = (log["aqn/sigma_effective"] for log in logs_of(trainer))
    assert first == 0 and second > 0.1  # the rollout after an evaluation is noisy


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ["nvfp4", "bf16", "nf4", "full"])
def test_cuda_graphs_read_current_weights(arm, path, tmp_path):
    """bfloat16: stock vLLM differs from transformers by 0.05 nats on random weights."""
    dtype = {"dtype": "float32" if arm == "full" else "bfloat16"}
    trainer = trainer_of(tmp_path, path, base_format=arm, bf16=True, model_init_kwargs=dtype, vllm_engine_kwargs=MEMORY)
    g = trainer.vllm_generation
    before = greedy(g.llm)[1]
    trainer.train()
    g.sync_weights()
    g.sync_noise()
    assert (greedy(g.llm)[1] - before).abs().mean() > 0.1
    g.run_probe()
    assert g.spec.dtype == "bfloat16" and g.probe_result.difference < 0.1
    assert logs_of(trainer)[0]["sampling/sampling_logp_difference/mean"] < 0.1

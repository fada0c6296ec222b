import dataclasses
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.memory.formulas import engine_kv_bytes, model_bytes, predicted_bytes, shape_of
from qerl_trl.memory.of_trainer import Recomputation, plan_trainer
from qerl_trl.memory.plan import GIB, Gpu, gpu_of_card, plan_run, relief
from qerl_trl.memory.workload import LARGER_STEPS, MAX_BATCHED_TOKENS, Workload
from qerl_trl.run import banner as report
from qerl_trl.run.banner import banner
from tests.shapes import FOURTEEN_B, SEVEN_B, THIRTY_TWO_B, THREE_B

SHAPE = shape_of(SEVEN_B)
WORK = Workload(batch=4, prompt_length=512, completion_length=1024, completions=64, rollout="colocate", accumulation=4)
CARDS = (16, 24, 32, 48, 80, 141)


def plan(gib: float | None = 80, **changes):
    return plan_run(SHAPE, dataclasses.replace(WORK, **changes), None if gib is None else Gpu.of_gib(gib))


def test_the_cache_is_what_all_sequences_need_and_no_more():
    made = plan(141)
    assert made.kv_bytes == made.kv_wanted == engine_kv_bytes(SHAPE, WORK, 64)
    assert (made.sequences, made.waves, made.fits) == (64, 1, True)
    assert made.peak == plan(80).peak == plan(None).peak
    assert made.changes == ()
    made.check()


def test_the_cache_shrinks_before_anything_else():
    tight = plan(16)
    assert tight.fits and tight.kv_bytes < tight.kv_wanted
    assert tight.peak <= 16 * GIB < plan(80).peak
    assert tight.waves == -(-64 // tight.sequences) > 1
    assert tight.kv_bytes == engine_kv_bytes(SHAPE, WORK, tight.sequences), "whole sequences"
    assert not tight.changes and tight.verdict() == "It fits into 16.0 GiB."
    tight.check()


def test_less_than_two_sequences_is_refused_with_a_setting_that_fits():
    made = plan(12)
    assert not made.fits
    with pytest.raises(RuntimeError, match=r"does not fit into 12\.0 GiB") as info:
        made.check()
    assert "per_device_train_batch_size: 2 (gradient_accumulation_steps: 8)" in str(info.value)
    assert plan(12, batch=2, accumulation=8).fits


@pytest.mark.parametrize("gib", CARDS)
@pytest.mark.parametrize("model", [THREE_B, SEVEN_B, FOURTEEN_B, THIRTY_TWO_B], ids=["3b", "7b", "14b", "32b"])
def test_proposed_settings_really_fit(model, gib):
    """Every proposal, read back as a workload and planned again."""
    shape = shape_of(model)
    made = plan_run(shape, dataclasses.replace(WORK, batch=16, completion_length=8192), Gpu.of_gib(gib))
    assert made.peak <= gib * GIB or not made.fits
    if not made.changes:
        return
    names = {
        "vllm_enable_sleep_mode": "sleep",
        "per_device_train_batch_size": "batch",
        "optim": "optimizer",
        "max_completion_length": "completion_length",
    }
    changed = {}
    for setting in made.changes:
        name, value = setting.split(" (")[0].split(": ")
        changed[names[name]] = {"true": True}.get(value, int(value) if value.isdigit() else value)
    again = plan_run(shape, dataclasses.replace(made.work, **changed), Gpu.of_gib(gib))
    assert again.fits
    assert made.work.completions == again.work.completions


def test_the_cheapest_change_is_one_setting_where_one_is_enough():
    made = plan(24, batch=16, accumulation=1)
    assert not made.fits and len(made.changes) == 1
    long = dataclasses.replace(WORK, batch=16, completion_length=8192)
    both = plan_run(shape_of(FOURTEEN_B), long, Gpu.of_gib(24))
    assert both.changes[0] == "vllm_enable_sleep_mode: true" and len(both.changes) > 1


def test_sleep_takes_the_cache_out_of_updates():
    awake, asleep = plan(16), plan(16, sleep=True)
    assert asleep.kv_bytes > awake.kv_bytes
    cache = next(part for part in asleep.parts if part.name == "KV cache")
    assert (cache.update, cache.rollout) == (0, asleep.kv_bytes)
    assert "freed in updates" in asleep.summary()


def test_sleep_takes_the_engines_copy_of_the_weights_out_of_updates_too():
    copied = plan(141, share_weights=False)
    asleep = plan(141, share_weights=False, sleep=True)
    size = next(part.update for part in copied.parts if "copy" in part.name)
    assert 5 * GIB < size < 6 * GIB
    assert copied.update - asleep.update == size + copied.kv_bytes
    assert plan(141).peak < copied.peak


def test_other_processes_on_the_gpu_leave_less():
    alone = plan_run(SHAPE, WORK, Gpu.of_gib(24))
    beside = plan_run(SHAPE, WORK, dataclasses.replace(Gpu.of_gib(24), outside=8 * GIB))
    assert beside.kv_bytes < alone.kv_bytes


def test_more_of_anything_needs_more():
    least = plan(None)
    for change in (
        {"batch": 16},
        {"completion_length": 4096},
        {"prompt_length": 4096},
        {"lora_rank": 128},
        {"completions": 256},
        {"base_format": "bf16"},
        {"base_format": "full", "share_weights": True},
        {"gradient_checkpointing": False},
        {"attention": "eager"},
        {"processes": 2},
        {"dtype_bytes": 4},
        {"share_weights": False},
    ):
        assert plan(None, **change).peak > least.peak, change
    for change in ({"optimizer": "adamw_8bit"}, {"graphs": False}, {"attention": "flash"}, {"kv_dtype_bytes": 1}):
        assert plan(None, **change).peak < least.peak, change


@pytest.mark.parametrize("sleep", [False, True], ids=["awake", "asleep"])
def test_layers_are_recomputed_only_where_memory_demands(sleep):
    def planned(gib, recomputed=None):
        return plan(gib, gradient_checkpointing=recomputed, sleep=sleep)

    kept = {gib: planned(gib).work.kept_layers for gib in (*CARDS, 200)}
    assert kept[16] < 2 and kept[200] == SHAPE.layers
    assert list(kept.values()) == sorted(kept.values()) and 0 < kept[48] < SHAPE.layers
    for gib in CARDS:
        made, always = planned(gib), planned(gib, recomputed=True)
        assert (made.kv_bytes, made.waves, made.fits) == (always.kv_bytes, always.waves, always.fits)
        # a tenth stays free, and one layer more would take it
        more = dataclasses.replace(made.work, kept_layers=made.work.kept_layers + 1, gradient_checkpointing=True)
        most = plan_run(SHAPE, more, Gpu.of_gib(gib)).update
        if made.work.kept_layers:
            assert made.update <= 0.9 * gib * GIB
            assert f"{made.work.kept_layers} of 28 layers not recomputed" in made.table()
        assert made.work.kept_layers == SHAPE.layers or most > 0.9 * gib * GIB or made.kv_bytes < made.kv_wanted
    assert planned(200).update == planned(200, recomputed=False).update
    assert planned(None).work.kept_layers == 0


def test_what_a_process_has_taken_beside_its_model_is_left_alone():
    counted = predicted_bytes(SHAPE, WORK)
    gpu = Gpu.of_gib(80)
    free = gpu.total - gpu.outside - counted.base - counted.trained
    work = dataclasses.replace(WORK, gradient_checkpointing=None)
    alone = plan_run(SHAPE, work, dataclasses.replace(gpu, free=free), counted)
    beside = plan_run(SHAPE, work, dataclasses.replace(gpu, free=free - 15 * GIB), counted)
    assert alone.work.kept_layers == plan_run(SHAPE, work, gpu).work.kept_layers
    assert beside.work.kept_layers < alone.work.kept_layers
    assert beside.update <= 0.9 * gpu.total - 15 * GIB


def test_out_of_memory_proposes_to_recompute_what_is_kept():
    asleep = plan(80, gradient_checkpointing=None, batch=1, sleep=True)
    assert relief(asleep, SHAPE, predicted_bytes(SHAPE, asleep.work), "update", GIB) == (
        "gradient_checkpointing: true",
    )


def test_what_fsdp_cannot_step_is_not_proposed():
    least = dataclasses.replace(WORK, batch=1, sleep=True, gradient_checkpointing=True)
    for work, proposed in ((least, "optim: adamw_8bit"), (least.under_fsdp(), "max_completion_length: 512")):
        made = plan_run(SHAPE, work, Gpu.of_gib(80))
        assert relief(made, SHAPE, predicted_bytes(SHAPE, made.work), "update", 2**20) == (proposed,)


def test_gradients_are_there_in_a_rollout_only_in_the_middle_of_an_update():
    def gradients(**changes):
        return next(part.rollout for part in plan(None, **changes).parts if part.name == "gradients")

    assert gradients() == 0  # 4 x 4 of 64: four updates per rollout
    assert gradients(accumulation=32) > 0  # two rollouts an update
    assert gradients(processes=2) > 0  # DDP's buckets stay


@pytest.mark.parametrize("rollout", ["transformers", "server"])
def test_without_an_engine_in_the_process_there_is_no_cache(rollout):
    made = plan(141, rollout=rollout)
    assert made.kv_bytes == 0 and made.fits and "KV cache" not in made.table()
    assert not [part for part in made.parts if "engine" in part.name and part.update]
    assert (made.rollout > plan(141, rollout="server").rollout) is (rollout == "transformers")
    assert not plan(8, rollout=rollout).fits


def test_a_share_or_a_size_given_by_hand_is_never_refused():
    share = plan(24, utilization=0.3)
    assert share.kv_bytes < 0.3 * 24 * GIB and share.kv_bytes != plan(24).kv_bytes
    size = plan(12, kv_limit=20 * GIB)
    assert size.kv_bytes == 20 * GIB and not size.fits
    size.check()
    plan(12, utilization=0.9).check()


def test_an_engine_for_longer_sequences_gets_a_cache_for_one_of_them():
    made = plan_run(SHAPE, dataclasses.replace(WORK, completions=2), Gpu.of_gib(141), max_model_len=32768)
    assert made.kv_bytes >= engine_kv_bytes(SHAPE, dataclasses.replace(WORK, prompt_length=32768 - 1024), 1)
    assert made.max_model_len == 32768 and made.fits


def test_the_engine_is_told_this_cache_and_less_than_what_is_free():
    arguments = plan(80).engine_arguments()
    assert arguments["kv_cache_memory_bytes"] == plan(80).kv_bytes
    assert arguments["gpu_memory_utilization"] == 0.01
    half = plan_run(SHAPE, WORK, Gpu(80 * GIB, GIB, free=40 * GIB)).engine_arguments()
    assert half["gpu_memory_utilization"] == 0.01


def test_an_engine_takes_larger_steps_where_its_prompts_fill_them_and_the_card_has_room():
    roomy, cramped = plan(80), plan(18)
    assert roomy.work.step_tokens == 16384 and roomy.engine_arguments()["max_num_batched_tokens"] == 16384
    assert roomy.rollout <= 0.9 * 80 * GIB and roomy.kv_bytes == roomy.kv_wanted
    assert cramped.fits and cramped.engine_arguments()["max_num_batched_tokens"] == MAX_BATCHED_TOKENS
    # each of the steps in between is taken by some card, and no card is asked for more KV cache or more memory than without
    steps = [plan(half / 2) for half in range(36, 50)]
    assert {made.work.step_tokens for made in steps} == {MAX_BATCHED_TOKENS, *LARGER_STEPS}
    assert [made.work.step_tokens for made in steps] == sorted(made.work.step_tokens for made in steps)
    for made in steps:
        small = plan(made.gpu.total / GIB, batched_tokens=MAX_BATCHED_TOKENS)
        assert (made.kv_bytes, made.sequences, made.work.kept_layers) == (
            small.kv_bytes, small.sequences, small.work.kept_layers,
        )  # fmt: skip
    assert plan(80, prompt_length=64).work.step_tokens == MAX_BATCHED_TOKENS  # 64 x 64 tokens
    assert plan(80, prompt_length=65).work.step_tokens == 8192


def test_steps_that_were_chosen_by_hand_stay():
    assert plan(80, batched_tokens=2048).engine_arguments()["max_num_batched_tokens"] == 2048
    assert plan(80, utilization=0.5).work.step_tokens == MAX_BATCHED_TOKENS  # the engine is told nothing but its share
    assert plan(80, rollout="server").work.step_tokens == MAX_BATCHED_TOKENS


def test_an_engine_that_runs_keeps_its_steps_when_updates_are_planned_again(make_trainer):
    """It was started where there was no room for larger ones, which what changed in the updates makes."""
    trainer = make_trainer(["a", "b"])
    tight = dataclasses.replace(WORK, rollout="colocate", prompt_length=4096, batch=1, packed=True)
    shape, counted = shape_of(trainer.model.config), model_bytes(trainer.model)
    least = plan_run(shape, tight, None, counted)
    made = trainer.memory_plan = plan_run(shape, tight, Gpu(round(least.rollout * 1.02)), counted)
    assert made.work.step_tokens == MAX_BATCHED_TOKENS and made.fits and made.waves == 1
    trainer.memory_plan = dataclasses.replace(made, gpu=Gpu.of_gib(80))
    assert plan_run(shape, tight, Gpu.of_gib(80), counted).work.step_tokens == LARGER_STEPS[0]
    Recomputation(trainer)._follow()
    assert trainer.memory_plan.work.step_tokens == MAX_BATCHED_TOKENS and not trainer.memory_plan.work.packed


def test_the_table_adds_up_and_is_readable():
    made = plan(16)
    table = made.table()
    assert "frozen base, nvfp4" in table and "optimizer, adamw_torch_fused" in table
    assert f"KV cache {made.kv_bytes / GIB:.1f} GiB: {made.sequences} sequences of 1536 tokens at a time" in table
    assert f"64 completions run in {made.waves} waves" in table
    rows = [line.split() for line in table.splitlines()[1:-2]]
    assert sum(float(row[-2]) for row in rows) == pytest.approx(made.update / GIB, abs=0.1)
    assert sum(float(row[-1]) for row in rows) == pytest.approx(made.rollout / GIB, abs=0.1)
    assert max(map(len, table.splitlines()[:-1])) < 90


# --- of a trainer -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path):
    def make(prompts, **settings):
        args = QeRLConfig(
            str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=4, report_to="none",
            max_completion_length=6, model_init_kwargs={"dtype": "float32"}, **settings,
        )  # fmt: skip
        return QeRLGRPOTrainer(
            str(tiny_model_dir("qwen2")),
            lambda completions, **kwargs: [0.0] * len(completions),
            args,
            Dataset.from_dict({"prompt": prompts}),
            processing_class=tiny_tokenizer,
            peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        )

    return make


def test_a_trainer_plans_with_its_own_data_and_counts_its_own_model(make_trainer, monkeypatch):
    trainer = make_trainer(["a", "a prompt of some length", "b"], gradient_accumulation_steps=2)
    made = trainer.memory_plan
    assert made is plan_trainer(trainer)
    assert made.work == Workload(
        batch=4, prompt_length=23, completion_length=6, completions=8, accumulation=2, lora_rank=4, dtype_bytes=4,
        gradient_checkpointing=None, generations=4, fused=True,
    ).on_a_cpu()  # fmt: skip
    counted = model_bytes(trainer.model)
    sizes = {part.name: part.update for part in made.parts}
    assert sizes["frozen base, nvfp4"] == counted.base and sizes["adapter, rank 4"] == counted.trained
    assert made.gpu == Gpu.of_machine() and made.max_model_len == 64
    assert "planned peak" in banner(trainer) and "4 per prompt" in banner(trainer)
    assert "\n  kernels" not in banner(trainer), "on a CPU there are none"
    monkeypatch.setattr(
        report, "selected_for_model", lambda model, rank, _: [f"o, rank {rank}: measured", "down: heuristic"]
    )
    assert "\n  kernels     o, rank 4: measured\n              down: heuristic" in banner(trainer)


def test_a_prompt_that_cannot_fit_stops_a_trainer_at_start(make_trainer):
    with pytest.raises(
        ValueError, match=r"1 of 2 prompts leave less than .* tokens for a completion: the longest has 600 tokens"
    ):
        make_trainer(["a", "x" * 600])


def test_a_run_that_will_not_fit_is_warned_of_and_one_with_an_engine_is_stopped(make_trainer, caplog):
    trainer = make_trainer(["a", "b"])
    trainer.memory_plan = None
    made = plan_trainer(trainer, Gpu(10**8))
    assert "does not fit into 0.1 GiB" in caplog.text and trainer.memory_plan is made
    generation = pytest.importorskip("qerl_trl.rollout.generation")
    accelerator = SimpleNamespace(device=torch.device("cuda"))
    engine = SimpleNamespace(gpu_memory_utilization=None, accelerator=accelerator, trainer=trainer)
    trainer.memory_plan = plan(80)
    assert generation.memory_arguments(engine) == plan(80).engine_arguments()
    trainer.memory_plan = plan(10)
    with pytest.raises(RuntimeError, match="It fits with vllm_enable_sleep_mode: true"):
        generation.memory_arguments(engine)


def test_a_run_beyond_the_machines_memory_is_refused_on_a_cpu(make_trainer, monkeypatch):
    machine = Gpu.of_machine(0.5)
    monkeypatch.setattr(Gpu, "of_machine", lambda: machine)
    with pytest.raises(
        RuntimeError, match=r"memory, GiB.*(?s:.*)It does not fit into 0\.5 GiB.*machine with more memory"
    ):
        make_trainer(["a", "b"])


@pytest.mark.parametrize("space", [None, "3"])
def test_an_engine_on_a_cpu_takes_the_planned_cache(monkeypatch, space):
    """vLLM's own is nine tenths of the machine. What its variable says is what it takes, and what is planned."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if space:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    work = dataclasses.replace(WORK, dtype_bytes=4).on_a_cpu()
    made = plan_run(SHAPE, work, Gpu.of_machine(400))
    blocks = work.completions * -(-work.length // 128) + 1
    whole = 2 * 4 * SHAPE.kv_width * SHAPE.layers * blocks * 128
    assert made.kv_bytes == (3 * GIB if space else whole)
    assert made.engine_arguments()["kv_cache_memory_bytes"] == made.kv_bytes
    assert made.engine_arguments()["max_num_batched_tokens"] == MAX_BATCHED_TOKENS


def test_a_plan_is_data(make_trainer):
    assert json.loads(json.dumps(dataclasses.asdict(plan(24))))["work"]["batch"] == 4


def test_a_card_by_name():
    assert gpu_of_card("rtx4090").total == gpu_of_card("NVIDIA GeForce RTX 4090").total == 24 * 10**9
    assert gpu_of_card("A100").total == 80 * 10**9 and gpu_of_card("A100-40GB").total == 40 * 10**9
    with pytest.raises(ValueError, match=r"--card 'Voodoo 2' .* is none of .*RTX 4090.*--gpu-gib"):
        gpu_of_card("Voodoo 2")


def test_the_capped_cases_of_whole_steps_fit_as_they_are(monkeypatch):
    """7B at 64 x 512 into 40 GiB and 32B at 8 x 512 into 26 GiB among them: within the cap, and all completions at a time."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    steps = importlib.import_module("step")
    capped = {name: case for name, case in steps.ALL.items() if case.cap is not None}
    assert {"ours-7b-64x512-40gib", "ours-32b-8x512-26gib"} <= capped.keys()
    for name, case in capped.items():
        plan = steps.plan_of(case)
        assert plan.fits and plan.waves == 1 and plan.peak <= case.cap * GIB, f"{name}\n{plan.table()}"
        assert plan.work.batch * plan.work.accumulation == case.batch

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from qerl_trl.memory.formulas import engine_kv_bytes, predicted_bytes, shape_of
from qerl_trl.memory.plan import CARDS, GIB, OTHERS, Gpu, gpu_of_card, plan_run, relief
from qerl_trl.memory.workload import MAX_BATCHED_TOKENS, Workload
from tests.shapes import FOURTEEN_B, SEVEN_B, THIRTY_TWO_B, THREE_B

SHAPE = shape_of(SEVEN_B)
WORK = Workload(batch=4, prompt_length=512, completion_length=1024, completions=64, rollout="colocate", accumulation=4)
SIZES = (16, 24, 32, 48, 80, 141)


def plan(gib: float | None = 80, **changes):
    return plan_run(SHAPE, dataclasses.replace(WORK, **changes), None if gib is None else Gpu.of_gib(gib))


def test_the_cache_is_for_all_sequences_and_no_larger():
    made = plan(141)
    assert made.kv_bytes == made.kv_wanted == engine_kv_bytes(SHAPE, WORK, 64)
    assert (made.sequences, made.waves, made.fits, made.changes) == (64, 1, True, ())
    assert made.peak == plan(80).peak == plan(None).peak
    made.check()
    assert json.loads(json.dumps(dataclasses.asdict(made)))["work"]["batch"] == 4, "a plan is data"


def test_the_cache_shrinks_before_anything_else():
    tight = plan(16)
    assert tight.fits and tight.kv_bytes < tight.kv_wanted
    assert tight.peak <= 16 * GIB < plan(80).peak
    assert tight.waves == -(-64 // tight.sequences) > 1
    assert tight.kv_bytes == engine_kv_bytes(SHAPE, WORK, tight.sequences), "whole sequences"
    assert not tight.changes and tight.verdict() == "It fits into 16.0 GiB."
    others = plan_run(SHAPE, WORK, dataclasses.replace(Gpu.of_gib(24), outside=8 * GIB))
    assert others.kv_bytes < plan(24).kv_bytes, "other processes leave less"


def test_less_than_two_sequences_is_refused_with_a_setting_that_fits():
    made = plan(12)
    with pytest.raises(RuntimeError, match=r"does not fit into 12\.0 GiB") as info:
        made.check()
    assert "per_device_train_batch_size: 2 (gradient_accumulation_steps: 8)" in str(info.value)
    assert plan(12, batch=2, accumulation=8).fits and not made.fits


def test_sleep_frees_the_cache_and_the_engines_weights_in_updates():
    awake, asleep = plan(16), plan(16, sleep=True)
    assert asleep.kv_bytes > awake.kv_bytes and "freed in updates" in asleep.summary()
    (cache,) = (part for part in asleep.parts if part.name == "KV cache")
    assert (cache.update, cache.rollout) == (0, asleep.kv_bytes)
    copied, asleep = plan(141, share_weights=False), plan(141, share_weights=False, sleep=True)
    (size,) = (part.update for part in copied.parts if "copy" in part.name)
    assert 5 * GIB < size < 6 * GIB
    assert copied.update - asleep.update == size + copied.kv_bytes


@pytest.mark.parametrize("rollout", ["transformers", "server"])
def test_without_an_engine_in_the_process_there_is_no_cache(rollout):
    made = plan(141, rollout=rollout)
    assert made.kv_bytes == 0 and made.fits and "KV cache" not in made.table()
    assert not [part for part in made.parts if "engine" in part.name and part.update]
    assert (made.rollout > plan(141, rollout="server").rollout) is (rollout == "transformers")
    assert not plan(8, rollout=rollout).fits


def test_an_explicit_share_or_size_is_never_refused():
    share, size = plan(24, utilization=0.3), plan(12, kv_limit=20 * GIB)
    assert share.kv_bytes < 0.3 * 24 * GIB and share.kv_bytes != plan(24).kv_bytes
    assert size.kv_bytes == 20 * GIB and not size.fits
    size.check()
    plan(12, utilization=0.9).check()


def test_an_engine_for_longer_sequences_gets_a_cache_for_one_of_them():
    made = plan_run(SHAPE, dataclasses.replace(WORK, completions=2), Gpu.of_gib(141), max_model_len=32768)
    assert made.kv_bytes >= engine_kv_bytes(SHAPE, dataclasses.replace(WORK, prompt_length=32768 - 1024), 1)
    assert made.max_model_len == 32768 and made.fits


@pytest.mark.parametrize("space", [None, "3"])
def test_an_engine_on_a_cpu_takes_the_planned_cache(monkeypatch, space):
    """vLLM's own is nine tenths of the machine; its environment variable overrides arguments."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if space:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    work = dataclasses.replace(WORK, dtype_bytes=4).on_a_cpu()
    made = plan_run(SHAPE, work, Gpu.of_machine(400))
    blocks = work.completions * -(-work.length // 128) + 1
    whole = 2 * 4 * SHAPE.kv_width * SHAPE.layers * blocks * 128
    assert made.kv_bytes == made.engine_arguments()["kv_cache_memory_bytes"] == (3 * GIB if space else whole)
    assert made.engine_arguments()["max_num_batched_tokens"] == MAX_BATCHED_TOKENS


def test_an_engine_gets_the_planned_arguments_or_does_not_start():
    generation = pytest.importorskip("qerl_trl.rollout.generation")
    arguments = plan(80).engine_arguments()
    assert (arguments["kv_cache_memory_bytes"], arguments["gpu_memory_utilization"]) == (plan(80).kv_bytes, 0.01)
    accelerator = SimpleNamespace(device=torch.device("cuda"))
    trainer = SimpleNamespace(memory_plan=plan(80))
    engine = SimpleNamespace(gpu_memory_utilization=None, accelerator=accelerator, trainer=trainer)
    assert generation.memory_arguments(engine) == arguments
    trainer.memory_plan = plan(10)
    with pytest.raises(RuntimeError, match="It fits with vllm_enable_sleep_mode: true"):
        generation.memory_arguments(engine)


NAMES = {"vllm_enable_sleep_mode": "sleep", "per_device_train_batch_size": "batch", "optim": "optimizer"}
NAMES |= {"max_completion_length": "completion_length"}


@pytest.mark.parametrize("gib", SIZES)
@pytest.mark.parametrize("model", [THREE_B, SEVEN_B, FOURTEEN_B, THIRTY_TWO_B], ids=["3b", "7b", "14b", "32b"])
def test_proposed_settings_really_fit(model, gib):
    """Every proposal, read back as a workload and planned again."""
    shape = shape_of(model)
    made = plan_run(shape, dataclasses.replace(WORK, batch=16, completion_length=8192), Gpu.of_gib(gib))
    assert made.peak <= gib * GIB or not made.fits
    if not made.changes:
        return
    changed = {}
    for setting in made.changes:
        name, value = setting.split(" (")[0].split(": ")
        changed[NAMES[name]] = {"true": True}.get(value, int(value) if value.isdigit() else value)
    again = plan_run(shape, dataclasses.replace(made.work, **changed), Gpu.of_gib(gib))
    assert again.fits and made.work.completions == again.work.completions


LEAST = dataclasses.replace(WORK, batch=1, sleep=True)


@pytest.mark.parametrize(
    ("work", "missing", "proposed"),
    [
        (dataclasses.replace(LEAST, gradient_checkpointing=None), GIB, "gradient_checkpointing: true"),
        (LEAST, 2**20, "optim: adamw_8bit"),
        (LEAST.under_fsdp(), 2**20, "max_completion_length: 512"),  # FSDP has no 8-bit optimizer
    ],
    ids=["kept-layers", "optimizer", "fsdp"],
)
def test_out_of_memory_proposes_the_cheapest_setting(work, missing, proposed):
    made = plan_run(SHAPE, work, Gpu.of_gib(80))
    assert relief(made, SHAPE, predicted_bytes(SHAPE, made.work), "update", missing) == (proposed,)


@pytest.mark.parametrize("sleep", [False, True], ids=["awake", "asleep"])
def test_layers_are_recomputed_only_where_memory_demands(sleep):
    def planned(gib, recomputed=None):
        return plan(gib, gradient_checkpointing=recomputed, sleep=sleep)

    kept = {gib: planned(gib).work.kept_layers for gib in (*SIZES, 200)}
    assert kept[16] < 2 and kept[200] == SHAPE.layers
    assert list(kept.values()) == sorted(kept.values()) and 0 < kept[48] < SHAPE.layers
    for gib in SIZES:
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


def test_an_engine_takes_larger_steps_filled_by_its_prompts_if_the_card_has_room():
    roomy, cramped = plan(80), plan(18)
    assert roomy.engine_arguments()["max_num_batched_tokens"] == roomy.work.step_tokens == 16384
    assert roomy.rollout <= 0.9 * 80 * GIB and roomy.kv_bytes == roomy.kv_wanted
    assert cramped.fits and cramped.engine_arguments()["max_num_batched_tokens"] == MAX_BATCHED_TOKENS
    for gib in range(18, 25):  # next to the same KV cache
        assert plan(gib).kv_bytes == plan(gib, batched_tokens=MAX_BATCHED_TOKENS).kv_bytes
    assert plan(80, prompt_length=64).work.step_tokens == MAX_BATCHED_TOKENS  # 64 x 64 tokens
    assert plan(80, prompt_length=65).work.step_tokens == 8192
    # explicit ones stay; with a share of the GPU, or on a server, the engine chooses
    assert plan(80, batched_tokens=2048).engine_arguments()["max_num_batched_tokens"] == 2048
    assert plan(80, utilization=0.5).work.step_tokens == MAX_BATCHED_TOKENS
    assert plan(80, rollout="server").work.step_tokens == MAX_BATCHED_TOKENS


def test_the_table_adds_up():
    made = plan(16)
    table = made.table()
    assert f"64 completions run in {made.waves} waves" in table
    rows = [line.split() for line in table.splitlines()[1:-2]]
    assert sum(float(row[-2]) for row in rows) == pytest.approx(made.update / GIB, abs=0.1)
    assert sum(float(row[-1]) for row in rows) == pytest.approx(made.rollout / GIB, abs=0.1)


NAMED = [("4090", 24), ("NVIDIA GeForce RTX 4090", 24), ("NVIDIA H100 80GB HBM3", 80), ("RTX 4060 Ti 16GB", 16)]
NAMED += [("NVIDIA A100-SXM4-40GB", 40), ("NVIDIA RTX 6000 Ada Generation", 48)]


@pytest.mark.parametrize(("name", "gigabytes"), [*NAMED, *(CARDS | OTHERS).items()])
def test_a_card_is_known_by_its_name(name, gigabytes):
    assert gpu_of_card(name).total == gigabytes * 10**9


@pytest.mark.parametrize("name", ["", "RTX", "H1000", "24GB", "A1", "T4", "Tesla V100-SXM2-32GB"])
def test_an_unknown_card_is_refused(name):
    with pytest.raises(ValueError, match=r"is none of RTX 3060, .*--gpu-gib"):
        gpu_of_card(name)

"""Formulas against counts of real (tiny) models, and against peaks that benchmarks/memory.py measured on a GPU."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, MixtralConfig, Qwen2Config
from transformers.cache_utils import DynamicCache

from qerl_trl import NVFP4Config
from qerl_trl.memory import formulas
from qerl_trl.memory.formulas import model_bytes
from qerl_trl.memory.plan import GIB, plan_run
from qerl_trl.memory.workload import Workload, _together
from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.checkpoints import Selection, divided
from qerl_trl.update import batches, lora_linear, row
from qerl_trl.update.compiled_layers import compile_layers
from tests import architectures
from tests.shapes import FOURTEEN_B, SEVEN_B, SEVENTY_B, THIRTY_TWO_B, THREE_B, qwen2
from tests.tiny_models import make_tiny_model
from tests.update.models import saved_bytes

SIZES = {"3b": THREE_B, "7b": SEVEN_B, "14b": FOURTEEN_B, "32b": THIRTY_TWO_B, "70b": SEVENTY_B}
WORK = Workload(batch=2, prompt_length=16, completion_length=32, completions=4, lora_rank=4, padded=False)


def policy_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=NVFP4Config(), dtype="bfloat16")
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, register_nvfp4_lora(lora)).train()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma3", "phi3"])
def test_static_parts_equal_a_built_model(tiny_model_dir, family):
    shape = formulas.shape_of(tiny_model_dir(family))
    counted, predicted = model_bytes(policy_of(tiny_model_dir(family))), formulas.predicted_bytes(shape, WORK)
    assert predicted.base == pytest.approx(counted.base, rel=1e-3)
    assert (predicted.trained, predicted.trained_parameters) == (counted.trained, counted.trained_parameters)


def test_a_fully_trained_model_has_no_frozen_base(tiny_model_dir):
    shape = formulas.shape_of(tiny_model_dir("qwen2"))
    counted = model_bytes(AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), dtype="float32"))
    work = dataclasses.replace(WORK, base_format="full", dtype_bytes=4)
    assert formulas.predicted_bytes(shape, work) == counted


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "qwen3_5_text"])
def test_the_cache_of_generate_equals_a_filled_one(name):
    model = architectures.dense_model(name) if name == "qwen3_5_text" else make_tiny_model(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(3, 20, dtype=torch.long), past_key_values=cache)
    filled = 0
    for layer in cache.layers:
        for part in ("keys", "values", "conv_states", "recurrent_states"):
            found = getattr(layer, part, None)
            tensors = found.values() if isinstance(found, dict) else found if isinstance(found, list) else [found]
            filled += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
    assert formulas.kv_bytes(formulas.shape_of(model.config), 3, 20) == filled


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("compiled", "fused"), [(False, False), (False, True), (True, True)])
def test_layer_activations_are_what_autograd_saves(tiny_model_dir, compiled, fused):
    """Bytes kept by one decoder layer under bf16 autocast."""
    model = policy_of(tiny_model_dir("llama"))
    if fused:
        lora_linear.fuse(model)
    if compiled:  # without code: forward and backward are split as inductor's are
        torch._dynamo.reset()
        layers = compile_layers(model, backend="aot_eager")

    def kept(count):
        hidden = model.get_input_embeddings()(torch.randint(5, 300, (WORK.batch, WORK.length))).requires_grad_()
        inner = model.get_base_model().model
        all_layers, inner.layers = inner.layers, inner.layers[:count]
        with torch.autocast("cpu", torch.bfloat16):
            saved = saved_bytes(model, lambda: inner(inputs_embeds=hidden, use_cache=False))
        inner.layers = all_layers
        return saved

    shape, measured = formulas.shape_of(tiny_model_dir("llama")), kept(2) - kept(1)
    work = dataclasses.replace(WORK, compiled=compiled, fused=fused)
    planned = formulas.layer_activation_bytes(shape, work)
    assert planned == pytest.approx(measured, rel=0.03 if fused and not compiled else 0.15)
    if compiled:
        layers.recompute(layers.layers)
        assert kept(2) - kept(1) == formulas.checkpoint_bytes(shape, work) // shape.layers


TINY = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 320}


@pytest.mark.parametrize("name", [*architectures.VISION, "experts", "no width of 16"])
def test_towers_and_models_that_cannot_be_quantized_are_counted(name):
    """The latter for base_format="full" and "bf16"."""
    if name == "experts":
        config = MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=2, **TINY)
    elif name == "no width of 16":
        config = Qwen2Config(hidden_size=24, intermediate_size=40, **TINY)
    else:
        config = architectures.dense_model(name).config
    with torch.device("meta"):
        auto = AutoModelForImageTextToText if name in architectures.VISION else AutoModelForCausalLM
        model = auto.from_config(config)
    shape = formulas.shape_of(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layers == config.get_text_config().num_hidden_layers
    assert len(shape.linears) == len(divided(model, Selection())[0])


MOMENTS = {"adamw_torch_fused": 8.0, "paged_adamw_8bit": 2.04, "paged_adamw_32bit": 8.0, "sgd": 0.0}


@pytest.mark.parametrize(("optimizer", "per_parameter"), MOMENTS.items())
def test_optimizer_state_follows_the_optimizer(optimizer, per_parameter):
    model = formulas.ModelBytes(base=7, trained=4 * 10**6, trained_parameters=10**6)
    assert formulas.optimizer_bytes(optimizer, model) == round(per_parameter * 10**6)
    half = dataclasses.replace(model, trained=2 * 10**6)  # weights in bf16, and so torch's moments
    assert formulas.optimizer_bytes("adamw_torch_fused", half) == 4 * 10**6


RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


MEASURED = [row for row in result("memory_h200")["memory"] if "measured_gib" in row]
UPDATES = result("update_h200")["other_runs"]
STEP = result("step_h200")["step"]
STEPS = {row["name"]: row for row in STEP}


@pytest.mark.parametrize("measured", MEASURED, ids=lambda row: f"{row['name']}-{row['commit']}")
def test_peaks_measured_on_a_gpu_are_planned_from_zero_to_ten_percent_above(measured):
    """Memory of a whole process, by NVML. These runs set `CONTEXT_BYTES`, and nothing else."""
    shape = formulas.shape_of(SIZES[measured["shape"]])
    planned = plan_run(shape, Workload(**measured["workload"]), None).peak
    assert 1.0 <= planned / GIB / measured["measured_gib"] <= 1.1


def test_a_sharded_run_measured_on_two_gpus_is_planned():
    (measured,) = (row for row in result("multi_gpu_h200x2")["multi_gpu"] if row["name"] == "ours-fsdp2")
    planned = plan_run(formulas.shape_of(SEVEN_B), Workload(**measured["workload"]), None).peak
    assert all(1.0 <= planned / GIB / gib <= 1.1 for gib in measured["gib"])


@pytest.mark.parametrize(
    "measured", [row for row in STEP if "planned_gib" in row], ids=lambda row: f"{row['name']}-{row['commit']}"
)
def test_no_step_took_more_than_planned(measured):
    shape = formulas.shape_of(SIZES[measured["size"]])
    assert plan_run(shape, Workload(**measured["workload"]), None).peak / GIB >= measured["measured_gib"]


#: GiB more that torch had reserved with steps of 16384 tokens than with 4096 (rollout.py at 4686260 and 2e4b6a8)
@pytest.mark.parametrize(("size", "more"), [("1.5b", 8.2 - 7.4), ("3b", 10.9 - 9.9)])
def test_larger_steps_of_an_engine_take_less_than_planned(size, more):
    shape = formulas.shape_of({"1.5b": qwen2(1536, 8960, 28, 12, 2, 151936), "3b": THREE_B}[size])
    work = Workload(prompt_length=256, completion_length=256, completions=256, rollout="colocate")
    planned = formulas.engine_rollout_bytes(shape, dataclasses.replace(work, batched_tokens=16384))
    planned -= formulas.engine_rollout_bytes(shape, work)
    assert 1.0 <= planned / GIB / more <= 1.4


INSIDE = "nvfp4-compiled-fused"
CASES = [("parts", case, mode) for mode in ("checkpointed", "plain") for case in UPDATES["parts"]["cases"]]
CASES += [("recompute", INSIDE, "checkpointed"), ("recompute", INSIDE, "checkpointed-around")]


@pytest.mark.parametrize(("run", "case", "mode"), CASES)
def test_updates_measured_on_a_gpu_are_planned(run, case, mode):
    """Allocated by forward and backward of a micro-batch without padding; at first recomputed from outside."""
    record, shape = UPDATES[run], formulas.shape_of(SEVEN_B)
    tokens, completion = record["tokens_each"], record["completion_tokens_each"]
    lengths = {"batch": record["sequences"], "prompt_length": tokens - completion, "completion_length": completion}
    kind = {"compiled": "compiled" in case, "fused": "fused" in case, "gradient_checkpointing": mode != "plain"}
    work = Workload(**lengths, **kind, padded=False, base_format="nvfp4" if "nvfp4" in case else "bf16")
    model = formulas.predicted_bytes(shape, work)
    planned = model.base + model.trained + formulas.update_bytes(shape, work)
    if (run, mode) in (("parts", "checkpointed"), ("recompute", "checkpointed-around")):
        planned -= formulas.inside_bytes(shape, work)
    assert 0.985 < planned / GIB / record["cases"][case]["peak_gib"][mode] < 1.03


@pytest.mark.parametrize(
    ("name", "longest", "tokens", "keys", "bounds"),
    [
        ("ours-7b-64x512", {}, 34816, 49152, (0.999, 1.02)),  # 8 prompts, 18 of 28 layers not recomputed
        ("ours-7b-ragged", {"batch": 16, "completion_length": 384}, 6656, 10240, (0.99, 1.01)),
    ],
)
def test_a_packed_update_measured_on_a_gpu_is_planned(name, longest, tokens, keys, bounds):
    measured, shape = STEPS[name], formulas.shape_of(SEVEN_B)
    work = Workload(**measured["workload"])
    adapter = 4 + 8 + 2 + 4 * bool(longest)  # float32, two moments, the engine's in bf16, earlier passes' gradients
    stays = formulas.base_bytes(shape) + adapter * formulas.adapter_parameters(shape, 32)
    stays += formulas.engine_kv_bytes(shape, work, work.completions) + 2**29  # the engine's buffers inside of torch
    work = dataclasses.replace(work, **longest)
    assert (work.tokens, work.keys) == (tokens, keys)
    planned = stays + formulas.update_bytes(shape, work)
    assert bounds[0] <= planned / GIB / measured["allocated_gib"] <= bounds[1]


@pytest.mark.parametrize(("batch", "generations"), [(4, 8), (8, 8), (16, 8), (64, 8), (6, 1), (1, 8), (6, 4)])
def test_tokens_are_those_of_the_packed_row(batch, generations):
    """As `update/batches.py` deals a rollout of equal completions, and `update/row.py` lays out a micro-batch."""
    prompt, completion, count = 20, 13, 3 * batch * generations
    prompts = [(line // generations,) * prompt for line in range(count)]
    sizes = set()
    for lines in batches.assign(prompts, [completion] * count, batch):
        ids = torch.tensor([[*prompts[line], *range(900, 900 + completion)] for line in lines])
        (chosen,) = row.rows(row.sequences(ids, torch.ones_like(ids), completion))
        built = row.build(chosen, completion, torch.device("cpu"))
        keys = built.segments.packed_keys
        sizes.add((built.input_ids.shape[1], built.input_ids.shape[1] if keys is None else len(keys)))
    rollout = dict.fromkeys(("steps_per_generation", "gradient_accumulation_steps"), 3 * generations)
    args = SimpleNamespace(per_device_train_batch_size=batch, num_generations=generations, **rollout)
    lengths = {"batch": batch, "prompt_length": prompt, "completion_length": completion}
    work = Workload(**lengths, packed=True, generations=_together(args))
    if batch % generations == 0 or generations % batch == 0:
        assert sizes == {(work.tokens, work.keys)}
    else:
        assert work.tokens >= max(tokens for tokens, _ in sizes) and work.generations == 1


@pytest.mark.parametrize(
    ("changes", "together"),
    [({}, 8), ({"gradient_accumulation_steps": 1}, 1), ({"loss_type": "bnpo"}, 1), ({"num_generations": 5}, 1)],
    ids=str,
)
def test_completions_of_a_prompt_share_a_pass_if_a_whole_rollout_is_dealt(changes, together):
    args = {"per_device_train_batch_size": 8, "num_generations": 8, "steps_per_generation": 4}
    assert _together(SimpleNamespace(**args | {"gradient_accumulation_steps": 4} | changes)) == together


def test_the_engines_cache_has_whole_blocks():
    shape, work = formulas.shape_of(SEVEN_B), Workload(prompt_length=100, completion_length=101)
    expected = (3 * 13 + 1) * 2 * 2 * 4 * 128 * 28 * 16
    for changes, share in (({}, 1), ({"tensor_parallel": 4}, 4), ({"kv_dtype_bytes": 1}, 2)):
        assert formulas.engine_kv_bytes(shape, dataclasses.replace(work, **changes), 3) == expected // share

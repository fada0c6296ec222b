"""LoRA linears in groups against PEFT's own forward and backward, for packed and dense bases."""

import contextlib
import copy
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.fused import fuse_storage
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.update import fused_lora, lora_linear
from qerl_trl.update.compiled_layers import compile_layers as compile_layers_of_the_package
from qerl_trl.update.lora_linear import FusedGroup, fuse, unfuse
from tests.tiny_models import FAMILIES, gathered, make_tiny_model

IDS = torch.arange(3, 43).view(2, 20)
BASES = ("packed", "dense")


def adapted(
    family: str = "qwen2", base: str = "packed", dtype: torch.dtype = torch.float32, layers: int = 2, **options
) -> nn.Module:
    """A tiny model with a random adapter, ranks that are no power of two and a scaling that is not 1."""
    model = make_tiny_model(family, dtype=dtype, num_hidden_layers=layers)
    if base == "packed":
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and name != "lm_head":
                    setattr(parent, name, NVFP4Linear.from_linear(child))
        fuse_storage(model)
    model.requires_grad_(False)
    options = {"r": 8, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    model = get_peft_model(model, register_nvfp4_lora(LoraConfig(**options)))
    randomize(model)
    return model.train()


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 1) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.normal_(0, 0.05)


def update(model: nn.Module, autocast: bool = False, tokens: int = 20) -> dict[str, torch.Tensor]:
    """The logits and the gradient of every tensor that has one."""
    model.zero_grad()
    ids = (torch.arange(2 * tokens, device=model.device) % 300 + 3).view(2, tokens)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach().float(), **gradients}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest over all tensors of |found - expected| / |expected|."""
    assert found.keys() == expected.keys(), set(found) ^ set(expected)
    return max(((found[n] - e).double().norm() / e.double().norm()).item() for n, e in expected.items())


#: what sums of some hundred float32 terms in another order differ by
REORDERED = 1e-5


def compile_layers(model: nn.Module, backend: str) -> None:
    torch.compiler.reset()
    for layer in model.get_base_model().model.layers:
        layer.compile(backend=backend, fullgraph=True)


def checkpointed(model: nn.Module) -> None:
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextlib.contextmanager
def counted_decodes(monkeypatch):
    """How often each packed weight is decoded, by address."""
    counts: dict[int, int] = {}
    decode = fused_lora.decode_into

    def counting(out, packed, *rest):
        counts[packed.data_ptr()] = counts.get(packed.data_ptr(), 0) + 1
        decode(out, packed, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(fused_lora, "decode_into", counting)
        yield counts


# --- values and gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_peft(family, base, checkpointing):
    model = adapted(family, base)
    if checkpointing:
        checkpointed(model)
    expected = update(model)
    assert fuse(model) == sum(isinstance(module, LoraLayer) for module in model.modules())
    assert distance(update(model), expected) < REORDERED


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_no_more_often_than_peft(family, base):
    """Under bf16 autocast, as the trainer runs: as near to the same model in float32 as PEFT's own products."""
    model = adapted(family, base, torch.bfloat16)
    exact = copy.deepcopy(model).float()
    for module in exact.modules():
        if isinstance(module, NVFP4Linear):
            module.compute_dtype = torch.float32
    truth = update(exact)
    peft = update(model, autocast=True)
    fuse(model)
    found = update(model, autocast=True)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in peft.items()}

    def error(result):
        return sum(((result[n] - t).double().norm() / t.double().norm()).item() ** 2 for n, t in truth.items()) ** 0.5

    assert error(found) < 1.1 * error(peft), (error(found), error(peft))


def graphs() -> Iterator[Any]:
    """Every combination for one family, and for the others those in which each option has each of its values."""
    for family, base, *options in itertools.product(["qwen2", "gemma3", "phi3"], BASES, [False, True], [False, True]):
        if family == "qwen2" or options == [base == "packed"] * 2:
            names = ["checkpointed" if options[0] else "kept", "autocast" if options[1] else "float32"]
            yield pytest.param(family, base, *options, id="-".join([family, base, *names]))


@pytest.mark.parametrize(("family", "base", "checkpointing", "autocast"), [*graphs()])
def test_compiles_as_one_graph_with_the_same_results(family, base, checkpointing, autocast):
    model = adapted(family, base, torch.bfloat16 if autocast else torch.float32)
    if checkpointing:
        checkpointed(model)
    expected = update(model, autocast)
    fuse(model)
    eager = update(model, autocast)
    torch.compiler.reset()
    compiled = compile_layers_of_the_package(model, backend="aot_eager")
    found = update(model, autocast)
    assert not compiled.failed
    bound = 2 * distance(eager, expected) if autocast else REORDERED  # both differ from PEFT by rounding
    assert distance(found, expected) < bound
    for group in groups(model):
        assert group.x is None and not group.ready, "nothing is left lying after a compiled layer"


def test_layers_of_one_kind_share_a_graph():
    """A group that the compiler took for a constant would compile every layer of a model anew."""
    model = adapted(layers=4)
    model.enable_input_require_grads()
    fuse(model)
    compile_layers(model, "aot_eager")
    torch._dynamo.utils.counters.clear()
    update(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("base", BASES)
def test_no_length_compiles_again(base):
    """In the layers as the trainer compiles them."""
    torch.compiler.reset()
    model = adapted(base=base)
    checkpointed(model)
    expected = {tokens: update(model, tokens=tokens) for tokens in (20, 37, 26)}
    fuse(model)
    compiled = compile_layers_of_the_package(model, backend="aot_eager")
    graphs = []
    for tokens, values in expected.items():
        assert distance(update(model, tokens=tokens), values) < REORDERED
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and len(set(graphs)) == 1 and not compiled.failed


def groups(model: nn.Module) -> list[FusedGroup]:
    return list({id(m.fused_group): m.fused_group for m in model.modules() if hasattr(m, "fused_group")}.values())


def test_groups_are_those_that_read_one_input():
    model = adapted("qwen2")
    fuse(model)
    sizes = sorted(len(group.members) for group in groups(model))
    assert sizes == [1, 1, 1, 1, 2, 2, 3, 3]


def test_part_of_a_group_has_an_adapter():
    for targets in (["q_proj", "v_proj"], ["k_proj", "up_proj"]):
        model = adapted(target_modules=targets)
        expected = update(model)
        assert fuse(model) == 4
        assert distance(update(model), expected) < REORDERED


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_ranks_and_scalings_differ_within_a_group_and_between_layers(base, compiles):
    model = adapted(
        base=base,
        layers=3,
        rank_pattern={"k_proj": 3, "up_proj": 5},
        alpha_pattern={"layers.1.*v_proj": 7, "layers.2.*v_proj": 8, "layers.2.*down_proj": 2},
        use_rslora=True,
    )
    expected = update(model)
    fuse(model)
    if compiles:
        compile_layers(model, "aot_eager")
    assert distance(update(model), expected) < REORDERED


def test_the_first_layer_needs_no_gradient_of_its_input(monkeypatch):
    model = adapted(layers=1)
    fuse(model)
    asked = []
    backward = fused_lora._backward_x
    monkeypatch.setattr(fused_lora, "_backward_x", lambda dys, *rest: asked.append(len(dys)) or backward(dys, *rest))
    update(model)
    assert sorted(asked) == [1, 1, 2], "o, down and gate|up; q|k|v read the frozen embeddings"


def test_outputs_may_be_changed_in_place():
    model = adapted(layers=1)
    fuse(model)
    q, k = (getattr(model.get_base_model().model.layers[0].self_attn, name) for name in ("q_proj", "k_proj"))
    x = torch.randn(2, 5, 128, requires_grad=True)
    (q(x).clamp_(-1, 1).sum() + k(x).mul_(2).sum()).backward()
    found = x.grad
    x.grad = None
    unfuse(model)
    (q(x).clamp_(-1, 1).sum() + k(x).mul_(2).sum()).backward()
    assert distance({"x": found}, {"x": x.grad}) < REORDERED


# --- what it costs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpointing", "passes"), [(False, 2), (True, 3)], ids=["kept", "checkpointed"])
def test_a_weight_is_decoded_once_per_pass(monkeypatch, checkpointing, passes):
    model = adapted()
    model.enable_input_require_grads()
    if checkpointing:
        checkpointed(model)
    fuse(model)
    with counted_decodes(monkeypatch) as counts:
        update(model)
    assert len(counts) == 14 and set(counts.values()) == {passes}


@pytest.mark.parametrize("base", BASES)
def test_nothing_is_saved_but_x_once_per_group_and_x_a(base):
    model = adapted(base=base, layers=1)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    fuse(model)
    layer = model.get_base_model().model.layers[0]
    x = torch.randn(40, 128, requires_grad=True)
    for members, saved_values in (
        ((layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj), 40 * (128 + 3 * 8)),
        ((layer.mlp.gate_proj, layer.mlp.up_proj), 40 * (128 + 2 * 8)),
        ((layer.self_attn.o_proj,), 40 * (128 + 8)),
    ):
        saved: dict[int, int] = {}

        def pack(tensor, saved=saved):
            if tensor.untyped_storage().data_ptr() not in own:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ys = [member(x) for member in members]
        assert sum(saved.values()) == 4 * saved_values, saved
        del ys


# --- PEFT stays the owner ---------------------------------------------------------------------------------------------------------


def both(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(fused, PEFT's own) of the model as it stands."""
    fuse(model)
    found = update(model)
    unfuse(model)
    return found, update(model)


@pytest.mark.parametrize("base", BASES)
def test_switches_of_peft_work_at_any_time(base):
    model = adapted(base=base)
    fuse(model)
    plain = update(model)["logits"]
    with model.disable_adapter(), torch.no_grad():
        without = model(input_ids=IDS).logits
        unfuse(model)
        assert torch.equal(without, model(input_ids=IDS).logits)
        fuse(model)
    assert torch.equal(update(model)["logits"], plain)
    model.merge_adapter()
    merged = model(input_ids=IDS).logits.detach()
    assert torch.allclose(merged, plain, rtol=1e-4, atol=1e-4) and not torch.equal(merged, without)
    model.unmerge_adapter()
    assert torch.allclose(update(model)["logits"], plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", BASES)
def test_a_second_adapter(base, caplog):
    caplog.set_level(logging.INFO)
    model = adapted(base=base)
    model.add_adapter("other", register_nvfp4_lora(LoraConfig(r=4, target_modules=["q_proj", "up_proj"])))
    randomize(model, seed=2)
    fuse(model)
    first = update(model)
    model.set_adapter("other")
    second = update(model)
    assert distance(*both(model)) < REORDERED and second.keys() != first.keys()
    model.base_model.set_adapter(["default", "other"])
    assert distance(*both(model)) == 0, "PEFT's own forward runs"
    fuse(model)
    assert "14 of 14 LoRA layers keep" in caplog.text and "several active adapters" in caplog.text


def test_on_a_gpu_it_is_a_warning(caplog):
    fuse(adapted("qwen2", "dense", lora_dropout=0.5).to("meta"))  # any device but a CPU
    assert [(record.levelname, "lora_dropout" in record.message) for record in caplog.records] == [("WARNING", True)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "Dora"),
        ({"lora_dropout": 0.5}, "lora_dropout"),
        ({"lora_bias": True}, "biases that are trained"),
    ],
    ids=["dora", "dropout", "bias"],
)
def test_what_is_not_one_plain_adapter_runs_peft_and_says_so(options, reason, caplog):
    model = adapted("phi3" if "lora_bias" in options else "qwen2", "dense", **options)
    with caplog.at_level(logging.INFO):
        assert fuse(model) == 0
    layers = sum(isinstance(module, LoraLayer) for module in model.modules())
    assert f"{layers} of {layers} LoRA layers keep PEFT's own" in caplog.text and reason in caplog.text
    torch.manual_seed(0)
    found = update(model)
    unfuse(model)
    torch.manual_seed(0)
    assert distance(found, update(model)) == 0


def test_hooks_on_a_layers_parts_are_called():
    """What watches an adapter (the check at the start of a run), or gathers it (ZeRO-3), hangs there."""
    model = adapted()
    fuse(model)
    part = model.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"]
    seen = []
    handle = part.register_forward_hook(lambda *_: seen.append(1))
    expected = update(model)
    handle.remove()
    assert seen and distance(update(model), expected) < REORDERED


def test_what_lies_ready_is_never_stale():
    model = adapted()
    fuse(model)
    attention = model.get_base_model().model.layers[0].self_attn
    x = torch.randn(2, 5, 128)

    def of_peft():
        unfuse(model)
        expected = attention.k_proj(x)
        fuse(model)
        return expected

    for change in (
        lambda: randomize(model, seed=3),
        lambda: x.mul_(2),
        lambda: attention.k_proj.set_scale("default", 5.0),
    ):
        attention.q_proj(x)
        change()
        assert torch.allclose(attention.k_proj(x), of_peft(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        attention.q_proj(x)
    assert attention.k_proj(x).requires_grad


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_bytes_that_were_gathered_as_floats_are_the_same_bytes(compiled):
    """FSDP 2 of torch 2.11 casts the packed weights too, to the dtype of mixed precision."""
    model = adapted(dtype=torch.bfloat16)
    model, twin = gathered(model, torch.bfloat16, whole_numbers=False), gathered(model, torch.bfloat16)
    assert fuse(model) == fuse(twin) > 0
    if compiled:
        for each in (model, twin):
            compile_layers(each, "aot_eager")
    found, expected = update(twin, autocast=True), update(model, autocast=True)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_names_files_and_copies_are_pefts(tmp_path):
    model = adapted()
    names = [name for name, _ in model.named_parameters()]
    model.save_pretrained(tmp_path / "before")
    fuse(model)
    model.get_base_model().model.layers[0].self_attn.q_proj(torch.randn(3, 128))  # something lies ready
    assert [name for name, _ in model.named_parameters()] == names
    model.save_pretrained(tmp_path / "after")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    copied = copy.deepcopy(model)
    randomize(copied, seed=9)
    assert distance(*both(copied)) < REORDERED
    assert not torch.equal(update(copied)["logits"], update(model)["logits"])
    state = get_peft_model_state_dict(model)
    unfuse(model)
    assert state.keys() == get_peft_model_state_dict(model).keys()
    assert not [m for m in model.modules() if isinstance(m, lora_linear._Fused) or "fused_group" in vars(m)]


# --- on a GPU ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("tokens", [20, 200], ids=["few", "many"])
@pytest.mark.parametrize("base", BASES)
def test_on_the_gpu_as_on_the_cpu(base, tokens, backend):
    """The kernel that decodes writes beside room for the adapter; few tokens run PEFT's forward on the kernels for them."""
    model = adapted("qwen2", base, torch.bfloat16)
    truth = update(model.float() if base == "dense" else model, autocast=False, tokens=tokens)
    model = adapted("qwen2", base, torch.bfloat16).to("cuda")
    peft = update(model, autocast=True, tokens=tokens)
    fuse(model)
    if backend:
        compile_layers(model, backend)
    found = update(model, autocast=True, tokens=tokens)
    bound = 2 * distance(on_cpu(peft), on_cpu(truth))
    assert distance(on_cpu(found), on_cpu(truth)) < bound


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


# --- in a trainer -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base_format", ["nvfp4", "bf16"])
def test_a_run_learns_the_same_with_and_without(base_format, tiny_model_dir, tiny_tokenizer, tmp_path):
    trained, fused = {}, {}
    for switch in (True, False):
        args = QeRLConfig(
            output_dir=str(tmp_path / str(switch)),
            base_format=base_format,
            fused_lora=switch,
            optim="sgd",  # AdamW's first steps would make a rounding error of a gradient near zero a whole step
            learning_rate=1.0,
            max_steps=3,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=6,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = QeRLGRPOTrainer(
            str(tiny_model_dir("qwen2")),
            lambda completions, **_: [float(sum(text.encode()) % 7) for text in completions],
            args,
            Dataset.from_dict({"prompt": ["say one ", "say two ", "say six "]}),
            processing_class=tiny_tokenizer,
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.train()
        fused[switch] = sum(isinstance(module, lora_linear._Fused) for module in trainer.model.modules())
        trained[switch] = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_B" in n}
    assert fused == {True: 14, False: 0}
    assert all(value.any() for value in trained[False].values()), "B starts at zero"
    assert distance(trained[True], trained[False]) < 1e-3, "rounding of three steps"

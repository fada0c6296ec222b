"""The update without padding against TRL's padded one: losses, gradients, runs, and unsupported models."""

import ast
import dataclasses
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Gemma2PreTrainedModel
from trl import GRPOTrainer

from qerl_trl import QeRLRLOOTrainer
from qerl_trl.nvfp4.linear import compute_of
from qerl_trl.run.banner import announce
from qerl_trl.update import attention, packing
from tests.architectures import dense_model
from tests.faults.tiny_runs import logged
from tests.tiny_models import FAMILIES, make_tiny_model
from tests.update.models import LORA, LOSSES, adapter_of, checkpointed


@pytest.fixture(scope="module")
def trainer(make):
    return make(beta=0.1)


def ragged():
    """A batch of TRL's loss: two prompts, completions of 0 to 15 tokens, one of them with tool tokens."""
    generator = torch.Generator().manual_seed(0)

    def noise(scale):
        return torch.randn(6, 15, generator=generator) * scale

    mask = (torch.arange(15) < torch.tensor([3, 15, 1, 9, 0, 7])[:, None]).long()
    prompts = torch.randint(2, 258, (2, 12), generator=generator)[[0, 1, 0, 0, 1, 1]]
    prompt_mask = (torch.arange(12) >= torch.tensor([7, 0, 7, 7, 0, 0])[:, None]).long()  # padded left
    old = (noise(0.3) - 5.5) * mask
    batch = {
        "prompt_ids": prompts * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(2, 258, (6, 15), generator=generator) * mask,
        "completion_mask": mask,
        "tool_mask": mask.clone(),
        "advantages": torch.tensor([1.0, -0.8, 0.5, -1.2, 0.3, 0.7]),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": old,
        "ref_per_token_logps": (noise(0.3) - 5.5) * mask,
        "sampling_per_token_logps": old + noise(0.1) * mask,
        "importance_sampling_ratio": (noise(0.1) * mask).exp(),
    }
    batch["tool_mask"][1, 4:8] = 0
    return batch


def both(trainer, compute):
    """(result of `compute`, gradients), padded and packed."""
    found = []
    trainer.model.train()
    for packed in (False, True):
        trainer._packing.on = packed
        trainer.model.zero_grad()
        result = compute()
        result.sum().backward()
        grads = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
        found.append((result.detach(), grads))
    return found


def assert_equal(padded, packed):
    torch.testing.assert_close(packed[0], padded[0], rtol=1e-5, atol=2e-6)
    assert padded[1] and padded[1].keys() == packed[1].keys()
    for name, grad in padded[1].items():
        error = (packed[1][name] - grad).norm() / grad.norm()
        assert error < 2e-5, (name, error.item())


def counted(trainer):
    """Shape of the tokens of each forward, in a list that grows."""
    seen = []
    embeddings = trainer._packing.inner(trainer.model).get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, output: seen.append(tuple(args[0].shape)))
    return seen


def joined(batch):
    return (torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], dim=1) for part in ("ids", "mask"))


def weighted_logps(trainer, batch):
    device = trainer.accelerator.device
    ids, mask, weight = (x.to(device) for x in (*joined(batch), torch.linspace(0.5, 1.5, 6 * 15).view(6, 15)))

    def compute():
        found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 15, compute_entropy=True)
        return torch.stack(found[:2]) * weight

    return compute


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_entropies_and_gradients(make, family):
    if family == "gemma2" and not Gemma2PreTrainedModel._supports_sdpa:
        pytest.skip("newer transformers leave it to eager attention, for its soft caps: its batches stay padded")
    trainer = make(family)
    assert trainer._packing.on
    assert_equal(*both(trainer, weighted_logps(trainer, ragged())))


@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_recomputed_layers_see_the_same_row(make, reentrant):
    trainer = make("gemma3", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    checkpointed(trainer.model, reentrant)
    assert_equal(*both(trainer, weighted_logps(trainer, ragged())))


@pytest.mark.parametrize(
    "changes",
    [
        *({"loss_type": loss} for loss in LOSSES),
        {"beta": 0.1},
        {"top_entropy_quantile": 0.5},
        {"_entropy_bonus_enabled": True, "entropy_coef": 0.1},
        {"importance_sampling_level": "sequence"},
        {"off_policy_mask_threshold": 0.01},
        {"corrected": True},
    ],
    ids=lambda changes: "-".join(map(str, changes.items())),
)
def test_losses_and_gradients(trainer, monkeypatch, changes):
    for name, value in {"beta": 0.0, "current_gradient_accumulation_steps": 2, **changes}.items():
        monkeypatch.setattr(trainer, name, value, raising=False)
    batch = ragged()
    if "corrected" not in changes:
        del batch["importance_sampling_ratio"]
    assert_equal(*both(trainer, lambda: trainer._compute_loss(trainer.model, batch)))


def test_every_loss_of_trl_is_tried():
    """A loss that a release of TRL adds has to be added to `LOSSES`."""
    known = set()
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[GRPOTrainer.__module__]))):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "loss_type":
            known |= {text.value for text in ast.walk(node) if isinstance(text, ast.Constant)}
    assert known == set(LOSSES)


def test_only_tokens_are_computed_and_equal_prompts_once(make):
    trainer = make()
    compute, seen = weighted_logps(trainer, ragged()), counted(trainer)
    compute()
    # the longest completion of each prompt with the prompt, without its last token: 5 + 9 - 1 and 12 + 15 - 1;
    # the others with the prompt's last token only: 3, 1 and 7; in a row of a multiple of 64
    assert seen == [(1, 64)]
    trainer._packing.on = False
    compute()
    assert seen[1] == (6, 27)


def test_each_completion_has_its_own_dropout_mask(make):
    trainer = make(peft_config=dataclasses.replace(LORA, lora_dropout=0.5))
    seen = counted(trainer)
    for training in (True, False):
        trainer.model.train(training)
        weighted_logps(trainer, ragged())()
    assert seen == [(1, 128), (1, 64)]  # with dropout 3 x 5 + 13 - 3 and 2 x 12 + 22 - 2 tokens
    assert all(inputs["packed_keys"] is None for inputs in trainer._packing.examples(4, 256))


def test_a_batch_without_completion_tokens_has_gradients_of_zero(trainer):
    batch = ragged()
    batch["completion_mask"].zero_()
    trainer._packing.on = True
    result = weighted_logps(trainer, batch)()
    result.sum().backward()
    assert not result.any()


RUN = {"max_steps": 3, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}


@pytest.mark.parametrize("case", ["grpo", "rloo", "experts"])
def test_a_run_is_the_padded_run(make, tmp_path, case):
    """Sampling, reference, micro-batches dealt again, optimizer; with experts also TRL's loss of their load."""
    options, bound = {"beta": 0.1} if case == "grpo" else {}, 0.02
    if case == "rloo":
        options = {"trainer_class": QeRLRLOOTrainer}
    elif case == "experts":
        model = dense_model("qwen3_moe").float()
        model.config.router_aux_loss_coef = 1.0
        model.save_pretrained(tmp_path / "m")
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        options, bound = {"model": tmp_path / "m", "peft_config": adapter}, 1e-3
    runs = []
    for padding_free in (False, True):
        one = make(padding_free=padding_free, optim="sgd", learning_rate=0.5, **RUN, **options)
        assert (one.memory_plan.work.generations == 1) is (case == "experts"), "each completion has its own prompt"
        start = adapter_of(one)
        one.train()
        runs.append(one)
    padded, packed = runs
    assert packed._packing.on and not padded._packing.on
    assert logged(packed, "reward") == logged(padded, "reward")
    for key in ("loss", "grad_norm"):  # others are means over micro-batches, which are dealt otherwise
        assert logged(packed, key) == pytest.approx(logged(padded, key), rel=1e-3, abs=1e-5)
    for name, value in adapter_of(packed).items():
        moved = (adapter_of(padded)[name] - start[name]).norm()
        assert moved > 0 and (value - adapter_of(padded)[name]).norm() < bound * moved, name


@pytest.mark.parametrize("options", [{}, {"loss_type": "bnpo"}, {"top_entropy_quantile": 0.5}, {"entropy_coef": 0.1}])
def test_micro_batches_are_dealt_by_prompt_unless_a_loss_depends_on_them(make, options):
    trainer, prompts = make(**RUN, **options), []
    compute = trainer._compute_loss

    def watching(model, inputs):
        prompts.append(len(torch.unique(inputs["prompt_ids"], dim=0)))
        return compute(model, inputs)

    trainer._compute_loss = watching
    trainer.train()
    assert len(prompts) == 12 and (set(prompts) == {1}) is (not options)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_fsdp2(make, one_process_group, recomputed):
    """Sharded when training starts, so tried at the first batch."""
    trainer, batch = make("gemma3"), ragged()
    padded = both(trainer, weighted_logps(trainer, batch))[0]
    if recomputed:
        checkpointed(trainer.model)
    inner = trainer._packing.inner(trainer.model)
    for layer in (*inner.get_decoder().layers, inner):
        fully_shard(layer)
    trainer._packing._untried = True
    packed = both(trainer, weighted_logps(trainer, batch))[1]
    assert trainer._packing.on and not trainer._packing._untried
    whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in packed[1].items()}
    assert_equal(padded, (packed[0], whole))


def test_no_logits_of_completions_are_made(make):
    """The head's own forward runs in generation only, one token at a time."""
    trainer, seen = make(aqn=True, aqn_schedule="constant", aqn_sigma_start=0.1, beta=0.1), []
    announce(trainer)  # measures the noise, with logits of two rows at a time
    head = trainer._packing.inner(trainer.model).get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    trainer.train()
    assert logged(trainer, "rollout/mismatch_kl") and seen and all(shape[1] == 1 for shape in seen)


def test_off_by_default_on_a_cpu(make, caplog):
    trainer = make(padding_free=None)
    assert not trainer._packing.on and "padding" not in caplog.text
    assert trainer.model.config._attn_implementation == "sdpa"


def stablelm():
    """Its decoder layers hand no further arguments to attention, which would see the whole row."""
    model = dense_model("stablelm").float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # random weights of the usual size hardly move log-probabilities
    return model


REFUSED = {
    "lfm2": (lambda: dense_model("lfm2").float(), {}, "another kind"),
    "qwen3_5_text": (lambda: dense_model("qwen3_5_text").float(), {}, "state"),
    "stablelm": (stablelm, {}, "packed, its log-probabilities differ"),
    "dropout": (lambda: make_tiny_model("qwen2", attention_dropout=0.1), {}, r"attention_dropout=0\.1"),
    "noise": (None, {"neftune_noise_alpha": 5}, "neftune_noise_alpha draws noise"),
    "eager": (None, {"model_init_kwargs": {"attn_implementation": "eager"}}, "attn_implementation='eager'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_run_is_refused(make, tmp_path, case):
    model, options, reason = REFUSED[case]
    if model is not None:
        model().save_pretrained(tmp_path / "m")
        options = {"model": tmp_path / "m", "peft_config": None, "base_format": "full"}
    with pytest.raises(ValueError, match=f"padding_free=True cannot work here: .*{reason}"):
        make(**options)


def one_sequence(q, k, v, *rest):
    parts = (x.transpose(0, 1) for x in (q, k[: len(q)], v[: len(q)]))
    return nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(0, 1)


def failing(*args, **kwargs):
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(("kernel", "reason"), [(one_sequence, "log-probabilities"), (failing, "no kernel image")])
def test_a_kernel_that_mixes_sequences_or_fails_is_found_at_the_start(make, monkeypatch, kernel, reason):
    monkeypatch.setattr(attention, "reference", kernel)
    with pytest.raises(ValueError, match=f"cannot work here: .*{reason}"):
        make()


def test_rounding_of_autocast_is_not_taken_for_a_leak(make, tmp_path):
    """The bound follows the dtype of the computation, not that of the weights."""
    make_tiny_model("llama", dtype=torch.float32, initializer_range=0.1).save_pretrained(tmp_path / "m")
    assert make(model=tmp_path / "m", base_format="full", peft_config=None, bf16=True)._packing.on


def test_rounding_of_fp8_activations_is_not_taken_for_a_leak(make, tmp_path, monkeypatch):
    """A packed attention that rounds differently by one bfloat16 step moved random W4A8 models beyond the bound."""
    own = attention.reference
    monkeypatch.setattr(attention, "reference", lambda *given, **more: own(*given, **more).bfloat16().float())
    make_tiny_model("qwen2", dtype=torch.float32, initializer_range=0.05).save_pretrained(tmp_path / "m")
    trainer = make(model=tmp_path / "m", base_format="nvfp4", compute="w4a8")
    assert trainer._packing.on and compute_of(trainer.model) == "w4a8"


def test_longrope_with_long_sequences_is_not_packed(make, tmp_path):
    """A row would choose the embedding by its own longest sequence."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [1.0 + 0.5 * i for i in range(16)]}
    limits = {"original_max_position_embeddings": 30}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors, **limits}
    options = {"max_position_embeddings": 256, "rope_parameters": rope, **limits}
    make_tiny_model("phi3", dtype=torch.float32, **options).save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=r"of more than 30 tokens .* and sequences of this run may have up to 3[1-9]"):
        make(model=tmp_path / "m")


def test_rotary_embeddings_that_depend_on_the_longest_sequence():
    def limit(rope):
        text = SimpleNamespace(max_position_embeddings=512, to_dict=lambda: {"rope_parameters": rope})
        return packing.alike_up_to(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text)))

    long = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert limit({"rope_type": "default"}) is None and limit({"rope_type": "yarn", "factor": 4.0}) is None
    assert limit(long) == 64 and limit({"rope_type": "dynamic", "factor": 2.0}) == 512
    assert limit({"full_attention": long, "sliding_attention": {"rope_type": "default"}}) == 64


def test_a_window_in_the_mask_alone_is_found_at_any_length(make, tmp_path):
    """The trial's sequences are shorter than any window."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320}
    sizes |= {"intermediate_size": 64, "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}
    window = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
    config = CONFIG_MAPPING["qwen2_moe"](**sizes, **window, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="sliding window from the attention mask alone"):
        make(model=tmp_path, peft_config=lora)


def test_pictures_are_left_to_trl(trainer):
    ids = torch.ones(2, 4, dtype=torch.long)
    trainer._packing.on = True
    assert trainer._packing(trainer.model, ids, ids, 2, pixel_values=torch.ones(1)) is None


def error(found, truth):
    """Mean error of the results, and relative error of all gradients."""
    flat = [torch.cat([x.float().cpu().flatten() for x in grads.values()]) for _, grads in (found, truth)]
    result = (found[0].float().cpu() - truth[0]).abs().mean().item()
    return result, ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


ON_GPU = {"use_cpu": False, "bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_it_is_as_near_to_float32_as_the_padded_way(make, family):
    exact = make(family)
    truth = both(exact, weighted_logps(exact, ragged()))[0]
    trainer = make(family, padding_free=None, compile_layers=False, **ON_GPU)
    assert trainer._packing.on
    padded, packed = (error(found, truth) for found in both(trainer, weighted_logps(trainer, ragged())))
    for a, b in zip(packed, padded, strict=True):
        assert a < 1.5 * b + 5e-3, (packed, padded)

"""The update without padding against TRL's own padded one, on the trainer: log-probabilities, losses, gradients, whole runs."""

import ast
import copy
import dataclasses
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Gemma2PreTrainedModel
from trl import GRPOTrainer

from qerl_trl import QeRLConfig, QeRLGRPOTrainer, QeRLRLOOConfig, QeRLRLOOTrainer
from qerl_trl.update import attention, packing
from tests.architectures import dense_model
from tests.tiny_models import FAMILIES, make_tiny_model
from tests.trainers import LORA, adapter_of, assert_identical, logged, settings, spread_reward

#: few prompts, long and short, so that micro-batches share some of them
PROMPTS = Dataset.from_dict({"prompt": ["say one ", "a longer prompt: say two ", "six ", "ten and eleven "] * 4})
WINDOW = {"mistral", "gemma2", "gemma3"}  # a sliding window shorter than the sequences
LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]


@pytest.fixture(scope="module")
def make(tmp_path_factory, tiny_tokenizer):
    """`make(family="qwen2", trainer_class=..., **arguments)`: a trainer in float32 that packs, with an adapter that matters."""
    folders = {}

    def build(family="qwen2", trainer_class=QeRLGRPOTrainer, model=None, peft_config=LORA, **kwargs):
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            window = {"sliding_window": 8} if family in WINDOW else {}
            make_tiny_model(family, dtype=torch.float32, **window).save_pretrained(folders[family])
        config = QeRLConfig if trainer_class is QeRLGRPOTrainer else QeRLRLOOConfig
        options = {"base_format": "bf16", "aqn": False, "padding_free": True, "max_completion_length": 12, **kwargs}
        folder = tmp_path_factory.mktemp("run")
        trainer = trainer_class(
            str(model or folders[family]),
            spread_reward,
            settings(folder, config, **options),
            PROMPTS,
            processing_class=tiny_tokenizer,
            peft_config=copy.deepcopy(peft_config),
        )
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        return trainer

    return build


@pytest.fixture(scope="module")
def trainer(make):
    return make(beta=0.1)


def ragged(seed=0):
    """A batch as TRL hands it to its loss: two prompts, completions of 0 to 15 tokens, one of them with tool tokens in it."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    def tokens(count):
        return torch.randint(2, 258, (count,), generator=generator)

    prompts, which, lengths = [tokens(5), tokens(12)], [0, 1, 0, 0, 1, 1], [3, 15, 1, 9, 0, 7]
    batch = {name: torch.zeros(6, 12, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")}
    batch |= {name: torch.zeros(6, 15, dtype=torch.long) for name in ("completion_ids", "completion_mask")}
    for line, (prompt, length) in enumerate(zip(which, lengths, strict=True)):
        batch["prompt_ids"][line, 12 - len(prompts[prompt]) :] = prompts[prompt]
        batch["prompt_mask"][line, 12 - len(prompts[prompt]) :] = 1
        batch["completion_ids"][line, :length] = tokens(length)
        batch["completion_mask"][line, :length] = 1
    mask = batch["completion_mask"]
    batch["tool_mask"] = mask.clone()
    batch["tool_mask"][1, 4:8] = 0
    batch["advantages"] = torch.tensor([1.0, -0.8, 0.5, -1.2, 0.3, 0.7])
    batch["num_items_in_batch"] = mask.sum()
    batch["old_per_token_logps"] = (random(6, 15) * 0.3 - 5.5) * mask
    batch["ref_per_token_logps"] = (random(6, 15) * 0.3 - 5.5) * mask
    batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + random(6, 15) * 0.1 * mask
    batch["importance_sampling_ratio"] = (random(6, 15) * 0.1 * mask).exp()
    return batch


def both(trainer, compute):
    """(`compute`'s result, gradients) padded and packed."""
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


def counted(trainer, updates_only=False):
    """Tokens of each call of the model, or of those whose gradients are asked, in a list that grows."""
    seen = []

    def note(module, args, output):
        if not updates_only or (torch.is_grad_enabled() and trainer.model.training):
            seen.append(tuple(args[0].shape))

    trainer._packing.inner(trainer.model).get_input_embeddings().register_forward_hook(note)
    return seen


def weighted_logps(trainer, batch):
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    device = trainer.accelerator.device
    ids, mask, weight = (x.to(device) for x in (ids, mask, torch.linspace(0.5, 1.5, 6 * 15).view(6, 15)))

    def compute():
        logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, 15, compute_entropy=True
        )
        return torch.stack([logps, entropies]) * weight

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
    trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    trainer.model.enable_input_require_grads()
    assert_equal(*both(trainer, weighted_logps(trainer, ragged())))


@pytest.mark.parametrize(
    "case", ["plain", "kl", "high-entropy", "entropy-bonus", "sequence-level", "corrected", "off-policy"]
)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_losses_and_gradients(trainer, monkeypatch, loss_type, case):
    changes = {
        "plain": {"beta": 0.0},
        "kl": {"beta": 0.1},
        "high-entropy": {"beta": 0.0, "top_entropy_quantile": 0.5},
        "entropy-bonus": {"beta": 0.0, "_entropy_bonus_enabled": True, "entropy_coef": 0.1},
        "sequence-level": {"beta": 0.0, "importance_sampling_level": "sequence"},
        "corrected": {"beta": 0.0},
        "off-policy": {"beta": 0.0, "off_policy_mask_threshold": 0.01},
    }[case]
    for name, value in {"loss_type": loss_type, "current_gradient_accumulation_steps": 2, **changes}.items():
        monkeypatch.setattr(trainer, name, value, raising=False)
    batch = ragged()
    if case != "corrected":
        del batch["importance_sampling_ratio"]
    assert_equal(*both(trainer, lambda: trainer._compute_loss(trainer.model, batch)))


def test_every_loss_of_trl_is_tried():
    """Those that the installed TRL's loss knows, whichever they are: one that a release adds is to be added here."""
    known = set()
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[GRPOTrainer.__module__]))):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "loss_type":
            known |= {text.value for text in ast.walk(node) if isinstance(text, ast.Constant)}
    assert known == set(LOSSES)


def test_losses_of_rloo(make):
    trainer = make(trainer_class=QeRLRLOOTrainer)
    batch = ragged()
    batch["old_logps"] = batch["old_per_token_logps"].sum(1)
    assert_equal(*both(trainer, lambda: trainer._compute_loss(trainer.model, batch)))


def test_only_tokens_are_computed_and_equal_prompts_once(make):
    trainer = make()
    compute, seen = weighted_logps(trainer, ragged()), counted(trainer)
    compute()
    # prompt and completion without its last token, of each prompt's longest completion; of the others the completion, one less, and the
    # prompt's last token; the empty one not at all
    asked = (5 + 9 - 1) + 3 + 1 + (12 + 15 - 1) + 7
    assert seen == [(1, 64)] and asked == 50
    trainer._packing.on = False
    compute()
    assert seen[1] == (6, 27)


def test_dropout_draws_for_each_completion_its_own(make):
    trainer = make(peft_config=dataclasses.replace(LORA, lora_dropout=0.5))
    seen = counted(trainer)
    trainer.model.train()
    weighted_logps(trainer, ragged())()
    assert seen == [(1, 128)]  # 3 x 5 + 13 - 3 and 2 x 12 + 22 - 2 tokens: each with its prompt
    trainer.model.eval()
    weighted_logps(trainer, ragged())()
    assert seen[1] == (1, 64)
    assert all(inputs["packed_keys"] is None for inputs in trainer._packing.examples(4, 256))


def test_without_gradients_rows_are_as_long_as_a_padded_batch(make):
    trainer = make()
    batch, seen = ragged(), counted(trainer)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    trainer.model.eval()
    with torch.no_grad():
        split = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 15, batch_size=1)[0]
        assert len(seen) == 3  # 13 + 3 + 1, 26, 12 + 7 - 1 tokens: a row takes 27
        whole = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 15, batch_size=6)[0]
    torch.testing.assert_close(split, whole)


def test_a_batch_of_which_nothing_is_asked_gives_a_gradient_of_zero(make):
    trainer = make()
    batch = ragged()
    batch["completion_mask"].zero_()
    result = weighted_logps(trainer, batch)()
    result.sum().backward()
    assert not result.any()


RUN = {"max_steps": 3, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}


@pytest.mark.parametrize("trainer_class", [QeRLGRPOTrainer, QeRLRLOOTrainer], ids=["grpo", "rloo"])
@pytest.mark.parametrize("beta", [0.0, 0.1], ids=["no-kl", "kl"])
def test_a_run_is_the_padded_run(make, trainer_class, beta):
    """Sampling, reference, micro-batches dealt again, optimizer: after three steps the adapters agree."""
    runs = []
    for padding_free in (False, True):
        one = make(
            trainer_class=trainer_class, padding_free=padding_free, beta=beta, optim="sgd", learning_rate=0.5, **RUN
        )
        start = adapter_of(one)
        one.train()
        runs.append(one)
    padded, packed = runs
    assert logged(packed, "reward") == logged(padded, "reward")
    for key in ("loss", "grad_norm"):  # others are means over micro-batches, which are dealt otherwise
        torch.testing.assert_close(
            torch.tensor(logged(packed, key)), torch.tensor(logged(padded, key)), rtol=1e-3, atol=1e-5
        )
    for name, value in adapter_of(packed).items():
        moved = (adapter_of(padded)[name] - start[name]).norm()
        assert moved > 0 and (value - adapter_of(padded)[name]).norm() < 0.02 * moved, name


def test_a_run_deals_micro_batches_by_prompt(make):
    trainer, prompts = make(**RUN), []
    compute = trainer._compute_loss

    def watching(model, inputs):
        prompts.append(len(torch.unique(inputs["prompt_ids"], dim=0)))
        return compute(model, inputs)

    trainer._compute_loss = watching
    trainer.train()
    assert prompts == [1] * 12  # four completions of one prompt, where TRL's shuffle mixes


@pytest.mark.parametrize("options", [{"loss_type": "bnpo"}, {"top_entropy_quantile": 0.5}, {"entropy_coef": 0.1}])
def test_where_a_micro_batch_is_its_own_measure_it_stays_as_trl_cut_it(make, options):
    trainer = make(**RUN, **options)
    seen = []
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: seen.append(inputs) or compute(model, inputs)
    trainer.train()
    assert any(len(torch.unique(batch["prompt_ids"], dim=0)) > 1 for batch in seen)


def test_resume_is_bit_exact(make):
    options = {**RUN, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make(**options)
    whole.train()
    checkpoint = f"{whole.args.output_dir}/checkpoint-2"
    resumed = make(**{**options, "output_dir": whole.args.output_dir})
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_identical(adapter_of(resumed), adapter_of(whole))


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
def test_fsdp2(make, one_process_group, checkpointed):
    """Sharded when training starts, so tried at the first batch."""
    trainer = make("gemma3")
    batch = ragged()
    padded = both(trainer, weighted_logps(trainer, batch))[0]
    if checkpointed:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer.model.enable_input_require_grads()
    inner = trainer._packing.inner(trainer.model)
    for layer in inner.get_decoder().layers:
        fully_shard(layer)
    fully_shard(inner)
    trainer._packing._untried = True
    packed = both(trainer, weighted_logps(trainer, batch))[1]
    assert trainer._packing.on and not trainer._packing._untried
    whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in packed[1].items()}
    assert_equal(padded, (packed[0], whole))


def test_the_load_of_experts_is_that_of_every_token(tiny_tokenizer):
    """TRL's load-balancing loss counts each token of each sequence: nothing is shared or left out then."""
    from accelerate import Accelerator
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    model = dense_model("qwen3_moe").float()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    stand_in = SimpleNamespace(accelerator=Accelerator(cpu=True), model=model, args=None)
    batch = ragged()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    options = {"compute_entropy": True, "compute_aux_loss": True, "batch_size": 6}
    padded = GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__(stand_in, model, ids, mask, 15, **options)
    attention.register()
    model.set_attn_implementation(attention.NAME)
    packed = packing.Packing(stand_in)._packed(model, ids, mask, 15, **options)
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=2e-6)


def test_with_a_loss_of_experts_load_a_run_is_the_padded_run(make, tmp_path):
    """It is a measure of a micro-batch of its own, so micro-batches stay as TRL cut them."""
    model = dense_model("qwen3_moe").float()
    model.config.router_aux_loss_coef = 1.0
    model.save_pretrained(tmp_path / "m")
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    runs = []
    for padding_free in (False, True):
        one = make(
            model=tmp_path / "m", peft_config=adapter, padding_free=padding_free, optim="sgd", learning_rate=0.5, **RUN
        )
        assert one.aux_loss_enabled and one._packing.on is padding_free
        assert one.memory_plan.work.generations == 1, "each completion computes its own prompt"
        start = adapter_of(one)
        one.train()
        runs.append(adapter_of(one))
    for name, value in runs[1].items():
        moved = (runs[0][name] - start[name]).norm()
        assert moved > 0 and (value - runs[0][name]).norm() < 1e-3 * moved, name


LONGROPE = {
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [1.0 + 0.5 * i for i in range(16)],
    },
}  # fmt: skip


@pytest.mark.parametrize("original", [30, 64])
def test_a_rotary_embedding_that_depends_on_the_longest_sequence(make, tmp_path, original):
    """Packed where no sequence is long enough, else padded: a row would decide by its own longest one."""
    rope = {**LONGROPE["rope_parameters"], "original_max_position_embeddings": original}
    options = {"original_max_position_embeddings": original, **LONGROPE, "rope_parameters": rope}
    make_tiny_model("phi3", dtype=torch.float32, **options).save_pretrained(tmp_path / "m")
    if original == 64:
        trainer = make(model=tmp_path / "m")
        assert trainer._packing.on and trainer.memory_plan.work.packed
        return
    with pytest.raises(ValueError, match=r"has more than 30, and those of this run may have up to 3[1-9]"):
        make(model=tmp_path / "m")
    trainer = make(model=tmp_path / "m", padding_free=False)
    assert not trainer._packing.on and not trainer.memory_plan.work.packed
    trainer.args.padding_free, trainer.longest_sequence = True, None  # no prompt was counted
    assert "may have more" in packing.Packing(trainer).reason_against()


def test_which_rotary_embeddings_depend_on_the_longest_sequence():
    def up_to(rope):
        text = SimpleNamespace(max_position_embeddings=512, to_dict=lambda: {"rope_parameters": rope})
        return packing.alike_up_to(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text)))

    long = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert up_to({"rope_type": "default"}) is None and up_to({"rope_type": "yarn", "factor": 4.0}) is None
    assert up_to(long) == 64 and up_to({"rope_type": "dynamic", "factor": 2.0}) == 512
    assert up_to({"full_attention": long, "sliding_attention": {"rope_type": "default"}}) == 64


def test_no_logits_of_completions_are_made(make):
    """Neither in the update nor for the noisy and the clean log-probabilities of a rollout: the head's own forward sees one token at a time,
    when transformers generates."""
    trainer = make(aqn=True, aqn_schedule="constant", aqn_sigma_start=0.1, beta=0.1, max_steps=2)
    seen = []
    trainer._packing.inner(trainer.model).get_output_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(output.shape)
    )
    trainer.train()
    assert logged(trainer, "rollout/mismatch_kl") and seen and all(shape[1] == 1 for shape in seen)


# --- on or off -------------------------------------------------------------------------------------------------------


def test_off_by_default_on_a_cpu(make, caplog):
    trainer = make(padding_free=None)
    assert not trainer._packing.on and "padding" not in caplog.text
    assert trainer.model.config._attn_implementation == "sdpa"


CANNOT = {
    "falcon_h1": "state",
    "lfm2": "another kind",
    "qwen3_5_text": "state",
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_packed_is_refused_by_reason(make, tmp_path, name):
    dense_model(name).float().save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=f"padding_free=True cannot work here: .*{CANNOT[name]}"):
        make(model=str(tmp_path / "m"), peft_config=None, base_format="full")
    trainer = make(model=str(tmp_path / "m"), peft_config=None, base_format="full", padding_free=False)
    assert not trainer._packing.on


def test_what_autocast_rounds_is_not_taken_for_a_leak(make, tmp_path):
    """The bound is that of what is computed in, not of how weights are stored."""
    model = make_tiny_model("llama", dtype=torch.float32, initializer_range=0.1)
    model.save_pretrained(tmp_path / "m")
    assert make(model=tmp_path / "m", base_format="full", peft_config=None, bf16=True)._packing.on


def test_noise_that_is_drawn_by_a_rows_length_is_padded(make):
    with pytest.raises(ValueError, match="cannot work here: neftune_noise_alpha draws noise"):
        make(neftune_noise_alpha=5)


def test_another_attention_is_left_alone(make):
    options = {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}}
    with pytest.raises(ValueError, match="cannot work here: attn_implementation='eager'"):
        make(**options)


def test_dropout_of_attention_is_padded(make, tmp_path):
    make_tiny_model("qwen2", dtype=torch.float32, attention_dropout=0.1).save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=r"cannot work here: attention_dropout=0\.1"):
        make(model=tmp_path / "m")


def test_layers_that_are_not_told_of_their_segments_are_found_at_the_start(make, tmp_path):
    """StableLM's decoder layers hand no further arguments to attention, which would then see the whole row."""
    model = dense_model("stablelm").float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # random weights of the usual size hardly move log-probabilities
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="cannot work here: packed, its log-probabilities differ"):
        make(model=tmp_path / "m", peft_config=None, base_format="full")


def test_a_row_without_walls_is_found_at_the_start(make, monkeypatch):
    def one_sequence(q, k, v, cu_q, cu_k, *rest):
        return attention_without_walls(q, k, v)

    def attention_without_walls(q, k, v):
        parts = (x.transpose(0, 1) for x in (q, k[: len(q)], v[: len(q)]))
        return nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(0, 1)

    monkeypatch.setattr(attention, "reference", one_sequence)
    with pytest.raises(ValueError, match=r"cannot work here: .*log-probabilities"):
        make()


def test_an_error_in_the_model_is_a_reason(make, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(attention, "reference", fails)
    with pytest.raises(ValueError, match="no kernel image"):
        make()


def test_pictures_are_left_to_trl(trainer):
    ids = torch.ones(2, 4, dtype=torch.long)
    trainer._packing.on = True
    assert trainer._packing(trainer.model, ids, ids, 2, pixel_values=torch.ones(1)) is None


def test_rows_to_compile_on_are_rows_as_in_training(make):
    trainer = make()
    made = trainer._packing.examples(4, 256)
    assert len({inputs["input_ids"].shape for inputs in made}) == len({inputs["max_length_k"] for inputs in made}) == 3
    decoder = trainer._packing.inner(trainer.model).get_decoder()
    for inputs in made:
        assert inputs["packed_keys"] is not None
        with torch.no_grad(), attention.packed_call():
            assert decoder(**inputs).last_hidden_state.isfinite().all()


# --- on a GPU --------------------------------------------------------------------------------------------------------


def error(found, truth):
    """Of results and of all gradients, relative."""
    flat = [torch.cat([x.float().cpu().flatten() for x in grads.values()]) for _, grads in (found, truth)]
    result = (found[0].float().cpu() - truth[0]).abs().mean().item()
    return result, ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


ON_GPU = {"use_cpu": False, "bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}, "use_vllm": False}


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


@pytest.mark.gpu
@pytest.mark.parametrize("base_format", ["bf16", "nvfp4"])
def test_compiled_layers_compute_the_row(make, base_format):
    eager = make(base_format=base_format, compile_layers=False, **ON_GPU)
    compiled = make(base_format=base_format, compile_layers=True, **ON_GPU, max_steps=2, max_completion_length=40)
    compiled.train()  # compiles; what follows are the same graphs
    with torch.no_grad():
        for a, b in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
            a.copy_(b)
    results = [both(one, weighted_logps(one, ragged()))[1] for one in (eager, compiled)]
    result, gradient = error(results[1], (results[0][0].float().cpu(), results[0][1]))
    assert result < 0.02 and gradient < 0.05


MOE = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "num_experts_per_tok": 1, "sliding_window": 32,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["phimoe", "qwen2_moe"])
def test_a_window_that_only_the_mask_has_is_known_however_long_it_is(kind, make, tmp_path):
    """Packed, these layers attended to everything: the trial's sequences are shorter than any window."""
    own = (
        {"num_local_experts": 2}
        if kind == "phimoe"
        else {"num_experts": 2, "use_sliding_window": True, "max_window_layers": 2}
    )
    config = CONFIG_MAPPING[kind](**MOE, **own)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="sliding window from the attention mask alone"):
        make(model=tmp_path / "model", peft_config=lora)
    assert not make(model=tmp_path / "model", peft_config=lora, padding_free=None)._packing.on
    config.sliding_window = 4096  # never acts in this run
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "wide")
    assert make(model=tmp_path / "wide", peft_config=lora)._packing.on


@pytest.mark.parametrize("kind", ["biogpt", "opt", "gpt_bigcode", "persimmon"])
def test_dropped_attention_weights_are_found_under_any_name(kind):
    """BioGPT's update ended in the middle of the first step."""
    small = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320}
    dropped = dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout"), 0.25)
    config = CONFIG_MAPPING[kind](**small, **dropped)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert "attention_dropout=0.25" in packing.why_not(model)

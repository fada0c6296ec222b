"""Policies with more than LoRA on linear layers, rebuilt from their folders: tokens added, rows of tokens trained."""

import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_trl import NVFP4Config, load_adapter
from qerl_trl.publish import export
from qerl_trl.publish.load import check_served_base, load_policy
from tests.faults.tiny_runs import FILE, edit, fails, works
from tests.tiny_models import make_tiny_tokenizer

IDS = torch.arange(20, 60)[None]


@pytest.fixture
def trainer_of(tiny_runs, monkeypatch):
    def build(model, folder, tokenizer, lora=None, **options):
        monkeypatch.setattr(tiny_runs, "tokenizer", tokenizer)
        loaded = {} if isinstance(model, str) else {"model_init_kwargs": None}
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **lora or {})
        defaults = {"max_steps": 1, "learning_rate": 1e-2, "save_strategy": "no", "aqn": False}
        return tiny_runs.trainer(folder, model=model, peft_config=config, **{**defaults, **loaded, **options})

    return build


def with_tokens(model_dir, rows, base_format):
    """Model and tokenizer with added tokens (but for 304), and embeddings resized to `rows`, None: as they are."""
    quantization = {"quantization_config": NVFP4Config(compute_dtype="float32")} if base_format == "nvfp4" else {}
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, **quantization)
    tokenizer = make_tiny_tokenizer()
    if rows != 304:
        tokenizer.add_special_tokens({"extra_special_tokens": [f"<tool_{number}>" for number in range(100)]})
    if rows is not None:
        model.resize_token_embeddings(rows)
    return model, tokenizer


def logits_of(policy):
    with torch.no_grad():
        return policy.eval()(IDS).logits


BOTH = ["embed_tokens", "lm_head"]


@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|save_embedding_layers)")
@pytest.mark.parametrize(
    ("family", "base_format", "rows", "lora", "warning"),
    [
        ("qwen2", "nvfp4", 358, {}, None),
        ("llama", "bf16", 358, {}, None),
        ("qwen2", "bf16", 384, {}, "AutoPeftModel"),
        ("llama", "nvfp4", 384, {}, "AutoPeftModel"),
        ("llama", "bf16", 358, {"modules_to_save": BOTH}, None),
        ("qwen2", "nvfp4", 358, {"trainable_token_indices": [340, 341]}, None),
        ("qwen2", "nvfp4", 304, {}, "AutoPeftModel"),
        ("qwen2", "bf16", None, {}, "ends in an error"),
    ],
    ids=["tied", "untied", "padded", "padded untied", "trained", "rows", "smaller", "not resized"],
)
def test_a_run_with_added_tokens_is_merged_and_loaded_with_them(
    family, base_format, rows, lora, warning, trainer_of, tiny_model_dir, tmp_path, caplog
):
    model, tokenizer = with_tokens(tiny_model_dir(family), rows, base_format)
    run, merged = tmp_path / "run", tmp_path / "merged"
    trainer = trainer_of(model, run, tokenizer, lora, base_format=base_format)
    said = [record.getMessage() for record in caplog.records if "The tokenizer has" in record.getMessage()]
    assert len(said) == (warning is not None) and (warning or "") in "".join(said)
    trainer.train()
    trainer.save_model()
    expected = logits_of(trainer.accelerator.unwrap_model(trainer.model))
    works("merge", run, merged, "--dtype", "float32")
    again = AutoModelForCausalLM.from_pretrained(merged)
    assert again.config.vocab_size == (rows or 320) == expected.shape[-1]
    torch.testing.assert_close(logits_of(again), expected, rtol=0, atol=2e-5)
    assert ("<tool_99>" in AutoTokenizer.from_pretrained(merged).get_vocab()) == (rows != 304)
    torch.testing.assert_close(logits_of(load_policy(run).model), expected, rtol=0, atol=2e-5)
    base, _ = with_tokens(tiny_model_dir(family), None, base_format)
    torch.testing.assert_close(logits_of(load_adapter(base, str(run))), expected, rtol=0, atol=2e-5)
    if base_format == "nvfp4":
        works("merge", run, tmp_path / "packed", "--as", "nvfp4", "--force")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "packed").config.vocab_size == (rows or 320)
    elif warning != "AutoPeftModel":
        export.copy_adapter(run, tmp_path / "adapter")  # what is pushed
        stock = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
        of_rows = logits_of(stock)[..., : rows or 320]  # it resizes to the tokenizer by itself
        torch.testing.assert_close(of_rows, expected, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:.*save_embedding_layers")
def test_a_run_with_added_tokens_is_resumed_with_its_rows(trainer_of, tiny_model_dir, tmp_path):
    """transformers draws new rows at random in each process."""
    for steps in (1, 2):
        model, tokenizer = with_tokens(tiny_model_dir("qwen2"), 358, "nvfp4")
        trainer = trainer_of(model, tmp_path, tokenizer, save_strategy="steps", save_steps=1, max_steps=steps)
        drawn = model.get_input_embeddings().weight.detach().clone()
        trainer.train(resume_from_checkpoint=trainer.to_resume())
        rows = model.get_input_embeddings().weight
        if steps == 1:
            first = rows.detach().clone()
    assert trainer.state.global_step == 2
    assert torch.equal(rows, first) and not torch.equal(rows, drawn)


@pytest.mark.parametrize(
    ("family", "base_format", "dtype"), [("qwen2", "nvfp4", "bfloat16"), ("llama", "bf16", "float32")]
)
def test_rows_of_tokens_are_trained_and_merged(
    family, base_format, dtype, trainer_of, tiny_model_dir, tiny_tokenizer, tmp_path
):
    """A tied head has the trained rows too (peft#2864)."""
    lora, run = {"trainable_token_indices": list(range(30, 90))}, tmp_path / "run"
    options = {"base_format": base_format, "model_init_kwargs": {"dtype": dtype}, "beta": 0.1}
    trainer = trainer_of(str(tiny_model_dir(family)), run, tiny_tokenizer, lora, **options)
    (rows,) = (p for n, p in trainer.model.named_parameters() if "trainable_tokens_delta" in n and "ref" not in n)
    before = rows.detach().clone()
    trainer.train()
    trainer.save_model()
    assert rows.dtype == torch.float32 and not torch.equal(rows, before)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    expected, atol = logits_of(policy), 2e-5 if dtype == "float32" else 0.1
    works("merge", run, tmp_path / "merged", "--dtype", dtype)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    embeddings = merged.get_input_embeddings().weight
    assert torch.equal(embeddings[30:90], rows.to(embeddings.dtype))
    assert merged.config.tie_word_embeddings == (family == "qwen2")
    torch.testing.assert_close(logits_of(merged), expected, rtol=0, atol=atol)
    torch.testing.assert_close(logits_of(load_policy(run).model), expected, rtol=0, atol=atol)
    if base_format == "bf16":
        stock = AutoPeftModelForCausalLM.from_pretrained(run, dtype=getattr(torch, dtype))
        assert isinstance(stock, PeftModel)
        torch.testing.assert_close(logits_of(stock), expected, rtol=0, atol=atol)
    else:
        works("merge", run, tmp_path / "base", "--as", "base")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").get_input_embeddings().weight
        assert torch.equal(base[30:90].float(), before.to(base.dtype).float())


def test_added_tokens_need_the_runs_base_and_no_engine_that_loads_lora_only(trainer_of, tiny_model_dir, tmp_path):
    model, tokenizer = with_tokens(tiny_model_dir("qwen2"), 358, "bf16")
    run, other = tmp_path / "run", shutil.copytree(tiny_model_dir("qwen2"), tmp_path / "other")
    trainer_of(model, run, tokenizer, base_format="bf16").save_model()
    with pytest.raises(ValueError, match=r"embed_tokens|lm_head.* but vLLM loads LoRA only. Evaluate its merge"):
        check_served_base(run, str(tiny_model_dir("qwen2")))
    edit(other / FILE, lambda stored: stored["model.layers.0.mlp.up_proj.weight"][0].add_(1))
    words = ("has other weights than the base that the adapter was trained on",)
    fails(words, "merge", run, tmp_path / "merged", "--base-model", other)

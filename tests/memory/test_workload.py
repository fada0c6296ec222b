import dataclasses
import logging
from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import trainer_optimizer
from transformers.training_args import OptimizerNames

from qerl_trl import QeRLConfig, QeRLRLOOConfig
from qerl_trl.memory import workload
from qerl_trl.memory.workload import ASSUMED_PROMPT, Lengths, Workload, run_lengths, workload_of, workload_of_file


def arguments(config=QeRLConfig, **changes):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_generations": 8}
    return config("out", use_cpu=True, bf16=False, max_completion_length=100, **(settings | changes))


def trainer(lengths=(5, 9, 7), evaluation=None, positions=512, **changes):
    """Prompts of so many words, one token each."""
    return SimpleNamespace(
        args=arguments(**changes),
        model=SimpleNamespace(
            config=SimpleNamespace(
                get_text_config=lambda: SimpleNamespace(max_position_embeddings=positions, vocab_size=9)
            )
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w " * n for n in lengths], "answer": ["1"] * len(lengths)}),
        eval_dataset=evaluation,
        _tokenize_prompts=lambda prompts: ([[1] * len(prompt.split()) for prompt in prompts], None, {}),
    )


def test_the_longest_prompt_of_all_data_and_the_longest_completion():
    assert run_lengths(trainer()) == Lengths(9, 100, 512)
    assert run_lengths(trainer()).engine == 109
    longer = Dataset.from_dict({"prompt": ["w " * 40]})
    assert run_lengths(trainer(evaluation=longer)).prompt == 40
    assert run_lengths(trainer(evaluation={"a": None, "b": longer})).prompt == 40


def test_prompts_are_counted_in_batches(monkeypatch):
    monkeypatch.setattr(workload, "_TOKENIZED_AT_ONCE", 2)
    assert list(workload.prompt_lengths(trainer(lengths=(5, 9, 7, 30, 1)))) == [5, 9, 7, 30, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": 20}, ["4 of 4 prompts", "longest has 31 tokens", "the model takes 20"]),
        (
            {"positions": 512, "use_vllm": True, "vllm_max_model_length": 30},
            ["1 of 4 prompts", "31 tokens", "takes 30", "raise vllm_max_model_length"],
        ),
    ],
    ids=["model", "engine"],
)
def test_prompts_that_leave_no_token_are_found_at_start(changes, words):
    with pytest.raises(ValueError, match="leave less than") as info:
        run_lengths(trainer(lengths=(5, 20, 7, 31), **changes))
    assert all(word in str(info.value) for word in words)


def test_an_engines_limit_is_nothing_to_a_run_without_one():
    assert run_lengths(trainer(lengths=(31,), vllm_max_model_length=30)).prompt == 31


def test_completions_that_will_be_cut_short_are_said(caplog):
    with caplog.at_level(logging.WARNING, logger=workload.__name__):
        found = run_lengths(trainer(lengths=(50, 20, 60), positions=130, use_vllm=True))
    assert "2 of 3 prompts leave less than max_completion_length=100" in caplog.text
    assert "the longest has 60 tokens" in caplog.text
    assert found.prompt + found.completion == found.engine == 130


@pytest.mark.parametrize("what", ["stream", "rollout_func", "environments", "images"])
def test_where_the_data_do_not_tell_a_length_is_assumed(what):
    made = trainer()
    if what == "stream":
        made.train_dataset = made.train_dataset.to_iterable_dataset()
    elif what == "images":
        made.train_dataset = made.train_dataset.add_column("image", ["x"] * 3)
    else:
        setattr(made, what, [object()])
    made.model.config.get_text_config().max_position_embeddings = 4096
    assert run_lengths(made) == Lengths(412, 100, 512, counted=False)
    assert run_lengths(made).engine == 512  # an engine may meet anything up to there
    unlimited = trainer(positions=None)
    unlimited.rollout_func = print
    assert run_lengths(unlimited) == Lengths(ASSUMED_PROMPT, 100, None, counted=False)
    assert run_lengths(unlimited).engine is None


def test_a_short_run_leaves_the_engines_probe_its_tokens():
    assert Lengths(3, 4, 512).engine == workload.SHORTEST_ENGINE
    assert Lengths(3, 4, 32).engine == 32


@pytest.mark.parametrize("config", [QeRLConfig, QeRLRLOOConfig], ids=["grpo", "rloo"])
def test_a_configuration_becomes_a_workload(config):
    args = arguments(config, use_vllm=True, optim="adamw_8bit", vllm_enable_sleep_mode=True, steps_per_generation=16)
    assert workload_of(args, Lengths(28, 100), lora_rank=16) == Workload(
        batch=4, prompt_length=28, completion_length=100, completions=64, accumulation=8, lora_rank=16, optimizer="adamw_8bit",
        rollout="colocate", sleep=True, gradient_checkpointing=None, packed=True, compiled=True, fused=True,
    )  # fmt: skip


def test_how_updates_are_computed_is_read():
    def read(base_format="nvfp4", attention="sdpa", lora_dropout=0.0, **settings):
        args = arguments(base_format=base_format, steps_per_generation=2, gradient_accumulation_steps=2, **settings)
        work = workload_of(args, Lengths(28, 100), lora_dropout=lora_dropout, attention=attention)
        return work.packed, work.generations, work.compiled, work.fused

    assert read() == (True, 4, True, True)
    assert read(padding_free=False) == read(attention="eager") == (False, 4, True, True)
    assert read(lora_dropout=0.1) == (True, 1, True, False)  # every completion's prompt is another sample
    assert read(compile_layers=False, fused_lora=False) == (True, 4, False, False)
    assert read("nf4") == (True, 4, True, False)


def test_engine_arguments_that_change_memory_are_read():
    engine = {
        "enforce_eager": True, "max_num_batched_tokens": 1024, "max_num_seqs": 8, "kv_cache_dtype": "fp8_e4m3",
        "kv_cache_memory_bytes": 10**9,
    }  # fmt: skip
    work = workload_of(arguments(use_vllm=True, vllm_engine_kwargs=engine), Lengths(28, 100))
    assert (work.graphs, work.batched_tokens, work.completions, work.kv_dtype_bytes, work.kv_limit) == (
        False, 1024, 8, 1, 10**9,
    )  # fmt: skip
    assert workload_of(arguments(use_vllm=True, vllm_gpu_memory_utilization=0.4), Lengths(28, 100)).utilization == 0.4


def test_a_server_has_no_share_of_this_gpu():
    work = workload_of(arguments(use_vllm=True, vllm_mode="server", vllm_tensor_parallel_size=4), Lengths(28, 100))
    assert (work.rollout, work.colocated, work.tensor_parallel, work.completions) == ("server", False, 1, 32)
    ranks = workload_of(arguments(use_vllm=True, vllm_tensor_parallel_size=4), Lengths(28, 100))
    assert (ranks.tensor_parallel, ranks.completions, ranks.shares_weights) == (4, 128, False)


@pytest.mark.parametrize(
    ("dtype", "base_format", "expected"),
    [(None, "nvfp4", 2), (None, "full", 4), ("bfloat16", "full", 2), ("float32", "bf16", 4), ("auto", "full", 2)],
)
def test_bytes_of_a_dtype(dtype, base_format, expected):
    assert workload.dtype_bytes_of(dtype, base_format) == expected


def test_a_file_is_read_without_the_gpu_it_is_for(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model_name_or_path: some/model\ndtype: bfloat16\nbf16: true\nlora_r: 8\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n"
        "generation_batch_size: 32\nnum_generations: 8\nmax_completion_length: 64\nuse_vllm: true\neval_problems: 5\n"
        "attn_implementation: flash_attention_2\noutput_dir: runs/x\n"
    )
    model, work = workload_of_file(path, 100)
    assert model == "some/model"
    expected = Workload(
        batch=2, prompt_length=100, completion_length=64, completions=32, accumulation=4, lora_rank=8, compiled=True, fused=True
    )  # fmt: skip
    assert work == dataclasses.replace(expected, rollout="colocate", attention="flash", gradient_checkpointing=None)


def test_under_fsdp_no_adamw_of_bitsandbytes_is_left():
    for optimizer in OptimizerNames:
        work = Workload(optimizer=optimizer.value)
        if optimizer not in trainer_optimizer._BITSANDBYTES_OPTIMIZERS:
            assert work.under_fsdp().optimizer == optimizer.value
        elif "adamw" in optimizer.value:
            assert work.under_fsdp().optimizer == "adamw_torch_fused"


def test_a_value_that_is_none_is_one_line(tmp_path):
    """It was two hundred lines of usage, and the end of the process."""
    (tmp_path / "run.yaml").write_text("model_name_or_path: some/model\noutput_dir: x\nmax_completion_length: many\n")
    with pytest.raises(ValueError, match="max-completion-length: invalid int value: 'many'"):
        workload_of_file(tmp_path / "run.yaml", 100)


def test_a_file_is_planned_with_the_adapter_and_the_type_that_a_run_takes(tmp_path):
    path = tmp_path / "run.yaml"
    for text, rank, bytes_ in (
        ("", 32, 2),
        ("lora_r: 128\n", 128, 2),
        ('lora_r: "64"\n', 64, 2),
        ("use_peft: true\ndtype: float32\n", 16, 4),
    ):
        path.write_text(f"model_name_or_path: some/model\noutput_dir: x\n{text}")
        work = workload_of_file(path, 100)[1]
        assert (work.lora_rank, work.dtype_bytes) == (rank, bytes_)

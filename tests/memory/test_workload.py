import dataclasses
import logging
from types import SimpleNamespace

import pytest
from datasets import Dataset

from qerl_trl import QeRLConfig, QeRLRLOOConfig
from qerl_trl.memory import workload
from qerl_trl.memory.workload import ASSUMED_PROMPT, Lengths, Workload, run_lengths, workload_of, workload_of_file

LENGTHS = Lengths(28, 100)


def arguments(config=QeRLConfig, **changes):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_generations": 8}
    return config("out", use_cpu=True, bf16=False, max_completion_length=100, **(settings | changes))


def trainer(lengths=(5, 9, 7), evaluation=None, positions=512, **changes):
    """Prompts of so many words, one token each."""
    text = SimpleNamespace(max_position_embeddings=positions, vocab_size=9)
    return SimpleNamespace(
        args=arguments(**changes),
        model=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text)),
        train_dataset=Dataset.from_dict({"prompt": ["w " * n for n in lengths], "answer": ["1"] * len(lengths)}),
        eval_dataset=evaluation,
        _tokenize_prompts=lambda prompts: ([[1] * len(prompt.split()) for prompt in prompts], None, {}),
    )


def test_the_longest_prompt_of_all_data_and_the_longest_completion(monkeypatch):
    monkeypatch.setattr(workload, "_TOKENIZED_AT_ONCE", 2)
    assert run_lengths(trainer()) == Lengths(9, 100, 512)
    assert run_lengths(trainer()).engine == 109
    longer = Dataset.from_dict({"prompt": ["w " * 40]})
    assert run_lengths(trainer(evaluation=longer)).prompt == 40
    assert run_lengths(trainer(evaluation={"a": None, "b": longer})).prompt == 40
    # the engine's limit matters with an engine only; its probe needs some tokens
    assert run_lengths(trainer(lengths=(31,), vllm_max_model_length=30)).prompt == 31
    assert (Lengths(3, 4, 512).engine, Lengths(3, 4, 32).engine) == (workload.SHORTEST_ENGINE, 32)


def test_prompts_beyond_the_engines_limit_are_refused():
    """Beyond the model's: tests/faults/test_r3_configuration.py."""
    with pytest.raises(ValueError, match=r"1 of 4 prompts.*31 tokens.*takes 30.*raise vllm_max_model_length"):
        run_lengths(trainer(lengths=(5, 20, 7, 31), use_vllm=True, vllm_max_model_length=30))


def test_shortened_completions_are_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger=workload.__name__):
        found = run_lengths(trainer(lengths=(50, 20, 60), positions=130, use_vllm=True))
    assert "2 of 3 prompts leave less than max_completion_length=100" in caplog.text
    assert found.prompt + found.completion == found.engine == 130


@pytest.mark.parametrize("source", ["stream", "rollout_func"])
def test_an_unknown_length_is_assumed(source):
    def made(positions):
        one = trainer(positions=positions)
        if source == "stream":
            one.train_dataset = one.train_dataset.to_iterable_dataset()
        else:
            one.rollout_func = object()
        return run_lengths(one)

    assert made(512) == Lengths(412, 100, 512, counted=False)
    assert (made(512).engine, made(None).engine) == (512, None), "an engine may meet anything up to there"
    assert made(None) == Lengths(ASSUMED_PROMPT, 100, None, counted=False)


@pytest.mark.parametrize("config", [QeRLConfig, QeRLRLOOConfig], ids=["grpo", "rloo"])
def test_a_configuration_becomes_a_workload(config):
    args = arguments(config, use_vllm=True, optim="adamw_8bit", vllm_enable_sleep_mode=True, steps_per_generation=16)
    lengths = {"batch": 4, "prompt_length": 28, "completion_length": 100, "completions": 64, "accumulation": 8}
    updates = {"lora_rank": 16, "optimizer": "adamw_8bit", "packed": True, "compiled": True, "fused": True}
    expected = Workload(**lengths, **updates, rollout="colocate", sleep=True, gradient_checkpointing=None)
    assert workload_of(args, LENGTHS, lora_rank=16) == expected


@pytest.mark.parametrize(
    ("changes", "packed", "generations", "compiled", "fused"),
    [
        ({}, True, 4, True, True),
        ({"padding_free": False}, False, 4, True, True),
        ({"attention": "eager"}, False, 4, True, True),
        ({"lora_dropout": 0.1}, True, 1, True, False),  # each completion's prompt has its own mask
        ({"compile_layers": False, "fused_lora": False}, True, 4, False, False),
        ({"base_format": "nf4"}, True, 4, True, False),
    ],
    ids=str,
)
def test_updates_are_planned_by_the_settings(changes, packed, generations, compiled, fused):
    of_model = {name: changes[name] for name in ("attention", "lora_dropout") if name in changes}
    settings = {name: value for name, value in changes.items() if name not in of_model}
    args = arguments(steps_per_generation=2, **{"gradient_accumulation_steps": 2} | settings)
    work = workload_of(args, LENGTHS, **of_model)
    assert (work.packed, work.generations, work.compiled, work.fused) == (packed, generations, compiled, fused)


def test_engine_arguments_that_change_memory_are_read():
    engine = {"enforce_eager": True, "max_num_batched_tokens": 1024, "max_num_seqs": 8, "kv_cache_dtype": "fp8_e4m3"}
    work = workload_of(arguments(use_vllm=True, vllm_engine_kwargs=engine | {"kv_cache_memory_bytes": 10**9}), LENGTHS)
    assert (work.graphs, work.batched_tokens, work.completions) == (False, 1024, 8)
    assert (work.kv_dtype_bytes, work.kv_limit) == (1, 10**9)
    assert workload_of(arguments(use_vllm=True, vllm_gpu_memory_utilization=0.4), LENGTHS).utilization == 0.4


@pytest.mark.parametrize(
    ("mode", "expected"), [("server", ("server", False, 1, 32)), ("colocate", ("colocate", True, 4, 128))]
)
def test_a_server_has_no_share_of_this_gpu(mode, expected):
    work = workload_of(arguments(use_vllm=True, vllm_mode=mode, vllm_tensor_parallel_size=4), LENGTHS)
    assert (work.rollout, work.colocated, work.tensor_parallel, work.completions) == expected
    assert mode == "server" or not work.shares_weights


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "run.yaml").write_text(f"model_name_or_path: some/model\noutput_dir: runs/x\n{text}")
        return workload_of_file(tmp_path / "run.yaml", 100)

    return read


def test_a_file_is_read_without_the_gpu_it_is_for(read):
    model, work = read(
        "dtype: bfloat16\nbf16: true\nlora_r: 8\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n"
        "generation_batch_size: 32\nnum_generations: 8\nmax_completion_length: 64\nuse_vllm: true\neval_problems: 5\n"
        "attn_implementation: flash_attention_2\n"
    )
    lengths = {"batch": 2, "prompt_length": 100, "completion_length": 64, "completions": 32, "accumulation": 4}
    expected = Workload(**lengths, lora_rank=8, compiled=True, fused=True, rollout="colocate", attention="flash")
    assert (model, work) == ("some/model", dataclasses.replace(expected, gradient_checkpointing=None))


@pytest.mark.parametrize(
    ("text", "rank", "dtype_bytes"),
    [("", 32, 2), ("lora_r: 128\n", 128, 2), ('lora_r: "64"\n', 64, 2), ("use_peft: true\ndtype: float32\n", 16, 4)],
)
def test_a_file_is_planned_with_the_adapter_and_dtype_of_a_run(read, text, rank, dtype_bytes):
    work = read(text)[1]
    assert (work.lora_rank, work.dtype_bytes) == (rank, dtype_bytes)


def test_a_wrong_value_is_named_in_one_line(read):
    with pytest.raises(ValueError, match="max-completion-length: invalid int value: 'many'"):
        read("max_completion_length: many\n")

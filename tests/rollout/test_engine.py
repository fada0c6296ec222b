"""The real vLLM engine against transformers, in float32: weights, adapter, noise, sharing, training, server, tensor parallel.

What is measured is in scenarios.py. Log-probabilities of two float32 implementations of these tiny models differ by about 1e-5;
an adapter, a noise or a scale that is missing moves them by 0.1 to 10.
"""

import re

import pytest
import torch

from qerl_trl.rollout.probe import ProbeResult

EXACT = 1e-4
#: of an engine on a GPU, see scenarios.MEMORY
KV_CACHE_MIB = 256


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_bf16_checkpoint_is_quantized_as_the_trainer_does(checkpoints, family):
    assert checkpoints[f"online bytes equal {family}"]
    assert checkpoints[f"online {family}"] < EXACT


@pytest.mark.parametrize(
    "case",
    [
        "offline compressed-tensors",
        "offline modelopt",
        "offline modelopt mixed",
        "separate scales",
        "online four_over_six",
    ],
)
def test_checkpoints_load_exactly(checkpoints, case):
    assert checkpoints[case] < EXACT


def test_fp8_layers_of_a_mixed_checkpoint_have_the_trainers_bits(checkpoints):
    assert checkpoints["mixed bytes equal"]


def test_fp8_layers_of_a_mixed_checkpoint_are_one_copy(bases):
    assert bases["mixed in one copy"] == [True, True]
    assert bases["mixed base"] < EXACT


def test_fused_layers_keep_one_scale_per_row_when_shards_differ(checkpoints):
    assert checkpoints["separate scales rows"] == 256  # 128 + 64 + 64 rows of q, k, v: not one maximum


def test_saved_folder_is_compressed_tensors(checkpoints):
    assert checkpoints["saved config"] == "compressed-tensors"


def test_ignored_layers_stay_dense(checkpoints):
    assert checkpoints["skipped layers"] == [
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.gate_up_proj",
    ]


def test_stock_engine_is_untouched(checkpoints):
    assert checkpoints["stock before"] == {
        "norm": "RMSNorm",
        "dtype": "torch.float32",
        "linear": "UnquantizedLinearMethod",
    }
    # in a process that has used our method, a stock engine gets our norm class in the stock role
    assert checkpoints["stock after"]["linear"] == "UnquantizedLinearMethod"
    assert checkpoints["stock after noisy"] == 0
    assert checkpoints["stock same output"]


def test_experts_are_refused_by_name(bases):
    assert "mixture-of-experts" in bases["experts"] and "mlp.experts" in bases["experts"]


# -------------------------------------------------------------------------------------------------------------- live


def test_weights_are_the_trainers_memory(live):
    assert all(live["same storage"].values()), live["same storage"]
    assert live["still same storage"]


def test_kernels_of_all_layers_are_compiled_at_once_before_they_run(live):
    """N, K, rows of the fused layers, padded rank, bias, aligned scales; on a CPU nothing is compiled, but asked for."""
    qkv, o = [256, 128, [128, 64, 64], 16, True, True], [128, 128, [128], 16, False, True]
    gate_up, down = [512, 128, [256, 256], 16, False, True], [128, 256, [128], 16, False, True]
    assert live["compiled ahead"] == [sorted([qkv, o, gate_up, down])]
    assert live["norms compiled ahead"] == [[128]]
    assert live["dtypes compiled ahead"] == ["torch.float32"]


def test_probe_agrees_and_leaves_no_trace(live):
    assert live["probe"]["difference"] < EXACT and live["probe"]["base_difference"] < EXACT
    assert live["probe"]["effect"] > 0.01
    assert live["probe restored the adapter"]


def test_adapter_updates_reach_the_engine(live):
    assert max(live["adapter"]) < EXACT
    assert live["adapter ignored"] > 0.1  # what the comparison would show without the adapter
    assert live["buffers stay"]


def test_noise_is_the_trainers_noise(live):
    assert live["noisy weights bit-equal"]
    assert live["noisy"] < EXACT
    assert live["noise ignored"] > 0.1
    assert live["sigma effective"] == pytest.approx(5e-2, rel=0.1)


def test_noise_is_stateless(live):
    assert live["a new draw is another noise"] and live["the same draw is the same noise"]


def test_noise_off_restores_every_bit(live):
    assert live["restored"]


def test_a_stale_adapter_is_noticed(live):
    assert live["stale"] > 0.1
    assert live["generate syncs by itself"] < EXACT


def test_syncs_do_not_grow_memory(live):
    assert live["growth of 200 syncs, MiB"] < 4


def test_refused_cache_reset_is_an_error(live):
    assert live["refused reset"].startswith("RolloutError") and "prefix cache" in live["refused reset"]


@pytest.mark.parametrize(
    ("case", "cause"), [("dead engine", "EngineCore died"), ("hanging engine", "rollout_timeout=0.5")]
)
def test_a_broken_engine_ends_the_run_with_its_cause(live, case, cause):
    assert live[case].startswith("RolloutError") and cause in live[case] and "resume" in live[case]


# ------------------------------------------------------------------------------------------------------------- bases


def test_dense_base_carries_adapter_and_shares(bases):
    assert bases["dense base"] < EXACT and bases["dense adapter"] < EXACT
    assert bases["dense shared"]
    assert bases["only targets have buffers"] == [
        "down_proj",
        "k_proj",
        "q_proj",
        "v_proj",
    ]  # k shares vLLM's layer with q and v


def test_copied_base_with_rank_and_alpha_patterns(bases):
    assert bases["copied adapter"] == "student"  # any name will do
    assert bases["copied base"] < EXACT
    assert not bases["copied shared"]


def test_trained_norms_follow(bases):
    assert bases["trained norms"] < EXACT
    assert bases["trained norms under noise"] < EXACT


@pytest.mark.parametrize(
    ("case", "named"), [("dora", "use_dora"), ("trained head", "lm_head"), ("adapter on the head", "lm_head")]
)
def test_what_the_engine_cannot_carry_is_refused(bases, case, named):
    assert bases[case].startswith("ValueError") and named in bases[case]


def test_probe_finds_a_wrong_engine(bases):
    assert "other weights or norms" in bases["probe finds other weights"]
    assert "clean log-probabilities differ" in bases["probe finds a stale adapter"]
    assert "the adapter acts otherwise" in bases["probe finds a lost adapter"]


@pytest.mark.parametrize("base", ["nvfp4", "dense"])
def test_probe_sees_through_the_rounding_of_bf16(bfloat16, base):
    found = ProbeResult(**bfloat16[base])
    assert found.fault is None and found.base_difference < 0.5 * found.limits[0]
    assert found.difference < 0.7 * found.limits[1]
    assert "the adapter acts otherwise" in bfloat16[f"{base} halved"]


# ---------------------------------------------------------------------------------------------------------- trainers


def test_five_grpo_steps(trainers):
    logs = trainers["logs"]
    assert len(logs) == 5
    assert logs[0]["aqn/sigma"] == 0 and logs[0]["sampling/sampling_logp_difference/max"] < 1e-3
    for log in logs[1:]:
        assert log["aqn/sigma_effective"] == pytest.approx(log["aqn/sigma"], rel=0.15)
        assert log["rollout/mismatch_kl"] > 0
    assert all(log["grad_norm"] > 0 for log in logs)
    assert trainers["shared at the end"]
    assert trainers["clean at the end"] < EXACT


def test_without_noise_rollout_and_trainer_agree(trainers):
    assert max(trainers["without noise"]) < 1e-3


def test_a_grammar_is_no_stale_adapter(trainers):
    """After trl#3924 and trl#7269: it ended every run in its third rollout."""
    found = trainers["grammar"]
    assert all(re.fullmatch("[0-9]{4}", text) for text in found["texts"])
    assert len(found["kl"]) == 4 and min(found["kl"]) > 0.1 and not found["told"]


def test_a_dying_engine_leaves_a_checkpoint_that_continues(trainers):
    rescue = trainers["rescue"]
    assert (
        rescue["error"].startswith("RolloutError")
        and "EngineCore died" in rescue["error"]
        and "Step 2 is saved" in rescue["error"]
    )
    assert rescue["saved"] == "checkpoint-2"
    assert rescue["steps after resuming"] == 3


def test_rloo(trainers):
    assert trainers["rloo steps"] == 2
    assert trainers["rloo"][0] == 0 and trainers["rloo"][1] > 1e-3


# ------------------------------------------------------------------------------------------- server and tensor parallel


def test_server_round_trip(server):
    assert server["probe"]["difference"] < EXACT and server["first"] < 1e-3
    assert server["shared memory"]
    assert len(server["adapter"]) == 4 and max(server["adapter"]) < EXACT


def test_server_noise(server):
    assert server["noisy"] < EXACT < 0.1 < server["noise ignored"]
    for sigma, effective in server["sigma"][1:]:
        assert effective == pytest.approx(sigma, rel=0.15)


def test_a_server_draws_again_what_it_drew(server):
    """A run that resumes draws what it would have drawn."""
    assert all(server["draws"].values())


def test_server_refuses_a_damaged_update(server):
    assert "arrived damaged" in server["damaged"] and server["still as before"] < EXACT


def test_server_with_other_weights_is_refused(server):
    assert "scale_rule='rtn' there, 'four_over_six' in the trainer" in server["other weights"]
    assert "QERL_SERVER_SECRET in its environment, the server is started by\nvllm serve" in server["other weights"]
    assert '"scale_rule": "four_over_six"' in server["other weights"]


def test_a_stranger_can_do_nothing_to_a_real_server(server):
    """vLLM's development mode is on there."""
    assert server["strangers"] == {"open": 200, "call": 401, "completions": 401, "collective_rpc": 401, "sleep": 401}
    assert server["after the strangers"] < EXACT


def test_nvfp4_server_is_refused_by_the_bf16_arm(server):
    assert server["bf16 arm"].startswith("RuntimeError")
    assert "NVFP4 there and dense in the trainer: model.layers.0" in server["bf16 arm"]
    assert '"base": "dense"' in server["bf16 arm"]


def test_bf16_arm_on_a_server_samples_bf16(dense_server):
    assert dense_server["probe"]["difference"] < EXACT
    assert max(dense_server["differences"]) < 1e-3
    assert "dense there and NVFP4 in the trainer" in dense_server["nvfp4 trainer"]


def test_dead_server_ends_the_run(server):
    assert server["dead server"].startswith("RolloutError") and "refused" in server["dead server"]


@pytest.mark.parametrize("case", ["right", "skipped, as told", "bf16 arm, as told", "packed checkpoint, as told"])
def test_an_engine_that_was_told_by_the_spec_passes(handshake, case):
    assert handshake[case] == []


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("scale rule", "other NVFP4 weights (scale_rule='four_over_six' there, 'rtn' in the trainer): model.layers.0"),
        ("dense there", "dense there and NVFP4 in the trainer: model.layers.0.mlp.down_proj"),
        ("NVFP4 there", "NVFP4 there and dense in the trainer: model.layers.1.self_attn.o_proj"),
        ("small adapter", "adapter buffers of rank 16, but the trainer's adapter has rank 20, in model.layers.0"),
        ("missing targets", "no adapter buffers in model.layers.0.mlp.down_proj"),
        ("other checkpoint", "other NVFP4 weights (another checkpoint): model.layers.0"),
        ("other checkpoint", "other embedding weights (another checkpoint): lm_head, model.embed_tokens"),
        ("bf16 arm, NVFP4 server", "NVFP4 there and dense in the trainer: model.layers.0"),
        ("norm and bias", "other norm weights (another checkpoint, or an earlier run trained them on this server): "
         "model.layers.1.input_layernorm"),
        ("norm and bias", "other bias weights (another checkpoint): model.layers.0.self_attn.k_proj.bias"),
    ],
)  # fmt: skip
def test_what_differs_is_named(handshake, case, named):
    assert any(difference.startswith(named) for difference in handshake[case]), handshake[case]


def test_one_engine_of_both_processes_of_a_sharded_trainer(sharded_tensor_parallel):
    assert sharded_tensor_parallel["engine's part"] == 0.5
    check_sharded(sharded_tensor_parallel)


def test_engine_of_a_sharded_trainer(sharded):
    assert sharded["engine's part"] == 1
    check_sharded(sharded)


def test_a_server_of_a_sharded_trainer(sharded_server):
    assert sharded_server["is sharded"]
    assert sharded_server["probe"]["difference"] < EXACT and sharded_server["first"] < 1e-3
    assert max(sharded_server["adapter"]) < EXACT
    (clean, none), (sigma, effective) = sharded_server["sigma"]
    assert clean == none == 0 < sigma and effective == pytest.approx(sigma, rel=0.15)


def check_sharded(sharded) -> None:
    assert sharded["is sharded"] and sharded["sharded adapter"] == "DTensor" and not sharded["shared"]
    assert sharded["probe"]["difference"] < EXACT and sharded["first"] < 1e-3
    assert sharded["noise"]["difference"] < EXACT
    assert max(sharded["adapter"]) < EXACT
    (clean, none), (sigma, effective) = sharded["sigma"]
    assert clean == none == 0 < sigma and effective == pytest.approx(sigma, rel=0.15)


def test_tensor_parallel_in_the_trainers_processes(tensor_parallel):
    assert not tensor_parallel["shared"]
    assert tensor_parallel["probe"]["difference"] < EXACT and tensor_parallel["first"] < 1e-3
    assert tensor_parallel["adapter"] < EXACT


def test_the_shards_of_an_engine_draw_the_same_tokens_whatever_moved_their_generators(tensor_parallel):
    one, other = tensor_parallel["drawn"]
    assert one == other and len(set(one)) > 1
    assert tensor_parallel["generator was moved"] == [True, False]  # the second one's own draws are its own again


# ---------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="float32 and torch.compile without graphs: vLLM 0.25.1's own attention kernel (triton_unified_attention) reads out of bounds",
)
def test_torch_compile_sees_updates_in_place(compiled):
    assert max(compiled["adapter"]) < EXACT
    assert compiled["noisy"] < EXACT < 0.1 < compiled["noise ignored"]
    assert compiled["restored"]


# ---------------------------------------------------------------------------------------------------------- sleep


@pytest.mark.gpu
def test_sleep_frees_the_cache_and_keeps_shared_weights(sleeping_shared):
    assert 0.9 * KV_CACHE_MIB < sleeping_shared["freed MiB"] < KV_CACHE_MIB + 0.5 * sleeping_shared["frozen MiB"]
    check_sleep(sleeping_shared)


@pytest.mark.gpu
def test_sleep_frees_a_copy_of_the_weights_too(sleeping_copy):
    assert sleeping_copy["freed MiB"] > 0.9 * (KV_CACHE_MIB + sleeping_copy["frozen MiB"])
    check_sleep(sleeping_copy)


def check_sleep(case):
    assert case["asleep at the start"] and case["asleep after generate"]
    assert case["adapter"] < EXACT  # synced while it slept
    assert case["same output"]

"""The parts of the rollout that need no running engine: options, plans, refusals, messages, sleep."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from qerl_trl.rollout_plan import GIB, plan_kv_cache
from qerl_trl.vllm_checksum import checksum


def shape(hidden=3584, layers=28, heads=28, kv_heads=4, inner=18944, vocab=152064) -> nn.Module:
    model = nn.Linear(4, 4)  # 16 + 4 trainable values
    config = SimpleNamespace(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=inner, vocab_size=vocab, head_dim=None,
    )  # fmt: skip
    model.config = SimpleNamespace(get_text_config=lambda: config)
    return model


def plan(**changes):
    settings = {
        "max_sequences": 64,
        "max_length": 1024,
        "train_tokens": 8192,
        "engine_tokens": 4096,
        "kv_sleeps": False,
    }
    return plan_kv_cache(shape(), **{"free": 130 * GIB, "total": 140 * GIB, **settings, **changes})


def test_plan_takes_what_the_sequences_need():
    made = plan()
    assert made.kv == made.wanted == 64 * (1024 + 32) * 2 * 28 * 4 * 128 * 2  # keys and values, bf16
    assert "KV cache" in str(made) and "optimizer" in str(made)


def test_plan_leaves_the_training_its_share_unless_the_cache_sleeps():
    awake, asleep = plan(free=24 * GIB), plan(free=24 * GIB, kv_sleeps=True)
    assert awake.kv < asleep.kv
    assert awake.kv + awake.optimizer + awake.activations + awake.engine <= 24 * GIB


def test_plan_leaves_room_for_a_copy_of_the_weights():
    shared, copied = plan(free=38 * GIB), plan(free=38 * GIB, copy=15 * GIB)
    assert copied.kv + copied.copy + copied.optimizer + copied.activations + copied.engine <= 38 * GIB
    assert copied.kv < shared.kv
    assert "copy of the weights 15.0" in str(copied) and "copy" not in str(shared)


def test_plan_refuses_too_little():
    with pytest.raises(RuntimeError, match="Too little is left"):
        plan(free=8 * GIB)


# ------------------------------------------------------------------------------------------------------------ adapters


def adapted(*names, target=("q_proj",)) -> nn.Module:
    """A tiny PEFT model with one adapter a name; the first is active."""
    from peft import LoraConfig, get_peft_model
    from tiny_models import make_tiny_model

    configs = [LoraConfig(r=4 * (i + 1), target_modules=list(target)) for i in range(len(names))]
    model = get_peft_model(make_tiny_model("qwen2"), configs[0], adapter_name=names[0])
    for name, config in zip(names[1:], configs[1:], strict=True):
        model.add_adapter(name, config)
    return model


def test_the_active_adapter_is_rolled_out_whatever_its_name():
    from qerl_trl.rollout_policy import adapter_room, check_servable, rollout_layers

    model = adapted("student", "ref")
    check_servable(model)
    assert adapter_room(model) == {"rank": 4, "targets": ["q_proj"]}
    assert all("student" in layer.lora_A for layer in rollout_layers(model).values())
    model.set_adapter("ref")
    with pytest.raises(ValueError, match="several adapters"):
        check_servable(model)


def test_two_active_adapters_are_refused():
    from qerl_trl.rollout_policy import active_adapter

    model = adapted("student", "ref")
    model.base_model.set_adapter(["student", "ref"])
    with pytest.raises(ValueError, match="student, ref are active at once"):
        active_adapter(model)


@pytest.mark.parametrize(
    ("zero_stage", "fsdp_version", "named"), [(3, None, "ZeRO-3"), (0, 1, "fsdp_version: 2")], ids=["zero3", "fsdp1"]
)
def test_sharding_that_hides_the_adapter_is_refused(zero_stage, fsdp_version, named):
    from qerl_trl.rollout_policy import check_sharding

    with pytest.raises(ValueError, match=named):
        check_sharding(zero_stage, fsdp_version)
    check_sharding(2, None)
    check_sharding(0, 2)


def test_checksums_of_shards_add_up():
    packed = torch.randint(0, 256, (64, 32), dtype=torch.uint8)
    scale = torch.randint(8, 120, (64, 4), dtype=torch.uint8)
    whole = checksum(packed, scale)
    rows = [checksum(packed[i : i + 16], scale[i : i + 16]) for i in range(0, 64, 16)]
    columns = [checksum(packed[:, i : i + 16], scale[:, i // 8 : i // 8 + 2]) for i in (0, 16)]
    assert whole == tuple(map(sum, zip(*rows, strict=True))) == tuple(map(sum, zip(*columns, strict=True)))
    packed[3, 3] ^= 1
    assert checksum(packed, scale) != whole


# ------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "patterns", "expected"),
    [
        ("lm_head", ["lm_head"], True),
        ("model.layers.1.mlp.gate", ["re:.*mlp.gate$"], True),
        ("model.layers.1.mlp.gate_proj", ["re:.*mlp.gate$"], False),
        ("model.layers.1.mlp.gate_proj", ["mlp.gate"], False),  # boundary-aware
        ("model.layers.1.mlp.gate_proj", ["gate_proj"], True),
        ("model.layers.11.mlp.up_proj", ["model.layers.1.*"], False),
        ("model.layers.1.mlp.up_proj", ["model.layers.1.*"], True),
    ],
)
def test_ignore_patterns(name, patterns, expected):
    from qerl_trl.vllm_quantization import is_ignored

    assert is_ignored(name, patterns) is expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scale_rule": "best"}, "best"),
        ({"base": "int8"}, "int8"),
        ({"rank": 3}, "rank"),
        ({"adapter": {"rank": 0, "targets": ["q_proj"]}}, "rank=0"),
        ({"adapter": {"rank": 4, "targets": []}}, "targets"),
    ],
)
def test_bad_options_are_named(options, named):
    from qerl_trl.vllm_quantization import EngineOptions

    with pytest.raises(ValueError, match=named):
        EngineOptions.from_dict(options)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}, "pack-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
        ({"quant_method": "gptq"}, "gptq"),
    ],
)
def test_other_formats_are_refused_by_name(config, named):
    from qerl_trl.vllm_quantization import QeRLQuantizationConfig

    with pytest.raises(ValueError, match=named):
        QeRLQuantizationConfig.from_config(config)


def test_a_checkpoint_is_only_taken_over_when_asked():
    from qerl_trl.vllm_quantization import QeRLQuantizationConfig

    checkpoint = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    assert QeRLQuantizationConfig.override_quantization_method(checkpoint, None) is None
    assert QeRLQuantizationConfig.override_quantization_method(checkpoint, "fp8") is None
    assert QeRLQuantizationConfig.override_quantization_method(checkpoint, "qerl_nvfp4") == "qerl_nvfp4"


# ------------------------------------------------------------------------------------------------------------ messages


def test_update_survives_the_wire():
    from qerl_trl.vllm_state import AdapterTensors
    from qerl_trl.vllm_worker import decode_update, encode_update

    adapter = {"model.layers.0.mlp.up_proj": AdapterTensors(torch.randn(4, 8), torch.randn(16, 4), 3.0)}
    norms = {"model.norm": torch.randn(8)}
    decoded, decoded_norms = decode_update(encode_update(adapter, norms, torch.float32), torch.device("cpu"))
    (tensors,) = decoded.values()
    assert torch.equal(tensors.a, adapter["model.layers.0.mlp.up_proj"].a)
    assert torch.equal(tensors.b, adapter["model.layers.0.mlp.up_proj"].b * 3.0) and tensors.scaling == 1.0
    assert torch.equal(decoded_norms["model.norm"], norms["model.norm"])


@pytest.mark.parametrize("data", [b"", b"\x80\x04\x95\x00", b"x" * 100])
def test_what_is_no_update_is_refused(data):
    from qerl_trl.vllm_worker import decode_update

    with pytest.raises(ValueError, match="not a safetensors file"):
        decode_update(data, torch.device("cpu"))


def test_an_update_with_half_an_adapter_is_refused():
    from safetensors.torch import save

    from qerl_trl.vllm_worker import decode_update

    with pytest.raises(ValueError, match="only half"):
        decode_update(save({"a:x": torch.zeros(2)}), torch.device("cpu"))
    with pytest.raises(ValueError, match="expected a:NAME"):
        decode_update(save({"weight": torch.zeros(2)}), torch.device("cpu"))


def test_parts_of_a_transfer_must_come_in_order():
    from qerl_trl.vllm_worker import QeRLWorkerExtension

    worker = QeRLWorkerExtension()
    assert "unknown transfer" in worker.qerl_receive("t", "1", "AAAA")["error"]
    assert worker.qerl_receive("t", "0", "AAAA") == {"bytes": 3}
    assert "when part 0 was due" in worker.qerl_receive("t", "5", "AAAA")["error"]
    assert "not base64" in worker.qerl_receive("t", "0", "no base64!")["error"]
    assert "damaged or incomplete" in worker.qerl_apply("t", "00")["error"]


# --------------------------------------------------------------------------------------------------------------- sleep


@pytest.mark.parametrize("has_discard", [True, False], ids=["new allocator", "allocator of 0.25"])
def test_sleep_unmaps_the_kv_cache_only(monkeypatch, has_discard):
    """With a stand-in for the CUDA allocator: which allocations are unmapped and mapped again."""
    import vllm.device_allocator
    from vllm.device_allocator import cumem

    from qerl_trl.vllm_sleep import KVOnlyBackend

    calls = []

    def allocation(tag, handle):
        return SimpleNamespace(tag=tag, handle=(0, handle, 0, 0), is_asleep=False, cpu_backup_tensor=None)

    allocations = {1: allocation("weights", 10), 2: allocation("kv_cache", 20), 3: allocation("kv_cache", 30)}

    class Allocator:
        pointer_to_data = allocations

        def wake_up(self, tags):
            for data in allocations.values():
                if tags is None or data.tag in tags:
                    calls.append(("map", data.handle[1]))
                    data.is_asleep = False

    def discard(self, tags):
        for data in allocations.values():
            if data.tag in tags:
                calls.append(("unmap", data.handle[1]))

    if has_discard:
        Allocator.discard = discard
    monkeypatch.setattr(vllm.device_allocator, "get_mem_allocator_instance", Allocator)
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: calls.append(("unmap", handle[1])), raising=False)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    backend = KVOnlyBackend()
    backend.suspend(2)
    assert calls == [("unmap", 20), ("unmap", 30)]
    calls.clear()
    backend.resume(None)
    assert calls == [("map", 20), ("map", 30)]

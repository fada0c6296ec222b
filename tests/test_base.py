"""What a trainer loads for its `base_format`: the versions that it must not load it with. The loading itself: test_trainer.py."""

import importlib.metadata

import pytest

from qerl_trl import QeRLConfig, base

functional = pytest.importorskip("bitsandbytes.functional")


@pytest.mark.parametrize(
    ("version", "avx512bf16", "base_format", "refused"),
    [
        ("0.49.0", True, "nf4", True),
        ("0.50.2", True, "nf4", True),
        ("0.50.2", False, "nf4", False),
        ("0.48.2", True, "nf4", False),
        ("0.50.2", True, "bf16", False),
    ],
)
def test_nf4_on_a_cpu_where_bitsandbytes_cannot_train(
    version, avx512bf16, base_format, refused, monkeypatch, tiny_model_dir, tmp_path
):
    real = importlib.metadata.version
    monkeypatch.setattr(
        base.importlib.metadata, "version", lambda name: version if name == "bitsandbytes" else real(name)
    )
    monkeypatch.setattr(functional, "has_avx512bf16", lambda: avx512bf16, raising=False)  # older releases have none
    args = QeRLConfig(output_dir=str(tmp_path), base_format=base_format, use_cpu=True, bf16=False, report_to="none")
    loading = base.model_init(str(tiny_model_dir("qwen2")), args, None)
    if refused:
        with pytest.raises(RuntimeError, match=rf"bitsandbytes {version} .* 'bitsandbytes<0\.49'"):
            loading.__enter__()
    else:
        with loading as config:
            assert (config is not None) == (base_format == "nf4")

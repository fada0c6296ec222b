"""What a trainer loads for its `base_format`: the versions that it must not load it with. The loading itself: test_trainer.py."""

import pytest

from qerl_trl import QeRLConfig
from qerl_trl.run import base

functional = pytest.importorskip("bitsandbytes.functional")


@pytest.mark.parametrize(
    ("avx512bf16", "base_format", "refused"),
    [(True, "nf4", True), (False, "nf4", False), (None, "nf4", False), (True, "bf16", False)],
    ids=["repacks", "other CPU", "before 0.49", "bf16"],
)
def test_nf4_on_a_cpu_where_bitsandbytes_cannot_train(
    avx512bf16, base_format, refused, monkeypatch, tiny_model_dir, tmp_path
):
    monkeypatch.delattr(functional, "has_avx512bf16", raising=False)
    if avx512bf16 is not None:
        monkeypatch.setattr(functional, "has_avx512bf16", lambda: avx512bf16, raising=False)
    args = QeRLConfig(output_dir=str(tmp_path), base_format=base_format, use_cpu=True, bf16=False, report_to="none")
    loading = base.model_init(str(tiny_model_dir("qwen2")), args, None)
    if refused:
        with pytest.raises(RuntimeError, match=r"bitsandbytes repacks .* 'bitsandbytes<0\.49'"):
            loading.__enter__()
    else:
        with loading as config:
            assert (config is not None) == (base_format == "nf4")

"""Whatever is wrong with a checkpoint's files is a `ValueError` that names the file and the tensor."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from qerl_trl.nvfp4 import headers
from qerl_trl.nvfp4.checkpoints import LAYOUTS
from qerl_trl.nvfp4.headers import check_headers, check_scales, read_headers

N, K = 8, 64
MODULE, OTHER = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"


def good_tensors(layout: str) -> dict[str, torch.Tensor]:
    """One packed module, with a bias, an activation scale and an all-zero block with a scale of zero."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0x08, 0x7F, (N, K // 16), dtype=torch.uint8, generator=generator)
    packed[2, :8], scale[2, 0] = 0x80, 0  # codes 0 and 8: plus and minus zero
    names = LAYOUTS[layout]
    tensors = {
        names.packed: packed,
        names.block_scale: scale.view(torch.float8_e4m3fn),
        names.global_scale: torch.tensor([3000.0]) if names.divides else torch.tensor(1 / 3000.0),
        "bias": torch.zeros(N, dtype=torch.bfloat16),
        "input_scale": torch.tensor(0.01),
    }
    return {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}


@pytest.fixture(params=list(LAYOUTS))
def layout(request):
    return request.param


@pytest.fixture
def check(tmp_path, layout):
    """`check(tensors)`: write and check them as the weights of a model with the linears `modules`."""

    def run(tensors, modules=(MODULE,), dense=(), ignored=(), rows=N):
        file, names = tmp_path / "model.safetensors", LAYOUTS[layout]
        save_file(tensors, file)
        linears = {name: nn.Linear(K, rows, device="meta") for name in modules}
        found = check_headers(read_headers([file]), names, linears, dense, ignored)
        for name in found:
            check_scales(name, *(tensors[f"{name}.{part}"] for part in names.tensors[1:]), names, str(file))
        return found

    return run


def test_a_good_checkpoint_passes(check, layout):
    assert list(check(good_tensors(layout))) == [MODULE]


def with_nan(scale: torch.Tensor) -> torch.Tensor:
    scale.view(torch.uint8)[5, 3] = 0xFF
    return scale


#: tensor -> (its name or part, its changed content or None without it, the message)
DAMAGE = {
    "no codes": ("packed", None, "missing"),
    "no global scale": ("global_scale", None, "missing"),
    "AWQ pre-scale": ("pre_quant_scale", lambda t: torch.zeros(1), "unexpected tensor"),
    "codes int8": ("packed", lambda t: t.to(torch.int8), r"is I8 .*; U8 .* belongs there"),
    "codes too narrow": ("packed", lambda t: t[:, :20].contiguous(), r"U8 \(8, 32\) belongs there"),
    "one row missing": ("block_scale", lambda t: t[:7].contiguous(), r"F8_E4M3 \(8, 4\) belongs there"),
    "two global scales": ("global_scale", lambda t: t.reshape(1).repeat(2), "of one number belongs there"),
    "NaN block scale": ("block_scale", with_nan, "1 of 32 values that are NaN"),
    "zero global scale": ("global_scale", lambda t: t * 0, "is 0, which is no positive"),
    "infinite global scale": ("global_scale", lambda t: t / 0, "is inf"),
    "reciprocal global scale": ("global_scale", lambda t: 1 / t, "looks like the reciprocal"),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_damage_is_found_and_named(check, layout, damage, tmp_path):
    part, change, message = DAMAGE[damage]
    name, tensors = f"{MODULE}.{getattr(LAYOUTS[layout], part, part)}", good_tensors(layout)
    stored = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(stored)
    with pytest.raises(ValueError, match=message) as caught:
        check(tensors)
    assert name in str(caught.value) and str(tmp_path / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 16}, r"\(8, 32\); U8 \(16, 32\) belongs there"),
        ({"modules": [MODULE, OTHER]}, rf"'{OTHER}\.\w+' is missing"),
        ({"modules": (), "dense": [MODULE]}, "says that this module is not quantized"),
        ({"modules": ()}, "belongs to no linear of the model"),
    ],
    ids=["another shape", "not there", "on the ignore list", "another model"],
)
def test_a_checkpoint_of_another_model_is_refused(check, layout, options, message):
    with pytest.raises(ValueError, match=message):
        check(good_tensors(layout), **options)


def test_tensors_that_the_models_class_ignores_are_ignored(check, layout):
    assert check(good_tensors(layout), (), ignored=[r"model\.layers\.0\."]) == {}


@given(keep=st.floats(0, 0.999))
@settings(max_examples=30)
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path_factory, keep):
    file = tmp_path_factory.mktemp("cut") / "cut.safetensors"
    save_file(good_tensors("compressed-tensors"), file)
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ValueError, match=r"cut\.safetensors"):
        read_headers([file])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_value_that_is_not_finite_is_found(dtype):
    tensor = torch.full((3, 50), 100.0).to(dtype)
    headers.check_finite("x", tensor, "file")
    values = [math.nan] if dtype == torch.float8_e4m3fn else [math.nan, math.inf]  # E4M3 has no infinity
    for stored in torch.tensor(values).to(dtype):
        bad = tensor.clone()
        bad.view(torch.uint8).view(3, -1)[1, : dtype.itemsize] = stored.view(1).view(torch.uint8)
        with pytest.raises(ValueError, match="file: tensor 'x' has 1 of 150 values that are NaN or infinite"):
            headers.check_finite("x", bad, "file")

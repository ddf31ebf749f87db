"""Norm, rotation and gate against their float64 definitions, in odd shapes and every dtype."""

import pytest
import torch

from decodelab.kernels import rms_norm as norm_op
from decodelab.kernels import rope as rope_op
from decodelab.kernels import swiglu as swiglu_op
from decodelab.kernels.linear.reference import relative_error
from decodelab.kernels.rms_norm import rms_norm, rms_norm_reference
from decodelab.kernels.rope import rope, rope_reference
from decodelab.kernels.swiglu import swiglu, swiglu_reference

pytest.importorskip("triton", reason="kernels are interpreted by triton")

# Root mean square: computed in float32 and rounded once. float64 is torch's own, computed as it is. Triton's
# interpreter does not round to bfloat16 but cuts off: bits are compared in the other dtypes.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}
ROWS = [(1, 1), (3, 60), (2, 100), (5, 64)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("T", "D"), [*ROWS, (0, 8)])
def test_norm_with_and_without_residual(T: int, D: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    x, residual = (torch.randn(T, D, generator=rng).to(dtype) for _ in range(2))
    weight = torch.rand(D, generator=rng).to(dtype)
    for other in (None, residual):
        total = x if other is None else x + other
        want, _ = rms_norm_reference(total.double(), weight.double(), 1e-5)
        y, h = rms_norm(x, weight, 1e-5, other)
        assert torch.equal(h, total) or (dtype == torch.bfloat16 and relative_error(h, total) < TOLERANCE[dtype])
        assert y.dtype == dtype
        assert T == 0 or relative_error(y, want) < TOLERANCE[dtype]


def test_a_fused_residual_has_the_bits_of_one_that_is_not(rng: torch.Generator) -> None:
    x, residual = (torch.randn(3, 60, generator=rng).half() for _ in range(2))
    weight = torch.rand(60, generator=rng).half()
    assert torch.equal(rms_norm(x, weight, 1e-6, residual)[0], rms_norm(x + residual, weight, 1e-6)[0])


def test_a_row_of_zeros_and_one_of_great_numbers(rng: torch.Generator) -> None:
    x = torch.stack([torch.zeros(20), torch.full((20,), 60000.0)]).half()  # whose squares half precision cannot hold
    y, _ = rms_norm(x, torch.ones(20).half(), 1e-6)
    assert torch.equal(y, torch.stack([torch.zeros(20), torch.ones(20)]).half())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("H", "D"), [(1, 2), (3, 20), (6, 64)])
def test_rows_are_turned_by_their_own_positions(H: int, D: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Siblings stand at one position (TensorRT-LLM#12962); x is the query and key part of a wider tensor."""
    positions = torch.tensor([7, 0, 130000, 8, 8])
    inv_freq = 10000.0 ** -(torch.arange(D // 2) / (D // 2))
    x = torch.randn(5, H + 2, D, generator=rng).to(dtype)[:, :H]
    got = rope(x, positions, inv_freq, 1.5)
    assert relative_error(got, rope_reference(x.double(), positions, inv_freq, 1.5)) < TOLERANCE[dtype]
    assert torch.equal(rope(x[3:4], positions[3:4], inv_freq, 1.5), got[3:4])


def test_rotation_is_the_model_s(rng: torch.Generator) -> None:
    """Whose cosines are rounded to float32 and whose sines carry the sign of the half that is turned."""
    inv_freq, positions = torch.tensor([1.0, 0.1, 0.01, 0.001]), torch.tensor([3, 40, 41, 41])
    angle = torch.outer(positions.float(), inv_freq).repeat(1, 2)[:, None]
    sign = torch.tensor([-1.0] * 4 + [1.0] * 4)
    x = torch.randn(4, 2, 8, generator=rng)
    want = torch.addcmul(x * (angle.cos() * 1.25), x.roll(4, -1), angle.sin() * 1.25 * sign)
    assert relative_error(rope(x, positions, inv_freq, 1.25), want) < 1e-6


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("T", "width"), [*ROWS, (2, 1030), (0, 8)])
def test_gate(T: int, width: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    gate_up = (torch.randn(T, 2 * width, generator=rng) * 3).to(dtype)
    got = swiglu(gate_up)
    assert got.shape == (T, width)
    assert got.dtype == dtype
    assert T == 0 or relative_error(got, swiglu_reference(gate_up.double())) < TOLERANCE[dtype]


def test_a_gate_far_from_zero_is_open_or_shut() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 3.0, 5.0]])
    assert torch.equal(swiglu(gate_up), torch.tensor([[0.0, 3e4, 0.0]]))


def test_they_are_ops_for_torch_compile(rng: torch.Generator) -> None:
    x, weight = torch.randn(2, 4, 8, generator=rng), torch.ones(8)
    check = torch.library.opcheck
    check(norm_op._op, (x[0], weight, 1e-5, None))
    check(norm_op._op, (x[0], weight, 1e-5, x[1]))
    check(rope_op._op, (x, torch.arange(2), torch.ones(4), 1.0))
    check(swiglu_op._op, (x[0],))

"""y = x Wᵀ over weights of 4 bits, w = (code − 8) · scale + shift, with a scale and a shift for a group of columns.

On a CPU a quarter of bfloat16's bytes are read, which makes it faster for the few rows of decoding. For many rows
PyTorch's (cpu.py) is slower than the dense product, since it dequantises the weight again for every few of them.
"""

from .reference import matmul_w4_reference

__all__ = ["matmul_w4_reference"]

"""y = x Wᵀ over weights of 8 bits with a scale an output: of x as it is, or (w8a8) of x rounded to 8 bits with a scale
a row, whose sums are of integers and exact."""

from .reference import matmul_w8_reference, matmul_w8a8_reference, rounded_rows

__all__ = ["matmul_w8_reference", "matmul_w8a8_reference", "rounded_rows"]

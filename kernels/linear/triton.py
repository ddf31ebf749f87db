"""Of 16 bits, row-invariant: the product of `matmul_w4.triton`, whose weight is read as it is."""

from ..aot import Specimen
from ..matmul_w4.triton import specimens_of


def specimens() -> list[Specimen]:
    return specimens_of(16)

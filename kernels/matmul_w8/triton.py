"""Of 8 bits: the product of `matmul_w4.triton`, a byte a code."""

from ..aot import Specimen
from ..matmul_w4.triton import specimens_of


def specimens() -> list[Specimen]:
    return specimens_of(8)

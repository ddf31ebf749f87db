"""Whether a product gives a row the same bits whatever rows stand beside it.

That depends on a library's version and the processor, so it is observed, not assumed. In the products observed all
terms must cancel, so that only the rounding of the sums is left, which no two orders share; of other products, the
outputs in bfloat16 would agree nearly always, whatever the order.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Row counts at which a row must come out the same.
PROBED_ROWS = (2, 5, 16, 48)


def orders(product: Callable[[Tensor], Tensor], x: Tensor) -> tuple[bool, bool]:
    """Whether a lone row is summed as two are, and two as any other number, of x's max(PROBED_ROWS) rows."""
    want = product(x)
    alike = all(torch.equal(product(x[:rows]), want[:rows]) for rows in PROBED_ROWS)
    return torch.equal(product(x[:1]), want[:1]), alike

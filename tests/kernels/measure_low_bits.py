"""Products of few bits against bfloat16's, in turn: `python tests/kernels/measure_low_bits.py [ROUNDS]`.

No test. What it prints is how many times as fast as bfloat16's a product is: the median over rounds, which a round that
was interrupted does not move, with its 95 % interval. As in decoding, no weight is in the cache when its turn comes:
each product goes round as many copies of its weight as exceed the cache. Threads: OMP_NUM_THREADS.
"""

import sys
import time
from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import torch
from scipy.stats import quantile_test

from decodelab.kernels.linear import Linear
from decodelab.quantization.codes import Codes
from decodelab.quantization.linear import QuantisedLinear

CACHE = 48 << 20  # bytes; more than the cache has
ROWS = (1, 2, 4, 8, 16)
CALLS = 6  # of each product in a round
SHAPES = {  # (N, K) of qkv, output, gate and up, down
    "SmolLM2-135M": [(960, 576), (576, 576), (3072, 576), (576, 1536)],
    "Qwen2.5-Coder-1.5B": [(2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)],
}
Product = Linear | QuantisedLinear


def products(N: int, K: int) -> dict[str, list[Product]]:
    """Of each kind, as many as exceed the cache."""
    draws = torch.Generator().manual_seed(0)
    eight = torch.randint(0, 256, (N, K), generator=draws, dtype=torch.uint8)
    zero = torch.full((N, 1), 128, dtype=torch.uint8)
    scale = torch.full((N, K // 64), 0.01, dtype=torch.float16)
    int8 = Codes(eight, scale[:, :1], bits=8, group_size=K, zero=zero)
    kinds: dict[str, Codes | None] = {
        "bfloat16": None,
        "int4, groups of 64": Codes(eight >> 4, scale, bits=4, group_size=64, zero=zero.expand_as(scale) >> 4),
        "int8": int8,
        "w8a8": replace(int8, activation_bits=8),
    }
    found: dict[str, list[Product]] = {}
    for name, codes in kinds.items():
        found[name] = []
        while sum(product.nbytes for product in found[name]) < CACHE:
            weight = torch.randn(N, K, generator=draws).bfloat16() if codes is None else codes
            found[name].append(
                QuantisedLinear(weight, None, torch.bfloat16) if isinstance(weight, Codes) else Linear(weight)
            )
    return found


@torch.inference_mode()
def main(rounds: int = 15) -> None:
    for model, shapes in SHAPES.items():
        for N, K in shapes:
            each_of = products(N, K)
            names, turns = list(each_of), {name: cycle(each) for name, each in each_of.items()}
            sys.stdout.write(f"\n{model} [{N}, {K}], {torch.get_num_threads()} threads\n")
            for name in names:
                sys.stdout.write(f"  {name}: {each_of[name][0].implementation}, {len(each_of[name])} copies\n")
            for rows in ROWS:
                x = torch.randn(rows, K).bfloat16()
                seconds: dict[str, list[float]] = {name: [] for name in names}
                for i in range(rounds + 1):  # the first warms up
                    for name in names[i % len(names) :] + names[: i % len(names)]:
                        some = list(islice(turns[name], CALLS))
                        begin = time.perf_counter()
                        for product in some:
                            product(x)
                        seconds[name].append(time.perf_counter() - begin)
                column = {name: np.array(each[1:]) for name, each in seconds.items()}
                base = column["bfloat16"]
                told = [f"{rows:2} rows: bfloat16 {np.median(base) / CALLS * 1e6:6.0f} us"]
                for name in names[1:]:
                    ratios = base / column[name]
                    found = quantile_test(ratios, q=1, p=0.5).confidence_interval(0.95)
                    told.append(f"{name.split(',')[0]} {np.median(ratios):.2f}× [{found.low:.2f}, {found.high:.2f}]")
                sys.stdout.write("  " + "   ".join(told) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

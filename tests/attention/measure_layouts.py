"""Plain decoding by layout of keys and values, in turn: `python tests/attention/measure_layouts.py [ROUNDS]`.

No test. For each context it prints the bytes of keys and values a token (as the cache's own tensors have them), tokens
a second, and how many times as fast as the model's own layout that is: the median over rounds with its 95 % interval.
The model is SmolLM2-135M in bfloat16. Converted weights are as slow trained as untrained: what they are worth is told
by `decodelab evaluate`, and no speed of theirs stands without it. Threads: OMP_NUM_THREADS.
"""

import sys
import time

import numpy as np
import torch
from scipy.stats import quantile_test

from decodelab.attention.cache import Cache
from decodelab.attention.options import (
    MHA,
    MQA,
    Attention,
    CrossLayer,
    Hybrid,
    LowBits,
    Native,
    SinkWindow,
    Table,
    Window,
)
from decodelab.attention.rows import chains
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.load import load_decoder
from decodelab.decoding.model.source import ModelSpec, open_source

CONTEXTS = (512, 2048, 8000)
TOKENS = 12  # of each layout in a round
PIECE = 2000  # tokens of a prompt at a time
LAYOUTS: dict[str, Attention] = {
    "native": Native(),
    "kv_int8": LowBits(8),
    "kv_int4": LowBits(4),
    "window, 1024": Window(1024),
    "sink_window, 1024 + 4": SinkWindow(1024, 4),
    "hybrid, wwwwwf": Hybrid(),
    "mha": MHA(),
    "mqa": MQA(),
    "cross_layer, 2": CrossLayer(2),
    "mqa, hybrid, 2, int8": Table("5*(window=1024) 1*full | kv_heads=1 share=2 bits=8"),
}


@torch.inference_mode()
def main(rounds: int = 9) -> None:
    source = open_source(ModelSpec("smollm2-135m"))
    config = ModelConfig.from_hf(source.config)
    models = {
        name: load_decoder(source, dtype=torch.bfloat16, layout=option.layout(config.layout, config.heads))
        for name, option in LAYOUTS.items()
    }
    sys.stdout.write(f"{torch.get_num_threads()} threads, {next(iter(models.values())).implementation}\n")
    ids = torch.randint(1000, 40000, (max(CONTEXTS),), generator=torch.Generator().manual_seed(0)).tolist()
    for context in CONTEXTS:
        caches: dict[str, tuple[Cache, int]] = {}
        for name, model in models.items():
            cache = model.open_cache(1, context + TOKENS * (rounds + 1))
            sequence = cache.open()
            for at in range(0, context, PIECE):
                piece = ids[at : min(at + PIECE, context)]
                model(chains([piece], [sequence], prompt=True), cache, logits_of=torch.tensor([0]))
                cache.commit({sequence: range(len(piece))})
            caches[name] = cache, sequence
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for i in range(rounds + 1):  # the first warms up
            for name in [*models][i % len(models) :] + [*models][: i % len(models)]:
                seconds[name].append(step(models[name], *caches[name]))
        base = np.array(seconds["native"][1:])
        for name, (cache, _) in caches.items():
            column = np.array(seconds[name][1:])
            found = quantile_test(base / column, q=1, p=0.5).confidence_interval(0.95)
            sys.stdout.write(
                f"{context:5} {name:22} {cache.nbytes / 1e6:7.1f} MB held {1 / np.median(column):6.1f} tokens/s "
                f"{np.median(base / column):.2f}× [{found.low:.2f}, {found.high:.2f}]\n"
            )
        sys.stdout.flush()


def step(model: Decoder, cache: Cache, sequence: int) -> float:
    """Seconds a token, of a few."""
    begin = time.perf_counter()
    for _ in range(TOKENS):
        token = int(model(chains([[11]], [sequence]), cache).logits[0, 0] > 0)
        cache.commit({sequence: [0]})
        assert token in (0, 1)
    return (time.perf_counter() - begin) / TOKENS


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

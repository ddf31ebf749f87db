"""The KV layout table: what it refuses, who owns keys, how many bytes a token takes."""

import pytest

from decodelab.attention.layout import LayerKV, Layout, uniform


def test_uniform() -> None:
    layout = uniform(3, kv_heads=2, head_dim=8, windows=[None, 4, None])
    assert [layer.owner for layer in layout.layers] == [0, 1, 2]
    assert [layer.window for layer in layout.layers] == [None, 4, None]
    assert layout.owners == (0, 1, 2)


def test_bytes_a_token() -> None:
    """Llama-3-8B in bfloat16: 2 × 32 × 8 × 128 × 2 = 128 KiB; layers that share keys count once."""
    assert uniform(32, 8, 128).bytes_per_token(2) == 128 * 1024
    shared = Layout((LayerKV(0, 8), LayerKV(0, 8), LayerKV(2, 2), LayerKV(2, 2)), head_dim=128)
    assert shared.owners == (0, 2)
    assert shared.bytes_per_token(2) == 2 * (8 + 2) * 128 * 2


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((LayerKV(1, 2), LayerKV(1, 2)), "layer 0: owner 1 is not one of layers 0 to 0"),
        ((LayerKV(-1, 2),), "layer 0: owner -1 is not one of layers 0 to 0"),
        ((LayerKV(0, 2), LayerKV(0, 4)), "layer 1 shares the cache of layer 0, so their entries must be equal"),
        ((LayerKV(0, 2, window=4), LayerKV(0, 2)), "layer 1 shares the cache of layer 0"),
        ((LayerKV(0, 2), LayerKV(0, 2), LayerKV(1, 2)), "layer 2 shares the cache of layer 1"),
        ((LayerKV(0, 0),), "layer 0: kv_heads must be at least 1, got 0"),
        ((LayerKV(0, 1, window=0),), "layer 0: window must be at least 1 and at most 2147483647, got 0"),
    ],
)
def test_what_a_layout_refuses(layers: tuple[LayerKV, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(layers, head_dim=8)

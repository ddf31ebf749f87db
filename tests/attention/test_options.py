"""The group `attention`: each option's table on one small model, the grammar, and what is refused and where."""

import re
from dataclasses import astuple

import pytest
import torch

from decodelab.attention.cache import DenseCache
from decodelab.attention.layout import SCALE_BYTES, LayerKV, Layout, uniform
from decodelab.attention.options import (
    GQA,
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
from decodelab.errors import UserError

HEADS = 8
NATIVE = uniform(6, kv_heads=4, head_dim=16)
SMALL = uniform(4, kv_heads=4, head_dim=16, windows=[None, 32, None, 32])
RECIPE = "5*(window=1024) 1*full | kv_heads=1 share=2 bits=8"


def table(settings: Attention, native: Layout = NATIVE) -> list[tuple[int, int, int | None, int, int]]:
    return [astuple(layer) for layer in settings.layout(native, HEADS).layers]


@pytest.mark.parametrize(
    ("settings", "entry"),
    [
        (Native(), lambda i: (i, 4, None, 0, 16)),
        (GQA(2), lambda i: (i, 2, None, 0, 16)),
        (MQA(), lambda i: (i, 1, None, 0, 16)),
        (MHA(), lambda i: (i, 8, None, 0, 16)),
        (CrossLayer(), lambda i: (i - i % 2, 4, None, 0, 16)),
        (CrossLayer(4), lambda i: (i - i % 4, 4, None, 0, 16)),
        (Window(8), lambda i: (i, 4, 8, 0, 16)),
        (SinkWindow(8, 2), lambda i: (i, 4, 8, 2, 16)),
        (Hybrid(8, "wwf"), lambda i: (i, 4, None if i % 3 == 2 else 8, 0, 16)),
        (LowBits(4), lambda i: (i, 4, None, 0, 4)),
    ],
)
def test_what_each_option_makes_of_a_model(settings, entry):
    assert table(settings) == [entry(i) for i in range(6)]


def test_what_an_option_does_not_say_is_as_the_model_has_it():
    assert [row[2] for row in table(MQA(), SMALL)] == [None, 32, None, 32]
    assert [row[0] for row in table(CrossLayer(2), SMALL)] == [0, 1, 0, 1]  # windowed layers share with windowed ones
    assert [row[2] for row in table(Table("full window=8"), SMALL)] == [None, 8, None, 8]
    assert [row[2] for row in table(Table("1*kv_heads=2"), SMALL)] == [None, 32, None, 32]


def test_the_recipe_in_one_line():
    """Five windows to one full layer, one KV head, 8 bits, and pairs of layers of one kind in one cache."""
    native = uniform(12, kv_heads=8, head_dim=128)
    found = Table(RECIPE).layout(native, 8)
    assert [layer.window for layer in found.layers] == ([1024] * 5 + [None]) * 2
    assert [layer.owner for layer in found.layers] == [0, 0, 2, 2, 4, 5, 4, 7, 7, 9, 9, 5]
    assert {(layer.kv_heads, layer.bits) for layer in found.layers} == {(1, 8)}
    assert found.bytes_per_token(2) == 6 * 2 * (128 + SCALE_BYTES)
    assert found.sequence_bytes(8000, 2) == (5 * 1024 + 8000) * 2 * (128 + SCALE_BYTES)
    assert native.sequence_bytes(8000, 2) / found.sequence_bytes(8000, 2) > 100  # "more than 20 times" at any length


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("full", [(i, 4, None, 0, 16) for i in range(6)]),
        ("2*(window=4 bits=8) full", [(i, 4, *((4, 0, 8) if i % 3 < 2 else (None, 0, 16))) for i in range(6)]),
        (" 3 * window=4   3*full|sinks=1 ", [(i, 4, *((4, 1, 16) if i < 3 else (None, 0, 16))) for i in range(6)]),
        ("4*full", [(i, 4, None, 0, 16) for i in range(6)]),  # repeated, and what is over is cut off
        ("5*(share=3) 1*(share=1)", [(o, 4, None, 0, 16) for o in (0, 0, 0, 3, 3, 5)]),
        ("full | share=6", [(0, 4, None, 0, 16)] * 6),
        ("(kv_heads=2 window=3) owner=0 4*full", [(0, 2, 3, 0, 16)] * 2 + [(i, 4, None, 0, 16) for i in range(2, 6)]),
        ("5*full (owner=0 kv_heads=4)", [*((i, 4, None, 0, 16) for i in range(5)), (0, 4, None, 0, 16)]),
    ],
)  # fmt: skip
def test_the_grammar(line, rows):
    assert table(Table(line)) == rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "attention.layers='' has no layer: write such as '5*(window=1024) 1*full"),
        (" | bits=8", "has no layer"),
        (
            "full widow=4",
            "character 6: 'widow=4' is unknown: words are full and, with a number, window, sinks, kv_heads",
        ),
        ("full | bit=8", "character 8: 'bit=8' is unknown"),
        ("2*(window=4", "character 1: '2*' begins no layers: write such as"),
        ("full window=4)", "character 14: ')' begins no layers"),
        ("full 0*full", "character 6: '0*full' is of no layer: count from 1"),
        ("full 99999999999*full", "character 6: '99999999999*full' is of more layers than a model has"),
        ("(window=99999999999)", "character 2: 'window=99999999999' needs a whole number of at most ten digits"),
        ("full ()", "character 6: '(' has no word"),
        ("window=", "character 1: 'window=' needs a whole number of at most ten digits, such as window=8"),
        ("window", "character 1: 'window' needs a whole number"),
        ("window=-1", "character 1: 'window=-1' needs a whole number"),
        ("(window=4 full)", "character 11: 'full' is a second window of the same layer"),
        ("full | bits=8 | share=2", "character 15: '|' is the second bar"),
        ("full | (bits=8)", "character 8: '(' is unknown"),
        ("full (owner=0 share=2)", "character 7: 'owner=0' has owner= and share=, which both say whose cache it is"),
        ("full | owner=0", "character 8: 'owner=0' is of one layer, not of all"),
    ],
)
def test_what_no_table_is_and_where(line, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Table(line)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GQA(3), "attention: layer 0: 8 attention heads cannot share 3 KV heads; 1, 2, 4, 8 can be"),
        (GQA(16), "8 attention heads cannot share 16 KV heads"),
        (GQA(0), "attention: layer 0: kv_heads must be at least 1, got 0"),
        (CrossLayer(0), "attention: layer 0: share must be at least 1, got 0"),
        (Window(0), "attention: layer 0: window must be at least 1 and at most 2147483647, got 0"),
        (Window(2**31), "attention: layer 0: window must be at least 1 and at most 2147483647, got 2147483648"),
        (SinkWindow(8, -1), "attention: layer 0: sinks must be at least 0 and at most 2147483647, got -1"),
        (SinkWindow(8, 2**31), "attention: layer 0: sinks must be at least 0 and at most 2147483647, got 2147483648"),
        (LowBits(3), "attention: layer 0: bits must be one of 16, 8, 4, got 3"),
        (Table("7*full"), "attention.layers is of 7 layers, and the model has 6"),
        (Table("full owner=0"), "attention.layers repeats 2 layers, of 6, so that owner= is of no one layer"),
        (Table("full (sinks=2)"), "attention: layer 1: 2 sinks without a window, but without one all keys are seen"),
        (Table("5*full owner=5"), None),
        (Table("full owner=4 4*full"), "attention: layer 1: owner 4 is not one of layers 0 to 1"),
        (Table("full owner=0 owner=1 3*full"), "attention: layer 2 shares the cache of layer 1"),
        (Table("5*full (owner=0 window=4)"), "layer 5 reads the cache of layer 0, whose window differs"),
    ],
)
def test_tables_that_contradict_themselves(settings, message):
    if message is None:
        assert settings.layout(NATIVE, HEADS) == NATIVE
        return
    with pytest.raises(UserError, match=re.escape(message)):
        settings.layout(NATIVE, HEADS)


def test_four_bits_are_packed_in_pairs():
    with pytest.raises(UserError, match="layer 0: 4 bits are packed in pairs, and heads of 15 are odd"):
        LowBits(4).layout(uniform(2, 4, 15), HEADS)
    assert LowBits(8).layout(uniform(2, 4, 15), HEADS).bytes_per_token(2) == 2 * 2 * 4 * (15 + 2)


def test_a_pattern_of_a_hybrid_is_letters():
    with pytest.raises(UserError, match=r"attention.pattern must be made of w \(a window\) and f \(full\), got 'wxf'"):
        Hybrid(8, "wxf")


def test_bytes_of_low_bits():
    """At a head of 128, with a float16 scale a token and head: 130 bytes and 66, not float32's 132 and 68."""
    native = uniform(32, 8, 128)
    assert LowBits(8).layout(native, 32).bytes_per_token(2) == 2 * 32 * 8 * (128 + 2)
    assert LowBits(4).layout(native, 32).bytes_per_token(4) == 2 * 32 * 8 * (64 + 2)


def test_bytes_of_windows():
    """A window and its sinks hold min(T, W + S) tokens; sharers none."""
    layers = (LayerKV(0, 2, 8, 2), LayerKV(0, 2, 8, 2), LayerKV(2, 2))
    layout = Layout(layers, head_dim=4)
    one = 2 * 2 * 4 * 2
    assert layout.bytes_per_token(2) == 2 * one
    assert [layout.sequence_bytes(T, 2) for T in (1, 10, 11, 100)] == [2 * one, 20 * one, 21 * one, 110 * one]


@pytest.mark.parametrize("settings", [Native(), MQA(), MHA(), CrossLayer(4), Table("2*full 1*(kv_heads=2 share=2)")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_real_tensors(settings, dtype):
    layout = settings.layout(NATIVE, HEADS)
    cache = DenseCache(layout, sequences=3, capacity=128, dtype=dtype, device="cpu")
    assert cache.nbytes == 3 * layout.sequence_bytes(cache.capacity, dtype.itemsize)
    assert cache.nbytes == layout.bytes_per_token(dtype.itemsize) * cache.slots

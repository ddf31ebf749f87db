"""Layouts as they are drawn."""

import doctest

from decodelab.attention import picture as module
from decodelab.attention.layout import LayerKV, Layout, uniform
from decodelab.attention.options import Table
from decodelab.attention.picture import picture


def drawn(line: str, layers: int) -> list[str]:
    return picture(Table(line).layout(uniform(layers, 8, 128), 8)).splitlines()


def test_layers_that_are_alike_are_one_line():
    assert picture(uniform(30, 3, 64)) == "30 layers: every token, 3 KV heads, 16 bits"
    assert picture(uniform(1, 1, 64, [8])) == "1 layer: 8 tokens back, 1 KV head, 16 bits"


def test_the_recipe():
    assert drawn("5*(window=1024) 1*full | kv_heads=1 share=2 bits=8", 12) == [
        "layer  0  AaAaABaAaA ab",
        "A  5 layers: 1,024 tokens back, 1 KV head, int8",
        "a  5 layers read the A before them",
        "B  1 layer: every token, 1 KV head, int8",
        "b  1 layer reads the B before it",
    ]


def test_who_reads_another_owner_is_named():
    assert drawn("3*full owner=0 owner=2", 5) == [
        "layer 0  AAAaa",
        "A  3 layers: every token, 8 KV heads, 16 bits",
        "a  1 layer reads the A before it, layer 3 reads layer 0",
    ]


def test_sinks_and_long_models():
    lines = drawn("(window=8 sinks=2 bits=4) full", 80)
    assert lines[:2] == [f"layer  0  {' '.join(['ABABABABAB'] * 6)}", "layer 60  ABABABABAB ABABABABAB"]
    assert lines[2] == "A  40 layers: 8 tokens back and the first 2, 8 KV heads, int4"


def test_more_kinds_than_letters_are_listed():
    layers = [LayerKV(i, 1, window=i + 1) for i in range(27)]
    lines = picture(Layout((*layers, layers[3]), head_dim=8)).splitlines()
    assert lines[0] == "layer 0  1 tokens back, 1 KV head, 16 bits"
    assert lines[-1] == "layer 27  reads layer 3"


def test_the_example_in_the_docstring():
    assert doctest.testmod(module).failed == 0

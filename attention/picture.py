"""A layout as people see it: a letter a layer, and what each letter stands for."""

from dataclasses import replace
from string import ascii_uppercase

from .layout import LayerKV, Layout

_GROUP, _LINE = 10, 60  # layers without a gap, and on a line


def picture(layout: Layout) -> str:
    """Capitals are layers with a cache of their own, one letter a kind; a small letter reads another layer's.

    >>> print(picture(Layout((LayerKV(0, 1), LayerKV(0, 1), LayerKV(2, 4, window=8)), head_dim=8)))
    layer 0  AaB
    A  1 layer: every token, 1 KV head, 16 bits
    a  1 layer reads the A before it
    B  1 layer: 8 tokens back, 4 KV heads, 16 bits
    """
    kinds = list(dict.fromkeys(replace(layer, owner=0) for layer in layout.layers))
    if len(kinds) > len(ascii_uppercase):
        return "\n".join(f"layer {i}  {_own(layout, i)}" for i in range(len(layout.layers)))
    letters = dict(zip(kinds, ascii_uppercase, strict=False))
    drawn = "".join(
        letter if layer.owner == i else letter.lower()
        for i, layer in enumerate(layout.layers)
        for letter in [letters[replace(layer, owner=0)]]
    )
    if set(drawn) == {"A"}:
        return f"{_counted(len(drawn))}: {_kind(kinds[0])}"
    width = len(str(len(drawn) - 1))
    lines = []
    for start in range(0, len(drawn), _LINE):
        row = drawn[start : start + _LINE]
        groups = [row[a : a + _GROUP] for a in range(0, len(row), _GROUP)]
        lines.append(f"layer {start:{width}}  {' '.join(groups)}")
    for kind, letter in letters.items():
        of = [i for i, layer in enumerate(layout.layers) if replace(layer, owner=0) == kind]
        own = [i for i in of if layout.layers[i].owner == i]
        lines.append(f"{letter}  {_counted(len(own))}: {_kind(kind)}")
        lines += _readers(layout, letter, of)
    return "\n".join(lines)


def _readers(layout: Layout, letter: str, of: list[int]) -> list[str]:
    """Of one kind: the layers that read the nearest owner before them, and those that read another one."""
    near, far, last = 0, [], -1
    for i in of:
        owner = layout.layers[i].owner
        if owner == i:
            last = i
        elif owner == last:
            near += 1
        else:
            far.append(f"layer {i} reads layer {owner}")
    told = [f"{_counted(near)} read{'s' if near == 1 else ''} the {letter} before {'it' if near == 1 else 'them'}"]
    said = (told if near else []) + far
    return [f"{letter.lower()}  {', '.join(said)}"] if said else []


def _own(layout: Layout, i: int) -> str:
    layer = layout.layers[i]
    return _kind(layer) if layer.owner == i else f"reads layer {layer.owner}"


def _kind(layer: LayerKV) -> str:
    seen = "every token" if layer.window is None else f"{layer.window:,} tokens back"
    sinks = f" and the first {layer.sink}" if layer.sink else ""
    bits = "16 bits" if layer.bits == 16 else f"int{layer.bits}"
    return f"{seen}{sinks}, {layer.kv_heads} KV head{'' if layer.kv_heads == 1 else 's'}, {bits}"


def _counted(layers: int) -> str:
    return f"{layers} layer{'' if layers == 1 else 's'}"

"""Pictures: that they show the numbers of the rows, and that what stands in a page is safe and whole there."""

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

import pytest

from decodelab.experiments.report.drawing import DARK, LIGHT, WIDEST, Picture, palette, svg
from decodelab.experiments.report.load import Run
from decodelab.experiments.report.plots import SHOWN, pictures
from decodelab.experiments.report.rows import Group, grouped
from decodelab.tests.experiments.report.made import interval, quality, quantised, run

NAMES = ["speedup", "positions", "phases", "categories", "quality", "costs"]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(*runs: Run) -> dict[str, Picture]:
    (group,) = grouped(runs)
    return {p.name.removeprefix("g-"): p for p in pictures(group, palette([group]))}


def texts(picture: Picture) -> list[str]:
    root = ElementTree.fromstring(svg(picture))
    return ["".join(node.itertext()).strip() for node in root.iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def full() -> Mapping[str, Picture]:
    """Of three rows: a faster, a dominated and a broken one."""
    return drawn(
        run("a", speedup=interval(3.0, 2.5, 3.5), quality=quality(gsm=0.6, mmlu=0.5)),
        run("b", config__drafting__max_draft=4, quality=quality(gsm=0.5)),
        run("c", config__drafting__max_draft=8, exactness__verdict="broken", quality=quality(gsm=0.9)),
    )


def test_all_of_them(full: Mapping[str, Picture]):
    assert list(full) == NAMES
    assert all(picture.about.endswith(".") for picture in full.values())


def lines(picture: Picture, panel: int = 0) -> list[list[tuple[float, float]]]:
    axes = picture.figure.axes[panel]
    return [[(float(x), float(y)) for x, y in line.get_xydata()] for line in axes.get_lines()]


def test_speedups_are_dots_on_their_intervals(full: Mapping[str, Picture]):
    """The fastest on top; the line of plain decoding at 1."""
    found = lines(full["speedup"])
    assert [(3.0, 0.0)] in found
    assert [(2.5, 0.0), (3.5, 0.0)] in found
    assert [(2.0, 1.0)] in found
    assert [(1.5, 1.0), (2.5, 1.0)] in found
    assert [(1.0, 0.0), (1.0, 1.0)] in found
    assert [(1.9, 0.0)] in found  # predicted
    assert {"3.00×", "2.00×", "prompt_lookup max_draft=4"} <= set(texts(full["speedup"]))


def test_acceptance_by_position_in_two_panels(full: Mapping[str, Picture]):
    assert lines(full["positions"], 0)[0] == [(1.0, 0.8), (2.0, 0.4)]
    assert lines(full["positions"], 1)[0] == [(1.0, 0.8), (2.0, 0.5)]


def test_positions_that_few_drafts_reached_have_no_share():
    few = [{"rate": 0.9, "conditional": 0.9, "reached": 9}, {"rate": 0.1, "conditional": 1.0, "reached": 4}]
    picture = drawn(run(strategy__acceptance_by_position=few))["positions"]
    assert lines(picture, 0) == [[(1.0, 0.9), (2.0, 0.1)], [(2.0, 0.1), (2.3, 0.1)]]  # and what leads to its name
    assert lines(picture, 1) == [[(1.0, 0.9)], [(1.0, 0.9), (2.3, 0.9)]]


def test_phases_are_milliseconds_of_a_token(full: Mapping[str, Picture]):
    bars = full["phases"].figure.axes[0].patches[:5]
    assert [bar.get_width() for bar in bars] == pytest.approx([1.0, 7.0, 1.0, 0.6, 0.4])
    assert [bar.get_x() for bar in bars] == pytest.approx([0.0, 1.0, 8.0, 9.0, 9.6])
    assert lines(full["phases"])[0] == [(20.0, -0.42), (20.0, 0.42)]


def test_categories_are_coloured_by_what_was_won(full: Mapping[str, Picture]):
    assert [text for text in texts(full["categories"]) if re.fullmatch(r"\d\.\d\d", text)] == ["0.90", "3.00"] * 3
    colours = {bar.get_facecolor()[:3] for bar in full["categories"].figure.axes[0].patches}
    assert len(colours) == 2


def test_untimed_categories_show_tokens_a_step():
    untimed = {name: {"n": 1, "speedup": interval(None), "tokens_per_step": 1.5} for name in ("x", "y")}
    picture = drawn(run(by_category=untimed))["categories"]
    assert picture.about.startswith("Tokens per step")
    assert texts(picture).count("1.50") == 2


def test_many_categories_stand_in_blocks():
    """22 side by side would be 22 numbers on top of each other."""
    many = {f"kind {n}": {"n": 1, "speedup": interval(1.0 + n / 100), "tokens_per_step": 1.5} for n in range(22)}
    blocks = drawn(run(by_category=many))["categories"].figure.axes
    assert [[label.get_text() for label in axes.get_xticklabels()] for axes in blocks] == [
        [f"kind {n}" for n in range(*ends)] for ends in ((0, 8), (8, 16), (16, 22))
    ]
    assert len({axes.get_xlim() for axes in blocks}) == 1


def test_quality_has_a_panel_a_task_with_its_front(full: Mapping[str, Picture]):
    """Row a is faster and better than b; c is broken, so its score counts for nothing."""
    panels = full["quality"].figure.axes
    assert [panel.get_title(loc="left") for panel in panels] == ["gsm acc", "mmlu acc"]
    found = lines(full["quality"])
    assert found[0] == [(3.0, 0.6)]  # the front
    assert [(2.0, 0.5)] in found
    assert [(2.0, 0.9)] in found


def test_quantisers_are_told_apart_and_have_a_front_whatever_they_were_measured_on():
    picture = drawn(*quantised())["quality"]
    assert lines(picture)[0] == [(20.0, 0.6), (30.0, 0.5)]  # of the drafted ones
    (axes,) = picture.figure.axes
    drawn_alone = [line for line in axes.get_lines() if len(line.get_xdata()) == 1]
    dots = {
        (float(line.get_xdata()[0]), float(line.get_ydata()[0])): (line.get_marker(), line.get_color())
        for line in drawn_alone
    }
    assert dots == {
        (10.0 * rate * (1 + drafted), score): (shape, LIGHT["c1" if drafted else "c0"])
        for shape, rate, score in (("^", 1.0, 0.6), ("s", 1.5, 0.5), ("o", 1.4, 0.4))
        for drafted in (False, True)
    }
    said = texts(picture)
    assert {"rtn bits=4, 200.0 MiB ‡", "rtn bits=3, 200.0 MiB ‡", "unquantised, 400.0 MiB"} <= set(said)
    assert {"prompt_lookup", "no drafter", "rtn bits=3", "rtn bits=4", "unquantised"} <= set(said)
    assert "‡ 4 of 6 were timed on a busy machine: the front may be noise." in picture.about
    assert "6 of 6 were timed on too few prompts" in picture.about


def test_lines_of_one_drafter_have_a_colour_each_that_their_names_share():
    axes = drawn(*quantised())["positions"].figure.axes[0]
    traced = {line.get_color() for line in axes.get_lines()}
    assert len(traced) == 6
    assert {text.get_color() for text in axes.texts} == traced


def test_where_less_is_better_the_best_is_still_on_top():
    points = [(2.0, 12.0), (1.5, 10.0), (1.2, 13.0)]
    lossy: dict[str, Any] = {"exactness__verdict": "lossy", "strategy": {}, "by_category": {}, "profile": None}
    picture = drawn(
        *(run(str(x), speedup=interval(x), quality=quality(higher=False, ppl=y), **lossy) for x, y in points)
    )["quality"]
    bottom, top = picture.figure.axes[0].get_ylim()
    assert bottom > top
    assert lines(picture)[0] == [(1.5, 10.0), (2.0, 12.0)]


def test_costs_are_in_plain_steps(full: Mapping[str, Picture]):
    """Each run's T(k) ÷ T(1), their median, the ceiling y = k, and each row's tokens a step at its rows."""
    curve = [(1.0, 1.0), (2.0, 1.1), (4.0, 1.2), (8.0, 1.6)]
    found = lines(full["costs"])
    assert [[(x, round(y, 9)) for x, y in line] for line in found[:4]] == [curve] * 4
    assert found[4] == [(1.0, 1.0), (8.0, 8.0)]
    assert found[5:8] == [[(3.0, 2.2)]] * 3


def test_pictures_without_numbers_are_not_drawn():
    assert drawn(Run(run().folder, {"schema": 1})) == {}
    bare: dict[str, Any] = {"strategy": {}, "by_category": {}, "profile": None, "speedup": interval(None)}
    assert drawn(run(**bare)) == {}
    one = drawn(run(**bare | {"speedup": interval(2.0, n=3)}))
    assert list(one) == ["speedup"]
    assert "too few prompts" in one["speedup"].about


def test_many_rows_are_cut_and_the_caption_says_so():
    runs = [run(str(i), config__seed=i, speedup=interval(1 + i / 100)) for i in range(SHOWN + 3)]
    picture = drawn(*(Run(r.folder, {**r.result, "strategy": {}, "by_category": {}, "profile": None}) for r in runs))
    assert picture["speedup"].about.endswith(f"The first {SHOWN} of {SHOWN + 3} rows.")


def test_a_drafter_has_one_colour_in_all_groups():
    groups = grouped([run("a"), run("b", digests__task="x"), run("c", config__drafting={"_target_": "mylab.a.A"})])
    assert palette(groups) == {"a": "c0", "prompt_lookup": "c1"}


# --- within a page


def test_both_themes_name_the_same_colours():
    assert LIGHT.keys() == DARK.keys()
    assert len(set(LIGHT.values())) == len(LIGHT)


@pytest.mark.parametrize("name", NAMES)
def test_an_svg_of_a_page(name: str, full: Mapping[str, Picture]):
    """Texts as texts, colours by name, ids of its own, nothing from elsewhere."""
    text = svg(full[name])
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.attrib["viewBox"].startswith("0 0 518 ")
    ids = [node.attrib["id"] for node in root.iter() if "id" in node.attrib]
    assert len(ids) == len(set(ids))
    assert all(i.startswith(f"g-{name}-") for i in ids)
    used = re.findall(r'href="([^"]*)"|url\(([^)]*)\)', text)
    assert all((href or url).startswith(f"#g-{name}-") and (href or url)[1:] in ids for href, url in used)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"#[0-9a-fA-F]{6}\b", text) == []
    assert "var(--text)" in text
    assert texts(full[name])


def test_labels_are_texts_whatever_they_hold():
    """No mathematics between dollars, no markup."""
    labels = [r"$\frac{1}{2}$", "<script>alert(1)</script>", "a&b"]
    runs = [run(str(i), config__drafting={"_target_": "x.y.Y", "k": label}) for i, label in enumerate(labels)]
    picture = drawn(*runs)["speedup"]
    assert "<script" not in svg(picture)
    shown = texts(picture)
    assert r"y k=$\frac{1}{2}$" in shown
    assert "y k=a&b" in shown


def test_long_labels_lose_their_middle():
    keys = [{"_target_": "x.y.Y", "k" * 60: i} for i in range(2)]
    shown = texts(drawn(*(run(str(i), config__drafting=k) for i, k in enumerate(keys)))["speedup"])
    assert {(len(text), text[:4], text[-4:]) for text in shown if "…" in text} == {
        (WIDEST, "y kk", "kk=0"),
        (WIDEST, "y kk", "kk=1"),
    }


def test_a_group_of_one_row_has_all_pictures():
    group: Group = grouped([run(quality=quality(gsm=0.5))])[0]
    assert [p.name for p in pictures(group, palette([group]), "p7")] == [f"p7-{name}" for name in NAMES]

"""The page: whole, of one file, and nothing that a model or a configuration says is more than text in it."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from decodelab.experiments.report.changes import compare
from decodelab.experiments.report.html import page
from decodelab.experiments.report.load import Found, Unfinished, find
from decodelab.experiments.report.rows import grouped
from decodelab.tests.experiments.report.made import brief, interval, quality, result, sample, write

VOID = {"meta", "br", "hr", "img", "input", "link"}
EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"


class Reader(HTMLParser):
    """Tags, attributes and texts; a tag that is closed by another's end is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Reader]:
    """Two groups, against an earlier run, with texts that want to be more than texts everywhere."""
    root = tmp_path_factory.mktemp("page")
    samples = [
        sample("slow", 1.0, 2.0, prompt=EVIL, category=EVIL),
        sample("fast", 4.0, 1.0, batch=1),
        sample("middle", 1.0, 1.0, batch=2),
    ]
    samples[0]["strategy"]["text"] = f"out {EVIL}"
    samples[1]["strategy"]["text"] = samples[1]["baseline"]["text"]
    evil = {"_target_": f"x.{EVIL.replace('.', '')}.X", "key": EVIL}
    write(root / "a", result(config__drafting=evil, warnings=[EVIL], quality=quality(**{EVIL: 0.5})), samples)
    write(root / "b", result(key="b", speedup=interval(1.2), config__seed=1))
    write(root / "c", result(key="c", provenance__device=EVIL))
    write(root / "old", result(config__drafting=evil), samples)
    found = find([root / name for name in "abc"])
    groups = grouped(found.runs)
    cells = (Unfinished(root, EVIL, "failed", EVIL),)
    labels = {row.run.folder: row.label for group in groups for row in group.rows}
    against = compare(found.runs, find([root / "old"]).runs, EVIL, labels)
    text = page(groups, Found(found.runs, cells, (EVIL,)), against)
    return text, read(text)


def test_it_asks_for_nothing(told: tuple[str, Reader]):
    text, reader = told
    names = {tag for tag, _ in reader.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "video", "image"}
    for tag, attributes in reader.tags:
        assert not any(name.startswith("on") or name in ("src", "srcset", "action") for name in attributes), tag
        assert (attributes.get("href") or "#").startswith("#"), tag
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    policy = next(a for tag, a in reader.tags if tag == "meta" and a.get("http-equiv"))
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_what_models_and_configurations_say_is_text(told: tuple[str, Reader]):
    text, reader = told
    assert "<script" not in text
    assert "49" not in "".join(t for t in reader.texts if "alert" in t)
    said = "".join(reader.texts)
    # prompt, output, category, label, warning, device, cell, reason, note, folder compared with
    assert said.count("<script>alert(1)</script>") > 10


def test_ids_are_unique(told: tuple[str, Reader]):
    ids = [attributes["id"] for _, attributes in told[1].tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 50


def test_what_it_shows(told: tuple[str, Reader]):
    text, reader = told
    said = [t.strip() for t in reader.texts if t.strip()]
    assert said.count("tiny · float32 · demo") == 2  # the machine differs
    for title in ("Speedup", "Acceptance by position", "Time per phase", "By category", "Cost of a step, T(k)"):
        assert said.count(title) == 2
    assert said.count("Quality against speed") == 1
    assert {"Cells without a result", "Not read"} <= set(said)
    assert {"2.00× [1.50, 2.50]", "1.20× (n=9)", "the same"} <= set(said)
    # each run's best and worst prompt, with its own speedup
    assert said.count("best") == said.count("worst") == 1
    assert ": fast (chat), 4.00×" in said
    assert "strategy of fast" not in text
    assert "baseline of slow" in text
    assert text.count("in words") == 3  # what the profile explained


def test_a_dark_page_has_other_colours(told: tuple[str, Reader]):
    style = re.search(r"<style>(.*?)</style>", told[0], re.DOTALL)
    assert style is not None
    light, _, dark = style[1].partition("@media (prefers-color-scheme: dark)")
    names = set(re.findall(r"var\((--\w+)\)", told[0]))
    for theme in (light, dark.partition("\n* {")[0]):
        assert names <= set(re.findall(r"(--\w+):", theme))
    assert light.count("{") == light.count("}")


def test_texts_are_cut_in_the_middle(tmp_path: Path):
    long = "begin " + "x" * 5000 + " end"
    write(tmp_path / "a", brief(), [sample("a", 1.0, 1.0, prompt=long), sample("b", 2.0, 1.0, batch=1)])
    found = find([tmp_path])
    text = page(grouped(found.runs), found, None)
    assert "x […] x" in text
    assert "begin x" in text
    assert "x end</pre>" in text
    assert "x" * 400 not in text

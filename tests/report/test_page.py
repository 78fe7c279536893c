"""The page of results: what it says, that nothing in it is foreign, and that a browser can show it."""

from __future__ import annotations

import base64
import math
import re
import statistics
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from browser import needs_browser, probe_page

import acclimate
from acclimate.data.corruptions import CORRUPTIONS
from acclimate.data.domains import Domain, DomainKey
from acclimate.data.preprocess import Preprocess
from acclimate.data.streams import Stream
from acclimate.evaluation.paired import pack_counts
from acclimate.evaluation.run import run
from acclimate.evaluation.spec import describe, specify
from acclimate.evaluation.store import Outcome
from acclimate.evaluation.tables import Grid
from acclimate.papers.dct.reported import reported
from acclimate.report.charts import Scale, frontier, round_step, scatter
from acclimate.report.html import Html, breakable, join, tag
from acclimate.report.page import page as page_of
from acclimate.testing.check import tiny_batches, tiny_model

MODEL = "vit_base_patch16_224.augreg_in21k_ft_in1k"
NOTHING = "–none"  # noqa: RUF001 (what is seen, and what is read out)


class Fog(Domain):
    """A domain of eight random images."""

    key, labels, identity = DomainKey("fog", 5), np.arange(8), "random"
    preprocess = Preprocess(None, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

    def load(self, indices):
        return torch.cat(tiny_batches(count=1, size=8))[torch.from_numpy(indices)]


STREAM = Stream(Fog(), batch_size=8)
SPEC = specify(STREAM, "source", {}, model=describe(tiny_model(), MODEL), dataset="imagenet-c")
RESULT = replace(
    run(acclimate.adapt(tiny_model(), "source"), STREAM),
    **dict(samples=100, seconds=1.0, peak_mib=9.0, forward=150, backward=50, used=25, ece=0.1),
)


def made(method="source", accuracy=50.0, domains=("fog",), seed=0, *, setting="normal", images=10_000, **values) -> Outcome:
    """A run that nobody made: the easiest images are right."""
    share, keys = accuracy / 100, [key if isinstance(key, DomainKey) else DomainKey(key, 5) for key in domains]
    index = np.arange(images).reshape(100, -1).T.ravel()  # so that both halves of the stream are alike
    right = pack_counts((index < share * images).astype(float), index, images)
    scores = dict(top1=share, mean=share, second_half=share + 0.01, per_domain=dict.fromkeys(keys, share))
    spec = replace(SPEC, method=method, domains=keys, seed=seed, setting=setting, data=SPEC.data * len(keys))
    curve = [(1, 1.0), (50, 0.9 * share), (100, share)]
    return Outcome(spec, replace(RESULT, **{**scores, "by_image": dict.fromkeys(keys, right), "curve": curve, **values}))


def page(outcomes, *, paper=None, **options) -> str:
    """The page of runs that may be mixed, with the paper's table whether it fits or not."""
    grid = Grid(outcomes, mix=True)
    return page_of(grid, paper=paper and paper.fitted(grid, mix=True), **options)


def shown(grid, row, column) -> str:
    gain = grid.gain(row, column)
    return grid.text(row, column) + ("" if gain is None else str(gain).replace("-", "\N{MINUS SIGN}"))


def table_of(methods=("source", "tent", "dct"), domains=("fog", "snow"), seeds=(0, 1)) -> list[Outcome]:
    return [
        made(m, 40 + 1.3 * i + 0.8 * j + 0.2 * seed * i, [d], seed, seconds=1.0 + i)
        for i, m in enumerate(methods)
        for j, d in enumerate(domains)
        for seed in seeds
    ]


LARGE = table_of([f"method_{i}" if i else "source" for i in range(20)], CORRUPTIONS, (0, 1, 2))


class Tree(HTMLParser):
    """A page as (tag, attributes, children); fails where an element is not closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = ("root", {}, [])
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert self.open == [self.root]

    def handle_starttag(self, name, attributes):
        assert len({key for key, _ in attributes}) == len(attributes), f"{name} has an attribute twice"
        element = (name, dict(attributes), [])
        self.open[-1][2].append(element)
        if name not in ("img", "meta", "wbr"):
            self.open.append(element)

    def handle_endtag(self, name):
        assert self.open.pop()[0] == name

    def handle_data(self, data):
        self.open[-1][2].append(data)

    def all(self, name: str, within=None, **attributes):
        """Elements of a kind, in order."""
        for child in (within or self.root)[2]:
            if not isinstance(child, str):
                if child[0] == name and attributes.items() <= child[1].items():
                    yield child
                yield from self.all(name, child, **attributes)

    def table(self, label: str) -> dict[str, list]:
        """The rows of a table by their first cell, the heads under the first head."""
        region = next(self.all("div", **{"aria-label": label}))
        rows = [[c for c in row[2] if not isinstance(c, str)] for row in self.all("tr", region)]
        return {" ".join(text(row[0]).split()): row[1:] for row in rows}


def text(element) -> str:
    return element if isinstance(element, str) else "".join(map(text, element[2]))


def accuracy_of(tree: Tree) -> dict[str, dict[str, tuple]]:
    rows = tree.table("Accuracy by method and domain")
    columns = [text(head) for head in rows.pop("method")]
    return {method: dict(zip(columns, cells)) for method, cells in rows.items()}


def lead(outcomes, **options) -> str:
    return text(next(Tree(page(outcomes, title="t", **options)).all("p", **{"class": "lead"})))


@pytest.mark.parametrize(
    "outcomes", [table_of(), LARGE, table_of(seeds=(0,)), [made()]], ids=["small", "large", "one seed", "one"]
)
def test_the_table_has_the_numbers_of_the_grid(outcomes):
    grid, tree = Grid(outcomes), Tree(page(outcomes, title="t"))
    rows = accuracy_of(tree)
    labels = {grid.label(row): row for row in grid.rows}
    assert list(rows) == list(labels)
    for label, cells in rows.items():
        assert set(cells) == {grid.heading(column) for column in grid.columns}
        for column in grid.columns:
            row, cell = labels[label], cells[grid.heading(column)]
            assert text(cell) == shown(grid, row, column)
            assert bool(list(tree.all("b", cell))) == grid.best(row, column)
            gain = grid.gain(row, column)
            beyond = gain is not None and gain.beyond_chance
            sides = {"up": beyond and gain.points > 0, "down": beyond and gain.points < 0}
            assert {side: side in cell[1].get("class", "").split() for side in sides} == sides


def test_a_larger_gain_has_a_stronger_tint():
    outcomes = [made("source", 50), *(made(f"m{g}", 50 + g) for g in (-20, -5, 1, 5))]
    cells = [accuracy_of(Tree(page(outcomes, title="t")))[f"m{g}"]["fog"][1] for g in (-20, -5, 1, 5)]
    sides, tints = zip(*(cell["class"].split() for cell in cells))
    assert [int(tint.removeprefix("tint")) for tint in tints] == pytest.approx([100, 50, 100 * math.sqrt(1 / 20), 50], abs=1)
    assert sides == ("down", "down", "up", "up")
    assert cells[0]["title"] == "\N{MINUS SIGN}20.0±0.8 points above source, more than chance"


def test_what_is_within_chance_is_neither_tinted_nor_best():
    outcomes = [made("source", 50, images=200), made("near", 51, images=200), made("far", 40, images=200)]
    tree = Tree(page(outcomes, title="t"))
    rows = accuracy_of(tree)
    assert "class" not in rows["near"]["fog"][1] and "within chance" in rows["near"]["fog"][1]["title"]
    assert [bool(list(tree.all("b", rows[m]["fog"]))) for m in ("source", "near", "far")] == [True, True, False]
    two = Tree(page(outcomes[:2], title="t"))
    assert not list(two.all("b", next(two.all("table")))), "where all are within chance, none is marked"
    unknown = Tree(page([made("source", 50, by_image={}), made("far", 40, by_image={})], title="t"))
    cell = accuracy_of(unknown)["far"]["fog"]
    assert text(cell) == "40.0\N{MINUS SIGN}10.0" and "class" not in cell[1], "without images there is no interval"
    assert not list(unknown.all("b", next(unknown.all("table"))))


def test_the_table_is_accessible():
    tree = Tree(page(table_of(), title="t", paper=reported("normal")))
    for head in tree.all("th"):
        assert head[1]["scope"] in ("row", "col", "rowgroup")
    for drawing in tree.all("svg"):
        assert drawing[1].get("aria-hidden") or text(next(tree.all("title", drawing))) == drawing[1]["aria-label"]
    assert next(tree.all("html"))[1]["lang"] == "en"
    assert all(button[1]["type"] == "button" and text(button) for button in tree.all("button"))


def test_the_summary_is_in_words():
    assert lead(table_of()) == (
        "dct is best on average with 43.2 % accuracy, 2.8 ± 0.3 points above the source model and 1.4 ± 0.2 above tent, the "
        "next (2 domains, 2 seeds, 400 images for each method)."
    )
    assert (
        lead([made("tent", 61)]) == "tent reaches 61.0 % accuracy on average (1 domain, 1 seed, 100 images for each method)."
    )
    assert lead([made("a", 61), made("b", 60)]).startswith(
        "a is best on average with 61.0 % accuracy, 1.0 ± 0.2 points above b, the next ("
    )
    both = lead([made("a", 61), made("b", 61), made("source", 50)])
    assert both.startswith(
        "a is highest on average with 61.0 % accuracy, 11.0 ± 0.6 points above the source model; b is within"
    )
    none = lead([made("a", 49), made("source", 50)])
    assert none.startswith(
        "No method is above the source model on average, which reaches 50.0 % accuracy; a is nearest, 1.0 ± 0.2 points"
    )
    chance = lead([made("a", 50.01), made("source", 50)])
    assert chance.startswith(
        "No method is above the source model by more than chance: a reaches 50.0 % accuracy on average, 0.0"
    )
    unknown = lead([made("a", 61, by_image={}), made("source", 50)])
    assert unknown.startswith("a is highest on average with 61.0 % accuracy, 11.0 points above the source model (")


def test_a_mean_over_other_domains_is_not_ranked():
    outcomes = [made(m, a, [d]) for m, a in (("source", 50), ("tent", 55)) for d in ("fog", "snow")] + [
        made("dct", 90, ["fog"])
    ]
    tree = Tree(page(outcomes, title="t"))
    rows = accuracy_of(tree)
    assert text(rows["dct†"]["snow"]) == NOTHING and text(rows["dct†"]["mean"]) == "90.0"
    assert rows["dct†"]["mean"][1]["class"] == "summary unranked" and not list(tree.all("b", rows["dct†"]["mean"]))
    assert list(tree.all("b", rows["tent"]["mean"])) and list(tree.all("b", rows["dct†"]["fog"]))
    assert lead(outcomes).startswith("tent is best on average with 55.0 %")
    assert "100 to 200 images" in lead(outcomes)
    assert "so not shown: dct." in text(tree.root)
    assert lead([made("a", 50, ["fog"]), made("b", 60, ["snow"])]).startswith("No method was run on every domain")
    alone = lead([made("a", 50, ["fog"]), made("b", 60, ["snow"]), made("b", 60, ["fog"])])
    assert alone.startswith("b, the only method that was run on every domain, reaches 60.0 %")


def test_without_a_source_row_nothing_is_tinted():
    written = page(table_of(("tent", "dct")), title="t")
    assert (
        'class="tint' not in written and not re.search(r'class="[^"]* tint', written) and "oints above source" not in written
    )


def test_the_paper_stands_beside():
    paper, outcomes = reported("normal"), table_of(("source", "tent", "mine"), CORRUPTIONS)
    tree = Tree(page(outcomes, title="t", paper=paper))
    rows = accuracy_of(tree)
    assert list(rows)[:5] == ["source", "source, paper", "tent", "tent, paper", "mine"]
    assert set(list(rows)[6:]) == set(paper.rows) - {"source", "tent"}
    assert list(rows)[5] == "Reported by the paper, not run here"
    for method, values in paper.rows.items():
        row = rows.get(f"{method}, paper") or rows[method]
        for column, value in (*zip(paper.columns, values), ("mean", paper.averages[method])):
            assert text(row[column]).partition("±")[0] == f"{value:.1f}"
            assert not list(tree.all("b", row[column]))
        assert text(row["second half"]) == NOTHING
    assert text(rows["dct"]["glass_blur"]) == "58.9±0.3" and text(rows["dct"]["mean"]) == "66.3±0.0"
    notes = [text(item) for item in tree.all("li", next(tree.all("aside", id="paper")))]
    grid = Grid(outcomes)
    here = statistics.fmean(grid.cell(grid.source, key).accuracy for key in grid.domains)
    there = statistics.fmean(paper.rows["source"])
    assert f"source is {here:.1f} here and {there:.1f} in the paper, {abs(here - there):.1f} points apart" in notes[0]
    assert notes[1:] == list(paper.doubts)


def test_what_does_not_compare_with_the_paper_is_said():
    written = page([made("source"), made("tent")], title="t", paper=reported("vit-l-bs1"))
    notes = [text(item) for item in Tree(written).all("li", next(Tree(written).all("aside")))]
    assert "The paper's model is vit_large_patch16_224.augreg_in21k_ft_in1k; here it is " + MODEL + "." in notes
    assert "Not the same: setting: bs1 there, normal here." in notes
    means = "The paper's mean is over 15 columns and ours over 1, 1 of them the same: the means do not compare"
    assert f"{means}, and it is left out." in notes
    unprinted = page([made("tent", setting="mixed")], title="t", paper=reported("mixed"))
    assert "it was not printed" in unprinted


def test_another_severity_is_another_column():
    paper = reported("normal")
    tree = Tree(page([made("source", 60, [DomainKey("fog", 3), DomainKey("fog", 5)])], title="t", paper=paper))
    row = accuracy_of(tree)["source, paper"]
    assert text(row["fog/3"]) == NOTHING and text(row["fog/5"]) == f"{paper.row('source')['fog']:.1f}"
    assert "Not the same: severity: 5 there, 3 and 5 here." in text(tree.root)


def test_where_the_papers_columns_are_settings_that_of_the_runs_is_taken():
    paper, domain = reported("imagenet-r"), [DomainKey("imagenet-r")]
    outcomes = [made("source", 57.0, domain), made("tent", 58, domain)]
    tree = Tree(page(outcomes, title="t", paper=paper))
    assert text(accuracy_of(tree)["source, paper"]["mean"]) == f"{paper.row('source')['normal']:.1f}"


@dataclass
class Drawn:
    """A figure as the page gets it."""

    title: str = "t"
    caption: str = "c"
    findings: list = field(default_factory=list)
    protocol: dict = field(default_factory=dict)
    svg: str = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"/>'


HOSTILE = [
    "<script>hacked = 1</script>",
    '"><img src=x onerror="hacked = 1">',
    "'><svg onload='hacked = 1'>",
    "</script><script>hacked = 1</script>",
    "</style><script>hacked = 1</script>",
    "</title></head><body onload=hacked=1>",
    "javascript:hacked=1",
    "--><script>hacked = 1</script><!--",
    "&lt;script&gt; & &quot;",
    "a_<b>_c",
    "\udcff\ud800",  # as in the name of a folder that is not UTF-8
]
ATTACK = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="40" height="20"
 onload="parent.hacked = hacked = 1"><script>parent.hacked = top.hacked = 1</script>
 <a xlink:href="javascript:parent.hacked=1"><rect width="40" height="20" onclick="parent.hacked = 1"/></a>
 <foreignObject width="40" height="20"><img xmlns="http://www.w3.org/1999/xhtml" src="x" onerror="parent.hacked = 1"/>
 </foreignObject><image href="http://127.0.0.1:9/x.png" width="9" height="9"/></svg>"""


def hostile_page(name: str) -> str:
    """A page with a name in every place where the results, the figures or the user can write one."""
    model = {**SPEC.model, "name": name, "weights": name, "architecture": name, "device": name}
    words = dict(model=model, config={name: name, "lr": 1}, dataset=name, changed={name: name}, preprocessing=[{name: name}])
    words |= dict(versions={name: name}, protocol={**SPEC.protocol, "reset": name, "predict": name, "classes": name})
    outcomes = [
        made(method, 40 + i, [name, "b"], setting=name, events=[(1, name), (2, f"{name}: {name}")])
        for i, method in enumerate((name, "source"))
    ]
    outcomes = [replace(o, spec=replace(o.spec, **words)) for o in outcomes]
    outcomes.append(made(name, 30, [DomainKey(name, 3)]))
    figures = [Drawn(name, name, [name], {name: name}, ATTACK)]
    return page(outcomes, title=name, notes=[name], figures=figures)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_others_write_is_text(name):
    written = hostile_page(name)
    tree = Tree(written)
    written.encode()
    assert [element[0] for element in tree.root[2] if not isinstance(element, str)] == ["html"]
    assert [len(list(tree.all(kind))) for kind in ("head", "body", "script", "style", "img")] == [1] * 5
    elements = [element for element in everything(tree.root) if element[0] != "root"]
    assert not [key for _, attributes, _ in elements for key in attributes if key.startswith("on") or key == "style"]
    assert {value for _, attributes, _ in elements for key, value in attributes.items() if key == "href"} <= {"#paper"}
    (image,) = tree.all("img")
    assert base64.b64decode(image[1]["src"].removeprefix("data:image/svg+xml;base64,")).decode() == ATTACK
    seen = name.encode("utf-8", "replace").decode()
    assert text(next(tree.all("h1"))) == seen == text(next(tree.all("title", next(tree.all("head")))))
    assert any(label.startswith(" ".join(seen.split())) for label in accuracy_of(tree))
    assert {seen, f"{seen}: {seen}"} <= {text(cell) for cell in tree.all("td")}
    assert seen in [text(item) for item in tree.all("li")] and seen in {text(value) for value in tree.all("dd")}
    assert seen in {text(heading) for heading in tree.all("h2")} and image[1]["alt"] == seen
    assert text(next(tree.all("pre"))).startswith(f"{seen}\n")


def everything(element):
    """Yield an element and all that are in it."""
    yield element
    for child in element[2]:
        if not isinstance(child, str):
            yield from everything(child)


@needs_browser
def test_no_script_of_others_runs(tmp_path):
    """All hostile names at once, a hostile figure, and markup that no function has escaped."""
    probe = "return {hacked: typeof hacked, dark: root.dataset.theme, images: all('img').map((image) => image.naturalWidth)}"
    found, console = probe_page(hostile_page(" ".join(HOSTILE)), probe, tmp_path)
    assert found == {"hacked": "undefined", "images": [40]} and not console
    raw = (
        '<script>hacked = 1</script><img src="x" onerror="hacked = 1"><p style="color: red">x</p><body onload="hacked = 1">'
    )
    leaky = page(table_of(), title="t").replace("</main>", f"{raw}</main>")
    found, console = probe_page(leaky, probe, tmp_path)
    assert found["hacked"] == "undefined" and len(console) >= 4, "the policy refuses it, and says so"


@pytest.mark.parametrize("paper", [None, reported("normal")])
def test_nothing_is_fetched(paper):
    written = page(table_of(), title="t", paper=paper)
    assert not re.search(r"https?:|@import|url\(|\bsrc=|<link|<img|<iframe|import\(|fetch\(|XMLHttp", written, re.I)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', written))
    assert "default-src &#x27;none&#x27;" in written, "the browser itself refuses"


def panels_of(tree: Tree) -> list[tuple]:
    """The panels of accuracy, one for each stream."""
    first = next(element for element in tree.all("div") if element[1].get("class", "").startswith("panels "))
    return list(tree.all("figure", first))


def lines_of(tree: Tree) -> list[list[tuple]]:
    return [list(tree.all("polyline", panel)) for panel in panels_of(tree)]


def test_a_panel_for_each_stream_and_a_line_for_each_method():
    assert [len(lines) for lines in lines_of(Tree(page(LARGE, title="t")))] == [20] * 15
    joint = [made(m, 50, CORRUPTIONS, setting="continual") for m in ("source", "tent")]
    tree = Tree(page(joint, title="t"))
    assert [len(lines) for lines in lines_of(tree)] == [2]
    assert "gaussian_noise to jpeg_compression, 15 domains in one stream (continual)" in text(tree.root)


def test_curves_are_means_over_seeds_and_stay_in_their_panel():
    curves = [[(1, 1.0), (50, 0.3), (100, 0.6)], [(1, 0.0), (50, 0.5), (100, 0.4)], [(1, 0.0), (60, 0.7), (100, 0.5)]]
    tree = Tree(page([made("tent", seed=seed, curve=curve) for seed, curve in enumerate(curves)], title="t"))
    ((line,),) = lines_of(tree)
    assert text(next(tree.all("title", line))) == "tent 50.0 %"
    places = [tuple(map(float, pair.split(","))) for pair in line[1]["points"].split()]
    assert len(places) == 2, "the first image is left out"
    assert places[-1][0] == 556 and places[0][0] == pytest.approx((38 + 556) / 2, abs=0.1)
    for lines in lines_of(Tree(page(LARGE, title="t"))):
        for line in lines:
            assert all(8 <= float(pair.split(",")[1]) <= 176 - 22 for pair in line[1]["points"].split())


def test_one_scale_for_all_panels():
    outcomes = [
        made(m, a, [d]) for d, a, b in (("fog", 3, 4), ("snow", 60, 90), ("rain", 99, 99.9)) for m, a in (("x", a), ("y", b))
    ]
    tree = Tree(page(outcomes, title="t"))
    assert "Each panel spans 40 points" in text(tree.root)
    for figure in panels_of(tree):
        ticks = [float(text(t).rstrip("%")) for t in tree.all("text", figure) if re.fullmatch(r"\d+%?", text(t))][:-1]
        assert max(ticks) - min(ticks) == 40 and min(ticks) >= 0 and max(ticks) <= 100


def test_only_so_many_lines_have_a_colour():
    lines = lines_of(Tree(page(LARGE, title="t")))[0]
    classes = [line[1]["class"] for line in lines]
    assert sorted(classes) == sorted([*(f"hue{i}" for i in range(7)), "source", *["rest"] * 12])
    assert classes[-1] == "hue0" and lines[-1][1]["data-m"] == "19", "the best is on top"


@pytest.mark.parametrize(
    ("low", "high", "log"), [(0, 1, False), (40, 100, False), (0.03, 0.031, False), (3, 2400, True), (9, 130, True)]
)
def test_ticks_are_round_and_inside(low, high, log):
    ticks = Scale(low, high, 0, 100, log).ticks
    assert 2 <= len(ticks) <= 10 and all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert all(len(f"{tick:g}".replace(".", "").strip("0")) <= 4 for tick in ticks)
    assert Scale(low, high, 0, 100, log)(low) == 0 and Scale(low, high, 100, 0, log)(high) == 0


def test_steps_are_round():
    assert [round_step(least) for least in (1, 1.1, 2, 3, 5, 7, 0.03, 70)] == [1, 2, 2, 5, 5, 10, pytest.approx(0.05), 100]


def test_the_frontier_is_what_nothing_beats():
    assert frontier({"slow": (9, 60), "bad": (5, 40), "fast": (1, 50), "same": (1, 45), "best": (20, 70)}) == [
        "fast",
        "slow",
        "best",
    ]


def test_time_is_logarithmic_where_it_must_be_and_labels_do_not_collide():
    assert ", log scale" in page([made("source", seconds=1.0), made("dct", seconds=11.0)], title="t")
    assert ", log scale" not in page([made("source", seconds=1.0), made("dct", seconds=9.0)], title="t")
    assert ", log scale" not in page([made("source", seconds=0.0), made("dct", seconds=9.0)], title="t")
    dots = {f"method {i}": (1.5 ** (i % 6) + i / 10, 50 + i % 4 + i / 9) for i in range(20)}
    tree = Tree(scatter(dots, {name: {} for name in dots}))
    boxes = []
    for group in tree.all("g"):
        label = next(tree.all("text", group))
        boxes.append((float(label[1]["x"]), float(label[1]["y"]), 3.4 * len(text(label))))
    apart = [
        abs(a[0] - b[0]) >= a[2] + b[2] - 0.2 or abs(a[1] - b[1]) >= 13.8 for i, a in enumerate(boxes) for b in boxes[:i]
    ]
    assert len(boxes) == 20 and all(apart)


def test_costs_come_from_the_runs():
    runs = [made("tent", seed=0), made("tent", seed=1, seconds=3.0, used=75, forward=250, ece=0.2, peak_mib=1500.0)]
    other = made("memo", peak_mib=None, seconds=50.0)
    rows = Tree(page([*runs, other], title="t")).table("Cost by method")
    assert [text(cell) for cell in rows["tent"]] == ["20", "50 %", "2.00", "0.50", "15.0 %", "1,500 MiB", "2"]
    assert text(rows["memo"][0]) == "500" and text(rows["memo"][-2]) == "\N{EN DASH}"


def test_events_are_counted_and_found():
    eventful = [(1, "recovered"), (2, "recovered"), (3, "recovered"), (9, "recovered"), (4, "rolled back: drift 3")]
    outcomes = [made("sar", seed=0, events=eventful), made("sar", seed=1, events=[(2, "rolled back: drift 5")]), made()]
    tree = Tree(page(outcomes, title="t"))
    said = [text(item) for item in tree.all("li")]
    assert "sar: recovered, 4 times in 1 of 2 runs" in said and "sar: rolled back, 2 times in 2 of 2 runs" in said
    region = next(tree.all("div", **{"aria-label": "Events by run"}))
    rows = [[text(c) for c in row[2]] for row in tree.all("tr", region)]
    assert rows[1:3] == [
        ["sar", "fog", "0", "recovered", "1\N{EN DASH}3, 9"],
        ["sar", "fog", "0", "rolled back: drift 3", "4"],
    ]
    assert "Events" not in [text(heading) for heading in Tree(page([made()], title="t")).all("h2")]
    many = page([made("sar", events=[(2 * i, "recovered") for i in range(30)])], title="t")
    assert "16, 18 and 20 more" in many


def test_the_protocol_is_there_to_be_read_and_to_be_copied():
    tree = Tree(page(table_of(), title="The title", notes=["First.", "Second."]))
    card = next(tree.all("dl"))
    assert dict(zip(map(text, tree.all("dt", card)), map(text, tree.all("dd", card)))) == SPEC.shared
    assert text(next(tree.all("pre"))).split("\n") == [
        "The title",
        *(f"{key}: {value}" for key, value in SPEC.shared.items()),
    ]
    assert [text(item) for item in tree.all("li")][-2:] == ["First.", "Second."]


def test_different_protocols_are_said_first_and_once():
    outcomes = table_of()
    outcomes[0] = replace(outcomes[0], spec=replace(outcomes[0].spec, batch_size=1))
    differences = Grid(outcomes, mix=True).differences
    tree = Tree(page(outcomes, title="t", notes=["A note."]))
    warning = next(tree.all("div", **{"class": "warning"}))
    assert [text(item) for item in tree.all("li", warning)] == differences
    assert [text(item) for item in tree.all("li")][-1] == "A note." and text(tree.root).count(differences[0]) == 1


def test_equal_outcomes_make_equal_pages():
    assert page(LARGE, title="t", paper=reported("normal")) == page(LARGE, title="t", paper=reported("normal"))


def test_markup_escapes_all_that_is_not_markup():
    assert tag("p", "<b>", tag("b", "&"), class_='"x"', data_m=0, hidden=True, title=None, id=False) == (
        '<p class="&quot;x&quot;" data-m="0" hidden>&lt;b&gt;<b>&amp;</b></p>'
    )
    assert join("<", Html(), Html("<br>")) == "&lt;\n<br>"
    assert breakable("a_<b") == "a_<wbr>&lt;b"


PROBE = """
theme.click();
picks[2].click();
return {
  sizes: all("svg").map((drawing) => [drawing.getBoundingClientRect().width, drawing.getBoundingClientRect().height]),
  labels: all("svg text").filter((label) => label.getBoundingClientRect().width === 0).length,
  tooWide: root.scrollWidth - root.clientWidth,
  scrolls: all(".scrolled").some((region) => region.scrollWidth > region.clientWidth),
  theme: [root.dataset.theme, getComputedStyle(root).colorScheme, theme.textContent],
  picked: all("tr.on").map((row) => row.cells[0].textContent),
  bright: all("polyline[data-m]").filter((line) => getComputedStyle(line).opacity === "1").length,
  rest: all("polyline.rest.on").map((line) => line.style.getPropertyValue("--hue")),
  tinted: all("td.up, td.down").filter((cell) => !/ 0[)]|transparent/.test(getComputedStyle(cell).backgroundColor)).length,
  plain: all("td:not(.up, .down)").filter((cell) => getComputedStyle(cell).backgroundColor === "rgba(0, 0, 0, 0)").length,
  columns: all(".panels").map((panels) => getComputedStyle(panels).getPropertyValue("--panel")),
  copy: !copy.hidden,
}"""


@needs_browser
def test_a_browser_shows_it(tmp_path):
    report, console = probe_page(page(LARGE, title="t", paper=reported("normal")), PROBE, tmp_path, "500,800")
    assert not console
    assert len(report["sizes"]) == 20 + 15 + 1 and all(width > 20 and height > 5 for width, height in report["sizes"])
    assert report["labels"] == 0
    assert report["tooWide"] <= 0 and report["scrolls"], "the tables scroll, the page does not"
    assert report["theme"] in (["dark", "dark", "Light"], ["light", "light", "Dark"])
    assert report["picked"] == ["method_2", "method_2"] and report["bright"] == 15
    assert report["rest"] == ["var(--hue6)"] * 15, "a grey line has a colour while it is picked"
    assert report["tinted"] > 200 and report["plain"] > 20 and report["columns"] == ["256px"]
    assert report["copy"]

"""A figure with the numbers behind it: how it is drawn, saved, and put into a page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.digests import digest_bytes
from ..core.files import write_whole
from ..errors import ConfigError, StateError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that white paper swallows
HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
INK = "#1b1b1c"  # of text and axes
PAGE_INK, DARK_PAGE_INK = "#1b1e23", "#e9ebee"  # what it becomes in a page: --ink of report/page.css
SEQUENTIAL = "viridis"
WORDS = ("name", "title", "caption", "findings", "protocol", "origin")  # what is in a figure's JSON file


@dataclass
class Figure:
    """A drawing, what it shows, and its numbers.

    Args:
        name: Stem of its files.
        title: A few words.
        caption: What is shown, how it was made, and what it does not show; for somebody who has not seen the code.
        rows: The numbers, one mapping for each row of the CSV file, all with the same keys.
        canvas: The drawing, made inside `drawing()`.
        findings: Sentences with the numbers that matter.
        protocol: How it was made, name by name.
        origin: What identifies the model and the data: `Subject.origin`.
    """

    name: str
    title: str
    caption: str
    rows: Sequence[Mapping[str, Any]]
    canvas: Canvas
    findings: Sequence[str] = ()
    protocol: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)

    def save(self, folder: Path) -> list[Path]:
        """Write NAME.png, NAME.svg, NAME.csv, and NAME.json with the words, and return the files."""
        words = {key: getattr(self, key) for key in WORDS}
        contents = {"png": self._drawn("png"), "svg": self._drawn("svg"), "csv": self.csv().encode()}
        about = {**words, "digest": _digest(words, contents["svg"])}
        contents["json"] = json.dumps(about, indent=1, ensure_ascii=False).encode()
        for kind, content in contents.items():
            write_whole(folder / f"{self.name}.{kind}", content)
        return [folder / f"{self.name}.{kind}" for kind in contents]

    def csv(self) -> str:
        """Return the numbers as a CSV file."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in self.rows)
        return text.getvalue()

    def _drawn(self, kind: str) -> bytes:
        import matplotlib

        content = io.BytesIO()
        # the same numbers give the same file
        fixed = {"svg.hashsalt": self.name, "svg.fonttype": "none"}
        with matplotlib.rc_context(fixed):
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            self.canvas.savefig(content, format=kind, dpi=200, metadata=metadata, transparent=kind == "svg")
        return content.getvalue()


@dataclass(frozen=True)
class SavedFigure:
    """A figure as it was saved. Its attributes are those of `Figure`, with the drawing as SVG."""

    name: str
    title: str
    caption: str
    findings: list[str]
    protocol: dict[str, str]
    origin: dict[str, str]
    svg: str  # for an image in a page: its text and axes take the page's colour

    @classmethod
    def read(cls, path: Path) -> SavedFigure:
        """Read a figure from its JSON file, and the drawing beside that. A figure that was changed is refused."""
        try:
            content = json.loads(path.read_bytes())
            drawn = path.with_suffix(".svg").read_bytes()
            words, digest = {key: content[key] for key in WORDS}, content["digest"]
            for key, kind in {**dict.fromkeys(WORDS, str), "findings": list, "protocol": dict, "origin": dict}.items():
                if not isinstance(words[key], kind):
                    raise TypeError(f"{key} is {words[key]!r}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateError(f"{path} is not a figure of `acclimate analyze` ({error}): make it again.") from None
        if digest != _digest(words, drawn) or words["name"] != path.stem:
            raise StateError(f"{path} and its drawing are not what `acclimate analyze` wrote: make them again.")
        return cls(**words, svg=_with_ink_of_page(drawn.decode()))

    def shows(self, model: Mapping[str, str]) -> bool:
        """Return whether this is a figure of a model, which `describe` or a run's `spec.model` describes."""
        return all(self.origin.get(key) == model[key] for key in ("weights", "architecture"))


def _digest(words: Mapping[str, Any], drawn: bytes) -> str:
    """Return the digest of the words and the drawing of a figure."""
    return digest_bytes(json.dumps(words, sort_keys=True).encode(), drawn)


def _with_ink_of_page(svg: str) -> str:
    """Return a drawing whose text and axes follow the colour scheme of the page that shows it as an image."""
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ color: {DARK_PAGE_INK}; }} }}"
    style = f"<style>svg {{ color: {PAGE_INK}; }} text {{ fill: currentColor; }} {dark}</style>"
    start, end = svg[: svg.index("<svg")], svg[svg.index("<svg") :].replace(INK, "currentColor")
    return start + end.replace(">", f">{style}", 1)


@contextmanager
def drawing() -> Iterator[None]:
    """Let matplotlib draw as a paper does, without a screen."""
    try:
        import matplotlib
        from cycler import cycler
    except ImportError:
        raise ConfigError("Figures need matplotlib and scikit-learn: pip install 'acclimate[figures]'.") from None
    style = {
        "backend": "Agg",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=HUES),
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#9a9a9a",
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "figure.constrained_layout.use": True,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
    with matplotlib.rc_context(style):
        yield


def spoken(name: str) -> str:
    """Return a corruption's name in words."""
    return name.replace("_", " ")


def new(width: float, height: float) -> Canvas:
    """Return an empty drawing; width and height are in inches."""
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(width, height))

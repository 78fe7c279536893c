"""The harm of adaptation on hostile streams, as tables for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ..evaluation.harm import HarmCell, summaries

HEADS = ("worst", "mean harm", "streams lost", "mean gain")
CAPTION = (
    "Points above the unadapted model over hostile streams, without and with the guard. Harm: mean of the losses, where a "
    "gain counts as 0. Streams lost: more than a point below, beyond chance (95 % interval, paired by image). Worst late: "
    "in the second half of a stream, with the guard."
)


def harm_overview(cells: Sequence[HarmCell]) -> Table:
    """Return a table of methods and rates of learning, for a terminal."""
    streams = len({cell.stream for cell in cells})
    table = Table(title=Text(f"Harm on {streams} hostile streams"), caption=Text(CAPTION), title_justify="left")
    for head in ("method", "rate", *(f"{head}\n{which}" for head in HEADS for which in ("without", "with"))):
        table.add_column(head, justify="left" if head in ("method", "rate") else "right", no_wrap=True)
    table.add_column("worst\nlate", justify="right", no_wrap=True)
    for words in _overview(cells):
        table.add_row(*map(Text, words))
    return table


def harm_markdown(cells: Sequence[HarmCell]) -> str:
    """Return the overview and a table of every stream, in Markdown."""
    heads = [
        "method",
        "rate",
        *(f"{head}, {which}" for head in HEADS for which in ("no guard", "guard")),
        "worst late, guard",
    ]
    lines = [_row(heads), "|---" * len(heads) + "|", *map(_row, _overview(cells))]
    for rate in dict.fromkeys(cell.rate for cell in cells):
        chosen = [cell for cell in cells if cell.rate == rate]
        streams = list(dict.fromkeys(cell.stream for cell in chosen))
        source = {cell.stream: f"{cell.source:.1f}" for cell in chosen}
        lines += ["", f"Rate: {rate}. No guard / guard.", "", _row(["method", *streams]), "|---" * (1 + len(streams)) + "|"]
        lines.append(_row(["source", *(source[stream] for stream in streams)]))
        for method in dict.fromkeys(cell.method for cell in chosen):
            mine = {cell.stream: f"{cell.unguarded} / {cell.guarded}" for cell in chosen if cell.method == method}
            lines.append(_row([method, *(mine.get(stream, "-") for stream in streams)]))
    return "\n".join(lines)


def _overview(cells: Sequence[HarmCell]) -> list[list[str]]:
    rows = []
    for (method, rate), both in summaries(cells).items():
        texts = [(f"{s.worst:+.1f}", f"{s.mean_harm:+.2f}", str(s.losses), f"{s.gain:+.2f}") for s in both]
        late = min(cell.late.points for cell in cells if (cell.method, cell.rate) == (method, rate))
        rows.append([method, rate, *(text for pair in zip(*texts) for text in pair), f"{late:+.1f}"])
    return rows


def _row(words: Sequence[str]) -> str:
    return "| " + " | ".join(words) + " |"

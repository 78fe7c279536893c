"""Markup that cannot be broken by what is put into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

EMPTY = ("meta", "wbr")  # elements that have no end


class Html(str):
    """Is markup. Every other string is text, and is escaped where it enters markup."""


def tag(name: str, /, *inside: str, **attributes: object) -> Html:
    """Return an element.

    Args:
        name: What kind of element.
        inside: Markup, or text.
        attributes: `class_` is written class and `data_m` data-m. True is an attribute without a value; None and False
            are none.
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    words = [key if value is True else f'{key}="{escape(str(value))}"' for key, value in given.items() if _is_given(value)]
    start = " ".join([f"<{name}", *words]) + ">"
    return Html(start if name in EMPTY else f"{start}{''.join(map(_markup, inside))}</{name}>")


def join(*parts: str) -> Html:
    """Return parts below each other, without those that are empty."""
    return Html("\n".join(_markup(part) for part in parts if part))


def breakable(name: str) -> Html:
    """Return a name that may be broken after an underscore."""
    return Html(f"_{tag('wbr')}".join(map(escape, name.split("_"))))


def _markup(part: str) -> str:
    return part if isinstance(part, Html) else escape(part)


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def section(heading: str, *inside: Html) -> Html:
    """Return a part of a page with its heading; nothing if there is nothing in it."""
    content = join(*inside)
    return tag("section", tag("h2", heading), content) if content else Html()


def items(kind: str, sentences: Sequence[str]) -> Html:
    """Return a list, "ul" or "ol"; nothing if it is empty."""
    return tag(kind, join(*(tag("li", sentence) for sentence in sentences))) if sentences else Html()


def definitions(lines: Mapping[str, Sequence[str]]) -> Html:
    """Return names with what belongs to each."""
    pairs = [join(tag("dt", name), *(tag("dd", value) for value in values)) for name, values in lines.items() if values]
    return tag("dl", join(*pairs))


def scrolled_table(label: str, heads: Sequence[Html], bodies: Sequence[Html], **attributes: object) -> Html:
    """Return a table that scrolls where the screen is narrow; `label` is read out by screen readers."""
    table = tag("table", tag("thead", tag("tr", *heads)), join(*bodies), **attributes)
    return tag("div", table, class_="scrolled", role="region", aria_label=label, tabindex=0)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 run", "2,000 runs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))

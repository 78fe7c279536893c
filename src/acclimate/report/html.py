"""HTML elements whose text is always escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

EMPTY = ("img", "meta", "wbr")  # elements that have no end tag


class Html(str):
    """A string of markup. Every other string is text, and is escaped when it is put into markup."""


def tag(name: str, /, *inside: str, **attributes: object) -> Html:
    """Return an element.

    Args:
        name: The name of the element.
        inside: The content: markup or text.
        attributes: The attributes. `class_` is written as class and `data_m` as data-m. True is an attribute without a
            value. An attribute that is None or False is left out.
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    words = [key if value is True else f'{key}="{_escaped(str(value))}"' for key, value in given.items() if _is_given(value)]
    start = " ".join([f"<{name}", *words]) + ">"
    return Html(start if name in EMPTY else f"{start}{''.join(map(_markup, inside))}</{name}>")


def join(*parts: str) -> Html:
    """Return the parts that are not empty, separated by line breaks."""
    return Html("\n".join(_markup(part) for part in parts if part))


def breakable(name: str) -> Html:
    """Return a name in which a line break is allowed after an underscore."""
    return Html(f"_{tag('wbr')}".join(map(_escaped, name.split("_"))))


def _markup(part: str) -> str:
    """Return a part as markup."""
    return part if isinstance(part, Html) else _escaped(part)


def _escaped(text: str) -> str:
    """Return text as markup. Names of files may contain characters that no encoding has, and these become question marks."""
    return escape(text.encode("utf-8", "replace").decode())


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def section(heading: str, *inside: Html) -> Html:
    """Return a section with its heading, or nothing if it has no content."""
    content = join(*inside)
    return tag("section", tag("h2", heading), content) if content else Html()


def items(kind: str, sentences: Sequence[str]) -> Html:
    """Return a list of the kind "ul" or "ol", or nothing if there are no sentences."""
    return tag(kind, join(*(tag("li", sentence) for sentence in sentences))) if sentences else Html()


def definitions(lines: Mapping[str, Sequence[str]]) -> Html:
    """Return a list of names, each with its values."""
    pairs = [join(tag("dt", name), *(tag("dd", value) for value in values)) for name, values in lines.items() if values]
    return tag("dl", join(*pairs))


def scrolled_table(label: str, heads: Sequence[Html], bodies: Sequence[Html], **attributes: object) -> Html:
    """Return a table that scrolls horizontally on a narrow screen; `label` is for screen readers."""
    table = tag("table", tag("thead", tag("tr", *heads)), join(*bodies), **attributes)
    return tag("div", table, class_="scrolled", role="region", aria_label=label, tabindex=0)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, for example "1 run" or "2,000 runs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Return names as an enumeration in a sentence, for example "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))

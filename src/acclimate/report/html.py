"""Markup that cannot be broken by what is put into it."""

from __future__ import annotations

from html import escape

EMPTY = ("meta", "wbr")  # elements that have no end


class Html(str):
    """Markup. Every other string is text, and is escaped where it enters markup."""


def tag(name: str, /, *inside: str, **attributes: object) -> Html:
    """An element.

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
    """Parts below each other, without those that are empty."""
    return Html("\n".join(_markup(part) for part in parts if part))


def breakable(name: str) -> Html:
    """A name that may be broken after an underscore."""
    return Html(f"_{tag('wbr')}".join(map(escape, name.split("_"))))


def _markup(part: str) -> str:
    return part if isinstance(part, Html) else escape(part)


def _is_given(value: object) -> bool:
    return value is not None and value is not False

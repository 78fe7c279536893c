"""The console that commands and runs print to."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class PlainConsole(Console):
    """A console that prints names as they are: rich would read `[/b]` as markup, and `:smile:` as a picture."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Let the caller decide what to do when the reader of the output has gone."""
        raise BrokenPipeError

"""`acclimate data`."""

from __future__ import annotations

from ._words import Commands


def add(commands: Commands) -> None:
    """To be written."""

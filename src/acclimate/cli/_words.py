"""What several commands share: words of a list, and the type of argparse's commands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = Any


def listed(option: str, text: str) -> list[str]:
    """A list that has something in it, and nothing twice."""
    from ..errors import ConfigError

    found = words(text)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"--{option} {text!r}: name one or several, separated by commas, each once.")
    return found


def words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]

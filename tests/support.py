"""What tests of several rooms share, beside the fixtures."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
SHARED = TESTS.parents[1] / "shared"  # beside the project; not part of it


def shared_golden() -> list[Path]:
    """Return the recordings beside the project, or in the folder that ACCLIMATE_GOLDEN names; they are not part of it."""
    folder = Path(os.environ.get("ACCLIMATE_GOLDEN", SHARED / "golden"))
    return sorted(folder.glob("*.safetensors"))

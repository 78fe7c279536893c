"""The engine divides batches among threads: its tests have two, unless the environment gives another number."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("ACCLIMATE_TEST_THREADS", "2")))
    yield
    torch.set_num_threads(before)

"""Fixtures that most tests share: the tiny models and batches of the conformance suite."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a busy machine, threads that wait would starve those that work

import hypothesis
import pytest
import torch

from acclimate.models.families import families
from acclimate.testing.check import tiny_batches, tiny_model

torch.set_num_threads(int(os.environ.get("ACCLIMATE_TEST_THREADS", "1")))  # more would wait for each other at this size
# The same examples everywhere. A range of floats, or of integers beyond 99, would not give them: Hypothesis also draws the
# constants that it finds in the modules imported so far, which depends on the tests before.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=20, derandomize=True)
hypothesis.settings.load_profile("ci")


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def batches():
    return tiny_batches()


@pytest.fixture(params=list(families()))
def family(request):
    pytest.importorskip(families()[request.param].package)
    return request.param


@pytest.fixture(scope="module")
def one_thread():
    """More would wait for each other at this size; and the same number everywhere, because weights are compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

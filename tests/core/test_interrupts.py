"""A step happens as a whole or not at all, wherever it is interrupted.

A trace function raises an exception at a random line of a step: a line of this library, of an optimizer, or of a context
manager of the standard library. The environment variable ACCLIMATE_FUZZ multiplies the number of trials.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import acclimate
from acclimate.core.adapter import Adapter
from acclimate.core.registry import find_method
from acclimate.errors import StateError
from acclimate.models.families import Sizes
from acclimate.testing.check import Case, assert_identical, tiny_batches, tiny_model
from support import trials, vit_methods

FOLDERS = (os.path.dirname(acclimate.__file__), os.path.join(os.path.dirname(torch.__file__), "optim"))
FILES = ("contextlib.py", "grad_mode.py")


class Interrupt(KeyboardInterrupt):
    """What the trace function raises."""


class Interrupter:
    """Counts the lines that run, and raises at some of them."""

    def __init__(self, *lines: int) -> None:
        self.lines = set(lines)
        self.count = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        return self.line if name.startswith(FOLDERS) or name.endswith(FILES) else None

    def line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            self.count += 1
            if self.count in self.lines:
                raise Interrupt
        return self.line

    def run(self, call: Callable[[], Any]) -> bool:
        """Run a function, and return whether it was interrupted."""
        usual = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except Interrupt:
            return True
        finally:
            sys.settrace(usual)
        return False


def lines_of(call: Callable[[], Any]) -> int:
    counter = Interrupter()
    counter.run(call)
    return counter.count


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let every line run in this thread, which the trace function sees."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_vit() -> nn.Module:
    return tiny_model(sizes=Sizes(patch=16, width=16, depth=2))


def wrapped(name: str, **options: Any) -> Adapter:
    quick = {"memo": {"views": 2}, "cotta": {"views": 2}, "dept-g": {"stages": 2}}.get(name, {})
    return Case(find_method(name), "timm", {**quick, **options}).wrap(small_vit())


def source_of(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in zip(adapter.engine.adapted.named, adapter.engine.adapted.source)}


def assert_untouched(adapter: Adapter, before: Any, source: dict[str, torch.Tensor], where: str) -> None:
    assert_identical(adapter.state.capture(), before, where)
    assert_identical(source_of(adapter), source, f"{where}, source values")
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")
    assert all(p.grad is None for p in adapter.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in adapter.modules())


@pytest.mark.parametrize("name", vit_methods())
def test_an_interrupted_step_changes_nothing(name):
    first, images = tiny_batches(2, size=2)
    adapter, other = wrapped(name), wrapped(name)
    adapter(first), other(first)
    record, before, source = adapter.record, adapter.snapshot(), source_of(adapter)
    count = lines_of(lambda: adapter(images))
    adapter.rollback(before)
    adapter.record = record
    rng = random.Random(name)
    hit = 0
    for _ in range(trials(60)):
        at = rng.randint(1, count)
        if Interrupter(at).run(lambda: adapter(images)):
            hit += 1
            assert_untouched(adapter, before, source, f"{name}, line {at} of {count}")
            assert adapter.record is record
        else:  # the number of lines differs a little from step to step
            adapter.rollback(before)
            adapter.record = record
    assert hit >= trials(57)
    assert torch.equal(adapter(images), other(images))
    assert_identical(adapter.state.capture(), other.state.capture(), "the next step")
    weights = dict(small_vit().named_parameters())
    assert_identical(dict(adapter.unwrap().named_parameters()), weights, "the unwrapped model")


@pytest.mark.parametrize("name", ["tent", "dct", "cotta", "memo"])
def test_an_interrupted_recovery_is_completed_by_the_next_call(name):
    """The second interrupt comes a few lines after the first, while the step is being undone."""
    first, images = tiny_batches(2, size=2)
    adapter = wrapped(name)
    adapter(first)
    before, source = adapter.snapshot(), source_of(adapter)
    count = lines_of(lambda: adapter(images))
    adapter.rollback(before)
    rng = random.Random(name)
    for _ in range(trials(50)):
        at = rng.randint(1, count)
        if Interrupter(at, at + rng.randint(1, 60)).run(lambda: adapter(images)):
            torch.set_grad_enabled(True)  # which nobody can do for a handler that was interrupted itself
            with adapter.frozen():
                adapter(images)
            assert_untouched(adapter, before, source, f"{name}, lines after {at} of {count}")
        else:
            adapter.rollback(before)


@pytest.mark.parametrize("call", ["reset", "rollback", "load_state_dict", "frozen"])
def test_other_calls_are_whole_too(call):
    first, second, images = tiny_batches(3, size=2)
    adapter = wrapped("cotta")
    adapter(first)
    state = adapter.state_dict()
    snapshot = adapter.snapshot()
    adapter(second)

    def frozen() -> None:
        with adapter.frozen():
            adapter(images)

    calls = {
        "reset": adapter.reset,
        "rollback": lambda: adapter.rollback(snapshot),
        "load_state_dict": lambda: adapter.load_state_dict(state),
        "frozen": frozen,
    }
    before, source = adapter.snapshot(), source_of(adapter)
    rng = random.Random(call)
    count = lines_of(calls[call])
    adapter.rollback(before)
    for _ in range(trials(50)):
        if Interrupter(rng.randint(1, count)).run(calls[call]):
            adapter.state.capture() if call != "frozen" else adapter.snapshot()  # a prediction is tidied by the next call
            assert_untouched(adapter, before, source, call)
        else:
            adapter.rollback(before)


def test_an_interrupted_unwrap_is_completed_by_a_second_one():
    weights = dict(small_vit().state_dict())
    rng = random.Random("unwrap")
    images = tiny_batches(1, size=2)[0]
    for _ in range(trials(30)):
        adapter = wrapped("dct")
        adapter(images)
        if Interrupter(rng.randint(1, 60)).run(adapter.unwrap) and adapter._stage == "unwrapping":
            with pytest.raises(StateError, match="call it again"):
                adapter(images)
            adapter.unwrap()
        model = adapter.model if adapter._stage == "unwrapped" else adapter.unwrap()
        assert_identical(dict(model.state_dict()), weights, "the unwrapped model")
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_signal_interrupts_a_step():
    """As Ctrl-C does: a real signal, at a random moment, with worker threads."""
    torch.set_num_threads(2)
    first, images = tiny_batches(2, size=8)
    adapter = Case(find_method("dct")).wrap()
    adapter(first)
    before, source = adapter.snapshot(), source_of(adapter)
    rng = random.Random(0)
    for _ in range(trials(30)):
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.05))
        usual = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            while True:
                adapter(images)
                adapter.rollback(before)
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, usual)
        if not torch.equal(adapter.snapshot()["steps"], before["steps"]):
            adapter.rollback(before)  # the signal came between the two calls
        assert_untouched(adapter, before, source, "after a signal")


def test_workers_stop_when_a_step_is_interrupted():
    """No thread passes images through the model any more when the step has ended."""
    torch.set_num_threads(2)
    adapter = Case(find_method("tent")).wrap(micro_batch=1)
    adapter(tiny_batches(1, size=8)[0])
    passed = adapter.engine.passes.forward
    logits = adapter.engine.view.logits
    calls = []

    def failing(images: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise Interrupt
        return logits(images)

    adapter.engine._logits = failing
    with pytest.raises(Interrupt):
        adapter(tiny_batches(1, size=64)[0])
    after = adapter.engine.passes.forward
    assert after - passed < 64
    time.sleep(0.2)
    assert adapter.engine.passes.forward == after

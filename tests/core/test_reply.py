"""Reply first: the logits leave in the middle of a step, and everything else is as if they had left at its end."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import acclimate
from acclimate.core.adapter import Adapter
from acclimate.core.engine import Engine
from acclimate.core.method import Info, Method, Step
from acclimate.core.registry import find_method
from acclimate.errors import ConfigError, ConformanceError, InputError
from acclimate.models.families import Sizes
from acclimate.testing.check import Case, assert_identical, tiny_batches, tiny_model
from support import child_environment, methods_of, trials

SMALL = Sizes(patch=16, width=16, depth=2)


def wrapped(name: str, **options: Any) -> Adapter:
    quick = {"memo": {"views": 2}, "cotta": {"views": 2}, "dept-g": {"stages": 2}}.get(name, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Case(find_method(name), "timm", {**quick, **options}).wrap(tiny_model(sizes=SMALL))


def held(adapter: Adapter, seconds: float = 10) -> threading.Event:
    """Let steps stop behind their replies, before the backward pass, until an event is set or the time is over."""
    let = threading.Event()
    learn = adapter.engine._learn

    def waiting(*args: Any) -> Any:
        let.wait(seconds)
        return learn(*args)

    adapter.engine._learn = waiting
    return let


def same_record(a: Adapter, b: Adapter) -> bool:
    return repr(replace(a.record, milliseconds=0)) == repr(replace(b.record, milliseconds=0))  # in which NaN equals NaN


@pytest.mark.parametrize("name", methods_of("batch norms"))
def test_every_method_gives_the_same_bits(name):
    """With parts of a batch, batches of several sizes, and images and logits that the caller changes at once."""
    first, last = (wrapped(name, reply=reply, micro_batch=2) for reply in ("first", "last"))
    for size in (5, 5, 1, 5):
        images = tiny_batches(1, size=size, seed=size)[0]
        theirs = last(images.clone())
        ours = first(images)
        images.zero_()
        assert torch.equal(ours, theirs), f"{name}, {size} images"
        ours.zero_()
        assert same_record(first, last)
    assert_identical(first.state_dict(), last.state_dict(), name)
    first.close()


@pytest.mark.parametrize("name", ["tent", "sar", "eta", "dct", "keel", "deyo"])
def test_the_reply_leaves_after_one_forward_pass(name):
    adapter = wrapped(name, reply="first")
    adapter(tiny_batches(1)[0])  # a first batch of keel is passed twice
    adapter.close()
    let, before = held(adapter), adapter.engine.passes.forward
    logits = adapter(tiny_batches(1, seed=3)[0])
    assert adapter.engine.passes.forward - before == len(logits)
    let.set()
    assert adapter.record.step == 2


@pytest.mark.parametrize("name", ["tent", "dct", "keel"])
def test_graphs_that_are_not_kept_give_the_same_bits(name, monkeypatch):
    first, last = (wrapped(name, reply=reply, micro_batch=1) for reply in ("first", "last"))
    monkeypatch.setattr("acclimate.core.microbatches.GRAPHS_AT_ONCE", 2 * first.engine.micro_batches._work)
    for images in tiny_batches(3):
        assert torch.equal(first(images), last(images))
    assert_identical(first.state_dict(), last.state_dict(), name)
    assert first.engine.passes.forward > last.engine.passes.forward


def test_whatever_needs_the_state_waits(tmp_path):
    """What each call sees is the state after the step, though the step is still under way when it begins."""
    adapter, blocking = wrapped("tent", reply="first"), wrapped("tent")
    held(adapter, 0.05)
    images = tiny_batches(1)[0]
    begin = adapter.snapshot()
    blocking(images)
    expected = blocking.state.capture()
    with blocking.frozen():
        frozen = blocking(images)

    def saved() -> Any:
        adapter.save(tmp_path / "state.safetensors")
        return acclimate.load(tmp_path / "state.safetensors", tiny_model(sizes=SMALL), reply="first").state.capture()

    def predicted() -> Any:
        with adapter.frozen():
            assert torch.equal(adapter(images), frozen)
        return adapter.state.capture()

    calls = {
        "snapshot": adapter.snapshot,
        "save": saved,
        "frozen": predicted,
        "state_dict": adapter.state_dict,
        "deepcopy": lambda: copy.deepcopy(adapter).state.capture(),
        "record": lambda: adapter.record and adapter.state.capture(),
        "close": lambda: adapter.close() or adapter.state.capture(),
    }
    for what, call in calls.items():
        adapter.rollback(begin)
        adapter(images)
        assert_identical(call(), expected, what)
    adapter(images)
    adapter.reset()
    assert_identical(adapter.state.capture(), begin, "reset")
    adapter(images)
    assert_identical(dict(adapter.unwrap().state_dict()), dict(tiny_model(sizes=SMALL).state_dict()), "unwrap")


def test_an_error_behind_the_reply_reaches_the_next_call():
    adapter, blocking = wrapped("tent", reply="first"), wrapped("tent")
    images, more = tiny_batches(2)
    learn = adapter.engine._learn

    def failing(*args: Any) -> Any:
        raise MemoryError("no memory for the backward pass")

    for call in (adapter.snapshot, adapter.close, adapter.reset, lambda: adapter(more)):
        adapter.engine._learn = failing
        with adapter.frozen():
            expected = adapter(images)
        assert torch.equal(adapter(images), expected)
        with pytest.raises(MemoryError, match="no memory"):
            call()
        adapter.engine._learn = learn
    assert adapter.record is None
    assert torch.equal(pickle.loads(pickle.dumps(adapter))(more), blocking(more))
    blocking.reset()
    assert torch.equal(adapter(more), blocking(more))
    assert_identical(adapter.state_dict(), blocking.state_dict(), "after the errors")


def test_an_error_before_the_reply_reaches_its_own_call():
    adapter = wrapped("tent", reply="first")
    before = adapter.snapshot()
    with pytest.raises(InputError, match="NaN"):
        adapter(torch.full((2, 3, 32, 32), torch.nan))
    with pytest.raises(InputError):
        adapter("no images")
    assert_identical(adapter.snapshot(), before, "after wrong images")


def test_a_step_that_is_not_finite_changes_nothing():
    adapter = wrapped("tent", reply="first", lr=1e38)
    before = adapter.snapshot()
    logits = adapter(tiny_batches(1)[0])
    assert logits.isfinite().all() and adapter.record.event.startswith("skipped: the update made a parameter")
    learned = [
        {name: t for name, t in state.items() if name.startswith(("model/", "optimizer/"))}
        for state in (before, adapter.snapshot())
    ]
    assert_identical(*learned, "after the step")


def test_an_alarm_of_the_guard_changes_the_state_alike():
    """The logits of that batch have left before the alarm, unless they are those of the unadapted model already."""
    limit = {"guard": acclimate.Guard(drift=1e-4), "lr": 1.0}
    first, last = (wrapped("tent", reply=reply, **limit) for reply in ("first", "last"))
    events = []
    for images in tiny_batches(4):
        on_trial = bool(last.guard.on_trial)
        ours, theirs = first(images), last(images)
        events.append(last.record.event)
        assert same_record(first, last) and torch.equal(ours, theirs) == (events[-1] is None or on_trial)
    assert any(events)
    assert_identical(first.state_dict(), last.state_dict(), "after an alarm")


def test_a_wrong_declaration_is_noticed():
    class Twice(Method):
        info = Info(passes=(1, 0), replies_first=True)

        def step(self, images: Tensor, engine: Engine) -> Step:
            return Step(2 * engine.predict(images))

    adapter = acclimate.adapt(tiny_model(sizes=SMALL), Twice, reply="first")
    adapter(tiny_batches(1)[0])
    with pytest.raises(ConformanceError, match="replies_first"):
        adapter.close()


def test_methods_that_cannot_reply_first_say_so():
    with pytest.warns(UserWarning, match="MEMO are known at the end"):
        Case(find_method("memo"), "timm", {"views": 2}).wrap(tiny_model(sizes=SMALL), reply="first")
    with pytest.warns(UserWarning, match='predict="after" are known at the end'):
        acclimate.adapt(tiny_model(sizes=SMALL), "tent", reply="first", predict="after")


@pytest.mark.parametrize(("share", "learned"), [(1.0, 6), (0.5, 3), (0.34, 2), (0, 0)])
def test_a_share_of_the_batches_is_learned_from(share, learned):
    adapter = wrapped("tent", reply="first", budget=share)
    for images in tiny_batches(6):
        adapter(images)
    assert int(adapter.steps) == learned and adapter.skipped == 6 - learned


@pytest.mark.parametrize(("budget", "skipped"), [("realtime", 1), ("1ms", 1), ("60000ms", 0), (None, 0)])
def test_a_late_batch_is_only_predicted(budget, skipped):
    adapter = wrapped("tent", reply="first", budget=budget)
    first, second, third = tiny_batches(3)
    adapter(first)
    assert adapter.record.event is None
    held(adapter, 0.05)
    adapter(second)
    logits = adapter(third)  # while the step of the second batch is under way
    record = adapter.record
    assert adapter.skipped == skipped and int(adapter.steps) == 3 - skipped
    if skipped:
        assert record.used == 0 and record.event == "skipped: the step before it was late" and record.step == 2
        with adapter.frozen():
            assert torch.equal(logits, adapter(third))
    adapter(first)
    assert int(adapter.steps) == 4 - skipped  # in time


@pytest.mark.parametrize(
    "options",
    [
        {"reply": "soon"}, {"budget": "realtime"}, {"reply": "first", "budget": "fast"}, {"reply": "first", "budget": 1.5},
        {"reply": "first", "budget": "-1ms"}, {"reply": "first", "budget": True}, {"reply": "first", "budget": "nanms"},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"reply=|budget="):
        acclimate.adapt(tiny_model(sizes=SMALL), "tent", **options)


def test_several_threads_may_call():
    adapter = wrapped("tent", reply="first")
    batches, failures = tiny_batches(8), []

    def call(images: Tensor) -> None:
        try:
            assert adapter(images).shape == (len(images), 10)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(images,)) for images in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and int(adapter.steps) == 8


def test_a_hook_may_call_the_adapter(one_thread):
    adapter = wrapped("tent", reply="first")
    images, calls = tiny_batches(1)[0], []

    def hook(*_: Any) -> None:
        if not calls:
            calls.append(adapter.record)
            with adapter.frozen():
                adapter(images)

    adapter.model.blocks[0].register_forward_pre_hook(hook)
    adapter(images)
    adapter.close()
    assert calls == [None] and int(adapter.steps) == 1


def test_the_thread_ends_with_the_adapter():
    before, adapter = set(threading.enumerate()), wrapped("tent", reply="first")

    def own() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if "behind" in thread.name and thread not in before]

    adapter(tiny_batches(1)[0])
    assert len(own()) == 1
    adapter.close()
    assert not own()
    adapter(tiny_batches(1)[0])
    (thread,) = own()
    del adapter
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_interrupt_while_the_caller_waits_undoes_the_step():
    """A real signal, as of Ctrl-C, before the reply."""
    adapter, blocking = wrapped("tent", reply="first"), wrapped("tent")
    first, second = tiny_batches(2)
    adapter(first), blocking(first)
    before, logits = adapter.snapshot(), adapter.engine._logits

    def slow(images: Tensor) -> Tensor:
        time.sleep(0.3)
        return logits(images)

    adapter.engine._logits = slow
    usual = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            adapter(second)
    finally:
        signal.signal(signal.SIGALRM, usual)
    adapter.engine._logits = logits
    assert_identical(adapter.snapshot(), before, "after an interrupt")
    assert torch.equal(adapter(second), blocking(second))
    assert_identical(adapter.state_dict(), blocking.state_dict(), "the next step")


def test_interrupts_at_any_moment_leave_whole_steps():
    """Real signals at random moments: a step has happened or not, and no later call hangs."""
    adapter, blocking = wrapped("tent", reply="first"), wrapped("tent")
    images, states = tiny_batches(1)[0], []
    for _ in range(4):
        states.append(blocking.state.capture())
        blocking(images)
    rng = random.Random(0)
    interrupted = 0
    usual = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(trials(40)):
            adapter.reset()
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.02))
                for _ in range(3):
                    adapter(images)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            now = adapter.snapshot()
            assert_identical(now, states[int(now["steps"])], f"after {int(now['steps'])} steps")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    assert interrupted > 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_continues():
    """In a process of its own: torch refuses a backward pass after a fork where other tests have started its threads."""
    code = "from core.test_reply import fork_while_a_step_is_under_way as fork; fork()"
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def fork_while_a_step_is_under_way():
    """The step that was under way is undone in the child, which has no such thread, and completed in the parent."""
    adapter = wrapped("tent", reply="first")
    first, second = tiny_batches(2)
    adapter(first)
    adapter.close()
    let = held(adapter)
    adapter(second)
    child = os.fork()
    if not child:
        code = 1
        try:
            let.set()
            assert int(adapter.steps) == 1
            adapter(second)
            code = 0 if int(adapter.steps) == 2 else 2
        finally:
            os._exit(code)
    let.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int(adapter.steps) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="an interrupt has another exit code there")
@pytest.mark.parametrize(("end", "codes"), [("", {0}), ("raise KeyboardInterrupt", {-signal.SIGINT, 1})])
def test_the_interpreter_exits_while_a_step_is_under_way(end, codes):
    """Nothing hangs or crashes, and a handler at the exit sees the state from before or after the step.

    After an interrupt the exit code is 1 if a handler at the exit runs code in a string, as torch does with tabulate.
    """
    script = f"""
import atexit, sys, torch, acclimate
sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
from core.test_reply import held, wrapped
from acclimate.testing.check import tiny_batches
adapter = wrapped("tent", reply="first")
held(adapter, 0.3)
atexit.register(lambda: print("steps", int(adapter.steps)))
adapter(tiny_batches(1)[0])
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=child_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode in codes and done.stdout in ("steps 0\n", "steps 1\n"), done
    assert "Fatal" not in done.stderr and "terminate called" not in done.stderr

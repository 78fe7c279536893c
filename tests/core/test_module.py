"""An adapter behaves as PyTorch's users expect of a module: state_dict, conversions, copies, processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import acclimate
from acclimate.errors import ConfigError, ModelError, NonFiniteError, StateError
from acclimate.testing.check import Case, assert_identical, tiny_batches, tiny_model
from support import child_environment, vit_methods

ALL = vit_methods()


# ---- state_dict -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tent", "dct", "eata", "t3a", "adacontrast", "foa"])
def test_a_state_dict_is_the_whole_state(name, batches, tmp_path):
    """Another adapter continues from it, as if it had made all steps itself."""
    case = Case(acclimate.core.registry.find_method(name))
    one, other = case.wrap(), case.wrap()
    for images in batches[:2]:
        one(images)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    assert (
        str(other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))) == "<All keys matched successfully>"
    )
    assert_identical(other.state.capture(), one.state.capture(), "after load_state_dict")
    for images in batches[2:]:
        assert torch.equal(one(images), other(images))
    assert_identical(other.state.capture(), one.state.capture(), "the steps after it")


def test_a_state_dict_is_a_copy(batches):
    model = acclimate.adapt(tiny_model(), "dct")
    state = model.state_dict()
    model(batches[0])
    model.load_state_dict(state)
    assert int(model.steps) == 0 and model.engine.adapted.drift() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: tiny_model().state_dict(), "unwrap"),
        (lambda state: {}, "unwrap"),
        (lambda state: {**state, "steps": 3}, "unwrap"),
        (lambda state: {name: t for name, t in state.items() if name != "rng"}, "rng is missing"),
        (lambda state: {**state, "more": torch.zeros(1)}, "more is unknown"),
    ],
    ids=["model", "nothing", "number", "missing", "unknown"],
)
def test_another_state_dict_is_refused(change, message, batches):
    model = acclimate.adapt(tiny_model(), "dct")
    model(batches[0])
    before = model.state.capture()
    with pytest.raises(StateError, match=message):
        model.load_state_dict(change(model.state_dict()))
    with pytest.raises(StateError, match="strict"):
        model.load_state_dict(model.state_dict(), strict=False)
    assert_identical(model.state.capture(), before, "after a refused state_dict")


def test_a_wrapped_model_refuses_weights(batches):
    """They would be mixed with what has adapted."""
    plain = tiny_model()
    weights = plain.state_dict()
    model = acclimate.adapt(plain, "dct")
    model(batches[0])
    before = model.state.capture()
    with pytest.raises(StateError, match="unwrap"):
        plain.load_state_dict(weights)
    with pytest.raises(StateError, match="adapter itself"):
        nn.Sequential(model).load_state_dict({})
    assert_identical(model.state.capture(), before, "after refused weights")
    model.unwrap().load_state_dict(weights)


def test_an_adapter_inside_a_module_writes_its_state(batches):
    model = acclimate.adapt(tiny_model(), "dct")
    model(batches[0])
    state = nn.Sequential(model).state_dict()
    assert int(state["0.steps"]) == 1 and len(state) == len(model.state_dict())


@pytest.mark.parametrize("wanted", [True, False])
def test_the_method_decides_what_learns(wanted, batches):
    model = acclimate.adapt(tiny_model(), "dct")
    with pytest.raises(StateError, match=r"frozen\(\)"):
        model.requires_grad_(wanted)
    model(batches[0])
    before = model.state.capture()
    model.engine.adapted.tensors[0].requires_grad_(False)
    with pytest.raises(StateError, match=r"requires_grad.*frozen\(\)"):
        model(batches[0])
    assert_identical(model.state.capture(), before, "after a refused step")


# ---- conversions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tent", "cotta", "dept-g", "t3a"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_conversion_keeps_adapter_and_fingerprint_consistent(name, dtype, batches, tmp_path):
    case = Case(acclimate.core.registry.find_method(name), options={"views": 2} if name == "cotta" else {})
    model = case.wrap()
    model(batches[0])
    model.fingerprint()
    model.to(dtype)
    model(batches[1])
    model.save(tmp_path / "state.safetensors")
    other = acclimate.load(tmp_path / "state.safetensors", tiny_model().to(dtype))
    assert torch.equal(model(batches[2]), other(batches[2]))
    with pytest.raises(StateError, match="another model"):
        acclimate.load(tmp_path / "state.safetensors", tiny_model())
    expected = tiny_model().to(dtype).state_dict()
    assert_identical(dict(model.unwrap().state_dict()), dict(expected), "the unwrapped model")


def test_a_conversion_that_cannot_work_is_refused(batches):
    model = acclimate.adapt(tiny_model(), "rotta", mean=0.5, std=0.5)
    mixed = acclimate.adapt(tiny_model(), "tent", precision="bfloat16")
    for adapter, error, convert in (
        (model, ModelError, lambda: model.half()),
        (model, ModelError, lambda: model.to("meta")),
        (mixed, ConfigError, lambda: mixed.half()),
    ):
        adapter(batches[0])
        before = adapter.state.capture()
        with pytest.raises(error):
            convert()
        assert_identical(adapter.state.capture(), before, "after a refused conversion")
        adapter(batches[1])


# ---- non-finite values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predict", ["before", "after"])
@pytest.mark.parametrize("name", ["tent", "sar", "dct", "eta", "memo", "adacontrast", "cotta", "rotta"])
def test_an_update_to_infinity_is_rolled_back(name, predict, batches):
    options = {"memo": {"views": 2}, "cotta": {"views": 2}, "eta": {"redundancy": 1.0}, "rotta": {"every": 6}}
    case = Case(acclimate.core.registry.find_method(name), options=options.get(name, {}))
    model, plain = case.wrap(predict=predict), case.wrap(predict=predict)
    model(batches[0]), plain(batches[0])
    healthy = model.method.optimizer

    def explosive(batch_size: int) -> torch.optim.Optimizer:
        optimizer = healthy(batch_size)
        for group in optimizer.param_groups:
            # large enough that SGD overflows by its decay; Adam itself refuses a larger rate, and makes the logits infinite
            adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
            group.update({"lr": 3e37} if adam else {"lr": 1e38, "weight_decay": 1e3})
        return optimizer

    model.method.optimizer = explosive
    model.rollback(model.snapshot())  # builds the optimizer
    before = model.state.capture()
    logits = model(batches[1])
    assert model.record.event is not None and model.record.event.startswith("skipped")
    assert logits.isfinite().all()
    after = model.state.capture()
    assert_identical({**after, "steps": before["steps"]}, _unguarded(before, after), "after an infinite update")
    model.guard = None
    with pytest.raises(NonFiniteError):
        model(batches[1])
    model.guard, model.method.optimizer = plain.guard, healthy
    model.rollback(model.snapshot())
    assert model(batches[2]).isfinite().all()


def _unguarded(before, after):
    """Return the state from before, with what a step may change although it learned nothing."""
    return {**before, **{n: t for n, t in after.items() if n.startswith("guard/") or n == "kept_share"}}


# ---- processes and threads ------------------------------------------------------------------------------------------


def _continue(adapter, images, queue):
    logits = adapter(images)
    queue.put((int(adapter.steps), pickle.dumps(logits)))


@pytest.mark.parametrize("name", ["dct"])
def test_a_spawned_process_gets_a_copy(name, batches):
    model = acclimate.adapt(tiny_model(), name)
    model(batches[0])
    before = model.state.capture()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_continue, args=(model, batches[1], queue))
    child.start()
    steps, logits = queue.get(timeout=120)
    child.join()
    assert steps == 2 and child.exitcode == 0
    assert_identical(model.state.capture(), before, "the state of the parent")
    assert torch.equal(pickle.loads(logits), model(batches[1]))


@pytest.mark.parametrize("name", ALL)
def test_an_adapter_can_be_pickled(name, batches):
    model = Case(acclimate.core.registry.find_method(name), options={"views": 2} if name in ("memo", "cotta") else {}).wrap()
    model(batches[0])
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(batches[1]), model(batches[1]))
    assert_identical(twin.state.capture(), model.state.capture(), "a pickled copy")


FORK = """
import os, threading, traceback
import torch
import acclimate
from acclimate.testing.check import assert_identical, tiny_batches, tiny_model

model, batches = acclimate.adapt(tiny_model(), "dct"), tiny_batches()
model(batches[0])
before = model.state.capture()
inside, forked = threading.Event(), threading.Event()
step = model.method.step

def slow(images, engine):
    result = step(images, engine)
    inside.set()
    forked.wait()
    return result

model.method.step = slow
thread = threading.Thread(target=model, args=(batches[1],))
thread.start()
inside.wait()
child = os.fork()
if not child:
    code = 1
    try:
        torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
        model.method.step = step
        model.snapshot()
        assert_identical(model.state.capture(), before, "the child")
        model(batches[1])
        code = 0 if int(model.steps) == 2 else 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
forked.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(model.steps))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_during_a_step_does_not_hang_the_child():
    """The child has the state from before the step, and can use the adapter."""
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=300, env=child_environment(), check=False
    )
    assert done.stdout == "0 2\n", done.stderr


@pytest.mark.parametrize("name", ["dct", "sar", "spa"])
def test_the_callers_autocast_does_not_reach_the_backward_pass(name, batches):
    """Neither in this thread nor in those that pass micro-batches."""
    plain, inside = (Case(acclimate.core.registry.find_method(name)).wrap(lr=0.01) for _ in range(2))
    for images in batches:
        expected = plain(images)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(inside(images), expected)
    assert_identical(inside.state.capture(), plain.state.capture(), "the states")


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *({"seed": seed} for seed in (-1, 1.5, "0", None, True, 10**30)),
        *({"classes": classes} for classes in ("ab", ["a"], [[1]], [1.5], {}, 7, [10**30], ..., [1j])),
        *({"compile": value} for value in (None, 1, "nonsense", [])),
        *({"blocks": blocks} for blocks in (1.5, "ab", [0.5], 10**9, [10**9], -1, 0, [], [1, 1], True, ...)),
        *({"micro_batch": size} for size in (0, 1.5, True, "2")),
        *({"precision": precision} for precision in (32, None, [], "double")),
        *({"batch_size": size} for size in (0, 1.5, "64")),
    ],
    ids=repr,
)
def test_bad_options_are_config_errors(options):
    model = tiny_model()
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        acclimate.adapt(model, "dct", **options)
    acclimate.adapt(model, "dct")  # not marked as wrapped


@pytest.mark.parametrize("patience", [1.5, 0, -1, "8", None, True, 10**13])
def test_patience_is_a_whole_number(patience):
    with pytest.raises(ConfigError, match="patience"):
        acclimate.Guard(patience=patience)


# ---- manners of transformers ------------------------------------------------------------------------------------------


def test_images_may_be_given_as_pixel_values():
    pytest.importorskip("transformers")
    adapter, other = acclimate.adapt(tiny_model("hf"), "tent"), acclimate.adapt(tiny_model("hf"), "tent")
    for images in tiny_batches(2):
        out = adapter(pixel_values=images)
        assert torch.equal(out.logits, other(images)) and out[0] is out.logits
    with adapter.frozen():
        assert adapter(**{"pixel_values": images}).logits.shape == (6, 10)
    with pytest.raises(acclimate.errors.InputError, match="and not both"):
        adapter(images, pixel_values=images)


def test_configuration_and_device_are_those_of_the_model():
    pytest.importorskip("transformers")
    model = tiny_model("hf")
    adapter = acclimate.adapt(model, "tent")
    assert adapter.config is model.config and adapter.device == torch.device("cpu")
    with pytest.raises(AttributeError, match="config"):
        _ = acclimate.adapt(tiny_model(), "tent").config

"""The conformance suite: checks that every method must pass, on tiny models: a ViT of every family, and a ResNet.

    acclimate.check_method("mine")

raises a `ConformanceError` that lists the checks that fail. A method that cannot pass a check names it, with the reason, in
`info.exceptions`. A model that lacks a part which the method needs is left out.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.adapt import adapt, load
from ..core.adapter import Adapter
from ..core.method import Method
from ..core.registry import find_method
from ..core.statistics import KINDS, source_statistics
from ..errors import ConformanceError, InputError
from ..models.families import Family, Sizes, families, view_of
from ..models.view import PARTS

SIZES = Sizes()
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # torch's registries and flags


class ResidualBlock(nn.Module):
    """A residual block of a ResNet with BatchNorm, which halves the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        return self.down(x) + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))


class TinyResNet(nn.Module):
    """A small ResNet with BatchNorm, as a user may write it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        widths = [sizes.width // 4 * 2**i for i in range(4)]
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(widths[0])
        self.stages = nn.Sequential(*(ResidualBlock(a, b) for a, b in zip(widths[:1] + widths, widths)))
        self.fc = nn.Linear(widths[-1], sizes.classes)
        self.pretrained_cfg = {"input_size": (3, sizes.image, sizes.image)}  # as a model of timm says what it takes

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc(self.stages(self.bn(self.stem(images)).relu()).mean((2, 3)))


def tiny_models() -> dict[str, Family]:
    """Return the families of the tiny models: those of vision transformers, and a ResNet."""
    return {**families(), "resnet": Family("resnet", "torch", lambda model: None, TinyResNet)}


def tiny_model(family: str = "timm", sizes: Sizes = SIZES) -> nn.Module:
    """Return a tiny model with random weights, the same at every call.

    Its predictions of random images have low entropies for some images and high entropies for others.
    """
    generator = torch.Generator().manual_seed(1)
    model = tiny_models()[family].tiny(sizes).eval()
    scales = {m.weight for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.BatchNorm2d))}
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 2:
                p.copy_(noise * (3.0 if p.shape[0] == sizes.classes else 1.5) / p.shape[1] ** 0.5)
            elif p.ndim > 2:
                p.copy_(0.3 * noise)
            else:
                p.copy_(0.1 * noise + (1 if p in scales else 0))
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            assert norm.running_var is not None
            norm.running_var.copy_(1 + torch.rand(norm.running_var.shape, generator=generator))
    return model


def tiny_batches(count: int = 4, size: int = 6, seed: int = 2) -> list[Tensor]:
    """Return batches of random images for the tiny models."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 3, SIZES.image, SIZES.image, generator=generator) for _ in range(count)]


@dataclass
class Case:
    """One method, with options, on the tiny model of one family."""

    method: type[Method]
    family: str = "timm"
    options: Mapping[str, Any] = field(default_factory=dict)

    def wrap(self, model: nn.Module | None = None, **more: Any) -> Adapter:
        """Return an adapter of a tiny model, with the source statistics that the method needs."""
        model = tiny_model(self.family) if model is None else model
        options: dict[str, Any] = {"mean": 0.5, "std": 0.5, **self.method.info.quick}  # needed by methods that augment
        kinds = [kind for kind in self.method.info.needs if not KINDS[kind].learned]
        if kinds:
            options["source_statistics"] = source_statistics(model, tiny_batches(2, seed=3), kinds=kinds, batch_size=6)
        return adapt(model, self.method, **{**options, **self.options, **more})

    def run(self, adapter: Adapter | None = None) -> Adapter:
        """Return an adapter after four steps."""
        adapter = adapter or self.wrap()
        for images in tiny_batches():
            adapter(images)
        return adapter


def assert_identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor], what: str) -> None:
    """Refuse tensors that are not bitwise equal. NaN equals NaN."""
    if a.keys() != b.keys():
        raise AssertionError(f"{what}: {sorted(a.keys() ^ b.keys())[:3]} on one side only")
    for name in a:
        if not torch.equal(_bits(a[name]), _bits(b[name])):
            raise AssertionError(f"{what}: {name} differs")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _equal(a: Tensor, b: Tensor, what: str) -> None:
    assert_identical({"logits": a}, {"logits": b}, what)


def _finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse parameters and optimizer states that are not finite. A buffer may use NaN for "no value yet"."""
    for name, tensor in tensors.items():
        if name.startswith(("model/", "optimizer/")) or ".weight" in name or ".bias" in name:
            assert tensor.isfinite().all(), f"{name} is not finite"


def configuration_round_trips(case: Case) -> None:
    """Check that a configuration can be written to JSON and read again."""
    method = case.wrap().method
    config = json.loads(json.dumps(method.config))
    again = json.loads(json.dumps(type(method)(**config).config))
    assert again == config, f"{config} came back as {again}"


def only_declared_parameters_change(case: Case) -> None:
    """Check that a method changes some parameters that it declares, and no others."""
    model = tiny_model(case.family)
    source = {name: p.clone() for name, p in model.named_parameters()}
    by_name = dict(model.named_parameters())
    adapter = case.run(case.wrap(model))
    declared = set(adapter.engine.adapted.named)
    for name, p in by_name.items():
        if f"model/{name}" not in declared:
            assert_identical({name: p}, {name: source[name]}, "undeclared")
    changed = [name for name, p in adapter.engine.adapted.named.items() if not torch.equal(p, adapter.state.initial[name])]
    assert changed or not declared, "no declared parameter changed in four steps"


def state_is_torch_state(case: Case) -> None:
    """Require that a step changes adapted parameters, buffers and the optimizer's state alone: what is reset and saved."""
    adapter = case.wrap()
    torch_state = _torch_state(adapter)
    before = _other_state(adapter, torch_state)
    for images in tiny_batches():
        adapter(images)
        after = _other_state(adapter, torch_state)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        assert not changed, f"a step changed {', '.join(changed)}: keep what changes in buffers"


def _torch_state(adapter: Adapter) -> dict[int, Any]:
    """Return, by identity, the tensors that a step may change, and the modules, which are looked into one by one."""
    tensors = [*adapter.engine.adapted.tensors, *adapter.method.buffers(), *adapter.model.parameters()]
    objects = [*tensors, *adapter.model.buffers(), *adapter.model.modules(), *adapter.method.modules()]
    return {id(each): each for each in objects}


def _other_state(adapter: Adapter, torch_state: Mapping[int, Any]) -> dict[str, Any]:
    """Return what else a method holds, by name: plain attributes, those of its class, parameters that do not adapt."""
    method = adapter.method
    found = {name: _content(p, torch_state) for name, p in adapter.state.constants().items()}
    for path, module in method.named_modules():
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE:
                found[f"{path}.{name}".lstrip(".")] = _content(value, torch_state)
    for cls in type(method).__mro__[: type(method).__mro__.index(Method)]:
        for name, value in vars(cls).items():
            if not name.startswith("__") and not hasattr(value, "__get__"):
                found[f"{cls.__name__}.{name}"] = _content(value, torch_state)
    return found


def _content(value: Any, torch_state: Mapping[int, Any], around: tuple[int, ...] = ()) -> Any:
    """Return what a value holds, in a form that equal ones share; torch state, and what is opaque, stands for itself."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if id(value) in torch_state or id(value) in around:
        return id(value)

    def inside(items: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(_content(item, torch_state, (*around, id(value))) for item in items)

    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), _bits(value).cpu().numpy().tobytes()
    if isinstance(value, (list, tuple)):
        return type(value), inside(value)
    if isinstance(value, Mapping):
        return type(value), inside(value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(inside(value))
    try:
        parts = value.__reduce_ex__(4)  # what pickle would write
    except Exception:  # whatever an object raises that cannot be pickled
        return id(value)
    if isinstance(parts, str):
        return parts
    state, items, pairs = (*parts[2:], None, None, None)[:3]
    return inside([parts[1], state, list(items or ()), list(pairs or ())])


def input_is_untouched(case: Case) -> None:
    """Check that a call does not change its images."""
    images = tiny_batches(1)[0]
    before = images.clone()
    case.wrap()(images)
    _equal(images, before, "input")
    assert images.grad is None and not images.requires_grad, "input got a gradient"


def reset_equals_freshly_wrapped(case: Case) -> None:
    """Check that an adapter after `reset` equals a freshly wrapped one."""
    adapter, fresh = case.run(), case.wrap()
    adapter.reset()
    assert_identical(adapter.state.capture(), fresh.state.capture(), "after reset")
    for images in tiny_batches(2, seed=5):
        _equal(adapter(images), fresh(images), "step after reset")
    assert_identical(adapter.state.capture(), fresh.state.capture(), "after reset and more steps")


def save_load_continue(case: Case) -> None:
    """Check that a run continues from a state file as if it had not been interrupted."""
    adapter = case.run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        adapter.save(path)
        loaded = load(path, tiny_model(case.family))
    assert loaded.method.config == adapter.method.config, "the configuration changed"
    for images in tiny_batches(2, seed=5):
        _equal(loaded(images), adapter(images), "step after load")
    assert_identical(loaded.state.capture(), adapter.state.capture(), "after load and more steps")


def snapshot_and_rollback(case: Case) -> None:
    """Check that `rollback` restores a snapshot, and that the following steps repeat themselves."""
    adapter = case.run()
    snapshot = adapter.snapshot()
    after = [adapter(images) for images in tiny_batches(2, seed=5)]
    adapter.rollback()
    assert_identical(adapter.state.capture(), snapshot, "after rollback")
    for images, expected in zip(tiny_batches(2, seed=5), after):
        _equal(adapter(images), expected, "step after rollback")


def unwrap_gives_back_the_source(case: Case) -> None:
    """Check that `unwrap` returns the original model, with its weights, modules and flags."""
    model = tiny_model(case.family).train()
    images = tiny_batches(1)[0]
    source = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model.eval()(images)
    model.train()
    layout = [(name, type(module), module.training) for name, module in model.named_modules()]
    flags = [p.requires_grad for p in model.parameters()]
    unwrapped = case.run(case.wrap(model)).unwrap()
    assert unwrapped is model, "not the same object"
    assert_identical(dict(model.state_dict()), source, "after unwrap")
    assert [(n, type(m), m.training) for n, m in model.named_modules()] == layout, "modules or modes differ"
    assert [p.requires_grad for p in model.parameters()] == flags, "requires_grad differs"
    with torch.no_grad():
        again = model.eval()(images)
    _equal(getattr(again, "logits", again), getattr(expected, "logits", expected), "logits after unwrap")


def frozen_changes_nothing(case: Case) -> None:
    """Check that frozen calls change no state and leave no record."""
    adapter = case.run()
    before, record = adapter.state.capture(), adapter.record
    with adapter.frozen():
        first, second = (adapter(tiny_batches(1, seed=5)[0]) for _ in range(2))
    _equal(first, second, "two frozen calls")
    assert_identical(adapter.state.capture(), before, "after frozen calls")
    assert adapter.record is record, "a frozen call left a record"


def same_seed_same_run(case: Case) -> None:
    """Check that the seed determines a run, whatever torch's global random state is."""
    a, b = case.wrap(seed=3), case.wrap(seed=3)
    torch.manual_seed(0)
    case.run(a)
    torch.manual_seed(1)  # the global generator must have no effect
    case.run(b)
    assert_identical(a.state.capture(), b.state.capture(), "same seed")


def two_adapters_are_independent(case: Case) -> None:
    """Check that two adapters do not influence each other."""
    alone, one, other = case.run(), case.wrap(), case.wrap(seed=7)
    for mine, theirs in zip(tiny_batches(), tiny_batches(seed=9)):
        one(mine)
        other(theirs)
    assert_identical(one.state.capture(), alone.state.capture(), "beside another adapter")


def batch_of_one(case: Case) -> None:
    """Check that a method adapts to single images without values that are not finite."""
    adapter = case.wrap()
    for images in tiny_batches(6, size=1):
        logits = adapter(images)
        assert logits.shape == (1, SIZES.classes) and logits.isfinite().all(), f"logits {logits}"
    _finite(adapter.state.capture())


def no_reliable_sample(case: Case) -> None:
    """Check that a method accepts batches in which no sample is reliable."""
    model = tiny_model(case.family)
    with torch.no_grad():  # all classes are equally likely, which is the largest entropy
        for p in view_of(model).head.parameters():
            p.zero_()
    adapter = case.wrap(model)
    for images in tiny_batches():
        assert adapter(images).isfinite().all(), "logits are not finite"
    _finite(adapter.state.capture())


def bad_images_leave_the_state_alone(case: Case) -> None:
    """Check that images with NaN or Inf raise an error or an event, and do not damage the state."""
    adapter = case.run()
    before = adapter.state.capture()
    for value in (float("nan"), float("inf")):
        images = tiny_batches(1)[0]
        images[2, 0, 3, 3] = value
        try:
            adapter(images)
        except InputError:
            assert_identical(adapter.state.capture(), before, f"after an image with {value}")
        else:
            assert adapter.record is not None and adapter.record.event, "neither an error nor an event"
    _finite(adapter.state.capture())


def memory_is_bounded(case: Case) -> None:
    """Check that neither the state nor the memory grows with the number of steps."""
    gc.freeze()  # so that only what is made from here on is looked at: the tensors of this adapter
    try:
        adapter = case.wrap()
        sizes = []
        for batches in (tiny_batches(12, 2), tiny_batches(20, 2, seed=5)):
            for images in batches:
                adapter(images)
            del batches, images
            gc.collect()
            with warnings.catch_warnings():  # inspecting all objects touches deprecated attributes of other libraries
                warnings.simplefilter("ignore")
                held = sum(o.numel() * o.element_size() for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter))
            sizes.append((held, sum(t.numel() for t in adapter.state.capture().values())))
    finally:
        gc.unfreeze()
    assert sizes[1][1] <= sizes[0][1], f"the state grew from {sizes[0][1]} to {sizes[1][1]} elements in 20 steps"
    assert sizes[1][0] <= 1.02 * sizes[0][0], f"tensors in memory grew from {sizes[0][0]} to {sizes[1][0]} bytes in 20 steps"


def caller_without_gradients(case: Case) -> None:
    """Check that results do not depend on `no_grad` or `inference_mode` of the caller."""
    contexts: Sequence[Callable[[], Any]] = (nullcontext, torch.no_grad, torch.inference_mode)
    captures = []
    for context in contexts:
        adapter = case.wrap()
        with context():
            for images in tiny_batches(2):
                logits = adapter(images.clone())  # an inference tensor in inference mode
        assert not logits.requires_grad, "the logits carry a graph"
        captures.append(adapter.state.capture())
    for capture in captures[1:]:
        assert_identical(capture, captures[0], "under no_grad or inference_mode")


def micro_batches_do_not_matter(case: Case) -> None:
    """Check that the size of the micro-batches does not change the result."""
    # in float64, so that rounding cannot explain a difference
    whole, parts = (case.run(case.wrap(tiny_model(case.family).double(), micro_batch=size)) for size in (6, 4))
    for name, p in whole.engine.adapted.named.items():
        difference = float((parts.engine.adapted.named[name] - p).detach().abs().max())
        assert difference < 1e-6, f"{name} differs by {difference:.1e}"


CHECKS: dict[str, Callable[[Case], None]] = {
    check.__name__: check
    for check in (
        configuration_round_trips,
        only_declared_parameters_change,
        state_is_torch_state,
        input_is_untouched,
        reset_equals_freshly_wrapped,
        save_load_continue,
        snapshot_and_rollback,
        unwrap_gives_back_the_source,
        frozen_changes_nothing,
        same_seed_same_run,
        two_adapters_are_independent,
        batch_of_one,
        no_reliable_sample,
        bad_images_leave_the_state_alone,
        memory_is_bounded,
        caller_without_gradients,
        micro_batches_do_not_matter,
    )
}


def check_method(method: str | type[Method], **options: Any) -> dict[str, str]:
    """Run every check on every installed family of models.

    Args:
        method: The name or the class of a method. A class must be registered, because the state file contains the name.
        **options: The options with which the method is checked.

    Returns:
        The outcome of each check, by "family: check": "passed", or "excused: reason".

    Raises:
        ConformanceError: If a check failed. The message lists all failed checks.
    """
    cls = find_method(method)
    unknown = sorted(cls.info.exceptions.keys() - CHECKS.keys())
    if unknown:
        raise ConformanceError(f"{cls.__name__}.info.exceptions names unknown checks: {', '.join(unknown)}.")
    outcomes: dict[str, str] = {}
    failures: list[str] = []
    for family, about in tiny_models().items():
        if importlib.util.find_spec(about.package) is None:
            outcomes[family] = f"excused: {about.package} is not installed"
            continue
        missing = [PARTS[part] for part in cls.info.requires if part not in view_of(tiny_model(family)).parts]
        if missing:
            outcomes[family] = f"excused: it lacks {missing[0]}"
            continue
        for name, check in CHECKS.items():
            where = f"{family}: {name}"
            if name in cls.info.exceptions:
                outcomes[where] = f"excused: {cls.info.exceptions[name]}"
                continue
            try:
                check(Case(cls, family, options))
                outcomes[where] = "passed"
            except Exception as error:  # any error of a method under test is a failed check
                outcomes[where] = "failed"
                failures.append(f"{where}: {type(error).__name__}: {error}")
    if failures:
        raise ConformanceError(f"{cls.name or cls.__name__} fails {len(failures)} checks:\n  " + "\n  ".join(failures))
    return outcomes

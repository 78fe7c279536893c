"""The adapter: a vision transformer that adapts while it predicts, and the only object that holds state."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .. import __version__
from ..errors import ConfigError, InputError, ModelError, NonFiniteError, StateError
from ..models.families import view
from ..models.fingerprint import fingerprint, require_same
from ..models.normalisation import normalisation, unknown_normalisation
from ..models.view import ViT
from . import state
from .engine import Engine, entropy
from .guard import Guard
from .method import Method, Step
from .registry import is_registered
from .statistics import SourceStatistics, require

if TYPE_CHECKING:
    from .ranks import Ranks

COST_ONLY = {"micro_batch", "compile"}  # options that change the cost of a run, and its result by rounding only
WRAPPED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_FROZEN: ContextVar[frozenset[int]] = ContextVar("frozen", default=frozenset())  # adapters, per thread


@dataclass(frozen=True)
class Record:
    """What happened in one step, on all ranks together if they share the batch."""

    step: int
    samples: int
    entropy: float  # mean over the batch, in nats
    used: int  # samples that the method learned from
    loss: float | None
    recovery: float | None  # moving average that triggers the method's own recovery
    drift: float  # distance from the source parameters, relative to their length
    event: str | None  # "recovered", "skipped: ...", "rolled back: ...", "frozen: ..."
    milliseconds: float


class Snapshot(Mapping[str, Tensor]):
    """A copy of all that an adapter may change. Made by `Adapter.snapshot`, for `Adapter.rollback`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        size = sum(t.numel() * t.element_size() for t in self.values())
        return f"Snapshot(step {int(self['steps'])}, {len(self)} tensors, {size / 2**20:.1f} MiB)"


class Adapter(nn.Module):
    """A wrapped model: images in, logits out, and every call adapts it a little. Made by `acclimate.adapt`.

    The model is changed in place, as little as the method needs; `unwrap` undoes that bit for bit. The model is always
    run in evaluation mode, whatever `train()` and `eval()` say: to predict without adapting, use `frozen`.

    With a process group, each rank passes its share of every batch, and all hold the same state. So `reset`, `rollback` and
    `load` are to be called on every rank; `save` and calls inside `frozen` exchange nothing, any rank may make them alone.
    A copy made by `copy.deepcopy` on every rank belongs to the same group; such an adapter cannot be pickled.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        classes: Sequence[int] | Tensor | None = None,
        predict: str = "before",
        guard: Guard | Literal["default"] | None = "default",
        micro_batch: int | None = None,
        precision: str = "float32",
        compile: bool | str = False,
        seed: int = 0,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        source: SourceStatistics | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        if predict not in ("before", "after"):
            raise ConfigError(f'predict={predict!r}: choose "before" or "after" this batch\'s update.')
        if not (guard is None or guard == "default" or isinstance(guard, Guard)):
            raise ConfigError(f"guard={guard!r}: give an acclimate.Guard, or None for no guard.")
        if isinstance(model, Adapter) or model in WRAPPED:
            raise ModelError("This model is wrapped already; call unwrap() on its adapter first.")
        vit = view(model)
        pixels = normalisation(vit, mean, std)
        if method.augments and pixels is None:
            raise unknown_normalisation(type(model).__name__)
        source_state = model.state_dict(keep_vars=True)  # under the names it has before any surgery
        names = {id(p): f"model/{name}" for name, p in source_state.items()}
        rng = torch.Generator().manual_seed(seed)
        self._was_training = {module: module.training for module in model.modules()}
        self._required_grad = {p: p.requires_grad for p in model.parameters()}
        self._fingerprint: dict[str, str] | None = None
        self._source_about: Mapping[str, Any] | None = None
        model.eval()
        try:
            if method.needs:
                self._fingerprint = fingerprint(vit, source_state)
                source = require(source, method.name or type(method).__name__, method.needs, model, self._fingerprint)
                self._source_about = source.about
                method.receive(source, vit)
            adapted = list(method.attach(vit, rng))
            names |= {id(p): f"method/{name}" for name, p in method.named_parameters()}
            vit.shorten()
            self.engine = Engine(
                vit,
                {names[id(p)]: p for p in adapted},
                classes=classes,
                micro_batch=micro_batch,
                precision=precision,
                compile=compile,
                normalisation=pixels,
                rng=rng,
                ranks=ranks,
            )
        except BaseException:
            self._give_back(vit)
            raise
        self.model = model
        self.method = method
        fresh = {} if guard == "default" else getattr(guard, "config", {})
        self.guard = None if guard is None else Guard(**fresh)  # its own: it remembers what this adapter does
        self.steps: Tensor
        self.batch_size: Tensor
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("batch_size", torch.tensor(0))  # of the first batch; 0 until there is one
        self.record: Record | None = None
        self._after = predict == "after" and bool(adapted) and not method.predicts_after
        self._learns = bool(adapted) or any(True for _ in method.buffers())
        self._options = {
            "classes": self.engine.classes,
            "predict": predict,
            "guard": None if self.guard is None else self.guard.config,
            "micro_batch": micro_batch,
            "precision": precision,
            "compile": compile,
            "seed": seed,
            "mean": mean if mean is None or isinstance(mean, (int, float)) else [float(v) for v in mean],
            "std": std if std is None or isinstance(std, (int, float)) else [float(v) for v in std],
        }
        self._lock = threading.RLock()
        self._source_state = source_state
        self._unwrapped = False
        model.requires_grad_(False)
        method.eval().requires_grad_(False)
        for p in adapted:
            p.requires_grad_(True)
        self._initial = self._capture()
        self.engine.begin_at([self._initial[name] for name in self.engine.named])  # one copy serves both
        self._last: Snapshot | None = None  # the user's
        self._good: Snapshot | None = None  # the guard's
        if ranks is not None:
            try:
                self._require_equal(ranks)
            except BaseException:
                self._give_back(vit)
                raise
        WRAPPED.add(model)

    def _require_equal(self, ranks: Ranks) -> None:
        """Refuse ranks that would not make the same run of the same batches."""
        options = {name: value for name, value in self._options.items() if name not in COST_ONLY}
        run = json.dumps([type(self.method).__qualname__, self.method.config, options], sort_keys=True, default=repr)
        begin = fingerprint(self.engine.vit, {**self._initial, **self._constants()})["weights"]
        digests = {**self.fingerprint(), "run": hashlib.sha256(run.encode()).hexdigest()[:16], "begin": begin}
        for what, others in ranks.differing(digests).items():
            who = f"Rank {', '.join(map(str, others))}"
            if what == "architecture":
                raise ModelError(f"{who} wraps a model of another architecture than rank 0.")
            if what == "weights":
                raise ModelError(f"{who} wraps a model with other weights than rank 0: load the same ones on every rank.")
            if what == "run":
                raise ConfigError(f"{who} was given another method or other options than rank 0.")
            name = type(self.method).__name__
            given = "was it given other source statistics, or" if self.method.needs else "does"
            raise ConfigError(f"{who} begins with another state than rank 0: {given} {name}.attach draw from `rng` alone?")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One caller at a time, and tensors that can be trained whatever mode the caller is in."""
        with self._lock, torch.inference_mode(False):
            if self._unwrapped:
                raise StateError("This adapter was unwrapped; wrap the model again with acclimate.adapt().")
            yield

    # ---- predict and adapt ------------------------------------------------------------------------------------

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch, (batch, classes); the model adapts to the batch unless it is frozen."""
        with self._alone():
            if id(self) in _FROZEN.get():
                return self.method.predict(self._checked(images), self.engine)
            with self.engine.together():
                return self._adapt(self._checked(images))

    def _checked(self, images: Tensor) -> Tensor:
        """The images as the model takes them."""
        if (pictures := self.method.pictures) > 1:
            if not isinstance(images, Tensor) or images.ndim != 5 or images.shape[1] != pictures:
                got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
                raise InputError(
                    f"{type(self.method).__name__} takes {pictures} pictures for an image here, as (batch, {pictures}, "
                    f"channels, height, width), got {got}: torch.stack([...], dim=1) makes that."
                )
            return torch.stack([self._pictures(each) for each in images.unbind(1)], dim=1)
        return self._pictures(images)

    def _pictures(self, images: Tensor) -> Tensor:
        """One picture for each image; a rank's share of a batch may be empty."""
        check, alone = self.engine.vit.check, self.engine.ranks is None
        if alone or not isinstance(images, Tensor) or images.ndim != 4 or len(images):
            return check(images)
        return check(images.new_zeros(1, *images.shape[1:]))[:0]

    def _adapt(self, images: Tensor) -> Tensor:
        """Predict, adapt, let the guard look, and leave a record."""
        start = time.perf_counter()
        engine = self.engine
        samples = len(images)
        if engine.ranks is not None:
            samples = engine.ranks.start(samples, int(self.steps), engine.drift())
        step, logits = self._step(images, samples)
        self.steps += 1
        drift = engine.drift()
        if logits.isfinite().all():
            event = self._watch(images, step.logits, logits, drift) or step.event
        else:
            event = step.event or "the logits are not finite"
        self.record = Record(
            step=int(self.steps),
            samples=samples,
            entropy=float(entropy(logits).mean()),
            used=step.used,
            loss=step.loss,
            recovery=step.recovery,
            drift=drift,
            event=event,
            milliseconds=1000 * (time.perf_counter() - start),
        )
        return step.logits

    def _step(self, images: Tensor, samples: int) -> tuple[Step, Tensor]:
        """A step, and the logits of the whole batch of so many samples, of which the step's may be one rank's share."""
        engine = self.engine
        if self.guard is not None and bool(self.guard.stopped):
            step = Step(self.method.predict(images, engine), event="frozen: the guard stopped adaptation")
            return step, engine.gather(step.logits)
        first = not int(self.batch_size)
        # the pass after the update may fail too, and so may another rank
        keep = self._after or engine.ranks is not None or not self.method.updates_once
        before = self._capture() if keep else None
        try:
            with engine.together():
                if first:
                    self._start(samples)
                step = self.method.step(images, engine)
                if self._after:
                    step.logits = self.method.predict(images, engine)
                engine.kept_share.fill_(step.used / samples)
                return step, engine.gather(step.logits)
        except BaseException as error:
            if first:
                self._start(0)
            if before is not None:
                self._apply_snapshot({**before, "loss_scale": engine.loss_scale})  # an overflow has to lower the scale
            if self.guard is None or not isinstance(error, NonFiniteError):
                raise
            step = Step(self.method.predict(images, engine), event=f"skipped: {error}")
            return step, engine.gather(step.logits)
        finally:
            for p in engine.parameters:
                p.grad = None

    def _start(self, batch_size: int) -> None:
        """Build the optimizer, whose learning rates depend on the stream's batch size; 0 means there is no stream yet."""
        self.batch_size.fill_(batch_size)
        self.engine.optimizer = self.method.optimizer(batch_size) if batch_size else None

    def _watch(self, images: Tensor, mine: Tensor, logits: Tensor, drift: float) -> str | None:
        """Let the guard look at a step, and act on it: `logits` are the whole batch's, `mine` those of `images`."""
        guard, engine = self.guard, self.engine
        if guard is None or not self._learns or bool(guard.stopped):
            return None
        guard.observe(logits)
        problem = None
        if not (drift <= guard.drift or self.method.searches):
            problem = f"drift of {drift:.3g} from the source"
        elif guard.suspects(engine.num_classes):
            with engine.at_source():
                agrees = engine.predict(images).argmax(-1) == mine.argmax(-1)
            if guard.collapsed(engine.gather(agrees)):
                problem = "the predictions collapsed"
        elif guard.good(engine.num_classes):
            self._good = self._capture()
        if problem is None:
            return None
        steps, batch_size = int(self.steps), int(self.batch_size)
        self._apply_snapshot(self._good or self._initial)
        self.steps.fill_(steps)
        if not int(self.batch_size):
            self._start(batch_size)  # the stream goes on, and with it its learning rates
        guard.forget()
        guard.stopped.fill_(guard.action == "freeze")
        return f"{'frozen' if guard.action == 'freeze' else 'rolled back'}: {problem}"

    @contextmanager
    def frozen(self) -> Iterator[Adapter]:
        """Inside, calls from this thread predict and change nothing."""
        token = _FROZEN.set(_FROZEN.get() | {id(self)})
        try:
            yield self
        finally:
            _FROZEN.reset(token)

    def train(self, mode: bool = True) -> Adapter:
        """Sets the flag alone: dropout and batch statistics have no place in adaptation."""
        self.training = mode
        return self

    # ---- state ------------------------------------------------------------------------------------------------

    def _live(self) -> dict[str, Tensor]:
        """Every tensor that a step may change, except the optimizer's, as views of the real ones."""
        live = {name: p.detach() for name, p in self.engine.named.items()}
        live |= {f"method/{name}": buffer for name, buffer in self.method.named_buffers()}
        if self.guard is not None:
            live |= {f"guard/{name}": tensor for name, tensor in self.guard.state_dict().items()}
        live |= {"loss_scale": self.engine.loss_scale, "kept_share": self.engine.kept_share}
        return live | {"steps": self.steps, "batch_size": self.batch_size}

    def _constants(self) -> dict[str, Tensor]:
        """What the method made for itself and never changes: not needed to go back, but to go on elsewhere."""
        made = {f"method/{name}": p.detach() for name, p in self.method.named_parameters()}
        return {name: p for name, p in made.items() if name not in self.engine.named}

    def _capture(self) -> Snapshot:
        tensors = {name: tensor.clone() for name, tensor in self._live().items()}
        if self.engine.optimizer is not None:
            for i, p in enumerate(self.engine.parameters):
                for key, value in self.engine.optimizer.state.get(p, {}).items():
                    if value is not None:
                        tensors[f"optimizer/{i}/{key}"] = torch.as_tensor(value).clone()
        tensors["rng"] = self.engine.rng.get_state()
        return Snapshot(tensors)

    def _apply_snapshot(self, snapshot: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._live().items():
                tensor.copy_(snapshot[name])
        self._start(int(self.batch_size))
        for name, value in snapshot.items():
            kind, *where = name.split("/")
            if kind == "optimizer" and self.engine.optimizer is not None:
                p = self.engine.parameters[int(where[0])]
                # a step count stays where torch keeps it; what has a parameter's shape goes to its device
                self.engine.optimizer.state[p][where[1]] = value.to(p.device, copy=True) if value.ndim else value.clone()
        self.engine.rng.set_state(snapshot["rng"].cpu())

    def snapshot(self) -> Snapshot:
        """Copy what adaptation may change, and remember it for `rollback`."""
        with self._alone():
            self._last = self._capture()
            return self._last

    def rollback(self, snapshot: Snapshot | None = None) -> None:
        """Return to a snapshot of this adapter; by default to the last one."""
        with self._alone():
            chosen = self._last if snapshot is None else snapshot
            if chosen is None:
                raise StateError("There is no snapshot to roll back to: call snapshot() first, or reset().")
            self._require_fitting(chosen, "The snapshot", self._live())
            self._apply_snapshot(chosen)
            self.record = None
            if self._good is not None and int(self._good["steps"]) > int(self.steps):
                self._good = None  # of a future that is undone

    def reset(self) -> None:
        """Return, bit for bit, to the freshly wrapped model."""
        with self._alone():
            self._apply_snapshot(self._initial)
            self.record, self._last, self._good = None, None, None

    def save(self, path: str | PathLike[str]) -> None:
        """Write what changed, not the backbone, to a safetensors file; `acclimate.load` continues from it."""
        with self._alone():
            if not is_registered(self.method):
                raise StateError(
                    f"{type(self.method).__name__} is not registered: decorate it with acclimate.register(...)."
                )
            good = {f"good/{name}": tensor for name, tensor in (self._good or {}).items()}
            header = {
                "method": self.method.name,
                "config": self.method.config,
                "options": self._options,
                "model": {"class": type(self.model).__name__, **self.fingerprint()},
                "steps": int(self.steps),
                "source": None if self._source_about is None else dict(self._source_about),
                "versions": {"acclimate": __version__, "torch": torch.__version__, **self.engine.vit.version},
            }
            state.write(path, {**self._capture(), **self._constants(), **good}, header)

    def load(self, path: str | PathLike[str]) -> None:
        """Continue from a state file of the same model, method and options; on any error nothing changes."""
        self.resume(path, *state.read(path))

    def resume(self, path: str | PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """The same, for a file that was read already."""
        with self._alone():
            check_model(path, header, self.model, self.fingerprint())
            mine = {"method": self.method.name, **self.method.config, **self._options}
            # an option that is younger than the file had no other value than its default
            defaults = {name: p.default for name, p in self.method.options().items()}
            theirs = {"method": header["method"], **defaults, **header["config"], **header["options"]}
            differences = [
                f"{key} is {theirs.get(key)!r} in the file, {mine.get(key)!r} here"
                for key in sorted({*mine, *theirs} - COST_ONLY)
                if _plain(mine.get(key)) != _plain(theirs.get(key))
            ]
            if differences:
                raise StateError(f"{path} is of another run: {'; '.join(differences)}. Use acclimate.load(path, model).")
            good = {name.removeprefix("good/"): t for name, t in tensors.items() if name.startswith("good/")}
            current = {name: t for name, t in tensors.items() if not name.startswith("good/")}
            self._require_fitting(current, str(path), {**self._live(), **self._constants()})
            if good:
                self._require_fitting(good, str(path), self._live())
            self._apply_snapshot(current)
            for name, tensor in self._constants().items():
                tensor.copy_(current[name])
            for name, tensor in self.method.beginnings().items():
                self._initial[f"method/{name}"].copy_(tensor)
            self.engine.begin_at(self.engine.source)
            self._good = Snapshot(good) if good else None
            self._last, self.record = None, None

    def unwrap(self) -> nn.Module:
        """The original model, bit for bit. The adapter cannot be used afterwards."""
        with self._alone():
            self.engine.restore()
            self._give_back(self.engine.vit)
            self._unwrapped = True
            WRAPPED.discard(self.model)
            return self.model

    def _give_back(self, vit: ViT) -> None:
        """Undo the surgery and all flags."""
        vit.restore()
        for module, training in self._was_training.items():
            module.training = training
        for p, required in self._required_grad.items():
            p.requires_grad_(required)

    def fingerprint(self) -> dict[str, str]:
        """Digests of the wrapped model's architecture and source weights."""
        with self._alone():
            if self._fingerprint is None:
                with self.engine.at_source():
                    self._fingerprint = fingerprint(self.engine.vit, self._source_state)
            return self._fingerprint

    def _require_fitting(self, tensors: Mapping[str, Tensor], what: str, live: Mapping[str, Tensor]) -> None:
        """Refuse tensors that cannot be applied, before anything is changed."""
        shapes = {name: tuple(t.shape) for name, t in live.items()} | {"rng": tuple(self.engine.rng.get_state().shape)}
        for i, p in enumerate(self.engine.parameters):
            momenta = [name for name in tensors if name.startswith(f"optimizer/{i}/") and tensors[name].ndim]
            shapes |= dict.fromkeys(momenta, tuple(p.shape))
        known = {*shapes, *(name for name, t in tensors.items() if name.startswith("optimizer/") and not t.ndim)}
        wrong = [name for name, shape in shapes.items() if name not in tensors or tuple(tensors[name].shape) != shape]
        wrong += [name for name in tensors if name not in known]
        if wrong:
            raise StateError(
                f"{what} does not fit this adapter: {', '.join(wrong[:4])} missing, unknown or of another shape."
            )

    # ---- torch.nn.Module --------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Adapter:
        """Called by to(), cuda(), half(): takes along what is not a parameter or a buffer."""
        super()._apply(fn, recurse)
        self.engine.source = [fn(tensor) for tensor in self.engine.source]
        if self.engine.optimizer is not None:
            for values in self.engine.optimizer.state.values():
                values.update({k: fn(v) for k, v in values.items() if isinstance(v, Tensor) and v.ndim})
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, values: dict[str, Any]) -> None:
        super().__setstate__(values)
        self._lock = threading.RLock()
        WRAPPED.add(self.model)

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.engine.parameters)
        model = f"{self.engine.vit.family} {type(self.model).__name__}, {len(self.engine.vit.blocks)} blocks"
        where = "unwrapped" if self._unwrapped else f"step {int(self.steps)}"
        where += "" if self.engine.ranks is None else f"; {self.engine.ranks!r}"
        return f"Adapter({self.method!r} on {model}; {count:,} parameters adapt; {where})"


def check_model(path: str | PathLike[str], header: Mapping[str, Any], model: nn.Module, mine: Mapping[str, str]) -> None:
    theirs = header.get("model")
    if not isinstance(theirs, Mapping) or "method" not in header:
        raise StateError(f"{path} is a file of acclimate's, but not the state of an adapter.")
    require_same(f"{path} is the state", theirs, model, mine)


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return list(value) if isinstance(value, tuple) else value

"""The adapter: a model that adapts while it predicts, and the only object that holds state."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from os import PathLike
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys

from .. import __version__
from ..errors import ConfigError, InputError, ModelError, NonFiniteError, StateError
from ..models.fingerprint import fingerprint, require_same
from ..models.images import ordinary
from ..models.normalisation import model_normalisation, unknown_normalisation
from ..models.view import layer_without_gradient, require_gradient, require_supported
from . import statefile
from .digests import digest_bytes
from .engine import Engine, Unadapted, columns_of, entropy, require_finite
from .guard import Harm
from .method import Info, Method, Setup, Step
from .options import COST_ONLY, Options
from .ranks import Ranks, SingleProcess
from .recentre import Recentring, form_of
from .registry import is_registered, require_parts_of_model
from .reply import Behind, Budget, Reply
from .state import Snapshot, State
from .statecheck import require_model_parts, require_parts
from .statistics import SourceStatistics, require_statistics
from .wrapping import WrappedModel

_ADAPTERS: weakref.WeakSet[Adapter] = weakref.WeakSet()
_FROZEN: ContextVar[frozenset[int]] = ContextVar("frozen", default=frozenset())  # ids of adapters, per thread


@dataclass(frozen=True)
class Record:
    """The record of one step. If several ranks share the batch, it is about the whole batch."""

    step: int
    samples: int
    entropy: float  # mean over the batch, in nats
    used: int  # samples that the method learned from
    loss: float | None
    recovery: float | None  # moving average that triggers a recovery by the method itself
    drift: float  # distance from the source parameters, divided by their norm
    event: str | None  # "recovered", "skipped: ...", "slower: ...", "rolled back: ...", "resting: ...", "frozen: ..."
    milliseconds: float
    estimated_accuracy: float | None = None  # of the adapted model, from 0 to 1, without labels
    harm: Harm | None = None  # estimated accuracy of the unadapted model minus that of the adapted one


class Output(NamedTuple):
    """What a call with `pixel_values=` returns."""

    logits: Tensor


class Before(NamedTuple):
    """What a call of an adapter may change, from before the call."""

    tensors: Snapshot
    record: Record | None
    last: Snapshot | None
    good: Snapshot | None


class Change:
    """The change of an adapter that is under way.

    It is a plain object, whose attributes are set by single instructions. An interrupt cannot divide these.
    """

    def __init__(self) -> None:
        self.before: Before | None = None  # to return to, unless the change is completed
        self.latest = 0  # the id of the newest `Before`
        self.running = False


P = ParamSpec("P")
T = TypeVar("T")


def all_or_nothing(call: Callable[Concatenate[Adapter, P], T]) -> Callable[Concatenate[Adapter, P], T]:
    """Let a call of an adapter change its state either completely or, whatever is raised and wherever, not at all.

    If the recovery itself is interrupted, the next call of the adapter completes it.
    """

    @wraps(call)
    def whole(self: Adapter, /, *args: P.args, **kwargs: P.kwargs) -> T:
        gradients = torch.is_grad_enabled()
        before = None
        try:
            with self._alone():
                change = self._change
                tensors, self._ahead = self._ahead or self.state.capture(), None
                before = Before(tensors, self._record, self._last, self._good)
                change.latest = id(before)
                change.before = before
                change.running = True
                try:
                    result = call(self, *args, **kwargs)
                    change.before = None
                finally:
                    change.running = False
            return result
        except BaseException:
            torch.set_grad_enabled(gradients)  # an interrupt may prevent that torch.no_grad() ends
            self._undo(before)
            raise

    return whole


class Adapter(nn.Module):
    """A wrapped model that takes images, returns logits, and adapts at every call. `acclimate.adapt` returns it.

    The model is changed in place, as little as the method needs, and `unwrap` undoes the changes bit for bit. The model
    always runs in evaluation mode, whatever `train()` and `eval()` set. To predict without adapting, use `frozen`.

    What you have changed in the model acts as before: layers of your own or of peft, hooks, parametrisations, a `forward` of
    an instance. A hook may be registered later, too, but not on a compiled model (`compile=`). A hook meets a batch in parts
    (`micro_batch=`), some samples twice, and is called in the thread of the caller if it was there when the model was
    wrapped.

    With a process group, each rank passes its share of every batch, and all ranks hold the same state. Call `reset`,
    `rollback` and `load` on every rank. `save` and calls inside `frozen` exchange nothing, so that a single rank may call
    them. A copy made by `copy.deepcopy` on every rank belongs to the same group. An adapter with a group cannot be pickled.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        options: Options | None = None,
        *,
        statistics: SourceStatistics | None = None,
        ranks: SingleProcess | None = None,
    ) -> None:
        super().__init__()
        options = options or Options()
        wrapped = self._wrapped = WrappedModel(model)
        try:
            self.engine = self._attached(method, options, statistics, ranks or SingleProcess())
            self.model = wrapped.model
            self.method = method
            self.guard = options.new_guard()
            if self.guard is not None:
                self.guard.attach(self.engine.view, self.engine.num_classes)
            self._record: Record | None = None
            self.recentring = self.engine.recentring
            self._options = options.header(self.engine.classes, None if self.recentring is None else self.recentring.form)
            self._lock = threading.RLock()
            self._change = Change()
            self._stage = "wrapped"  # then "unwrapping" and "unwrapped"
            adapted = self.engine.adapted.tensors
            self._after = options.predict == "after" and bool(adapted) and not method.info.predicts_after
            self._early = method.info.replies_first and not self._after
            self._behind = self._started_behind(options, ranks)
            self._budget = Budget(options.budget)
            self._ahead: Snapshot | None = None  # of the state as it is, so that the next step need not copy it first
            self._learns = bool(adapted) or any(True for _ in method.buffers()) or self.recentring is not None
            is_reference = getattr(method, "reference", False)  # the authors' code is never compared nor changed
            adapts = self._learns or method.info.adapts != Info.adapts
            self._is_watched = self.guard is not None and adapts and not is_reference
            self.state = State(self.engine, method, self.guard)
            self._last: Snapshot | None = None  # of the user, for `rollback`
            self._good: Snapshot | None = None  # of the guard, from before any collapse
            if isinstance(ranks, Ranks):
                self._require_equal(ranks)
            wrapped.learn_only(adapted, method)
            wrapped.claim(self)
            _ADAPTERS.add(self)
        except BaseException:
            wrapped.give_back()
            raise

    def _attached(
        self, method: Method, options: Options, statistics: SourceStatistics | None, ranks: SingleProcess
    ) -> Engine:
        """Attach the method to the model, and return the engine that runs the model."""
        model, view = self._wrapped.model, self._wrapped.view
        form = form_of(options.recentre, method.info.recentre)
        require_parts_of_model(method, view, method.info.requires)
        require_parts_of_model(method, view, () if form is None else ("features",), what="recentre")
        if method.info.passes[1]:
            require_gradient(layer_without_gradient(model))
        known = model_normalisation(view, options.mean, options.std)
        if method.info.augments and known is None:
            raise unknown_normalisation(type(model).__name__)
        self._fingerprint: dict[str, str] | None = None
        self._source_about: Mapping[str, Any] | None = None
        needs = method.info.needs
        if needs:
            self._fingerprint = fingerprint(view, self._wrapped.weights)
            name = method.name or type(method).__name__
            statistics = require_statistics(statistics, name, needs, model, self._fingerprint)
            self._source_about = statistics.about
        self._require_type(view.dtype, method, options.precision)
        rng = torch.Generator().manual_seed(options.seed)
        classes = columns_of(options.classes, view.classes)
        if method.info.batch_statistics:
            view.use_batch_statistics()
        adapted = list(method.attach(view, Setup(rng, statistics if needs else None, classes)))
        if form is not None and options.compile:
            raise ConfigError("recentre reads the features of every pass, which a compiled model hides: leave out compile=.")
        if form is not None:
            view.require_logits_of_head()
            view.head_weight()  # raises an error if there is none
        view.shorten()
        names = self._wrapped.names(method)
        return Engine(
            view,
            {names[id(p)]: p for p in adapted},
            classes=classes,
            micro_batch=options.micro_batch,
            precision=options.precision,
            compile=options.compile,
            normalisation=known,
            rng=rng,
            ranks=ranks,
            recentring=None if form is None else Recentring(view, len(classes or range(view.classes)), form),
        )

    def _require_type(self, dtype: torch.dtype, method: Method, precision: str) -> None:
        """Refuse weights of a type that the method or the precision cannot handle."""
        model = self._wrapped.model
        require_supported(
            model,
            method.info.float16 or dtype is not torch.float16,
            "Adam divides by averages of squared gradients, which are too small for weights in float16. Convert it with "
            'model.bfloat16() or model.float(); precision="float16" then passes images in float16',
        )
        if {str(dtype), f"torch.{precision}"} == {"torch.bfloat16", "torch.float16"}:
            raise ConfigError(
                f"precision={precision!r}: the weights of this model are {dtype}, which torch does not "
                f"mix with {precision}. Leave out precision=, or convert the model with model.float()."
            )

    def _started_behind(self, options: Options, ranks: SingleProcess | None) -> Behind | None:
        """Return what runs steps behind their replies, if the options ask for it."""
        if options.reply == "last":
            return None
        if ranks is not None and ranks.shared:
            raise ConfigError('reply="first": ranks that share a batch have to finish their steps together.')
        if not self._early and self.method.info.passes != (1, 0):
            whose = 'predict="after"' if self._after else type(self.method).__name__
            warnings.warn(f'reply="first": the logits of {whose} are known at the end of a step only.', stacklevel=5)
        return Behind()

    def _require_equal(self, ranks: Ranks) -> None:
        """Refuse ranks that would compute different results from the same batches."""
        options = {name: value for name, value in self._options.items() if name not in COST_ONLY}
        run = json.dumps([type(self.method).__qualname__, self.method.config, options], sort_keys=True, default=repr)
        begin = fingerprint(self.engine.view, {**self.state.initial, **self.state.constants()})["weights"]
        digests = {**self.fingerprint(), "run": digest_bytes(run.encode()), "begin": begin}
        for what, others in ranks.differing(digests).items():
            who = f"Rank {', '.join(map(str, others))}"
            if what == "architecture":
                raise ModelError(f"{who} wraps a model of another architecture than rank 0.")
            if what == "weights":
                raise ModelError(f"{who} wraps a model with other weights than rank 0: load the same ones on every rank.")
            if what == "run":
                raise ConfigError(f"{who} was given another method or other options than rank 0.")
            name = type(self.method).__name__
            cause = "was it given other source statistics, or" if self.method.info.needs else "does"
            raise ConfigError(f"{who} begins with another state than rank 0: {cause} {name}.attach draw from `rng` alone?")

    @property
    def steps(self) -> Tensor:
        """The number of batches that the model has adapted to."""
        self._wait()
        return self.state.steps

    @property
    def record(self) -> Record | None:
        """The record of the last step, or None before the first."""
        self._wait()
        return self._record

    @record.setter
    def record(self, record: Record | None) -> None:
        self._record = record

    @property
    def skipped(self) -> int:
        """The number of batches that the budget has left out. They were predicted, but not learned from."""
        return self._budget.skipped

    def _wait(self) -> float:
        """Wait for the step that runs behind a reply, and return for how many seconds."""
        return 0.0 if self._behind is None else self._behind.wait(self._lock)

    @contextmanager
    def _alone(self, stage: str = "wrapped") -> Iterator[None]:
        """Let one thread at a time into the block, without the caller's inference mode and autocast."""
        device = self.engine.view.device.type
        with self._lock, torch.inference_mode(False), torch.autocast(device, enabled=False):
            if self._stage == "unwrapped":
                raise StateError("This adapter was unwrapped; wrap the model again with acclimate.adapt().")
            if self._stage == "unwrapping" and stage != "unwrapping":
                raise StateError("unwrap() was interrupted: call it again.")
            if self._behind is not None:
                self._behind.raise_error()
            if not self._change.running:
                self._recover()
            yield

    def _undo(self, before: Before | None) -> None:
        """Return to the state from before a call that failed, unless another thread has made a call since."""
        with self._lock, torch.inference_mode(False):
            if before is not None and self._change.latest == id(before):
                self._change.before = before
            self._recover()

    def _recover(self) -> None:
        """Undo a change that was begun and not completed. This can be interrupted and repeated."""
        before = self._change.before
        if before is None:
            self.engine.adapted.use_own()  # an interrupted prediction changes nothing else
            return
        self._ahead = None
        self.engine.tidy()
        self.state.apply(before.tensors)
        self.record, self._last, self._good = before.record, before.last, before.good
        self._change.before = None

    # ---- as a model of transformers ---------------------------------------------------------------------------

    def __call__(self, *args: Any, pixel_values: Tensor | None = None, **kwargs: Any) -> Any:
        """Return the logits of a batch.

        If images are given as `pixel_values=`, in the way of transformers, return an object with `.logits`:
        `adapter(**processor(images, return_tensors="pt")).logits`.
        """
        if pixel_values is None:
            return super().__call__(*args, **kwargs)
        if args:
            raise InputError("Give images as pixel_values=, or without a name, and not both.")
        return Output(super().__call__(pixel_values, **kwargs))

    @property
    def config(self) -> Any:
        """The configuration of a model of transformers. Other models have none."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.engine.view.device

    # ---- predict and adapt ------------------------------------------------------------------------------------

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch, (batch, classes), and adapt the model to the batch unless it is frozen.

        Whatever is raised, the adapter then has the state from before the call.
        """
        if id(self) in _FROZEN.get():
            with self._alone():
                return self._predict(self._checked(images))
        behind = self._behind
        if behind is None or behind.is_this_thread():
            return self._adapt(images)
        reason = self._budget.refusal(self._wait())
        if reason is not None:
            return self._skip(images, reason)
        if isinstance(images, Tensor):
            with torch.inference_mode(False):
                images = images.clone()  # the caller may use the memory of its own for the next batch
        return behind.call(lambda reply: self._adapt(images, reply), self._lock, self._early)

    @property
    def _unadapted_replies(self) -> bool:
        """Whether the unadapted model replies, because the run is on trial, or rests."""
        guard = self.guard
        return guard is not None and self._is_watched and not bool(guard.stopped) and guard.is_in_doubt

    def _predict(self, images: Tensor) -> Tensor:
        """Return the logits of a batch, and change nothing."""
        return self.engine.unadapted(images).logits if self._unadapted_replies else self.method.predict(images, self.engine)

    def _skip(self, images: Tensor, reason: str) -> Tensor:
        """Predict a batch that the budget leaves out, and note this in the record."""
        start = time.perf_counter()
        with self._alone():
            logits = self._predict(self._checked(images))
            if self._record is not None:
                self.record = replace(
                    self._record,
                    samples=len(images),
                    entropy=float(entropy(logits).mean()),
                    used=0,
                    loss=None,
                    event=reason,
                    milliseconds=1000 * (time.perf_counter() - start),
                )
            return logits

    def _checked(self, images: Tensor) -> Tensor:
        """Return the images as the model takes them, or raise an error that explains why they cannot be used."""
        views = self.method.info.views
        if isinstance(images, Tensor):
            images = ordinary(images)
        if views == 1:
            return self._checked_view(images)
        if not isinstance(images, Tensor) or images.ndim != 5 or images.shape[1] != views:
            got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise InputError(
                f"{type(self.method).__name__} takes {views} images for a sample here, as (batch, {views}, channels, "
                f"height, width), got {got}: torch.stack([...], dim=1) makes that."
            )
        return torch.stack([self._checked_view(each) for each in images.unbind(1)], dim=1)

    def _checked_view(self, images: Tensor) -> Tensor:
        """Check a tensor with one image per sample. A rank's share of a batch may be empty."""
        check = self.engine.view.check
        if not self.engine.ranks.shared or not isinstance(images, Tensor) or images.ndim != 4 or len(images):
            return check(images)
        return check(images.new_zeros(1, *images.shape[1:]))[:0]

    @all_or_nothing
    def _adapt(self, images: Tensor, reply: Reply | None = None) -> Tensor:
        """Predict a batch, adapt to it, let the guard check the step, and store its record.

        `reply` takes the logits to a caller that does not wait for the end.
        """
        start = time.perf_counter()
        adapted, state = self.engine.adapted, self.state
        with self.engine.ranks.together():
            images = self._checked(images)
            adapted.require_gradients()
            before = adapted.drift() if self.engine.ranks.shared else 0.0
            samples = self.engine.ranks.start(len(images), int(state.steps), before)
            unadapted = self._trial(images)
            if reply is not None and unadapted is not None:
                reply.send(unadapted.logits)
            elif reply is not None:
                reply.images, self.engine.reply = images, reply
            blank = self._is_watched and self._is_blank(images)
            if blank:
                step = Step(self._predict(images), event="skipped: every image is of a single colour")
                logits = self.engine.ranks.gather(step.logits)
            else:
                step, logits = self._step(images, samples)
            state.steps += 1
            drift = adapted.drift()
            if blank:
                event = step.event
            elif logits.isfinite().all():
                event = self._watch(images, step, drift, unadapted) or step.event
            else:
                event = step.event or "the logits are not finite"
            guard = self.guard
            self.record = Record(
                step=int(state.steps),
                samples=samples,
                entropy=float(entropy(logits).mean()),
                used=step.used,
                loss=step.loss,
                recovery=step.recovery,
                drift=drift,
                event=event,
                milliseconds=1000 * (time.perf_counter() - start),
                estimated_accuracy=None if guard is None else guard.estimated_accuracy,
                harm=None if guard is None else guard.harm,
            )
            if reply is not None:
                self.engine.reply = None
                reply.end(step.logits)
                self._ahead = state.capture()
            return step.logits

    def _is_blank(self, images: Tensor) -> bool:
        """Return whether every image of the whole batch is of a single colour, as those of a covered camera are."""
        pixels = images.flatten(-2).flatten(1, -2)
        varied = (pixels.amax(-1) > pixels.amin(-1)).any(-1)
        return not bool(self.engine.ranks.gather(varied.float()).any())

    def _step(self, images: Tensor, samples: int) -> tuple[Step, Tensor]:
        """Make a step, and return it with the logits of the whole batch.

        The logits of the step itself may be only one rank's share of the batch. If the step makes a value infinite, it is
        undone, and the logits are those of the state from before.
        """
        engine, method, state = self.engine, self.method, self.state
        guard = self.guard
        if guard is not None and bool(guard.stopped):
            step = Step(method.predict(images, engine), event="frozen: the guard stopped adaptation")
            return step, engine.ranks.gather(step.logits)
        if guard is not None and guard.is_resting:
            step = Step(engine.unadapted(images).logits)
            return step, engine.ranks.gather(step.logits)
        try:
            with engine.ranks.together():
                if int(state.batch_size):
                    state.follow(samples)
                else:
                    state.start(samples)
                with engine.observing(images):
                    step = method.step(images, engine)
                if guard is not None and guard.scale < 1:
                    assert self._change.before is not None, "a step is made inside a change"
                    engine.adapted.shorten_step(self._change.before.tensors, guard.scale)
                if engine.reply is not None:
                    engine.reply.require(step.logits)
                if self._after:
                    step.logits = method.predict(images, engine)
                engine.micro_batches.kept_share.fill_(step.used / samples)
                logits = engine.ranks.gather(step.logits)
                if self._learns:
                    require_finite(logits)
                engine.adapted.require_finite()
                return step, logits
        except NonFiniteError as error:
            before = self._change.before
            assert before is not None, "a step is made inside a change"
            before.tensors["loss_scale"].copy_(engine.loss_scale)  # keep the scale that an overflow has lowered
            if self.guard is None:
                raise
            sent = None if engine.reply is None else engine.reply.sent
            engine.tidy()
            state.apply(before.tensors)
            step = Step(method.predict(images, engine) if sent is None else sent, event=f"skipped: {error}")
            return step, engine.ranks.gather(step.logits)
        finally:
            engine.adapted.set_gradient(None)

    def _trial(self, images: Tensor) -> Unadapted | None:
        """Return the predictions of the unadapted model, if these are the reply because the run is on trial."""
        guard = self.guard
        if guard is None or guard.is_resting or not self._unadapted_replies:
            return None
        return self.engine.unadapted(images)

    def _watch(self, images: Tensor, step: Step, drift: float, trial: Unadapted | None) -> str | None:
        """Let the guard check a step, apply its decision, and return what it did.

        On trial, and when a trial begins, the logits of the step become those of the unadapted model.

        Args:
            images: This rank's share of the batch.
            step: The step, with the logits of `images`.
            drift: The drift after the step.
            trial: The predictions of the unadapted model, if the run is on trial.
        """
        guard, engine, state = self.guard, self.engine, self.state
        if guard is None or not self._is_watched or bool(guard.stopped):
            return None
        mine, count = engine.ranks.positions(images)
        if guard.is_resting:
            guard.since_alarm += count
            return guard.recover()
        if engine.recentring is not None:
            guard.forget_domain(engine.recentring.kept)
        passes = 1 + step.used / count * (sum(self.method.info.passes) - 1)  # a sample that is not kept has a single one
        for chosen in filter(None, guard.selections(count, passes)):
            rows = torch.isin(mine.cpu(), torch.tensor(chosen, dtype=mine.dtype)).to(images.device)
            unadapted = engine.unadapted(images[rows]) if trial is None else trial
            together = (engine.ranks.gather(tensor) for tensor in (step.logits[rows], *unadapted[:2]))
            adapted, logits, features = together
            guard.compare(adapted, Unadapted(logits, features, unadapted.rows))
        decided = guard.verdict(0.0 if self.method.info.far_from_source else drift)
        if trial is not None or decided is not None:
            step.logits = engine.unadapted(images).logits if trial is None else trial.logits
        if decided is None:
            if guard.good_state_due():
                self._good = state.capture()
            return guard.recover()
        verdict, why = decided
        if verdict == "trial":
            guard.try_run(guard.evidence)
            return f"on trial: {why}"
        if verdict == "trust":
            guard.trust_run()
            return f"trusted again: {why}"
        if not guard.trusts_good_state:
            self._good = None
        kept = {name: tensor.clone() for name, tensor in state.live().items() if name.startswith("guard/")}
        steps, batch_size = int(state.steps), int(state.batch_size)
        state.apply({**(self._good or state.initial), **kept})
        state.steps.fill_(steps)
        if not int(state.batch_size):
            state.start(batch_size)  # the stream continues, and so do its learning rates
        guard.convict(can_lower=bool(engine.adapted.tensors))
        if guard.is_resting:
            return f"resting: {why}"
        what = {"lower": "slower", "rollback": "rolled back", "freeze": "frozen"}[guard.action]
        return f"{what}: {why}"

    @contextmanager
    def frozen(self) -> Iterator[Adapter]:
        """Keep the adapter frozen inside the block: calls from this thread predict and change nothing."""
        token = _FROZEN.set(_FROZEN.get() | {id(self)})
        try:
            yield self
        finally:
            _FROZEN.reset(token)

    def train(self, mode: bool = True) -> Adapter:
        """Set the flag `training` only. Adaptation uses neither dropout nor batch statistics."""
        self.training = mode
        return self

    # ---- state ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return a copy of everything that adaptation may change, and keep it for `rollback`."""
        with self._alone():
            self._last = self.state.capture()
            return self._last

    @all_or_nothing
    def rollback(self, snapshot: Snapshot | None = None) -> None:
        """Return to a snapshot of this adapter, by default to the last one."""
        chosen = self._last if snapshot is None else snapshot
        if chosen is None:
            raise StateError("There is no snapshot to roll back to: call snapshot() first, or reset().")
        self.state.apply(self.state.checked(chosen, "The snapshot", self.state.live()))
        self.record = None
        if self._good is not None and int(self._good["steps"]) > int(self.steps):
            self._good = None  # its steps are undone by this rollback

    @all_or_nothing
    def reset(self) -> None:
        """Return to the state of the freshly wrapped model, bit for bit."""
        self.state.apply(self.state.initial)
        self.record, self._last, self._good = None, None, None

    def save(self, path: str | PathLike[str], *, note: str | None = None) -> None:
        """Write the state to a safetensors file, from which `acclimate.load` can continue.

        The file contains what adaptation changed, and not the backbone.

        Args:
            path: The file.
            note: A text that is kept in the header of the file.
        """
        with self._alone():
            statefile.write(path, self._contents(), self.header(note))

    def header(self, note: str | None = None) -> dict[str, Any]:
        """Return what a state file says about this adapter, in addition to its tensors."""
        with self._alone():
            if not is_registered(self.method):
                raise StateError(
                    f"{type(self.method).__name__} is not registered: decorate it with acclimate.register(...)."
                )
            return {
                "method": self.method.name,
                "config": self.method.config,
                "options": self._options,
                "model": {"class": type(self.model).__name__, **self.fingerprint()},
                "steps": int(self.steps),
                "note": note,
                "source": None if self._source_about is None else dict(self._source_about),
                "versions": {"acclimate": __version__, "torch": torch.__version__, **self.engine.view.version},
            }

    def _contents(self) -> dict[str, Tensor]:
        """Return copies of all tensors that are needed to continue in another adapter of the same model."""
        constants = {name: tensor.clone() for name, tensor in self.state.constants().items()}
        parts = {"good": self._good or {}, "initial": self.state.beginning()}
        more = {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        return {**self.state.capture(), **constants, **more}

    def load(self, path: str | PathLike[str]) -> None:
        """Continue from a state file of the same model, method and options. After an error nothing has changed."""
        self.resume(path, *statefile.read(path))

    @all_or_nothing
    def resume(self, path: str | PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Continue from a state file that was already read. `path` is used in error messages."""
        check_model(path, header, self.model, self.fingerprint())
        require_parts(path, header, method=str, config=dict, options=dict)
        mine = {"method": self.method.name, **self.method.config, **self._options}
        # an option that did not exist when the file was written has its default value
        defaults = {name: p.default for name, p in self.method.options().items()}
        theirs = {"method": header["method"], **defaults, **header["config"], **header["options"]}
        differences = [
            f"{key} is {theirs.get(key)!r} in the file, {mine.get(key)!r} here"
            for key in sorted({*mine, *theirs} - COST_ONLY)
            if _plain(mine.get(key)) != _plain(theirs.get(key))
        ]
        if differences:
            raise StateError(f"{path} is of another run: {'; '.join(differences)}. Use acclimate.load(path, model).")
        self._continue(str(path), tensors)

    def _continue(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Check tensors as `_contents` returns them, and continue from them. `what` is used in error messages."""
        state = self.state
        good, initial = (_below(tensors, part) for part in ("good/", "initial/"))
        current = {name: t for name, t in tensors.items() if not name.startswith(("good/", "initial/"))}
        current = state.checked(current, what, {**state.live(), **state.constants()})
        initial = state.checked(initial, what, state.beginning())
        good = state.checked(good, what, state.live()) if good else {}
        state.apply(current)
        for own, read in ((state.constants(), current), (state.beginning(), initial)):
            for name, tensor in own.items():
                tensor.copy_(read[name])
        self.engine.adapted.set_source(self.engine.adapted.source)
        self._good = Snapshot(good) if good else None
        self._last, self.record = None, None

    def close(self) -> None:
        """Wait for the step that runs behind a reply as `wait` does, and end its thread. A further call starts another."""
        if self._behind is not None:
            self._behind.close()
        self.wait()

    def wait(self) -> None:
        """Wait for the step that runs behind a reply.

        Raises:
            Exception: The error of that step.
        """
        if self._behind is not None:
            with self._lock:
                self._behind.raise_error()

    def unwrap(self) -> nn.Module:
        """Return the original model, bit for bit. The adapter cannot be used afterwards.

        If this call is interrupted, call it again.
        """
        with self._alone("unwrapping"):
            self._stage = "unwrapping"
            self.engine.tidy()
            self.engine.adapted.restore()
            self._wrapped.give_back()
            self._stage = "unwrapped"
            self._ahead = None
            return self._wrapped.given

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the wrapped model's architecture and source weights."""
        with self._alone():
            if self._fingerprint is None:
                with self.engine.adapted.at_source():
                    self._fingerprint = fingerprint(self.engine.view, self._wrapped.weights)
            return self._fingerprint

    # ---- torch.nn.Module --------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return copies of the tensors that a state file contains: what adaptation changed, the optimizer, and counters.

        The weights of the backbone are not included. `load_state_dict` takes this dictionary.
        """
        with self._alone():
            found = {f"{prefix}{name}": tensor for name, tensor in self._contents().items()}
        if destination is None:
            return OrderedDict(found)
        destination.update(found)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Continue from what `state_dict` returned, in an adapter of the same model with the same method and options.

        After an error nothing has changed.

        Raises:
            StateError: If the tensors are not exactly those of this adapter, for example if they are weights of a model.
        """
        if not strict or assign:
            raise StateError("The state of an adapter is copied as a whole: leave out strict= and assign=.")
        self._load_state(state_dict)
        return IncompatibleKeys([], [])

    @all_or_nothing
    def _load_state(self, tensors: Mapping[str, Any]) -> None:
        if "steps" not in tensors or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise StateError(
                "load_state_dict takes what state_dict() of an adapter returns. To load weights into the model, call "
                "unwrap(), load them into the model that it returns, and wrap this model again with acclimate.adapt()."
            )
        self._continue("The state_dict", tensors)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to be loaded as a part of another module, which would load the parts of the adapter one by one."""
        raise StateError("An adapter is a part of this module: call load_state_dict() of the adapter itself, or its load().")

    def requires_grad_(self, requires_grad: bool = True) -> Adapter:
        """Refuse to change which parameters learn."""
        raise StateError(
            "The method decides which parameters learn. To predict without adapting, use `with adapter.frozen():`; to get "
            "the model back, call unwrap()."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Adapter:
        """Apply `fn` to the whole state, for to(), cuda(), half() and double(). The fingerprint follows the new type."""
        with self._alone():
            self._ahead = None
            view = self.engine.view
            example = fn(torch.empty(0, dtype=view.dtype, device=view.device))
            require_supported(self.model, not example.is_meta, "on the device meta its weights would be lost")
            self._require_type(example.dtype, self.method, self._options["precision"])
            if example.dtype is not view.dtype:
                self._fingerprint = None
            owners = [owner for owner in (self.method, self.guard, self.recentring) if owner is not None]
            parts = [m for owner in owners for m in owner.modules() if not getattr(m, "of_the_models_type", False)]
            remembered = [(module, name, buffer) for module in parts for name, buffer in module.named_buffers(recurse=False)]
            with self._wrapped.converting(fn):
                super()._apply(fn, recurse)
            for module, name, buffer in remembered:  # is never rounded to less than float32
                if buffer.is_floating_point():
                    now = getattr(module, name)
                    setattr(module, name, buffer.to(now.device, torch.promote_types(now.dtype, torch.float32)))
            self.engine.adapted.convert(fn)
            return self

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs. No copy is made in the middle of a step."""
        with self._alone(self._stage):
            return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_change")}

    def __setstate__(self, values: dict[str, Any]) -> None:
        super().__setstate__(values)
        self._lock, self._change = threading.RLock(), Change()
        self.state.own()  # torch lets processes share the memory of tensors that are sent
        self._wrapped.claim(self)
        _ADAPTERS.add(self)

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.engine.adapted.tensors)
        blocks = f", {len(self.engine.view.blocks)} blocks" if self.engine.view.blocks else ""
        model = f"{self.engine.view.family} {type(self.model).__name__}{blocks}"
        where = self._stage if self._stage != "wrapped" else f"step {int(self.steps)}"
        where += f"; {self.engine.ranks!r}" if self.engine.ranks.shared else ""
        return f"Adapter({self.method!r} on {model}; {count:,} parameters adapt; {where})"


def check_model(path: str | PathLike[str], header: Mapping[str, Any], model: nn.Module, mine: Mapping[str, str]) -> None:
    """Refuse a file that is not the state of an adapter, or that belongs to another model."""
    theirs = header.get("model")
    if not isinstance(theirs, Mapping) or "method" not in header:
        raise StateError(f"{path} is a file of acclimate's, but not the state of an adapter.")
    require_model_parts(path, theirs)
    require_same(f"{path} is the state", theirs, model, mine)


def _forked() -> None:
    """Let a forked process use the adapters that it inherits. Another thread may have been inside of one."""
    for adapter in list(_ADAPTERS):
        adapter._lock = threading.RLock()
        adapter._change.running = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _plain(value: Any) -> Any:
    """Return the value of an option in the form in which JSON returns it."""
    return list(value) if isinstance(value, tuple) else value

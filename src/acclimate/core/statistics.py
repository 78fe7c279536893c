"""Statistics of the source data that some methods need, which are computed once and saved to a file.

    statistics = acclimate.source_statistics(model, clean_images)
    statistics.save("stats.safetensors")
    model = acclimate.adapt(model, "eata", source_statistics="stats.safetensors")

Each kind of statistics is one subclass of `Statistic`. It keeps sums of a fixed size, so that the number of images is not
limited; only "logits" keeps a row for each image. A kind may also be learned, by the package of the method that needs it. A
method names the kinds that it needs in `Info.needs`, and keeps the tensors that it uses as its own constants. Its state file
therefore suffices to continue a run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import __version__
from ..errors import ConfigError, InputError, StateError, require_whole, suggest
from ..models.families import view_of
from ..models.fingerprint import fingerprint, require_same
from ..models.view import PARTS, ModelView, parameters_of, require_supported
from . import statefile
from .engine import Engine, keep_all
from .statecheck import AllocationLimit, fitted, require_model_parts, require_parts, require_real
from .wrapping import require_unwrapped

AT_ONCE = 32  # images per pass without gradients


class Statistic:
    """The base class of the kinds of source statistics.

    An instance adds up sums over the source images and computes the statistics from them. A subclass is registered under its
    `kind` when it is defined.
    """

    kind: ClassVar[str]
    what: ClassVar[str] = "statistics of the source data"  # for messages
    how: ClassVar[str] = (
        "acclimate.source_statistics(model, clean_images), or on the command line: "
        "acclimate source-statistics --model NAME --data folder --root DIR --out stats.safetensors"
    )
    requires: ClassVar[str | None] = None  # the part that a model must have, of `PARTS`
    learned: ClassVar[bool] = False  # whether it is trained, instead of computed by `source_statistics`

    def __init_subclass__(cls) -> None:
        KINDS[cls.kind] = cls

    def __init__(self, view: ModelView) -> None:
        """Set all sums to zero, in the shapes that this model needs."""

    def add(self, images: Tensor, labels: Tensor | None, engine: Engine) -> None:
        """Add one batch to the sums."""
        raise NotImplementedError

    def result(self) -> dict[str, Tensor]:
        """Return the statistics by name. They are zeros if no image was added."""
        raise NotImplementedError

    @classmethod
    def empty(cls, view: ModelView, about: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return tensors of zeros in the right shapes.

        They serve a method whose constants are then read from its state file, and tell what a file of statistics must hold.
        """
        return cls(view).result()

    @classmethod
    def never_negative(cls, name: str) -> bool:
        """Return whether the values of the tensor with this name are zero or more."""
        return False


KINDS: dict[str, type[Statistic]] = {}


def computed_kinds() -> list[str]:
    """Return the kinds of statistics that `source_statistics` can compute."""
    return [name for name, kind in KINDS.items() if not kind.learned]


class Fisher(Statistic):
    """Diagonal Fisher information of the parameters of the norms, by their names in the model (EATA).

    It is the mean over batches of the squared gradient of the batch's mean cross-entropy, with the model's own predictions
    as labels. The gradient is averaged before it is squared, so that the values decrease as the batch size increases.
    """

    kind = "fisher"
    requires = "norms"

    def __init__(self, view: ModelView) -> None:
        self._names = norm_names(view)
        self._sums = [torch.zeros_like(p, dtype=torch.float64, device="cpu") for p in self._names]
        self._batches = 0

    def add(self, images: Tensor, labels: Tensor | None, engine: Engine) -> None:
        """Add the squared gradient of one batch."""
        engine.gradient(images, _own_cross_entropy)
        for p, total in zip(self._names, self._sums):
            assert p.grad is not None
            total += p.grad.cpu().double() ** 2
            p.grad = None
        self._batches += 1

    def result(self) -> dict[str, Tensor]:
        """Return the mean squared gradient of each parameter."""
        means = (total / max(self._batches, 1) for total in self._sums)
        return {name: mean.to(p.dtype) for (p, name), mean in zip(self._names.items(), means)}

    @classmethod
    def never_negative(cls, name: str) -> bool:
        """Return that squares are not negative."""
        return True


class Features(Statistic):
    """Mean, central moments and class means of the features that enter the head, squashed as in CFA.

    `mean`, `moment2` and `moment3` are (width,), `class_means` is (classes, width), and `class_counts` is (classes,). The
    mean of a class without images is zero. If no labels are given, predicted classes are used (CFA itself uses labels).
    """

    kind = "features"
    requires = "features"

    def __init__(self, view: ModelView) -> None:
        self._powers = torch.zeros(3, view.feature_width, dtype=torch.float64)  # sums; precise enough for values below 1
        self._classes = torch.zeros(view.classes, view.feature_width, dtype=torch.float64)
        self._counts = torch.zeros(view.classes, dtype=torch.int64)

    @torch.no_grad()
    def add(self, images: Tensor, labels: Tensor | None, engine: Engine) -> None:
        """Add the powers of the features of one batch, and their sums for each class."""
        for start in range(0, len(images), AT_ONCE):
            features, logits = engine.view.features(images[start : start + AT_ONCE])
            classes = logits.argmax(-1) if labels is None else labels[start : start + AT_ONCE]
            hidden, classes = squashed(features).cpu().double(), classes.cpu()
            for power, total in enumerate(self._powers, start=1):
                total += (hidden**power).sum(0)
            self._classes.index_add_(0, classes, hidden)
            self._counts += classes.bincount(minlength=len(self._counts))

    def result(self) -> dict[str, Tensor]:
        """Return the mean, the second and third central moments, and the class means and counts."""
        mean, square, cube = self._powers / self._counts.sum().clamp(min=1)
        return {
            "mean": mean.float(),
            "moment2": (square - mean**2).float(),
            "moment3": (cube - 3 * mean * square + 2 * mean**3).float(),
            "class_means": (self._classes / self._counts.clamp(min=1)[:, None]).float(),
            "class_counts": self._counts.clone(),
        }

    @classmethod
    def never_negative(cls, name: str) -> bool:
        """Return that counts are not negative."""
        return name == "class_counts"


class ClassTokens(Statistic):
    """Mean and standard deviation of the class token after every block, concatenated as in FOA.

    `mean` and `std` have the length of what `ModelView.class_tokens` returns. The standard deviation of one image is zero.
    """

    kind = "class_tokens"
    requires = "blocks"

    def __init__(self, view: ModelView) -> None:
        self._powers = torch.zeros(2, view.class_tokens_width, dtype=torch.float64)
        self._count = 0

    def add(self, images: Tensor, labels: Tensor | None, engine: Engine) -> None:
        """Add the class tokens of one batch and their squares."""
        tokens = engine.class_tokens(images)[1].cpu().double()
        self._powers += torch.stack([tokens.sum(0), tokens.square().sum(0)])
        self._count += len(tokens)

    def result(self) -> dict[str, Tensor]:
        """Return the mean and the standard deviation."""
        mean, std = mean_and_std(self._powers[0], self._powers[1], self._count)
        return {"mean": mean.float(), "std": std.float()}

    @classmethod
    def never_negative(cls, name: str) -> bool:
        """Return that standard deviations are not negative."""
        return name == "std"


class Logits(Statistic):
    """The logits of all source images, (images, classes), from which POEM takes the distribution of the entropies.

    They are the only kind that grows with the number of images. Entropies alone would be those of one temperature, and of
    all classes of the head.
    """

    kind = "logits"

    def __init__(self, view: ModelView) -> None:
        self._parts = [torch.zeros(0, view.classes)]

    def add(self, images: Tensor, labels: Tensor | None, engine: Engine) -> None:
        """Add the logits of one batch."""
        self._parts.append(engine.predict(images).cpu().float())

    def result(self) -> dict[str, Tensor]:
        """Return the logits in the order of the images."""
        return {"logits": torch.cat(self._parts)}

    @classmethod
    def empty(cls, view: ModelView, about: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return zeros for as many images as there were."""
        return {"logits": torch.zeros(about["samples"], view.classes)}


def mean_and_std(sums: Tensor, squares: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the unbiased standard deviation, from the sums of `count` values and of their squares.

    The standard deviation of a single value is zero.
    """
    mean = sums / max(count, 1)
    return mean, ((squares - mean * sums) / max(count - 1, 1)).clamp(min=0).sqrt()


def squashed(features: Tensor) -> Tensor:
    """Return features as CFA compares them: normalised without an affine part, then mapped to values from -1 to 1."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    return F.layer_norm(features, features.shape[-1:], eps=1e-5).tanh()


def norm_names(view: ModelView) -> dict[nn.Parameter, str]:
    """Return the parameters of the norms in order, with their names in the model. Call it before any surgery."""
    names = {p: name for name, p in view.model.named_parameters()}
    return {p: names[p] for p in parameters_of(view.norms)}


def _own_cross_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy with the predicted classes as labels, and a mask that keeps every sample."""
    losses = F.cross_entropy(logits, logits.detach().argmax(-1), reduction="none")
    return keep_all(losses)


@dataclass(frozen=True, repr=False)
class SourceStatistics:
    """Statistics of source images under one model.

    `acclimate.source_statistics` computes them, and `prompts.train_prompts` learns them.
    """

    tensors: Mapping[str, Tensor]  # by "kind/name"
    model: Mapping[str, str]  # its class, and digests of its architecture and weights
    about: Mapping[str, Any]  # how they were made: samples, batch_size, labels ("given" or "predicted")
    origin: str = field(default="source_statistics=", compare=False)  # for messages

    @property
    def kinds(self) -> list[str]:
        """The kinds of statistics that there are."""
        return list(dict.fromkeys(name.partition("/")[0] for name in self.tensors))

    def of(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors of one kind, by name."""
        return {name.removeprefix(f"{kind}/"): t for name, t in self.tensors.items() if name.startswith(f"{kind}/")}

    @property
    def identity(self) -> str:
        """A line of text that identifies these statistics."""
        content = statefile.digest(self.tensors, json.dumps([dict(self.model), dict(self.about)], sort_keys=True))
        return f"{self.about['samples']} images in batches of {self.about['batch_size']}, SHA-256 {content[:16]}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics to a safetensors file."""
        header = {"statistics": self.kinds, "model": dict(self.model), "about": dict(self.about)}
        statefile.write(path, self.tensors, {**header, "versions": {"acclimate": __version__, "torch": torch.__version__}})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SourceStatistics:
        """Read a file that `save` wrote, and raise a `StateError` for a damaged file or any other file."""
        tensors, header = statefile.read(path)
        if "statistics" not in header:
            raise StateError(f"{path} is a file of acclimate's, but does not hold source statistics.")
        require_parts(path, header, statistics=list, model=dict, about=dict)
        require_model_parts(path, header["model"])
        require_parts(path, header["about"], samples=int, batch_size=int)
        require_real(f"{path} does not hold source statistics", tensors)
        return cls(tensors, header["model"], header["about"], str(path))

    def require_fitting(self, kinds: Iterable[str], view: ModelView) -> None:
        """Refuse statistics of these kinds whose tensors do not fit a model."""
        what = f"{self.origin} does not fit this model"
        for kind in kinds:
            try:
                with AllocationLimit(what, [*self.tensors.values(), *view.model.parameters()]):
                    expected = KINDS[kind].empty(view, self.about)
            except (ConfigError, KeyError, TypeError, ValueError, OverflowError) as error:  # sizes that are none
                raise StateError(f"{what}: {type(error).__name__}: {error}.") from error
            ranges = {name: (0.0, math.inf) for name in expected if KINDS[kind].never_negative(name)}
            fitted(f"{what}: of the kind {kind!r}", self.of(kind), expected, ranges=ranges)

    @classmethod
    def opened(cls, statistics: SourceStatistics | str | os.PathLike[str]) -> SourceStatistics:
        """Return the statistics, after reading them if a file is given."""
        return statistics if isinstance(statistics, SourceStatistics) else cls.load(statistics)

    def __repr__(self) -> str:
        made = ", ".join(f"{name} {value}" for name, value in self.about.items())
        return f"SourceStatistics({', '.join(self.kinds)}; {made}; weights {self.model['weights']})"


@torch.inference_mode(False)
def source_statistics(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    labels: Tensor | None = None,
    kinds: Sequence[str] | None = None,
    samples: int = 2000,
    batch_size: int = 64,
    micro_batch: int | None = None,
) -> SourceStatistics:
    """Compute the statistics of clean source images that methods such as EATA need.

    Args:
        model: The source model, not wrapped. It is left as it was.
        images: A tensor of images as the model takes them, or an iterable of batches (a `DataLoader`). A batch is a tensor,
            or a tuple that begins with images and labels. The first `samples` images are used, so shuffle them.
        labels: The labels of the images, if these are one tensor. Without labels, predicted classes are used where labels
            are needed.
        kinds: The kinds of statistics: "fisher" (for EATA), "features" (moments and class means, for CFA), "class_tokens"
            (mean and standard deviation after every block, for FOA, ReCAP and ActMAD), "logits" (of every image, for POEM).
            Default: all that suit the model.
        samples: The largest number of images to use. EATA's authors use 2000.
        batch_size: The size of the batches that the Fisher information is averaged over. The scale of the Fisher information
            depends on it. The authors use the batch size of the stream. Images are regrouped into batches of this size,
            whatever the batches of the loader are.
        micro_batch: Samples per pass; by default 32, on a CPU 2 for ViT-B and more for smaller models.

    Example:
        >>> acclimate.source_statistics(model, loader).save("stats.safetensors")
        >>> model = acclimate.adapt(model, "eata", source_statistics="stats.safetensors")
    """
    require_whole(1, samples=samples, batch_size=batch_size)
    known = computed_kinds()
    for kind in kinds or ():
        if kind not in known:
            raise ConfigError(
                f"kinds: there is no {kind!r}.{suggest(str(kind), known, 0.5)} Choose from {', '.join(known)}."
            )
    if kinds is not None and not kinds:
        raise ConfigError(f"kinds: name at least one of {', '.join(known)}.")
    require_unwrapped(model, "take the statistics of the plain source model, before adapt().")
    view = view_of(model)
    model, parts = view.model, view.parts
    suited = [kind for kind in known if KINDS[kind].requires in (None, *parts)]
    kinds = suited if kinds is None else kinds
    for kind in kinds:
        needed = KINDS[kind].requires
        require_supported(model, kind in suited, f"{kind!r} statistics need {PARTS[needed or 'norms']}")
    mine = {"class": type(model).__name__, **fingerprint(view, model.state_dict())}
    made = [KINDS[kind](view) for kind in dict.fromkeys(kinds)]
    count, labelled = 0, True
    norms = norm_names(view) if "norms" in parts else {}
    with _at_rest(view, norms):
        engine = Engine(view, {name: p for p, name in norms.items()}, micro_batch=micro_batch, rng=torch.Generator())
        for batch, classes in _regrouped(_pieces(images, labels, view), batch_size, samples):
            for statistic in made:
                statistic.add(batch, classes, engine)
            count += len(batch)
            labelled = labelled and classes is not None
    if not count:
        raise InputError("There are no source images: pass at least one.")
    about = {"samples": count, "batch_size": batch_size, "labels": "given" if labelled else "predicted"}
    return SourceStatistics(_named(made), mine, about)


def empty_statistics(
    kinds: Iterable[str], view: ModelView, model: Mapping[str, str], about: Mapping[str, Any]
) -> SourceStatistics:
    """Return statistics of zeros in the right shapes.

    They serve a method whose constants are then read from its state file.
    """
    tensors = {f"{kind}/{name}": t for kind in kinds for name, t in KINDS[kind].empty(view, about).items()}
    return SourceStatistics(tensors, model, about)


def choose_statistics(several: Sequence[SourceStatistics], needs: Sequence[str]) -> SourceStatistics | None:
    """Return the first of several statistics that has all needed kinds.

    If there is none, return the first one, so that the error message can say what it lacks.
    """
    return next((each for each in several if {*needs} <= {*each.kinds}), next(iter(several), None))


def require_statistics(
    statistics: SourceStatistics | None, method: str, needs: Sequence[str], model: nn.Module, mine: Mapping[str, str]
) -> SourceStatistics:
    """Return the statistics if a method can use them with this model, and otherwise raise an error that says what to do."""
    kind = KINDS[needs[0]]
    if statistics is None:
        raise ConfigError(
            f"{method} needs {kind.what} ({', '.join(needs)}): give source_statistics=. Make them by {kind.how}"
        )
    missing = [name for name in needs if name not in statistics.kinds]
    if missing:
        raise ConfigError(
            f"{method} needs {kind.what} ({', '.join(needs)}); {statistics.origin} has {', '.join(statistics.kinds)}, not "
            f"{', '.join(missing)}. Make them by {kind.how}"
        )
    require_same(f"{statistics.origin} holds the source statistics", statistics.model, model, mine)
    statistics.require_fitting(needs, view_of(model))
    return statistics


def constants(tensors: Iterable[Tensor], view: ModelView) -> nn.ParameterList:
    """Return tensors as constants that a method keeps and never changes.

    Constants are part of the state file, but not of every snapshot.
    """
    return nn.ParameterList(nn.Parameter(t.detach().clone().to(view.device), requires_grad=False) for t in tensors)


def _named(made: Iterable[Statistic]) -> dict[str, Tensor]:
    return {f"{statistic.kind}/{name}": t for statistic in made for name, t in statistic.result().items()}


@contextmanager
def _at_rest(view: ModelView, learned: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep the model in evaluation mode, with gradients for some parameters only, inside the block.

    All flags are restored afterwards.
    """
    training = {module: module.training for module in view.model.modules()}
    required = {p: p.requires_grad for p in view.model.parameters()}
    view.model.eval().requires_grad_(False)
    for p in learned:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was
        for p, was in required.items():
            p.requires_grad_(was)
            p.grad = None


def _pieces(
    images: Tensor | Iterable[Any], labels: Tensor | None, view: ModelView
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the checked images with their labels, in the order and in the batches in which they come."""
    if isinstance(images, Tensor):
        images = [(images, labels)]
    elif labels is not None:
        raise ConfigError("labels= goes with one tensor of images; a loader gives tuples of images and labels.")
    for item in images:
        batch, classes = (item, None) if isinstance(item, Tensor) else (*item, None)[:2]
        batch = view.check(batch)
        if classes is not None:
            classes = torch.as_tensor(classes)
            if (
                len(classes) != len(batch)
                or classes.is_floating_point()
                or not 0 <= classes.min() <= classes.max() < view.classes
            ):
                raise InputError(
                    f"Labels must be whole numbers from 0 to {view.classes - 1}, columns of the model's head, one per image."
                )
        yield batch, classes


def _regrouped(
    pieces: Iterable[tuple[Tensor, Tensor | None]], size: int, most: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the first `most` images in batches of `size`. The last batch may be smaller."""
    held: list[tuple[Tensor, Tensor | None]] = []
    count = 0
    for images, labels in pieces:
        while len(images) and most:
            take = min(size - count, most, len(images))
            held.append((images[:take], None if labels is None else labels[:take]))
            images, labels = images[take:], None if labels is None else labels[take:]
            count, most = count + take, most - take
            if count == size or not most:
                yield _joined(held)
                held, count = [], 0
        if not most:
            return
    if held:
        yield _joined(held)


def _joined(held: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    labels = [classes for _, classes in held if classes is not None]
    return torch.cat([images for images, _ in held]), torch.cat(labels) if len(labels) == len(held) else None

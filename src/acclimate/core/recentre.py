"""Recentring: remove the displacement that a domain shift gives to the features of all images.

Under fog, say, all features that enter the head move in the same direction, and the head names a few classes for everything.
If a centre c of the stream is subtracted, the logits are W (f - c) + b. Nothing is learned by a gradient, and the mean comes
from a pass that the method makes anyway. The idea is that of NEO (Murphy et al., ICLR 2026). The two corrected forms are
our own.

The mean of a stream that contains few classes also contains these classes, and to subtract it would remove what the head
needs. The corrected forms estimate this part. Let g be the row of the head that is expected for an image, softmax(z) W. If
the stream has all classes in equal shares, the mean of g is that of the rows of W. If not, features follow g with a slope a,
which is estimated on the stream, and the centre is

    c = mean(f) - share * a * (mean(g) - mean(W)).

The slope is at most the one that makes the centre smallest, and the centre is then shortened by what few classes leave
unknown about it. The correction has a price: it removes a part of the displacement as well. The form "order" therefore asks
the stream whether it is needed, in two ways. If the order of the classes is not random, the variance of the means of groups
of images exceeds that within groups. While there is a single class, which shows no such variance, predictions with the
corrected centre are sure, and those with the plain mean contain little information: the surer the former are, the more
information the latter would contain if there were many classes. Groups of images count by their variance, so that images
which show nothing are not taken for a class.

A shift does not move all images of a stream equally far. In the form "order", what is subtracted from the features of an
image is therefore their own part in the direction of the centre, without the part that is due to the expected class, if this
is between nothing and twice the centre.

Older images have less weight. In a random order, a block of images whose mean is too far from that of the stream shows that
the domain has changed, and what was known before has little weight then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..models.view import ModelView
from .engine import entropy
from .statecheck import Range

FORMS = {
    "mean": "the mean of the features",
    "class": "the mean without the part that is due to the classes of the stream",
    "order": "the mean if the order of the stream is random, and otherwise without the part of the classes",
}
WINDOW = 512  # images after which the weight of an image in the centre has fallen to 1/e
ORDER_WINDOW = 256  # the same for what is known about the order
GROUP = 16  # consecutive images whose mean is compared with that of others
RANDOM = 2.0  # largest ratio of the variances between and within groups for a random order
SURE = 0.45  # largest mean entropy of sure predictions, as a share of that of a uniform one
INFORMED = 0.22  # least information of predictions of many classes, as a share of the largest possible one
FEW = 2.0  # images without displacement that are added to those of the stream
FARTHEST = 2.0  # largest displacement of an image, as a multiple of the centre
BLOCK = 48  # least images whose mean is compared with that of all before
CHANGED = 3.0  # ratio of variances from which on the mean of many images shows another domain
TINY = 1e-12
NOT_NEGATIVE: Range = (0, math.inf)


def form_of(recentre: bool | str | None, default: str | None) -> str | None:
    """Return the form that the option `recentre` selects, or None for no recentring.

    Args:
        recentre: The value of the option. None selects the default of the method.
        default: The form that the method uses by default.
    """
    if recentre is None:
        return default
    if isinstance(recentre, bool):
        return "order" if recentre else None
    if recentre not in FORMS:
        forms = ", ".join(f'"{name}" ({what})' for name, what in FORMS.items())
        raise ConfigError(f"recentre={recentre!r}: choose True, False, {forms}.")
    return recentre


class Order(nn.Module):
    """What is known about the order of a stream: groups of images are compared. Older groups have less weight.

    Args:
        like: A tensor of the type and on the device of the sums.
        classes: Number of the target's classes.
    """

    ranges: Mapping[str, Range] = dict.fromkeys(
        (
            *("started", "started_spread", "started_entropy", "started_doubt"),
            *("groups", "squared_groups", "images", "between", "within", "doubt"),
        ),
        NOT_NEGATIVE,
    )

    def __init__(self, like: Tensor, classes: int) -> None:
        super().__init__()
        self.started: Tensor  # images of the group that is not yet complete
        self.started_mean: Tensor  # of their products with the head
        self.started_spread: Tensor  # sum of the squared distances from that mean
        self.started_prediction: Tensor  # sum of their predictions with the plain mean as the centre
        self.started_entropy: Tensor  # sum of the entropies of these predictions
        self.started_doubt: Tensor  # sum of the entropies of their predictions with the corrected centre
        self.groups: Tensor  # weight of the complete groups
        self.squared_groups: Tensor  # sum of the squared weights of single groups
        self.images: Tensor  # weight of the images in complete groups
        self.mean: Tensor
        self.between: Tensor  # squared distances of the means of groups from the mean, times the images of a group
        self.within: Tensor  # squared distances from the mean of the own group
        self.information: Tensor  # of the predictions with the plain mean, weighted by the squared distances in `within`
        self.doubt: Tensor  # weighted in the same way
        for name in ("started_mean", "started_prediction", "mean"):
            self.register_buffer(name, like.new_zeros(classes))
        for name in ("information", *self.ranges):
            self.register_buffer(name, like.new_zeros(()))

    def forget(self, kept: float) -> None:
        """Leave only a share of the weight of all complete groups."""
        for name in ("groups", "images", "between", "within", "information", "doubt"):
            getattr(self, name).mul_(kept)
        self.squared_groups.mul_(kept**2)

    def add(self, products: Tensor, plain: Tensor, corrected: Tensor) -> None:
        """Add a batch.

        Args:
            products: The products of the features with the rows of the head.
            plain: The logits with the plain mean as the centre.
            corrected: The logits with the corrected centre.
        """
        for group in zip(*(tensor.split(GROUP) for tensor in (products, plain, corrected))):
            self._start(*group)
            if float(self.started) >= GROUP:
                self._complete()

    def _start(self, products: Tensor, plain: Tensor, corrected: Tensor) -> None:
        """Add images to the group that is not yet complete."""
        count, mean = len(products), products.mean(0)
        distance = mean - self.started_mean
        common = self.started * count / (self.started + count)
        self.started_spread.add_((products - mean).square().sum() + common * distance.square().sum())
        self.started.add_(count)
        self.started_mean.add_(distance * count / self.started)
        self.started_prediction.add_(plain.softmax(-1).sum(0))
        self.started_entropy.add_(entropy(plain).sum())
        self.started_doubt.add_(entropy(corrected).sum())

    def _complete(self) -> None:
        """Add the group that was started to the complete ones, and start another."""
        count = self.started.clone()
        classes = len(self.mean)
        age = torch.exp(-count / ORDER_WINDOW)
        whole = entropy((self.started_prediction / count).clamp_min(TINY).log())
        most = math.log(min(classes, int(count))) or 1.0
        spread = self.started_spread / count  # images that look alike, such as noise, tell little about classes
        old, distance = age * self.images, self.started_mean - self.mean
        self.images.copy_(old + count)
        self.mean.add_(distance * count / self.images)
        for total, new in (
            (self.groups, 1.0),
            (self.between, old * count / self.images * distance.square().sum()),
            (self.within, self.started_spread),
            (self.information, spread * (count * whole - self.started_entropy) / most),
            (self.doubt, spread * self.started_doubt / (math.log(classes) or 1.0)),
        ):
            total.mul_(age).add_(new)
        self.squared_groups.mul_(age.square()).add_(1)
        for name, buffer in self.named_buffers():
            if name.startswith("started"):
                buffer.zero_()

    def ratio(self) -> float:
        """Return the ratio of the variance between groups to that within groups.

        It is near 1 if the order of the stream is random. It is infinite before two groups are complete.
        """
        groups = float(self.groups)
        free = groups - float(self.squared_groups) / groups if groups else 0.0
        within = float(self.within) / max(1.0, float(self.images) - groups)
        return float(self.between) / free / within if free > 0 and within > 0 else math.inf

    def share(self) -> float:
        """Return the share of the correction for the classes of the stream that is needed."""
        ratio, within = self.ratio(), max(TINY, float(self.within))
        information, doubt = float(self.information) / within, float(self.doubt) / within
        one_class = doubt < SURE and information < min(0.65, max(INFORMED, 2 * (SURE - doubt) - 0.05))
        return 1.0 if one_class else 1 - RANDOM / ratio if ratio > RANDOM else 0.0


class Recentring(nn.Module):
    """The centre of a stream, and the sums from which it is computed. Older images have less weight in these.

    Args:
        view: The model. Its head must be a linear function of the features.
        classes: Number of the target's classes.
        form: One of `FORMS`.
        window: The number of images after which the weight of an image has fallen to 1/e.
    """

    ranges: Mapping[str, Range] = dict.fromkeys(
        ("images", "variance", "prediction", "scatter", "free", "block", "block_prediction", "block_scatter"), NOT_NEGATIVE
    )

    def __init__(self, view: ModelView, classes: int, form: str, *, window: int = WINDOW) -> None:
        super().__init__()
        self.form = form
        self.window = window
        self.centre: Tensor
        self.images: Tensor  # their weight
        self.scatter: Tensor  # sum of the squared distances of features from the mean of their block
        self.free: Tensor  # degrees of freedom of this sum
        self.block: Tensor  # images of the block that is not yet complete
        self.block_random: Tensor  # whether the order was random before it
        self.block_mean: Tensor  # of their features
        self.block_prediction: Tensor  # their mean prediction
        self.block_scatter: Tensor  # sum of the squared distances from that mean
        self.mean: Tensor  # of the features
        self.prediction: Tensor  # mean prediction
        self.covariance: Tensor  # of the features with the expected rows, summed over the images and the dimensions
        self.variance: Tensor  # of the expected rows, summed in the same way
        like = torch.zeros((), dtype=view.precise, device=view.device)
        for name in ("centre", "mean", "block_mean"):
            self.register_buffer(name, like.new_zeros(view.feature_width))
        for name in ("prediction", "block_prediction"):
            self.register_buffer(name, like.new_zeros(classes))
        for name in ("images", "covariance", "variance", "scatter", "free", "block", "block_scatter"):
            self.register_buffer(name, like.clone())
        self.register_buffer("block_random", torch.tensor(False, device=like.device))
        self.order = Order(like, classes) if form == "order" else None
        self.kept = 1.0  # share of the earlier weights that the last batch has left

    @property
    def is_empty(self) -> bool:
        """Whether no image was observed yet."""
        return not float(self.images)

    def displacement(self, features: Tensor, weight: Tensor) -> Tensor:
        """Return what recentring subtracts from the features of each image.

        Args:
            features: What enters the head, without recentring.
            weight: The rows of the head of the target's classes.
        """
        centre, mean, weight = (tensor.to(features.dtype) for tensor in (self.centre, self.mean, weight))
        if self.order is None:
            return centre.expand_as(features)
        expected = ((features.detach() - mean) @ weight.T).softmax(-1)
        of_class = (expected - 1 / len(weight)) @ (weight @ centre) * self._slope().to(features.dtype)
        multiple = (features @ centre - of_class) / centre.square().sum().clamp_min(TINY)
        return multiple.clamp(0, FARTHEST).unsqueeze(-1) * centre

    def _slope(self) -> Tensor:
        """Return the slope of the features on the expected rows."""
        return (self.covariance / self.variance.clamp_min(TINY)).clamp(min=0)

    @torch.no_grad()
    def observe(self, features: Tensor, logits: Tensor, weight: Tensor) -> None:
        """Move the centre to that of the stream with a further batch.

        Args:
            features: What enters the head, without recentring.
            logits: The logits without recentring.
            weight: The rows of the head of the target's classes.
        """
        features, logits, weight = (tensor.to(self.centre) for tensor in (features, logits, weight))
        predictions = (logits - weight @ self.centre).softmax(-1)
        if self.order is not None:
            self.kept = self._keep(features, predictions, self.order)
        self._add(features, predictions, weight)
        away = self.prediction @ weight - weight.mean(0)
        smallest = (self.mean @ away) / away.square().sum().clamp_min(TINY)
        slope = self._slope().clamp(max=smallest).clamp(min=0)
        if self.order is not None:
            plain = logits - weight @ self.mean
            self.order.add(features @ weight.T, plain, plain + weight @ away * slope)
        share = float(self.form == "class") if self.order is None else self.order.share()
        self.centre.copy_(self.mean - share * slope * away)
        # the variance of the mean of so few classes
        few = self.prediction.square().sum() - 1 / len(weight)
        unknown = slope.square() * (weight - weight.mean(0)).square().sum(1).mean() * few
        self.centre.mul_((1 - share * unknown / self.centre.square().sum().clamp_min(TINY)).clamp(min=0))
        if self.order is not None:
            self.centre.mul_(self.images / (self.images + FEW))  # the centre of a single image would be the image itself

    def forget(self, kept: float) -> None:
        """Leave only a share of the weight of all images."""
        for total in (self.images, self.covariance, self.variance, self.scatter, self.free):
            total.mul_(kept)

    def _keep(self, features: Tensor, predictions: Tensor, order: Order) -> float:
        """Add a batch to the block, and return the share of the weight before the block that is kept when it is complete."""
        begun, means = (
            float(self.block),
            (self.block_mean.clone(), self.block_prediction.clone()),
        )  # in the means of the stream
        count = begun + len(features)
        if not begun:
            self.block_random.fill_(not order.share())  # another domain would make the order look less random
        distance = features.mean(0) - self.block_mean
        self.block_scatter.add_((features - features.mean(0)).square().sum())
        self.block_scatter.add_(begun * len(features) / count * distance.square().sum())
        self.block_mean.add_(distance * len(features) / count)
        self.block_prediction.add_((predictions.mean(0) - self.block_prediction) * len(features) / count)
        self.block.fill_(count)
        if count < BLOCK:
            return 1.0
        old, kept = float(self.images) - begun, 1.0
        if old > TINY and float(self.free) and self.block_random:
            earlier = [mean + (mean - part) * begun / old for mean, part in zip((self.mean, self.prediction), means)]
            kept = self._share_of_domain(count, old, float((self.block_mean - earlier[0]).square().sum()))
            if kept < 1:
                for mean, of_old, part in zip((self.mean, self.prediction), earlier, means):
                    mean.copy_((kept * old * of_old + begun * part) / (kept * old + begun))
                self.forget(kept)
                self.images.fill_(kept * old + begun)  # those of the block are of the new domain
                order.forget(kept)
        age = math.exp(-count / self.window)
        self.scatter.mul_(age).add_(self.block_scatter)
        self.free.mul_(age).add_(count - 1)
        for name, buffer in self.named_buffers():
            if name.startswith("block"):
                buffer.zero_()
        return kept

    def _share_of_domain(self, count: float, old: float, distance: float) -> float:
        """Return the share of the weight of the images before a block that is left if the block shows another domain.

        In a random order, the squared distance of the mean of the block from that before is known if the domain has not
        changed. What exceeds it is the squared error of the mean before, and gives this its weight.
        """
        expected = float(self.scatter) / float(self.free) * (1 / count + 1 / old)
        excess = distance / max(expected, TINY) - CHANGED * (1 + GROUP / count)  # the mean of few images may be anywhere
        return 1 / (1 + max(0.0, excess) * (1 + old / count))

    def _add(self, features: Tensor, predictions: Tensor, weight: Tensor) -> None:
        """Add a batch to the mean features and predictions, and to the covariance of features with expected rows."""
        count, mean, prediction = len(features), features.mean(0), predictions.mean(0)
        age = math.exp(-count / self.window)
        old = age * self.images
        common = old * count / (old + count)
        to_mean, to_prediction = mean - self.mean, prediction - self.prediction
        to_row, rows = to_prediction @ weight, (predictions - prediction) @ weight
        self.covariance.mul_(age).add_(((features - mean) * rows).sum() + common * (to_mean @ to_row))
        self.variance.mul_(age).add_(rows.square().sum() + common * (to_row @ to_row))
        self.images.copy_(old + count)
        self.mean.add_(to_mean * count / self.images)
        self.prediction.add_(to_prediction * count / self.images)

    def extra_repr(self) -> str:
        """Return the form, for `repr`."""
        return f"{self.form!r}"

"""The guard, which compares the adapted model with the unadapted one, and undoes an adaptation that does harm.

A model that is harmed by adaptation names fewer and fewer classes. Few classes alone prove nothing, because the images of a
stream may all be of one class. The unadapted model therefore predicts a random share of the images, too. For each of these
images the guard compares two surprises: how surprising the prediction of the adapted model is, given its earlier ones, and
the same for the unadapted model. Their mean difference is the difference of the entropies of the predicted classes. If it is
negative, gamblers who bet on that become rich (`betting`), and their wealth is the evidence of harm.

No label is needed for an estimate of accuracy, either. The unadapted model with recentred features (`recentre`) serves as a
judge. The mean probability that it gives to the classes that a model has predicted is the estimated accuracy of that model.
Other gamblers bet that it is lower for the adapted model. A harm that the judge does not see is no reason for an alarm.

A little evidence puts a run on trial. The unadapted model then replies, and the run goes on behind it, so that a method
that is bad at first and good later is not lost. All images of a trial are compared. It ends when the judge prefers the
adapted model for 128 images, or after 512 images, with an alarm if the evidence was large.

No rule without labels can be certain. A harm that keeps the diversity of the predictions is not found.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError, ModelError, require_between, require_whole
from ..models.view import ModelView
from .betting import Wealth
from .engine import Unadapted
from .recentre import Recentring
from .statecheck import COUNT, Range

ACTIONS = {
    "lower": "return to the last good state, and learn more slowly for a while",
    "rollback": "return to the last good state",
    "freeze": "return to the last good state, and stop adaptation",
}
WINDOW = 64  # compared images after which the weight of an image has fallen to 1/e
JUDGE_WINDOW = 128  # the same for the centre of the judge
PRIOR = 2.0  # predictions, spread over all classes, that are known of a model at first
SURE = 0.95  # probability from which on a prediction of the unadapted model is sure
RARE = 0.01  # share of sure predictions that the adapted model may contradict
WORSE = 0.002  # loss of estimated accuracy that is no harm
DOUBTFUL = 0.1  # the same for each image on which the models differ, because the judge comes from the unadapted model
UNIT = 0.65  # largest difference of two surprises that counts, as a share of ln C for C classes
SUSPECT = 1.1  # evidence from which on more images are compared
DOUBT = 1.5  # evidence from which on a run is on trial
FEWEST = 24  # weight of the compared images that a trial needs
TRIAL = 512  # images of a trial, at most
BETTER = 128  # images for which the judge has to prefer the adapted model, before a trial ends well
NEW = 256  # images of a domain, while which it is new
NEW_PERIOD = 4  # of so many images one is compared while a domain is new
SUSPECT_PERIOD = 2  # of so many images one is compared while a run is suspect
SLOWER = 0.1  # factor of the length of a step after an alarm
LEVELS = 3  # alarms after which the unadapted model predicts for a while
LONGEST = 5  # doublings of the patience
COMPARED = ("compared", "differing", "adapted", "source", "right_adapted", "right_source", "squares")  # sums over images
MOST = 1000.0  # evidence beyond which its amount says nothing more


class Harm(NamedTuple):
    """The estimated accuracy of the unadapted model minus that of the adapted one, with its 95 % interval.

    It is positive if adaptation does harm.
    """

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.estimate:+.1f} points ({100 * self.low:+.1f} to {100 * self.high:+.1f})"


class Guard(nn.Module):
    """Compare the adapted model with the unadapted one on a share of the images, and undo an adaptation that does harm.

    A step with logits or gradients that are not finite is always skipped. While a run is on trial, the unadapted model
    replies, and adaptation goes on. At an alarm, the adapter returns to its last good state, or to the source model if there
    is none, and begins on trial. What else happens is the `action`. With "lower", steps are ten times shorter after each
    alarm. After the third one, or if the trial after an alarm ends with another, the unadapted model predicts alone. After
    `patience` images without an alarm the steps are ten times longer again. The patience doubles with every alarm, and is as
    at first when the steps have their full length.

    Args:
        share: The passes of the unadapted model, as a share of the forward and backward passes that the method makes. Each
            gives the predictions of one image. At least 1/4 of the first 256 images of a domain are predicted so, at least
            1/2 while a run is suspect, and all on trial.
        alarm: The bound a of the probability of a false alarm, which is at most a (1 + n / 1024) in n compared images. While
            steps are shorter, the bound is the root of a.
        tolerance: The loss of diversity that is no harm, as a share of 0.65 ln C nats for C classes.
        patience: The number of images after which a lower rate of learning rises again, and a good state is stored.
        drift: The largest allowed distance from the source parameters, divided by their norm.
        action: "lower", "rollback" or "freeze".
    """

    ranges: Mapping[str, Range] = {
        **dict.fromkeys(("seen", "met", "since_alarm", "since_good", "alarms", "tried", "preferred"), COUNT),
        **dict.fromkeys(("compared", "differing", "adapted", "source", "squares"), (0, math.inf)),
        **dict.fromkeys(("right_adapted", "right_source", "peak", "passes"), (0, math.inf)),
        "level": (0, LEVELS),
    }

    def __init__(
        self,
        *,
        share: float = 1 / 12,
        alarm: float = 0.05,
        tolerance: float = 0.02,
        patience: int = 1024,
        drift: float = 3.0,
        action: str = "lower",
    ) -> None:
        super().__init__()
        if action not in ACTIONS:
            known = ", ".join(f'"{name}" ({what})' for name, what in ACTIONS.items())
            raise ConfigError(f"action={action!r}: choose {known}.")
        require_between(1e-6, 1, share=share, alarm=alarm)
        require_between(0, 1, tolerance=tolerance)
        require_between(0, math.inf, drift=drift)
        require_whole(1, 10**9, patience=patience)
        self.share = share
        self.alarm = alarm
        self.tolerance = tolerance
        self.patience = patience
        self.drift = drift
        self.action = action
        self.diversity = Wealth()
        self.agreement = Wealth()
        self.judgement = Wealth()
        self.judge: Recentring | None = None
        self.stopped: Tensor
        self.on_trial: Tensor  # whether the unadapted model replies while adaptation goes on
        self.tried: Tensor  # images of this trial
        self.preferred: Tensor  # images of this trial since the judge prefers the adapted model
        self.peak: Tensor  # the largest evidence in this trial
        self.level: Tensor  # alarms that have shortened the steps, and were not forgotten yet
        self.alarms: Tensor  # since the steps had their full length
        self.seen: Tensor  # images
        self.met: Tensor  # images since recentring saw another domain
        self.passes: Tensor  # of an image in a step of the method, mean over the last images
        self.since_alarm: Tensor  # images since the last alarm, or since the last change of the level
        self.since_good: Tensor  # images since the last good state
        self.compared: Tensor  # weight of the compared images; older ones have less
        self.differing: Tensor  # weight of those on which the two models differ
        self.adapted: Tensor  # sum of the predictions of the adapted model
        self.source: Tensor  # sum of the predictions of the unadapted model
        self.right_adapted: Tensor  # sum of the judge's probabilities of the classes that the adapted model predicted
        self.right_source: Tensor  # the same for the unadapted model
        self.squares: Tensor  # sum of the squared differences of the two
        for name in ("stopped", "on_trial"):
            self.register_buffer(name, torch.tensor(False))
        for name in ("level", "alarms", "seen", "met", "since_alarm", "since_good", "tried", "preferred"):
            self.register_buffer(name, torch.tensor(0))
        for name in ("compared", "differing", "right_adapted", "right_source", "squares", "peak", "passes"):
            self.register_buffer(name, torch.tensor(0.0))

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that create an equal guard."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def attach(self, view: ModelView, classes: int) -> None:
        """Prepare the guard for a model with so many classes in the target domain."""
        self.to(view.device, view.precise)
        self.register_buffer("adapted", torch.zeros(classes, dtype=view.precise, device=view.device))
        self.register_buffer("source", torch.zeros_like(self.adapted))
        try:
            with view.unadapted():
                view.require_logits_of_head()
                view.head_weight()
        except ModelError:
            return  # without a linear head there is no judge
        self.judge = Recentring(view, classes, "mean", window=JUDGE_WINDOW)

    # ---- comparison -------------------------------------------------------------------------------------------

    def selections(self, count: int, passes: float = 1.0) -> Iterator[list[int]]:
        """Yield the images of the next batch to compare, and then further ones if the run is suspect after the first.

        One image of each 1 / (share passes) images is drawn at random. The draw depends only on how many images were seen
        and on the passes. On trial, all images are compared.

        Args:
            count: The number of images in the batch.
            passes: The mean number of forward and backward passes of an image that the method has made in its step.
        """
        first = int(self.seen)
        self.passes.lerp_(torch.full_like(self.passes, passes), 1 - math.exp(-count / WINDOW) if first else 1.0)
        is_new = int(self.met) < NEW
        self.seen += count
        self.met += count
        self.since_alarm += count
        self.since_good += count
        if self.on_trial:
            self.tried += count
            self.preferred += count
            yield list(range(count))
            return
        period = max(1, round(1 / (self.share * float(self.passes))))
        if is_new:
            period = min(period, NEW_PERIOD)
        if self.is_suspect:
            period = min(period, SUSPECT_PERIOD)
        chosen = _drawn(first, count, period)
        yield chosen
        if self.is_suspect and period > SUSPECT_PERIOD:
            yield sorted({*_drawn(first, count, SUSPECT_PERIOD)} - {*chosen})

    def forget_domain(self, kept: float) -> None:
        """Leave only a share of the weight of what was known before the domain changed.

        The judge has the centre of the earlier domain, and would prefer the unadapted model.
        """
        if kept == 1:
            return
        self.met.zero_()
        for name in COMPARED:
            getattr(self, name).mul_(kept)
        if self.judge is not None:
            self.judge.forget(kept)

    @property
    def is_suspect(self) -> bool:
        """Whether there is some evidence of harm."""
        return self.evidence >= SUSPECT

    @property
    def evidence(self) -> float:
        """The mean wealth of all gamblers, which is large if there is harm."""
        return sum(wealth.mean for wealth in self._gamblers) / len(self._gamblers)

    @property
    def _gamblers(self) -> tuple[Wealth, ...]:
        return self.diversity, self.agreement, self.judgement

    def compare(self, adapted: Tensor, unadapted: Unadapted) -> None:
        """Add images that both models have predicted.

        Args:
            adapted: The logits of the adapted model.
            unadapted: The predictions of the unadapted model.
        """
        finite = unadapted.logits.isfinite().all(-1) & unadapted.features.isfinite().all(-1)
        if not finite.any():
            return
        adapted, unadapted = adapted[finite], Unadapted(unadapted.logits[finite], unadapted.features[finite], unadapted.rows)
        mine, source = (z.to(self.adapted).softmax(-1) for z in (adapted, unadapted.logits))
        opinion = self._opinion(unadapted)
        right_mine = opinion.gather(1, mine.argmax(-1, keepdim=True)).flatten()
        right_source = opinion.gather(1, source.argmax(-1, keepdim=True)).flatten()
        classes = mine.shape[1]
        age, prior, unit = math.exp(-1 / WINDOW), PRIOR / classes, UNIT * math.log(classes)
        for i in range(len(mine)):
            known = PRIOR + self.compared
            surprise = -(mine[i] * ((self.adapted + prior) / known).log()).sum()
            usual = -(source[i] * ((self.source + prior) / known).log()).sum()
            self.diversity.bet(float(surprise - usual) / unit + self.tolerance)
            differ = bool(mine[i].argmax() != source[i].argmax())
            if self.judge is not None:
                self.judgement.bet(float(right_mine[i] - right_source[i]) + WORSE + DOUBTFUL * differ)
            if float(source[i].max()) > SURE:
                self.agreement.bet(RARE - float(differ))
            for total, new in (
                (self.compared, 1.0),
                (self.differing, float(differ)),
                (self.adapted, mine[i]),
                (self.source, source[i]),
                (self.right_adapted, right_mine[i]),
                (self.right_source, right_source[i]),
                (self.squares, (right_mine[i] - right_source[i]).square()),
            ):
                total.mul_(age).add_(new)

    def _opinion(self, unadapted: Unadapted) -> Tensor:
        """Return the predictions of the judge."""
        logits, features, rows = unadapted
        if self.judge is None:
            return logits.to(self.adapted).softmax(-1)
        logits, features, rows = (tensor.to(self.judge.centre) for tensor in (logits, features, rows))
        self.judge.observe(features, logits, rows)
        return (logits - self.judge.displacement(features, rows) @ rows.T).to(self.adapted).softmax(-1)

    @property
    def estimated_accuracy(self) -> float | None:
        """The estimated accuracy of the adapted model, or None if it is not known."""
        weight = float(self.compared)
        return None if self.judge is None or not weight else float(self.right_adapted) / weight

    @property
    def harm(self) -> Harm | None:
        """The estimated harm, or None if it is not known."""
        weight = float(self.compared)
        if self.judge is None or not weight:
            return None
        estimate = (float(self.right_source) - float(self.right_adapted)) / weight
        spread = max(0.0, float(self.squares) / weight - estimate**2)
        error = 1.96 * math.sqrt((spread + 1 / weight**2) / weight)  # few equal images prove little
        return Harm(estimate, max(-1.0, estimate - error), min(1.0, estimate + error))

    # ---- decision ---------------------------------------------------------------------------------------------

    def verdict(self, drift: float) -> tuple[str, str] | None:
        """Return what is decided about a run with this drift, with the reason, or None if nothing is.

        The decision is "trial" if a trial begins, "trust" if it ends well, and "alarm" if there is enough evidence of harm.
        If the judge sees next to no harm, a loss of diversity is none: the images may be of few classes.
        """
        if not drift <= self.drift:
            return "alarm", f"drift of {drift:.3g} from the source"
        wealth, harm = self.evidence, self.harm
        unseen = harm is not None and harm.estimate < WORSE + DOUBTFUL * float(self.differing / self.compared)
        enough = 1 / (self.alarm ** (0.5 if int(self.level) else 1))
        if self.on_trial:
            self.peak.fill_(max(float(self.peak), wealth))
            if harm is None or harm.high >= 0:
                self.preferred.zero_()
            elif int(self.preferred) >= BETTER:
                return "trust", f"the adapted model is better, estimated harm {harm}"
            if int(self.tried) < TRIAL:
                return None
            if float(self.peak) >= enough and not unseen:
                return "alarm", self._evidence(float(self.peak))
            return "trust", "there is little evidence of harm"
        if wealth < min(DOUBT, enough) or float(self.compared) < FEWEST:
            return None
        if unseen:
            if wealth >= enough:
                self._forget_evidence()
            return None
        return "trial", self._evidence(wealth)

    def _evidence(self, wealth: float) -> str:
        """Return the evidence of harm, in numbers."""
        amount = f"{wealth:.1f}" if wealth < MOST else f"above {MOST:.0f}"
        harm = "" if self.harm is None else f", estimated harm {self.harm}"
        if self.agreement.mean > self.diversity.mean:
            return f"it contradicts predictions of which the unadapted model is sure (wealth {amount}{harm})"
        weight = float(self.compared)
        mine, source = (float(_entropy(total / weight)) for total in (self.adapted, self.source))
        return (
            f"the predictions are less diverse than those of the unadapted model (entropy of the classes {mine:.2f} and "
            f"{source:.2f} nats, wealth {amount}{harm})"
        )

    def try_run(self, wealth: float) -> None:
        """Begin a trial."""
        self.on_trial.fill_(True)
        self.tried.zero_()
        self.preferred.zero_()
        self.peak.fill_(wealth)

    def trust_run(self) -> None:
        """End a trial, and forget the evidence."""
        self.on_trial.fill_(False)
        self._forget_evidence()

    def convict(self, *, can_lower: bool) -> None:
        """Take note of an alarm, and forget the evidence.

        Args:
            can_lower: Whether the method makes steps that can be shorter.
        """
        soon = int(self.alarms) > 0 and int(self.since_alarm) < 2 * TRIAL  # so that shorter steps do not help
        self.alarms += 1
        if self.action == "lower":
            self.level.fill_(min(LEVELS, int(self.level) + 1) if can_lower and not soon else LEVELS)
        self.stopped.fill_(self.action == "freeze")
        self.since_good.zero_()
        self._start_again()

    def _start_again(self) -> None:
        """Begin another run, on trial, and forget the evidence and what it came from."""
        self.try_run(0.0)
        self.since_alarm.zero_()
        self._forget_evidence()
        for name in COMPARED:
            getattr(self, name).zero_()

    def _forget_evidence(self) -> None:
        for wealth in self._gamblers:
            wealth.restart()

    def recover(self) -> str | None:
        """Let learning be faster again if there was no alarm for long, and return what has changed."""
        wait = self.patience * 2 ** min(LONGEST, max(0, int(self.alarms) - 1))
        if not int(self.level) or int(self.since_alarm) < wait or self.is_suspect or (self.on_trial and not self.is_resting):
            return None
        rested = self.is_resting
        self.level -= 1
        if not int(self.level):
            self.alarms.zero_()
        self._start_again()
        return f"{'adaptation begins again' if rested else 'no harm was seen'}: steps have {self.scale:g} of their length"

    @property
    def scale(self) -> float:
        """The share of each step of the method that is made."""
        return SLOWER ** int(self.level)

    @property
    def is_resting(self) -> bool:
        """Whether the unadapted model predicts for a while."""
        return int(self.level) == LEVELS

    @property
    def is_in_doubt(self) -> bool:
        """Whether the unadapted model replies."""
        return self.is_resting or bool(self.on_trial)

    @property
    def trusts_good_state(self) -> bool:
        """Whether the last good state is so old that an alarm now says nothing against it."""
        return 2 * int(self.since_good) >= self.patience and not int(self.level)

    def good_state_due(self) -> bool:
        """Return whether the present state is good, and the last good one is old."""
        if int(self.since_good) < self.patience or self.evidence > 1 or self.on_trial:
            return False
        self.since_good.zero_()
        return True

    def extra_repr(self) -> str:
        """Return the configuration, for `repr`."""
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())


def _drawn(first: int, count: int, period: int) -> list[int]:
    """Return the images of a batch to compare: one of each `period` images of the stream, drawn at random."""
    blocks = range(first // period, (first + count - 1) // period + 1)
    drawn = (block * period + random.Random(block).randrange(period) - first for block in blocks)
    return [i for i in drawn if 0 <= i < count]


def _entropy(shares: Tensor) -> Tensor:
    return -torch.xlogy(shares, shares).sum()

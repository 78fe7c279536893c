"""Replays of methods that compare features with those of the source data."""

from __future__ import annotations

from ...core.engine import Engine
from ...core.statistics import source_statistics
from ...methods.cfa import CFA
from . import Recording, Result, replays, run


@replays("CFA", of="cfa")
def _cfa(recording: Recording) -> Result:
    """Replay CFA with statistics computed from the recorded images, which must equal the recorded ones."""
    extra = recording.group("extra/")
    images, labels = extra["source_images"], extra["source_labels"]
    statistics = source_statistics(recording.model(), images, labels=labels, kinds=["features"], samples=len(images))
    lengths: list[float] = []

    class Noting(CFA):
        """CFA that stores the norm of each gradient from before clipping."""

        def shorten(self, engine: Engine) -> float:
            lengths.append(super().shorten(engine))
            return lengths[-1]

    result = run(
        recording,
        Noting,
        observe=lambda *_: {"grad_norm_before_clipping": lengths[-1]},
        trace_tolerance=recording.tolerance_logits,
        source_statistics=statistics,
    )
    ours = statistics.of("features")
    names = {"moment_1": "mean", "moment_2": "moment2", "moment_3": "moment3", "class_mean": "class_means"}
    for name, mine in names.items():
        if name in extra:  # only as many moments as the recorded run used
            result.compare(name, ours[mine][None], extra[name], recording.tolerance_final)
    return result

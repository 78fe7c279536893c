"""Methods that compare features with those of the source."""

from __future__ import annotations

from ...core.engine import Engine
from ...core.statistics import source_statistics
from ...methods.cfa import CFA
from . import Recording, Result, replays, run


@replays("CFA")
def _cfa(recording: Recording) -> Result:
    """With the statistics that we compute from the recorded images, which have to be the recorded ones."""
    extra = recording.group("extra/")
    images, labels = extra["source_images"], extra["source_labels"]
    statistics = source_statistics(recording.model(), images, labels=labels, kinds=["features"], samples=len(images))
    lengths: list[float] = []

    class Noting(CFA):
        """Notes how long each gradient was before it was clipped."""

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
        if name in extra:  # as many moments as the recorded run compared
            result.compare(name, ours[mine][None], extra[name], recording.tolerance_final)
    return result

"""The results of a bench, as a sequence of runs, as tables, or as a data frame."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, overload

from ..core.console import PlainConsole
from ..data.corruptions import CORRUPTIONS
from ..errors import ConfigError
from .formats import WIDTH, terminal, write_table
from .store import Outcome
from .tables import SOURCE, Grid, RowKey

if TYPE_CHECKING:
    import pandas


class Results(Sequence[Outcome]):
    """The runs of a bench with their results, in order. A notebook shows them as tables."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self._outcomes = list(outcomes)

    @overload
    def __getitem__(self, index: int) -> Outcome: ...
    @overload
    def __getitem__(self, index: slice) -> Results: ...
    def __getitem__(self, index: int | slice) -> Outcome | Results:
        return Results(self._outcomes[index]) if isinstance(index, slice) else self._outcomes[index]

    def __len__(self) -> int:
        return len(self._outcomes)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self._outcomes)

    def where(self, **fields: object) -> Results:
        """Return the runs with these values in their specification: `results.where(setting="bs1", method="dct")`."""
        return Results(o for o in self if all(getattr(o.spec, name) == value for name, value in fields.items()))

    def ordered(self, methods: Sequence[str] = (SOURCE,)) -> Results:
        """Return the runs in the order of a table.

        The given methods come first, and others follow by name. Corruptions are in the order of the papers.
        """

        def place(outcome: Outcome) -> tuple[object, ...]:
            spec = outcome.spec
            first = methods.index(spec.method) if spec.method in methods else len(methods)
            known = [CORRUPTIONS.index(k.name) if k.name in CORRUPTIONS else len(CORRUPTIONS) for k in spec.domains]
            domains = [(number, key.name, key.severity or 0) for number, key in zip(known, spec.domains)]
            return first, RowKey.of(spec), domains, spec.seed

        return Results(sorted(self, key=place))

    def grids(self, *, mix: bool = False) -> dict[str, Grid]:
        """Return a table for each setting."""
        settings = dict.fromkeys(o.spec.setting for o in self)
        return {setting: Grid(self.where(setting=setting), mix=mix) for setting in settings}

    def table(self) -> str:
        """Return the tables as text, as a terminal shows them."""
        return "\n".join(write_table("terminal", grid, _title(grid)) for grid in self.grids().values())

    def frame(self) -> pandas.DataFrame:
        """Return a pandas data frame with a row for each run and domain. Accuracies are from 0 to 1."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("A data frame needs pandas: pip install pandas.") from None
        rows = []
        for spec, result in ((outcome.spec, outcome.result) for outcome in self):
            scores = {k: v for k, v in asdict(result).items() if not isinstance(v, (list, dict))}
            for key, accuracy in result.per_domain.items():
                rows.append(
                    {"method": spec.method, "setting": spec.setting, "domain": key.name, "severity": key.severity,
                     "seed": spec.seed, "accuracy": accuracy, **scores, "model": spec.model["name"], "run": spec.id}
                )  # fmt: skip
        return pandas.DataFrame(rows)

    def __repr__(self) -> str:
        return self.table() if self._outcomes else "Results([])"

    def _repr_html_(self) -> str:
        console = PlainConsole(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False)
        for grid in self.grids().values():
            console.print(terminal(grid, _title(grid), width=WIDTH))
        style = "line-height:1.2; overflow-x:auto; color:#000; background:#fff"  # the colours of cells suit a light page
        return console.export_html(inline_styles=True, code_format=f"<pre style='{style}'>{{code}}</pre>")


def _title(grid: Grid) -> str:
    return f"Top-1 accuracy in %: {grid.scope}, model {grid.model}"

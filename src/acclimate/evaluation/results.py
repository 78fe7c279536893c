"""What a bench returns: its runs, as a list, as tables, as a data frame."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, overload

from rich.console import Console

from ..errors import ConfigError
from .store import Outcome
from .tables import Grid, terminal, written

if TYPE_CHECKING:
    import pandas


class Results(Sequence[Outcome]):
    """Runs with their results, in the order of the grid. In a notebook it shows itself as tables."""

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
        """The runs whose specification has these values: `results.where(setting="bs1", method="dct")`."""
        return Results(o for o in self if all(getattr(o.spec, name) == value for name, value in fields.items()))

    def grids(self, *, mix: bool = False) -> dict[str, Grid]:
        """A table for each setting."""
        settings = dict.fromkeys(o.spec.setting for o in self)
        return {setting: Grid(self.where(setting=setting), mix=mix) for setting in settings}

    def table(self) -> str:
        """The tables, as a terminal would show them."""
        return "\n".join(written("terminal", grid, f"Top-1 in %, {setting}") for setting, grid in self.grids().items())

    def frame(self) -> pandas.DataFrame:
        """A pandas data frame with a row for each run and domain; accuracies are shares of one."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("A data frame needs pandas: pip install pandas.") from None
        rows = []
        for outcome in self:
            spec, result = outcome.spec, outcome.result
            scores = {k: v for k, v in asdict(result).items() if not isinstance(v, (list, dict))}
            for title, accuracy in result.per_domain.items():
                name, _, severity = title.partition("/")
                rows.append(
                    {"method": spec.method, "setting": spec.setting, "domain": name, "severity": severity or None,
                     "seed": spec.seed, "accuracy": accuracy, **scores, "model": spec.model["name"], "run": spec.id}
                )  # fmt: skip
        return pandas.DataFrame(rows)

    def __repr__(self) -> str:
        return self.table() if self._outcomes else "Results([])"

    def _repr_html_(self) -> str:
        console = Console(file=io.StringIO(), record=True, width=120)
        for setting, grid in self.grids().items():
            console.print(terminal(grid, f"Top-1 in %, {setting}"))
        return console.export_html(inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>")

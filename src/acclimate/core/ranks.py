"""The processes that adapt to one stream: each passes its share of every batch, and all make the same update.

Every exchange begins with a meeting, in which each rank tells the others its place in the program and a few numbers. All
meetings have the same format. A rank that fails therefore sends its error to the next meeting of the others, and all ranks
raise the error together instead of waiting for each other. Ranks that execute different calls are detected in the same way.
A rank that died or makes no call cannot be detected: the timeout of the group ends such a wait.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import errors
from ..errors import AcclimateError, ConfigError, InputError, NonFiniteError, StateError

OCCASIONS = ("the start of a batch", "a gradient", "a gather", "the end of a load", "a failure")
BATCH, GRADIENT, GATHER, LOADED, FAILURE = range(len(OCCASIONS))
NUMBERS = 3  # that each rank can send in a meeting
ON_CPU = ("gloo", "mpi")  # backends that exchange tensors on the CPU; others do so on the device of the model


class SingleProcess:
    """A single process, which passes every batch alone."""

    rank = 0
    count = 1
    shared = False  # whether several ranks may share a batch

    def together(self) -> AbstractContextManager[None]:
        """Let an error on one rank inside the block be raised on all ranks at their next exchange."""
        return nullcontext()

    def start(self, samples: int, steps: int, drift: float) -> int:
        """Begin a batch of which this rank has `samples` samples, and return the number of samples on all ranks."""
        return samples

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks, in the order of ranks, given one row per sample of this rank's share of a batch.

        A method that stores samples, or that compares the samples of a batch with each other, must use these rows. All ranks
        must call this method.
        """
        return tensor

    def positions(self, images: Tensor) -> tuple[Tensor, int]:
        """Return the positions of this rank's samples in the whole batch, and the size of the whole batch.

        Random numbers per sample must be drawn for the whole batch, and each rank then uses those at its positions. All
        ranks then draw the same numbers, and these are the numbers that one process would draw. All ranks must call this
        method.
        """
        return torch.arange(len(images)), len(images)

    def share(self, rows: Tensor) -> Tensor:
        """Return this rank's part of rows that all ranks hold. `gather` concatenates the parts again."""
        return rows

    def mean(self, values: Tensor) -> tuple[int, float]:
        """Return the number of values on all ranks, and their mean, which is NaN if there are none."""
        return len(values), float(values.mean())

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return each tensor summed over the ranks, bit for bit the same on all. Call it only after a meeting."""
        return tensors

    def finish_load(self) -> None:
        """Wait until every rank has read its state file."""


class Ranks(SingleProcess):
    """The ranks of a process group, which hold equal models and share the batches of one stream.

    Args:
        group: A `torch.distributed` process group.
        model: The model of this rank. Tensors are exchanged on its device, if the backend of the group supports that.
    """

    shared = True

    def __init__(self, group: dist.ProcessGroup, model: nn.Module) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"group={group!r}: give a torch.distributed process group that this rank belongs to, such as "
                "torch.distributed.group.WORLD after init_process_group()."
            )
        self.group = group
        self.model = model
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self._backends = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
        if self.device.type not in self._backends:
            raise ConfigError(
                f"group: its backend serves {', '.join(self._backends)}, but the model is on {self.device}: "
                "move the model before it is wrapped."
            )

    @property
    def device(self) -> torch.device:
        """The device on which tensors are exchanged."""
        here = next(self.model.parameters()).device
        return torch.device("cpu") if self._backends.get(here.type, "gloo") in ON_CPU else here

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return a copy in the same group: a copied adapter adapts with the copies on the other ranks."""
        return Ranks(self.group, copy.deepcopy(self.model, memo))

    def __reduce__(self) -> NoReturn:
        raise StateError("An adapter with a process group cannot be pickled: use save(), and acclimate.load() there.")

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.count}"

    # ---- exchanges --------------------------------------------------------------------------------------------

    def meet(self, place: int, *numbers: float, error: Exception | None = None) -> list[list[float]]:
        """Exchange a few numbers, and return those of every rank in the order of ranks.

        Raises:
            AcclimateError: The same error on every rank, if one rank reports an error or the ranks are at different places.
        """
        report = b"" if error is None else _report(error)
        mine = torch.zeros(2 + NUMBERS, dtype=torch.float64)
        mine[: 2 + len(numbers)] = torch.tensor([place, len(report), *numbers], dtype=torch.float64)
        table = torch.stack(self._exchange(_bytes(mine))).cpu().view(torch.float64).tolist()
        lengths = [int(row[1]) for row in table]
        if any(lengths):
            said = self._exchange(torch.tensor(list(report), dtype=torch.uint8), lengths)
            _raise_together(error, [bytes(text.tolist()).decode() for text in said])
        places = [OCCASIONS[int(row[0])] for row in table]
        if len(set(places)) > 1:
            where = ", ".join(f"rank {rank} at {name}" for rank, name in enumerate(places))
            raise _agreed(StateError(f"The ranks went different ways ({where}): make the same calls on all of them."))
        return [row[2 : 2 + len(numbers)] for row in table]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let an error on this rank inside the block be raised on all ranks at their next exchange."""
        try:
            yield
        except Exception as error:
            if not getattr(error, "agreed", False):
                self.meet(FAILURE, error=error)
            raise

    def start(self, samples: int, steps: int, drift: float) -> int:
        """Begin a batch, check that all ranks are at the same step and drift, and return the size of the whole batch."""
        table = self.meet(BATCH, samples, steps, math.inf if math.isnan(drift) else drift)
        for rank, (_, theirs, far) in enumerate(table):
            # devices of different kinds may round the drift differently
            if theirs != table[0][1] or not math.isclose(far, table[0][2], rel_tol=1e-4, abs_tol=1e-6):
                raise _agreed(
                    StateError(
                        f"The ranks have not adapted alike: rank 0 is at step {table[0][1]:.0f} with a drift of "
                        f"{table[0][2]:.6g}, rank {rank} at step {theirs:.0f} with {far:.6g}. Call reset(), rollback() "
                        "and load() on all of them."
                    )
                )
        total = int(sum(row[0] for row in table))
        if not total:
            raise _agreed(InputError("The batch is empty on every rank. Pass at least one image."))
        return total

    def mean(self, values: Tensor) -> tuple[int, float]:
        """Return the number of values on all ranks, and their mean, which is NaN if there are none."""
        table = self.meet(GRADIENT, len(values), float(values.double().sum()))
        count, total = (sum(column) for column in zip(*table))
        return int(count), total / count if count else math.nan

    def finish_load(self) -> None:
        """Wait until every rank has read its state file."""
        self.meet(LOADED)

    def positions(self, images: Tensor) -> tuple[Tensor, int]:
        """Return the positions of this rank's samples in the whole batch, and the size of the whole batch."""
        owners = self.gather(torch.full((len(images), 1), self.rank))[:, 0]
        return (owners == self.rank).nonzero()[:, 0], len(owners)

    def share(self, rows: Tensor) -> Tensor:
        """Return this rank's part of rows that all ranks hold."""
        return rows.tensor_split(self.count)[self.rank]

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks, in the order of ranks."""
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        table = self.meet(GATHER, len(tensor), row)
        if len({size for _, size in table}) > 1:
            sizes = ", ".join(f"{size:.0f}" for _, size in table)
            raise _agreed(StateError(f"The ranks gather rows of different sizes: {sizes} bytes."))
        parts = self._exchange(_bytes(tensor), [int(rows) * row for rows, _ in table])
        rows = int(sum(rows for rows, _ in table))
        return torch.cat(parts).to(tensor.device).view(tensor.dtype).view(rows, *tensor.shape[1:])

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return each tensor summed over the ranks."""
        flat = torch.cat([tensor.flatten() for tensor in tensors]).to(self.device)
        with _connected():
            dist.all_reduce(flat, group=self.group)
        pieces = flat.to(tensors[0].device).split([tensor.numel() for tensor in tensors])
        return [piece.view_as(tensor).to(tensor.dtype) for piece, tensor in zip(pieces, tensors)]

    def differing(self, digests: Mapping[str, str]) -> dict[str, list[int]]:
        """Return the ranks whose hexadecimal digest differs from that of rank 0, by the name of the digest."""
        mine = torch.tensor([list(bytes.fromhex(digest)) for digest in digests.values()], dtype=torch.uint8)
        table = self.gather(mine[None])
        same = (table == table[0]).all(-1)
        found = {what: (~same[:, i]).nonzero().flatten().tolist() for i, what in enumerate(digests)}
        return {what: ranks for what, ranks in found.items() if ranks}

    def _exchange(self, mine: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Return the bytes of every rank. `sizes` are their numbers of bytes; by default all are equal."""
        sizes = sizes or [len(mine)] * self.count
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = mine
        theirs = [torch.empty_like(padded) for _ in sizes]
        with _connected():
            dist.all_gather(theirs, padded, group=self.group)
        return [part[:size] for part, size in zip(theirs, sizes)]


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes, which every backend can send without rounding."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


@contextmanager
def _connected() -> Iterator[None]:
    """Let a lost connection inside the block raise an error that is not sent to other ranks."""
    try:
        yield
    except RuntimeError as error:
        raise _agreed(StateError(f"The ranks lost each other; start the group again: {error}")) from error


def _agreed(error: Exception) -> Exception:
    """Mark an error as known to all ranks."""
    error.agreed = True  # type: ignore[attr-defined]
    return error


def _report(error: Exception) -> bytes:
    """Return the message of an error, with the closest class of errors that the other ranks can raise."""
    known = [cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__]
    text = f"{known[0]}\n{error}" if known else f"{AcclimateError.__name__}\n{type(error).__name__}: {error}"
    return text[:2000].encode(errors="replace")


def _raise_together(error: Exception | None, reports: Sequence[str]) -> NoReturn:
    """Raise the same error on all ranks.

    It is this rank's own error if all ranks report the same, or if only this rank can raise it.
    """
    if error is not None and (len(set(reports)) == 1 or not isinstance(error, AcclimateError)):
        raise _agreed(error)
    # a NonFiniteError, which the guard may skip, comes last, so that it hides no other error
    failed = sorted((text.startswith(NonFiniteError.__name__), rank) for rank, text in enumerate(reports) if text)
    rank = failed[0][1]
    kind, message = reports[rank].split("\n", 1)
    raise _agreed(getattr(errors, kind)(f"On rank {rank}: {message}")) from error

"""The processes of a group, and what they must agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from scaled_mm.errors import BadParamError, BadTensorShapeError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A process group with this process's rank in it and the number of its processes."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: object) -> Ranks:
        """Of a process group, a `DeviceMesh` with one dimension, or None: all processes. Raises BadParamError for anything else."""
        if isinstance(group, Ranks):
            return group
        outside = "group: expected a group that this process is in, it is not"
        if not dist.is_available() or not dist.is_initialized():
            raise BadParamError("group: expected an initialized torch.distributed (init_process_group; torchrun sets its environment), it is not")
        if group is None:
            group = dist.group.WORLD
        elif isinstance(group, dist.DeviceMesh):
            if group.ndim != 1:
                raise BadParamError(f"group: expected a DeviceMesh with one dimension, such as mesh['tp'], got {group.ndim}")
            if group.get_coordinate() is None:
                raise BadParamError(outside)
            group = group.get_group()
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise BadParamError(outside)
        if not isinstance(group, dist.ProcessGroup):
            raise BadParamError(f"group: expected a process group, a DeviceMesh or None, got {type(group).__name__}")
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def __deepcopy__(self, memo: dict) -> Ranks:
        """Itself: a process group has no copies."""
        return self

    def __reduce__(self):
        raise BadParamError("model: expected a whole one to pickle or torch.save; save before `parallelize_`")

    def agreed(self, make: Callable[[], Mapping[str, object]]) -> list[Mapping[str, object]]:
        """The facts of every rank, in order of rank. make: the facts of this one; if it raises on any rank, all ranks raise, so that none of them
        waits for another in a later collective."""
        try:
            mine: object = dict(make())
            error = None
        except Exception as raised:  # noqa: BLE001 - it is raised again, once the others know
            mine, error = f"{type(raised).__name__}: {raised}", raised
        found: list[object] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        if error is not None:
            raise error
        for rank, facts in enumerate(found):
            if isinstance(facts, str):
                raise BadParamError(f"rank {rank} of {self.size}: {facts}")
        return found

    def same(self, facts: list[Mapping[str, object]], **of: str) -> None:
        """BadParamError on all ranks unless these facts are the same on all of them. of: the argument that a fact is of."""
        for fact, argument in of.items():
            values = [of_rank[fact] for of_rank in facts]
            if any(value != values[0] for value in values):
                what = "" if fact == argument else f"{fact.replace('_', ' ')} "
                raise BadParamError(f"{argument}: expected the same {what}on all {self.size} ranks, got {', '.join(map(str, values))}")

    def checked(self, argument: object, check: Callable[[], T], **sizes: Callable[[T], int]) -> T:
        """check(), which raises for wrong arguments. Where `argument` is not on a GPU, its error is raised on all ranks, and sizes(check()), by the
        names of arguments (`x__rows`: "the same rows"), must be the same on all: gloo would return wrong sums, close connections or abort.

        Only check() on GPUs, where reading the others' answers would synchronize, and in compiled code; there the group's timeout must do.
        """
        if torch.compiler.is_compiling() or isinstance(argument, torch.Tensor) and argument.device.type != "cpu":
            return check()
        found, error, mine = None, None, [0] * len(sizes)
        try:
            found = check()
            mine = [size(found) for size in sizes.values()]
        except Exception as raised:  # noqa: BLE001 - it is raised again, once the others know
            error = raised
        extremes = torch.tensor([error is not None, *mine, *(-size for size in mine)], dtype=torch.int64)
        try:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        except RuntimeError:
            if error is None:
                raise
        if error is not None:
            raise error
        refused, *others = extremes.tolist()
        if refused:
            raise BadParamError(f"group: expected arguments that all {self.size} ranks accept, got an error on another rank")
        for name, most, least in zip(sizes, others, others[len(sizes) :]):
            if most != -least:
                argument_name, _, what = name.partition("__")
                what = what.replace("_", " ")
                raise BadTensorShapeError(f"{argument_name}: expected the same {what} on all {self.size} ranks, got {-least} to {most}")
        return found


def ranks_of(layer: object) -> Ranks:
    """The ranks of a parallel layer. BadParamError for one that `from_shard` has not made."""
    if layer.ranks is None:
        raise BadParamError(f"group: expected a {type(layer).__name__} that from_shard has made, got one without")
    return layer.ranks


def rows_of(rows: int, rank: int, size: int) -> slice:
    """The rows that a rank has after a reduce-scatter of `rows` rows: ceil(rows / size) each, the last ranks fewer or none."""
    each = -(-rows // size)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))

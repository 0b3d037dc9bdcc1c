"""The processes of a group, and what they must agree on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from scaled_mm.errors import BadParamError

T = TypeVar("T")
Facts = Mapping[str, object]


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
        raise BadParamError("model: expected a whole one, a split layer holds a process group and cannot be pickled; save before `parallelize_`")

    def device_of(self, device: torch.device | None) -> torch.device:
        """The device of a call's collectives: that of an argument, or if it is no tensor, the one that the group's other ranks probably use."""
        if device is None or device.type not in ("cpu", "cuda"):
            return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend_config(self.group) else torch.device("cpu")
        return device

    def gather_facts(self, make: Callable[[], Facts]) -> list[Facts]:
        """The facts of every rank, in order of rank. make: those of this rank; if it raises on any rank, all ranks raise, so that none of them waits
        for another in a later collective."""
        mine, error = {}, None
        try:
            mine = dict(make())
        except Exception as raised:  # noqa: BLE001 - it is raised again, once the others know
            error = raised
        found: list[object] = [None] * self.size
        try:
            dist.all_gather_object(found, mine if error is None else f"{type(error).__name__}: {error}", group=self.group)
        except RuntimeError:
            if error is None:
                raise
        if error is not None:
            raise error
        for rank, facts in enumerate(found):
            if isinstance(facts, str):
                raise BadParamError(f"rank {rank} of {self.size}: {facts}")
        return found

    def require_same(self, found: list[Facts], **argument_of: str) -> None:
        """BadParamError on all ranks unless these facts are the same on all of them. found: of `gather_facts`. argument_of: the argument that the
        error names, by fact. Of a fact that is a mapping it names the first key that differs."""
        for fact, argument in argument_of.items():
            values = [facts.get(fact, "none") for facts in found]
            if all(value == values[0] for value in values):
                continue
            what = "" if fact == argument else f"{fact.replace('_', ' ')} "
            if all(isinstance(value, Mapping) for value in values):
                missing = object()
                keys = [key for value in values for key in value]
                key = next(key for key in keys if any(value.get(key, missing) != values[0].get(key, missing) for value in values))
                what, values = f"{what}{key} ", [value.get(key, "none") for value in values]
            raise BadParamError(f"{argument}: expected the same {what}on all {self.size} ranks, got {', '.join(map(str, values))}")

    def checked(self, device: torch.device | None, check: Callable[[], T], facts: Callable[[T], Facts], **argument_of: str) -> T:
        """check(), which raises for wrong arguments. If device is not a GPU, its error is raised on all ranks, and facts(check()) must be the same on
        all: see `require_same`. gloo would return wrong sums, close connections or abort.

        On a GPU only check(), because reading the others' answers would synchronize, and in compiled code; there the group's timeout must do. Costs
        one small all-reduce.
        """
        device = self.device_of(device)
        if torch.compiler.is_compiling() or device.type == "cuda":
            return check()
        found, error, mine = None, None, {}
        try:
            found = check()
            mine = dict(facts(found))
        except Exception as raised:  # noqa: BLE001 - it is raised again, once the others know
            error = raised
        code = code_of(mine)
        extremes = torch.tensor([error is not None, code, -code], dtype=torch.int64)
        try:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        except RuntimeError:
            if error is None:
                raise
            raise error from None
        refused, most, least = extremes.tolist()
        if refused or most != -least:
            self.explain(mine, error, **argument_of)
        return found

    def explain(self, mine: Facts, error: Exception | None, **argument_of: str) -> None:
        """Raises on all ranks: this rank's error, that of another, or the fact that differs. All ranks must call it."""

        def make() -> Facts:
            if error is not None:
                raise error
            return mine

        self.require_same(self.gather_facts(make), **argument_of)
        raise BadParamError(f"group: expected the same facts on all {self.size} ranks, got {mine} here")


def code_of(facts: Facts) -> int:
    """A number below 2^62 by which ranks compare facts."""
    return int.from_bytes(hashlib.sha256(repr(sorted(facts.items())).encode()).digest()[:8], "little") >> 2


def ranks_of(layer: object) -> Ranks:
    """The ranks of a parallel layer. BadParamError for one that `from_shard` has not made."""
    if layer.ranks is None:
        raise BadParamError(f"group: expected a {type(layer).__name__} made by from_shard, got one without a process group")
    return layer.ranks


def part_of(count: int, rank: int, size: int) -> slice:
    """The part of `count` rows or experts that a rank has: ceil(count / size) in order of rank, the last ranks fewer or none."""
    each = -(-count // size)
    return slice(min(rank * each, count), min((rank + 1) * each, count))

"""One island from the inside: the ranks of one torchrun group, which together are one learner.

Owns: torch.distributed (gloo on CPU, nccl on cuda), the device, DDP or FSDP2 wrapping, and the copying of a
fragment out of and into the model on all ranks. Must not know of the syncer, sockets to it, or when to sync.
Called by: run.learner_main, train.loop. A collective method must be called by all ranks, in the same order.

An island of one rank has no process group at all: it starts faster and its steps cost nothing extra.
FSDP2 places rows [r * c, (r + 1) * c) of each parameter on rank r, with c = ceil(rows / ranks).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from diloco_cli.config.schema import Device, IslandConfig, Parallel
from diloco_cli.errors import ConfigError, EnvironmentNotReady

if TYPE_CHECKING:
    from diloco_cli.core.fragments import FragmentSpec, Slice

PLAN_WORDS = 64  # int64 words per round of broadcast_plan; the first of the first round is the length
COLLECTIVE_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one tensor that one rank holds, and where they lie in the fragment's flat vector."""

    name: str
    rank: int
    local_start: int
    num_rows: int
    offset: int
    numel: int


def micro_batch(cfg: IslandConfig) -> int:
    """Sequences per micro-batch of one rank: batch / (ranks * accumulate), which must come out even."""
    parts = max(1, cfg.nproc_per_node * max(1, len(cfg.hosts))) * cfg.accumulate
    if parts <= 0 or cfg.sequences <= 0 or cfg.sequences % parts:
        raise ConfigError(
            f"batch {cfg.batch} cannot be shared out evenly",
            where="islands.each.batch",
            why=f"it must divide by ranks * accumulate = {parts}",
            hint=f"batch={max(1, round(cfg.sequences / max(1, parts))) * max(1, parts)}",
        )
    return cfg.sequences // parts


def set_deterministic() -> None:
    """The same bits every time on the same machine: deterministic kernels only, no autotuning."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


class Island:
    """The ranks of one learner, seen from one of them.

    Args:
        cfg: the island's own settings (named overrides already applied).
        timeout_s: longest that a collective waits for the other ranks before it raises. A rank 0 that has to
            wait for the syncer must call broadcast_plan([]) more often than this.
        init_method: as of torch.distributed; env:// reads what torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, ...).
        rank, world_size, local_rank: None: from RANK, WORLD_SIZE, LOCAL_RANK (absent: one rank alone).
    """

    def __init__(
        self,
        cfg: IslandConfig,
        *,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
        init_method: str = "env://",
        rank: int | None = None,
        world_size: int | None = None,
        local_rank: int | None = None,
    ) -> None:
        self.cfg = cfg
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", str(self.rank))) if local_rank is None else local_rank
        self.device = resolve_device(cfg.device, self.world_size, self.local_rank)
        self.sharded = cfg.parallel is Parallel.fsdp and self.world_size > 1
        self.module: nn.Module
        """What to call in forward (the DDP wrapper, if any); set by setup."""
        self.model: nn.Module
        """The user's model itself: names without prefixes; set by setup."""
        self._tensors: dict[str, Tensor] = {}
        self._full_rows: dict[str, int] = {}
        self._group_started = False
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            self._start_group(init_method, timeout_s)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that talks to the syncer."""
        return self.rank == 0

    def _start_group(self, init_method: str, timeout_s: float) -> None:
        import torch.distributed as dist

        # Plans and counts live on the CPU on every kind of machine, so gloo is always there.
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend,
                init_method=init_method,
                timeout=timedelta(seconds=timeout_s),
                rank=self.rank,
                world_size=self.world_size,
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise EnvironmentNotReady(
                "the ranks of this island did not find each other",
                where=f"rank {self.rank} of {self.world_size}",
                why=str(error).splitlines()[0],
                hint="see the logs of the other ranks; MASTER_ADDR and MASTER_PORT must be reachable from all",
            ) from error
        self._group_started = True

    # ---- model ----------------------------------------------------------------------------------

    def setup(
        self,
        model: nn.Module,
        *,
        unused_parameters: bool = False,
        compile_model: bool = False,
        low_precision: bool = False,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> nn.Module:
        """Put the model on the device and wrap it; returns what to call in forward. Collective.

        All ranks leave with the same parameters (under DDP, rank 0's; under FSDP2 the model must have been
        built from the same seed on all ranks).

        Args:
            unused_parameters: some parameters may get no gradient in a step (mixture of experts, foreign models).
            low_precision: FSDP2 gathers and computes in bfloat16 and reduces gradients in float32.
            tensors: names that fragments use -> parameter or buffer; None: train.model.state_tensors.
        """
        model.to(self.device)
        if tensors is None:
            from diloco_cli.train.model import state_tensors

            names = list(state_tensors(model))
        else:
            names = list(tensors)
        found = dict(_named_tensors(model))
        self._full_rows = {name: _rows(found[name]) for name in names}
        self.model = model
        self.module = model
        if self.sharded:
            self._shard(model, compile_model, low_precision)
        else:
            if compile_model:
                model.compile()
            if self.world_size > 1:
                self.module = self._wrap_ddp(model, unused_parameters)
        # Taken once: FSDP2 puts unsharded stand-ins into the module around forward, but these stay the truth.
        found = dict(_named_tensors(model))
        self._tensors = {name: found[name].detach() for name in names}
        return self.module

    def _wrap_ddp(self, model: nn.Module, unused_parameters: bool) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=unused_parameters,
        )

    def _shard(self, model: nn.Module, compile_model: bool, low_precision: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from diloco_cli.train.model import layer_modules

        mesh = init_device_mesh(self.device.type, (self.world_size,))
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if low_precision
            else MixedPrecisionPolicy()
        )
        for block in layer_modules(model):
            if compile_model:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def no_sync(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch: under DDP only the last one reduces gradients.

        FSDP2 reduces every time: keeping unsharded gradients would cost the memory that sharding saves.
        """
        if last or self.sharded or self.world_size == 1:
            return nullcontext()
        return cast(AbstractContextManager[None], cast(Any, self.module).no_sync())

    def free_unsharded(self) -> None:
        """After a forward pass without backward: drop FSDP2's gathered copy, which an install would not reach."""
        if self.sharded:
            for module in self.model.modules():
                if hasattr(module, "reshard"):
                    cast(Any, module).reshard()

    # ---- fragments ------------------------------------------------------------------------------

    def gather_fragment(self, fragment: FragmentSpec, out: Tensor | None = None) -> Tensor | None:
        """Copy a fragment off the device. Collective (under DDP only rank 0 has anything to do).

        Args:
            out: rank 0: float32 [numel] on the CPU to write into; None: a new one (pinned on cuda).

        Returns:
            Rank 0: the flat float32 vector [fragment.numel] on the CPU, complete when this returns. Others: None.
        """
        if not self.is_main and not self.sharded:
            return None
        if not self.sharded:
            return self._copy_out(fragment, out)
        pieces = self._pieces(fragment)
        if not self.is_main:
            self._send_pieces([p for p in pieces if p.rank == self.rank])
            return None
        flat = self._host_vector(fragment.numel, out)
        buffers = {r: self._buffer(sum(p.numel for p in pieces if p.rank == r)) for r in range(1, self.world_size)}
        self._exchange([("recv", r, buffer) for r, buffer in buffers.items() if buffer.numel()])
        for rank in range(self.world_size):
            mine = [p for p in pieces if p.rank == rank]
            packed = self._pack(mine) if rank == 0 else buffers[rank]
            for piece, part in zip(mine, torch.split(packed, [p.numel for p in mine]) if mine else (), strict=True):
                flat[piece.offset : piece.offset + piece.numel].copy_(part, non_blocking=flat.is_pinned())
        self._wait_for_device()
        return flat

    def install_fragment(self, fragment: FragmentSpec, flat: Tensor | None, alpha: float = 0.0) -> None:
        """theta <- alpha * theta + (1 - alpha) * flat, on every rank. Collective.

        Integer and boolean buffers are mixed in float32 and then rounded.

        Args:
            flat: rank 0: float32 [fragment.numel] on the CPU, free again when this returns. Others: None.
            alpha: share of the learner's own value that is kept, 0..1.
        """
        if self.is_main and (flat is None or flat.numel() != fragment.numel or flat.dtype != torch.float32):
            raise ValueError(f"fragment {fragment.fragment} needs a float32 vector of {fragment.numel} elements")
        if self.sharded:
            self._install_sharded(fragment, flat, alpha)
        else:
            self._install_whole(fragment, flat, alpha)
        self._wait_for_device()

    def _copy_out(self, fragment: FragmentSpec, out: Tensor | None) -> Tensor:
        flat = self._host_vector(fragment.numel, out)
        on_device = flat if self.device.type == "cpu" else torch.empty(fragment.numel, device=self.device)
        for piece in fragment.slices:
            source = _take_rows(self._tensors[piece.name], piece.row_start, piece.num_rows)
            on_device[piece.offset : piece.offset + piece.numel].view(source.shape).copy_(source)
        if on_device is not flat:
            flat.copy_(on_device, non_blocking=flat.is_pinned())
            self._wait_for_device()
        return flat

    def _install_whole(self, fragment: FragmentSpec, flat: Tensor | None, alpha: float) -> None:
        values = self._to_device(flat, fragment.numel)
        if self.world_size > 1:
            import torch.distributed as dist

            dist.broadcast(values, src=0)
        for piece in fragment.slices:
            target = _take_rows(self._tensors[piece.name], piece.row_start, piece.num_rows)
            _mix(target, values[piece.offset : piece.offset + piece.numel], alpha)

    def _install_sharded(self, fragment: FragmentSpec, flat: Tensor | None, alpha: float) -> None:
        pieces = self._pieces(fragment, buffers_everywhere=True)
        mine = [p for p in pieces if p.rank == self.rank]
        if self.is_main:
            assert flat is not None
            packets = []
            for rank in range(1, self.world_size):
                parts = [flat[p.offset : p.offset + p.numel] for p in pieces if p.rank == rank]
                if parts:
                    packets.append(("send", rank, torch.cat(parts).to(self.device)))
            self._exchange(packets)
            values = [flat[p.offset : p.offset + p.numel].to(self.device) for p in mine]
        else:
            packed = self._buffer(sum(p.numel for p in mine))
            if mine:
                self._exchange([("recv", 0, packed)])
            values = list(torch.split(packed, [p.numel for p in mine])) if mine else []
        for piece, value in zip(mine, values, strict=True):
            _mix(_take_rows(_local(self._tensors[piece.name]), piece.local_start, piece.num_rows), value, alpha)

    def _pieces(self, fragment: FragmentSpec, *, buffers_everywhere: bool = False) -> list[Piece]:
        """Who holds what of a fragment under FSDP2; the same list on every rank."""
        return [p for piece in fragment.slices for p in self._owners(piece, buffers_everywhere)]

    def _owners(self, piece: Slice, everywhere: bool) -> Iterator[Piece]:
        row = piece.numel // piece.num_rows if piece.num_rows else 0
        tensor = self._tensors[piece.name]
        if not hasattr(tensor, "to_local"):  # not sharded: a buffer, the same on all ranks
            for rank in range(self.world_size if everywhere else 1):
                yield Piece(piece.name, rank, piece.row_start, piece.num_rows, piece.offset, piece.numel)
            return
        chunk = -(-self._full_rows[piece.name] // self.world_size)
        end = piece.row_start + piece.num_rows
        for rank in range(self.world_size):
            first, last = max(piece.row_start, rank * chunk), min(end, (rank + 1) * chunk)
            if first < last:
                offset = piece.offset + (first - piece.row_start) * row
                yield Piece(piece.name, rank, first - rank * chunk, last - first, offset, (last - first) * row)

    def _pack(self, pieces: Sequence[Piece]) -> Tensor:
        """This rank's pieces as one float32 vector on the device."""
        packed = self._buffer(sum(p.numel for p in pieces))
        at = 0
        for piece in pieces:
            source = _take_rows(_local(self._tensors[piece.name]), piece.local_start, piece.num_rows)
            packed[at : at + piece.numel].view(source.shape).copy_(source)
            at += piece.numel
        return packed

    def _send_pieces(self, pieces: Sequence[Piece]) -> None:
        if pieces:
            self._exchange([("send", 0, self._pack(pieces))])

    def _exchange(self, packets: Sequence[tuple[str, int, Tensor]]) -> None:
        import torch.distributed as dist

        if not packets:
            return
        calls = [dist.P2POp(dist.isend if kind == "send" else dist.irecv, t, peer) for kind, peer, t in packets]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    def _buffer(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=torch.float32, device=self.device)

    def _host_vector(self, numel: int, out: Tensor | None) -> Tensor:
        if out is None:
            return torch.empty(numel, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        if out.numel() != numel or out.dtype != torch.float32:
            raise ValueError(f"out must be float32 with {numel} elements")
        return out

    def _to_device(self, flat: Tensor | None, numel: int) -> Tensor:
        if flat is None:
            return self._buffer(numel)
        return flat if self.device.type == "cpu" else flat.to(self.device, non_blocking=flat.is_pinned())

    def _wait_for_device(self) -> None:
        """The other side of a non_blocking copy: the host memory may be read or reused after this."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    # ---- small collectives ----------------------------------------------------------------------

    def broadcast_plan(self, words: Sequence[int] | None = None) -> list[int]:
        """Rank 0's list of integers on every rank, about 0.1 ms. Collective; the others pass None."""
        mine = list(words) if words is not None else []
        if self.world_size == 1:
            return mine
        import torch.distributed as dist

        first = torch.zeros(PLAN_WORDS, dtype=torch.int64)
        if self.is_main:
            head = torch.tensor([len(mine), *mine[: PLAN_WORDS - 1]], dtype=torch.int64)
            first[: head.numel()] = head
        dist.broadcast(first, src=0)
        length = int(first[0])
        plan = first[1 : 1 + min(length, PLAN_WORDS - 1)].tolist()
        if length > PLAN_WORDS - 1:
            rest = torch.tensor(mine[PLAN_WORDS - 1 :], dtype=torch.int64)
            if not self.is_main:
                rest = torch.zeros(length - (PLAN_WORDS - 1), dtype=torch.int64)
            dist.broadcast(rest, src=0)
            plan += rest.tolist()
        return cast("list[int]", plan)

    def all_reduce_sum(self, *numbers: float) -> tuple[float, ...]:
        """Sums over the ranks, in float64 (exact for counts below 2**53). Collective."""
        if self.world_size == 1:
            return tuple(float(n) for n in numbers)
        import torch.distributed as dist

        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values)
        return tuple(values.tolist())

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank says so (agreement on stopping). Collective."""
        return self.all_reduce_sum(1.0 if flag else 0.0)[0] > 0

    def close(self) -> None:
        """Leave the process group. Not collective: the other ranks may be gone already."""
        if self._group_started:
            import torch.distributed as dist

            self._group_started = False
            dist.destroy_process_group()


# ---- helpers ------------------------------------------------------------------------------------


def resolve_device(wanted: Device, world_size: int, local_rank: int) -> torch.device:
    """The device of one rank; auto: cuda, then mps (one rank only), then cpu."""
    if wanted is Device.cuda or (wanted is Device.auto and torch.cuda.is_available()):
        count = torch.cuda.device_count()
        if count == 0:
            raise EnvironmentNotReady("no cuda device on this machine", where="device: cuda", hint="device=cpu")
        if local_rank >= count:
            raise EnvironmentNotReady(
                f"rank {local_rank} has no cuda device of its own",
                where="islands.each.nproc_per_node",
                why=f"this machine has {count}",
                hint=f"nproc_per_node={count}",
            )
        return torch.device("cuda", local_rank)
    mps = torch.backends.mps.is_available()
    if wanted is Device.mps and (not mps or world_size > 1):
        why = "torch.distributed has no backend for it" if mps else "this machine has none"
        raise EnvironmentNotReady("mps cannot be used here", where="device: mps", why=why, hint="device=cpu")
    return torch.device("mps" if mps and world_size == 1 and wanted is not Device.cpu else "cpu")


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def _take_rows(tensor: Tensor, start: int, count: int) -> Tensor:
    return tensor.narrow(0, start, count) if tensor.ndim else tensor


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows of an FSDP2 parameter (shares its memory); a plain tensor as it is."""
    return cast(Tensor, cast(Any, tensor).to_local()) if hasattr(tensor, "to_local") else tensor


def _mix(target: Tensor, values: Tensor, alpha: float) -> None:
    """target <- alpha * target + (1 - alpha) * values, in place; values is float32, flat."""
    values = values.view(target.shape)
    if not target.is_floating_point():
        mixed = values if alpha == 0.0 else target.float().lerp_(values, 1.0 - alpha)
        target.copy_(mixed >= 0.5 if target.dtype is torch.bool else mixed.round())
    elif alpha == 0.0:
        target.copy_(values)
    elif alpha != 1.0:
        target.mul_(alpha).add_(values, alpha=1.0 - alpha)

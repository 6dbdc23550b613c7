"""Real groups of ranks on this machine, from a forkserver that has torch loaded already."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

PRELOAD = ["torch", "torch._dynamo", "torch.nn.parallel", "torch.distributed.fsdp"]


def _rank_main(
    body: Callable[..., Any], rank: int, world_size: int, store: str, args: tuple[Any, ...], out: Connection
):
    import torch

    torch.set_num_threads(1)
    try:
        result = ("ok", body(rank, world_size, store, *args))
    except BaseException:
        result = ("error", traceback.format_exc())
    out.send(result)
    out.close()


@pytest.fixture
def run_ranks(tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """run_ranks(body, world_size, *args) -> what body(rank, world_size, init_method, *args) returned on each rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started: list[Any] = []

    def run(body: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        store = f"file://{tmp_path}/store-{len(started)}"
        pipes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(body, rank, world_size, store, args, theirs), daemon=True
            )
            process.start()
            theirs.close()
            started.append(process)
            pipes.append(ours)
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout_s), f"rank {rank} did not answer within {timeout_s} s"
            results.append(pipe.recv())
        errors = [f"rank {rank}:\n{value}" for rank, (kind, value) in enumerate(results) if kind == "error"]
        assert not errors, "\n".join(errors)
        return [value for _, value in results]

    yield run
    for process in started:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()

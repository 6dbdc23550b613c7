"""What authentication, encryption and framing cost: the rounds of raw_hub over our own transport, without a merge.

    python benchmarks/transport.py [--mb 16 64 256] [--workers 2] [--rounds 9]

Prints, per size, plain TCP (default and cubic congestion control) and Channel, alternating in one run. CPU is of all
processes together: on two busy cores that is what counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from queue import Queue

from raw_hub import WARM_UP_ROUNDS, HubResult, raw_hub

from diloco_cli.run import credentials
from diloco_cli.run.channel import Channel
from diloco_cli.run.connecting import connect
from diloco_cli.run.links import LinkShaper
from diloco_cli.run.listener import Listener
from diloco_cli.wire.messages import ContributionMsg, Heartbeat, Hello, MergedMsg


def channel_hub(num_bytes: int, num_workers: int = 2, rounds: int = 9) -> HubResult:
    """Push, barrier, pull of `num_bytes` per worker through Channel; see raw_hub."""
    total = rounds + WARM_UP_ROUNDS
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        credentials.make_authority(keys)
        for name in ["syncer", *(f"island-{i}" for i in range(num_workers))]:
            credentials.issue(keys, name)
        sock = socket.create_server(("127.0.0.1", 0))
        receiver, sender = context.Pipe(duplex=False)
        hub = context.Process(target=_hub, args=(sock, keys, num_bytes, num_workers, total, sender))
        workers = [
            context.Process(target=_worker, args=(sock.getsockname(), keys, f"island-{i}", num_bytes, total))
            for i in range(num_workers)
        ]
        before = os.times()
        for process in [hub, *workers]:
            process.start()
        sock.close()
        times = receiver.recv()[WARM_UP_ROUNDS:]
        for process in [hub, *workers]:
            process.join()
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return HubResult(
        round_s=statistics.median(push + pull for push, pull in times),
        push_s=statistics.median(push for push, _ in times),
        pull_s=statistics.median(pull for _, pull in times),
        cpu_s=cpu / total,
        congestion="cubic",
    )


def _hub(sock: socket.socket, keys: Path, num_bytes: int, num_workers: int, total: int, result) -> None:
    joined: Queue[Channel] = Queue()
    listener = Listener(sock, credentials.load(keys, "syncer"), lambda channel, _hello: joined.put(channel))
    channels = [joined.get() for _ in range(num_workers)]
    barrier = threading.Barrier(num_workers + 1)

    def serve(channel: Channel) -> None:
        buffer = memoryview(bytearray(num_bytes))
        merged = MergedMsg(fragment=0, version=1, wire="float32", numel=num_bytes // 4, taken=True, global_step=0)
        for _ in range(total):
            barrier.wait()
            channel.send(Heartbeat())
            channel.receive(lambda _message, _size: buffer)
            barrier.wait()
            channel.send(merged, buffer)
            channel.receive(lambda _message, _size: None)
            barrier.wait()

    threads = [threading.Thread(target=serve, args=(channel,)) for channel in channels]
    for thread in threads:
        thread.start()
    times = []
    for _ in range(total):
        start = time.perf_counter()
        barrier.wait()
        barrier.wait()
        pushed = time.perf_counter()
        barrier.wait()
        times.append((pushed - start, time.perf_counter() - pushed))
    for thread in threads:
        thread.join()
    result.send(times)
    listener.close()


def _worker(address: tuple[str, int], keys: Path, name: str, num_bytes: int, total: int) -> None:
    hello = Hello(island=name, kind="bulk", layout_hash="", version="", session="", batch_tokens=1)
    channel = connect(address, credentials.load(keys, name), LinkShaper(), hello, 10)
    buffer = memoryview(bytearray(num_bytes))
    contribution = ContributionMsg(
        fragment=0, base_version=0, tokens=1, steps=1, sent_at_step=1, wire="float32", numel=num_bytes // 4
    )
    for _ in range(total):
        channel.receive(lambda _message, _size: None)
        channel.send(contribution, buffer)
        channel.receive(lambda _message, _size: buffer)
        channel.send(Heartbeat())
    channel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[16, 64, 256], help="payload sizes in 10^6 bytes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for mb in options.mb:
        size = int(mb * 1e6) // 4 * 4
        raw = raw_hub(size, options.workers, options.rounds)
        cubic = raw_hub(size, options.workers, options.rounds, "cubic")
        ours = channel_hub(size, options.workers, options.rounds)
        moved_gb = 2 * options.workers * size / 1e9
        for name, result in (("plain TCP", raw), ("plain TCP, cubic", cubic), ("Channel", ours)):
            print(
                f"{mb:g} MB  {name:17} round {result.round_s * 1e3:6.1f} ms  CPU {result.cpu_s / moved_gb:.2f} s/GB  "
                f"{result.round_s / raw.round_s:.2f} x plain TCP"
            )


if __name__ == "__main__":
    main()

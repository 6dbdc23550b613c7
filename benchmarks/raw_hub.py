"""The reference for benchmarks/sync.py: a hub that moves bytes over plain TCP and does nothing else.

Each round: every worker pushes `num_bytes` to the hub; when the hub has all of them (the barrier), every worker pulls
`num_bytes` back. No encryption, no merge, no framing but one byte to start a round: what the machine's sockets allow.
The hub has one thread per worker; hub and workers are processes of their own, as in a run. A round is timed in
the hub, from the byte that starts it to the last worker's word that it has everything.

    python benchmarks/raw_hub.py [--mb 16 64 256] [--workers 2] [--rounds 9] [--congestion cubic]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import threading
import time
from dataclasses import dataclass

CHUNK = 1 << 20
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class HubResult:
    """Medians over the rounds, in seconds; CPU seconds are of all processes, per round."""

    round_s: float
    push_s: float
    pull_s: float
    cpu_s: float
    congestion: str


def raw_hub(num_bytes: int, num_workers: int = 2, rounds: int = 9, congestion: str | None = None) -> HubResult:
    """Measure push, barrier, pull of `num_bytes` per worker over loopback TCP.

    Args:
        congestion: TCP congestion control of all sockets; None for the system's default.
    """
    context = multiprocessing.get_context("fork")
    listener = socket.create_server(("127.0.0.1", 0))
    _set_congestion(listener, congestion)
    total = rounds + WARM_UP_ROUNDS
    address = listener.getsockname()
    workers = [
        context.Process(target=_worker, args=(address, num_bytes, total, congestion)) for _ in range(num_workers)
    ]
    receiver, sender = context.Pipe(duplex=False)
    hub = context.Process(target=_hub, args=(listener, num_bytes, num_workers, total, sender))
    before = _children_cpu_s()
    for process in [hub, *workers]:
        process.start()
    sender.close()
    listener.close()
    times = receiver.recv()[WARM_UP_ROUNDS:]
    for process in [hub, *workers]:
        process.join()
    return HubResult(
        round_s=statistics.median(push + pull for push, pull in times),
        push_s=statistics.median(push for push, _ in times),
        pull_s=statistics.median(pull for _, pull in times),
        cpu_s=(_children_cpu_s() - before) / total,
        congestion=congestion or "default",
    )


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _set_congestion(sock: socket.socket, congestion: str | None) -> None:
    if congestion:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def _hub(listener: socket.socket, num_bytes: int, num_workers: int, total: int, result) -> None:
    sockets = [listener.accept()[0] for _ in range(num_workers)]
    buffers = [memoryview(bytearray(num_bytes)) for _ in sockets]
    for sock in sockets:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    barrier = threading.Barrier(num_workers + 1)

    def serve(sock: socket.socket, buffer: memoryview) -> None:
        for _ in range(total):
            barrier.wait()
            sock.sendall(b"s")
            _receive(sock, buffer)
            barrier.wait()
            sock.sendall(buffer)
            sock.recv(1)
            barrier.wait()

    threads = [threading.Thread(target=serve, args=pair) for pair in zip(sockets, buffers, strict=True)]
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


def _worker(address: tuple[str, int], num_bytes: int, total: int, congestion: str | None) -> None:
    sock = socket.socket()
    _set_congestion(sock, congestion)
    sock.connect(address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(num_bytes))
    buffer[: len(buffer) // CHUNK * CHUNK] = os.urandom(CHUNK) * (len(buffer) // CHUNK)
    for _ in range(total):
        sock.recv(1)
        sock.sendall(buffer)
        _receive(sock, buffer)
        sock.sendall(b"d")


def _receive(sock: socket.socket, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = sock.recv_into(buffer[done : done + CHUNK])
        if not count:
            raise ConnectionError("closed")
        done += count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[16, 64, 256], help="payload sizes in 10^6 bytes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--congestion", default=None, help="cubic, bbr, ...; default: the system's")
    options = parser.parse_args()
    for mb in options.mb:
        result = raw_hub(int(mb * 1e6), options.workers, options.rounds, options.congestion)
        print(
            f"{mb:g} MB, {options.workers} workers, {result.congestion}: round {result.round_s * 1e3:.0f} ms "
            f"(push {result.push_s * 1e3:.0f}, pull {result.pull_s * 1e3:.0f}), CPU {result.cpu_s * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()

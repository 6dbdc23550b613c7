"""Real sockets on loopback: a listener with real certificates, and what tests need around it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue

from diloco_cli.run import credentials
from diloco_cli.run.channel import Channel
from diloco_cli.run.connecting import connect
from diloco_cli.run.links import LinkShaper
from diloco_cli.run.listener import Listener
from diloco_cli.wire.messages import ContributionMsg, Hello

WAIT_S = 20.0


def hello(island: str = "island-0", kind: str = "bulk", **fields) -> Hello:
    return Hello(island=island, kind=kind, layout_hash="h", version="0", session="s", batch_tokens=1, **fields)


def contribution(num_bytes: int, fragment: int = 0) -> ContributionMsg:
    return ContributionMsg(
        fragment=fragment,
        base_version=0,
        tokens=1,
        steps=1,
        sent_at_step=1,
        wire="float32",
        numel=max(num_bytes // 4, 1),
    )


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Server:
    """A listener, what it handed over and whom it refused."""

    def __init__(self, keys: Path, **options) -> None:
        self.sock = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address: tuple[str, int] = self.sock.getsockname()
        self.channels: Queue[tuple[Channel, Hello]] = Queue()
        self.refused: list[tuple[str, str]] = []
        self.opened: list[Channel] = []
        self.keys = keys
        self.listener = Listener(
            self.sock,
            credentials.load(keys, "syncer"),
            lambda channel, said: self.channels.put((channel, said)),
            on_refused=lambda address, reason: self.refused.append((address, reason)),
            **options,
        )

    def pair(self, island: str = "island-0", shaper: LinkShaper | None = None) -> tuple[Channel, Channel]:
        """(the island's end, the syncer's end) of a new connection; `shaper` is for island to syncer."""
        ours = connect(self.address, credentials.load(self.keys, island), shaper or LinkShaper(), hello(island), WAIT_S)
        theirs, said = self.channels.get(timeout=WAIT_S)
        assert said.island == island == theirs.peer
        self.opened += [ours, theirs]
        return ours, theirs

    def close(self) -> None:
        for channel in self.opened:
            channel.close()
        self.listener.close()

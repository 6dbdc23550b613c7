"""The real syncer in a thread of the test's process, a pair of learners that keep it merging, and hand-made clients."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from net_helpers import WAIT_S, wait_until

from diloco_cli import __version__
from diloco_cli.config.compose import compose
from diloco_cli.config.schema import Config
from diloco_cli.core.fragments import Layout, fingerprint
from diloco_cli.core.learner import LearnerCore, LearnerSettings
from diloco_cli.core.types import (
    DiscardPayload,
    InstallFragment,
    LearnerEffect,
    MergedReceived,
    PullReceived,
    SendFragment,
    StepFinished,
)
from diloco_cli.observe.events import Tail
from diloco_cli.run import credentials, rundir
from diloco_cli.run.channel import Channel
from diloco_cli.run.connecting import connect
from diloco_cli.run.learner_link import Incoming, Lost, Merged, SyncerLink
from diloco_cli.run.links import LinkShaper
from diloco_cli.run.secure import ChannelClosed
from diloco_cli.run.syncer_main import Syncer
from diloco_cli.wire.frames import ProtocolError
from diloco_cli.wire.messages import ContributionMsg, Hello, Installed, PullMsg, Reject, Report, StopMsg, Welcome

# island-0 and island-1 train; the others are for tests, and nobody waits for them.
SETTINGS = [
    "model.dim=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=64",
    "data.seq_len=32",
    "islands.count=4",
    "islands.each.batch=4",
    "sync.fragments=3",
    "sync.min_fragment_bytes=4KiB",
    "sync.inner_steps=2",
    "sync.overlap_steps=2",
    "sync.quorum=2",
    "network.bandwidth=unlimited",
    "network.latency=0ms",
    "network.wire_up=float32",
    "network.wire_down=float32",
    "network.connect_timeout=2s",
    "launcher.start_timeout=60s",
    "run.steps=1000000",
    "logging.interval=0.2s",
]
STEP_S = 0.02


class SyncerRun:
    """A syncer with its run folder, until close()."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.cfg = compose([*SETTINGS, *overrides], None)
        self.run = rundir.create(self.cfg, [], path)
        credentials.make_authority(self.run.keys)
        for name in ("syncer", *self.cfg.island_names(), "island-9"):
            credentials.issue(self.run.keys, name)
        self.sock = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address: tuple[str, int] = self.sock.getsockname()[:2]
        rundir.write_json(self.run.path / "syncer.json", {"started_monotonic_s": time.monotonic()})
        control, self._control = os.pipe()
        self._tail = Tail(self.run.events)
        self.events: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.syncer = Syncer(self.run, self.sock, control)
        self.layout: Layout = self.syncer.layout
        self._thread = threading.Thread(target=self._serve, name="syncer")
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.syncer.run_to_end()
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        """Stop as the launcher does."""
        os.write(self._control, json.dumps({"event": "stop", "reason": "the test is over"}).encode() + b"\n")
        self._thread.join(timeout=WAIT_S)
        os.close(self._control)
        assert not self._thread.is_alive()

    def has_exited(self, name: str) -> None:
        """Say of an island, as the launcher does, that its process is over for good."""
        said = {"event": "exited", "island": name, "reason": "over", "returns": False}
        os.write(self._control, json.dumps(said).encode() + b"\n")

    def seen(self, event: str, since: int = 0, **fields: object) -> list[dict[str, Any]]:
        """Events so far, from the since-th on, that have these fields."""
        self.events += self._tail.poll()
        found = [e for e in self.events[since:] if e["event"] == event]
        return [e for e in found if all(e.get(key) == value for key, value in fields.items())]

    def wait_for(self, event: str, since: int = 0, **fields: object) -> dict[str, Any]:
        """The first such event, once it is there."""
        wait_until(lambda: bool(self.seen(event, since, **fields)) or self.error is not None)
        assert self.error is None
        return self.seen(event, since, **fields)[0]

    def now(self) -> int:
        """Events so far."""
        self.seen("")
        return len(self.events)

    def goes_on_merging(self, merges: int = 6) -> None:
        """So many more merges from now on, and both of the good pair have a part in them."""
        start = self.now()

        def enough() -> bool:
            found = self.seen("merge", start)
            return len(found) >= merges and {"island-0", "island-1"} <= {m for e in found for m in e["learners"]}

        wait_until(lambda: enough() or self.error is not None)
        assert self.error is None
        assert not self.seen("error")

    def held_by(self, name: str) -> int:
        """Contributions of a learner that lie in the syncer's memory."""
        return sum(held.owner == name for held in list(self.syncer.store._held.values()))


class GoodLearner(threading.Thread):
    """An honest learner whose training is a little noise; everything else is the product's own."""

    def __init__(self, run: SyncerRun, name: str) -> None:
        super().__init__(daemon=True, name=f"good-{name}")
        self.cfg: Config = run.cfg
        self.layout = run.layout
        self.island = name
        self.error: BaseException | None = None
        self.stopped = threading.Event()
        self.values: dict[int, torch.Tensor] = {}
        self._early: list[Incoming] = []
        self._merged: dict[int, Merged] = {}
        keys = credentials.load(run.run.keys, name)
        self.link = SyncerLink(run.cfg, name, run.layout, run.address, keys, seed=1)
        self.start()

    def run(self) -> None:
        try:
            self.core = self._join()
            while not self.stopped.is_set():
                self._perform(self.core.handle(StepFinished(tokens=128)))
                self.link.report(
                    Report(step=self.core.step, tokens=128 * self.core.step, step_time_s=STEP_S, metrics={}, phases={})
                )
                self._take_for(STEP_S)
        except BaseException as error:
            self.error = error
        finally:
            self.link.close("done")

    def _join(self) -> LearnerCore:
        welcome: Welcome | None = None
        versions: dict[int, int] = {}
        while welcome is None or len(versions) < len(self.layout):
            match message := self.link.inbox.get(timeout=WAIT_S):
                case Welcome():
                    welcome = message
                case Merged():
                    versions[message.message.fragment] = message.message.version
                    self._keep(message)
                case _:
                    self._early.append(message)
        sync = self.cfg.sync
        settings = LearnerSettings(
            num_fragments=len(self.layout),
            inner_steps=sync.inner_steps,
            overlap_steps=sync.overlap_steps,
            target_steps=self.cfg.target_steps(),
        )
        return LearnerCore(settings, step=welcome.global_step, versions=[versions[f] for f in sorted(versions)])

    def _take_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                self._take(self._early.pop(0) if self._early else self.link.inbox.get(timeout=left))

    def _take(self, message: Incoming) -> None:
        match message:
            case Merged():
                handle = id(message)
                self._merged[handle] = message
                event = MergedReceived(
                    fragment=message.message.fragment, version=message.message.version, handle=handle
                )
                self._perform(self.core.handle(event))
            case PullMsg():
                self._perform(self.core.handle(PullReceived(fragment=message.fragment)))
            case StopMsg():
                self.stopped.set()
            case Lost() | Reject():
                raise AssertionError(f"{self.island} was disturbed: {message.reason}")

    def _perform(self, effects: tuple[LearnerEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case InstallFragment():
                    self._keep(self._merged.pop(effect.handle))
                    counted = {"tokens": effect.tokens, "steps": effect.steps, "step": self.core.step}
                    self.link.installed(
                        Installed(fragment=effect.fragment, version=effect.version, waited_s=0.0, **counted)
                    )
                case SendFragment():
                    flat = self.link.float_buffer(effect.fragment)
                    flat.copy_(self.values[effect.fragment]).add_(torch.randn(len(flat)), alpha=1e-4)
                    self.link.send(effect, flat)
                case DiscardPayload():
                    self.link.release(self._merged.pop(effect.handle))

    def _keep(self, merged: Merged) -> None:
        assert torch.isfinite(merged.values).all(), "Theta is poisoned"
        self.values[merged.message.fragment] = merged.values.clone()
        self.link.release(merged)


class Client:
    """A hand-made learner process: says what it is told to, and keeps what it hears."""

    def __init__(
        self, run: SyncerRun, name: str, session: str = "by-hand", keys: credentials.Credentials | None = None, **hello
    ) -> None:
        self.run, self.name = run, name
        self.keys = keys or credentials.load(run.run.keys, name)
        self.hello = {
            "island": name,
            "layout_hash": run.layout.hash,
            "layout": fingerprint(run.layout),
            "version": __version__,
            "session": session,
            "batch_tokens": 128,
            **hello,
        }
        self.channels: dict[str, Channel] = {}
        self.heard: queue.Queue[object] = queue.Queue()
        self.ended: dict[str, str] = {}
        self._threads: list[threading.Thread] = []

    def dial(self, kind: str, *, listen: bool = True) -> Channel:
        """Open one of the two connections."""
        said = Hello(kind=kind, **self.hello)
        channel = connect(self.run.address, self.keys, LinkShaper(), said, 3.0)
        self.channels[kind] = channel
        if listen:
            thread = threading.Thread(target=self._listen, args=(kind, channel), daemon=True)
            self._threads.append(thread)
            thread.start()
        return channel

    def join(self, **listen) -> Client:
        """Both connections, and the syncer's welcome."""
        since = self.run.now()
        self.dial("control")
        self.dial("bulk", **listen)
        self.run.wait_for("join", since, learner=self.name)
        return self

    def hears(self, wanted: type, timeout_s: float = WAIT_S) -> Any:
        """The next message of a type."""
        while not isinstance(message := self.heard.get(timeout=timeout_s), wanted):
            pass
        return message

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        for thread in self._threads:
            thread.join(timeout=WAIT_S)
            assert not thread.is_alive()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def contribution(self, fragment: int = 0, **fields) -> ContributionMsg:
        """A right-looking one, but for `fields`."""
        numel = self.run.layout.fragments[fragment].numel if fragment < len(self.run.layout) else 8
        version = self.run.syncer.core.versions[fragment] if fragment < len(self.run.layout) else 0
        right = {"base_version": version, "tokens": 128, "steps": 1, "sent_at_step": 1, "wire": "float32"}
        return ContributionMsg(**{"fragment": fragment, "numel": numel, **right, **fields})

    def payload(self, value: float = 0.0, fragment: int = 0) -> bytes:
        return torch.full((self.run.layout.fragments[fragment].numel,), value).numpy().tobytes()

    def _listen(self, kind: str, channel: Channel) -> None:
        try:
            while True:
                message, _ = channel.receive(lambda _message, size: memoryview(bytearray(size)))
                self.heard.put(message)
        except (ChannelClosed, ProtocolError) as error:
            self.ended[kind] = str(error)


def disconnected(client: Client) -> Callable[[], bool]:
    """Whether the syncer has closed all of a client's connections."""
    return lambda: set(client.ended) == set(client.channels)

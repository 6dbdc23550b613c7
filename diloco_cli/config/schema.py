"""The typed configuration: every group of conf/ as a dataclass, with its meaning under each field.

Owns: field names, defaults, what each means, and the numbers behind the written quantities. Quantities stay as
people wrote them ("3gbps", "40ms") and are read through the `..._s`, `..._num_bytes` properties, `Config.link`
and `Config.target_steps`, so that config.yaml shows what was meant.
Must not import anything heavy: every process of a run reads its settings from here. OmegaConf is imported only
inside `load_config` and `dump_config`.
Called by: config.compose (builds it with Hydra), config.validate (checks it), every other layer (reads it).

The dataclasses are not frozen: OmegaConf marks the nodes of a frozen class read-only, and then no override can be
applied to it. Nobody but config.compose changes one all the same.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from diloco_cli.config.quantities import (
    is_step,
    parse_bytes,
    parse_count,
    parse_duration_s,
    parse_rate_bps,
    parse_step,
)
from diloco_cli.errors import ConfigError


class ModelKind(StrEnum):
    """Where the model comes from."""

    llama = "llama"
    huggingface = "huggingface"
    entry_point = "entry_point"


class DataKind(StrEnum):
    """What the training text is stored as."""

    auto = "auto"
    stdlib = "stdlib"
    text = "text"
    jsonl = "jsonl"
    huggingface = "huggingface"
    tokens = "tokens"


class Parallel(StrEnum):
    """How the ranks of one island share the work."""

    ddp = "ddp"
    fsdp = "fsdp"


class Device(StrEnum):
    """Where an island computes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


class WireType(StrEnum):
    """Element types of what travels between islands and syncer."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"
    int4 = "int4"
    e3m0 = "e3m0"
    auto = "auto"


class Algorithm(StrEnum):
    """The protocols of algorithm.md, "Baselines"."""

    decoupled = "decoupled"
    streaming = "streaming"
    diloco = "diloco"
    data_parallel = "data_parallel"


class FragmentStrategy(StrEnum):
    """How tensors are dealt out to fragments."""

    balanced = "balanced"
    strided = "strided"
    sequential = "sequential"


class MergeRule(StrEnum):
    """How the learners' drifts become one."""

    rda = "rda"
    average = "average"


class Anchor(StrEnum):
    """What a stale learner's drift is measured against."""

    base = "base"
    # The member must be called "global", as users and files write it (OmegaConf reads member names), but
    # that word is Python's own. `Anchor.global_` is an alias of the same member.
    vars()["global"] = "global"
    global_ = "global"


class Late(StrEnum):
    """What becomes of a contribution that missed its merge."""

    drop = "drop"
    next = "next"


class InnerOptimizerKind(StrEnum):
    """Optimizers inside a learner."""

    adamw = "adamw"
    muon = "muon"


class Schedule(StrEnum):
    """Learning-rate schedules after the warm-up."""

    cosine = "cosine"
    wsd = "wsd"
    constant = "constant"


class OuterOptimizerKind(StrEnum):
    """Optimizers of the syncer."""

    nesterov = "nesterov"
    sgd = "sgd"


class Autocast(StrEnum):
    """Precision of the forward pass."""

    auto = "auto"
    off = "off"
    bfloat16 = "bfloat16"


class LauncherKind(StrEnum):
    """Ways to start an island's processes."""

    torchrun = "torchrun"
    forkserver = "forkserver"
    ssh = "ssh"
    slurm = "slurm"


class Tunnel(StrEnum):
    """What carries an island's connections to the syncer."""

    none = "none"
    ssh = "ssh"


AUTO = "auto"
"""islands.*.batch: measured before the run's start (run.batches), which puts numbers in its place."""


@dataclass(frozen=True)
class LinkDirection:
    """One direction of one island's link in numbers: bit/s (infinity: unlimited) and seconds."""

    rate_bps: float
    latency_s: float
    jitter_s: float


@dataclass(frozen=True)
class Link:
    """One island's link, as the sender of each direction emulates it."""

    up: LinkDirection
    down: LinkDirection


@dataclass
class ModelConfig:
    """What is trained: the built-in Llama-style decoder, a Hugging Face causal model, or your own."""

    name: str = "tiny"
    """A label for screens and reports."""
    kind: ModelKind = ModelKind.llama
    """llama (built in), huggingface (hf_config), entry_point (your own function)."""
    dim: int = 96
    """Width of the residual stream."""
    num_layers: int = 2
    """Transformer blocks."""
    num_heads: int = 4
    """Query heads; must divide dim, and dim / num_heads must be even."""
    num_kv_heads: int = 2
    """Key/value heads (grouped-query attention); must divide num_heads."""
    ffn_dim: int = 256
    """Hidden width of the SwiGLU feed-forward block (of each expert, if there are any)."""
    vocab_size: int | None = None
    """null: what the tokenizer has (256 for bytes)."""
    max_seq_len: int = 2048
    """Longest sequence that rotary tables are made for."""
    tied: bool = True
    """Whether the output head shares the embedding's weights."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""
    norm_eps: float = 1e-5
    """Added under the root of RMSNorm."""
    num_experts: int = 0
    """0: dense. Above: mixture of experts with that many experts in each layer."""
    experts_per_token: int = 2
    """Experts that each token is sent to (mixture of experts only)."""
    router_aux_weight: float = 0.01
    """Weight of the load-balancing loss (mixture of experts only)."""
    hf_config: str | None = None
    """Folder or file with a Hugging Face config.json (kind: huggingface; needs the extra `hf`)."""
    entry_point: str | None = None
    """package.module:function returning a torch.nn.Module that maps tokens [B, T] to logits [B, T, V]."""
    entry_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for entry_point."""


@dataclass
class DataConfig:
    """What it is trained on, and how it is cut into tokens and shards."""

    kind: DataKind = DataKind.stdlib
    """stdlib: the Python standard library's own sources; auto: told from the path."""
    path: str | None = None
    """A file or folder (text, jsonl, huggingface data set on disk, .bin tokens)."""
    pattern: str = "**/*"
    """Which files of a folder (text, jsonl)."""
    text_field: str = "text"
    """The key that holds the text (jsonl, huggingface)."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json of the `tokenizers` library."""
    token_dtype: str = "uint16"
    """Integer type of .bin token files: uint16 or uint32, little-endian."""
    seq_len: int = 128
    """Tokens in a training sequence."""
    validation_fraction: float = 0.05
    """Share of the documents held out for validation; never trained on."""
    validation_path: str | None = None
    """Validation text of its own, instead of a held-out share."""
    heterogeneity: float = 0.0
    """0: every learner sees the same mix; 1: each learner sees its own slice of the corpus only."""


@dataclass
class IslandConfig:
    """What the islands share (islands.each): one island is one torchrun group."""

    launcher: LauncherKind | None = None
    """How the island is started: torchrun, forkserver, ssh or slurm; null: as launcher.kind, or ssh if it has hosts."""
    hosts: list[str] = field(default_factory=list)
    """ssh: the island's machines, as you would type them after `ssh`; the first one leads. Empty: this machine."""
    nproc_per_node: int = 1
    """Ranks on each machine of the island's torchrun group."""
    device: Device = Device.auto
    """auto: cuda, else mps, else cpu."""
    parallel: Parallel = Parallel.ddp
    """ddp: every rank holds the model; fsdp: FSDP2 shards it over the ranks."""
    # A whole number or auto (config.validate). Not int | str: OmegaConf 2.3.1 cannot merge such a union into a mapping.
    batch: Any = 8
    """Sequences per inner step over the whole island (all ranks, all accumulation steps); auto: as many as make its
    steps take as long as the others' (docs/mixed-hardware.md)."""
    accumulate: int = 1
    """Micro-batches per inner step; batch must divide by nproc_per_node * accumulate."""
    speed: float = 1.0
    """Below 1: emulate slower hardware (0.5 = every step takes twice as long)."""
    step_share: float | None = None
    """Its steps for each step of the fastest island, for run.tokens; null: as speed says. batch: auto writes it."""
    threads: int | None = None
    """CPU threads per rank; null: this machine's cores shared out among its ranks."""
    env: dict[str, str] = field(default_factory=dict)
    """Extra environment variables for the island's processes."""
    python: str = "python3"
    """ssh, slurm: the Python with diloco in it on the island's machines, as a path or a name on their PATH."""
    workdir: str = ".diloco"
    """ssh, slurm: folder on the island's machines for a run's files; relative: to the home folder."""
    port: int | None = None
    """ssh: the port of sshd; null: as ~/.ssh/config says."""
    ssh_args: list[str] = field(default_factory=list)
    """ssh: more arguments for the ssh command ([-J, bastion])."""
    tunnel: Tunnel = Tunnel.none
    """none: the island dials the syncer; ssh: its connections go back through the ssh connection."""
    slurm: dict[str, str] = field(default_factory=dict)
    """slurm: settings of submitit's executor (partition, time, gpus_per_node, ...)."""

    @property
    def sequences(self) -> int:
        """`batch` as the number that it is once a run has started."""
        if isinstance(self.batch, int):
            return self.batch
        raise ConfigError(
            f"batch: {self.batch} is measured when a run starts; before that, or without hardware, it is no number",
            where="islands.each.batch",
            hint="islands.each.batch=8",
        )


@dataclass
class IslandOverride:
    """What one named island has of its own (islands.named.<name>); null: as in islands.each."""

    launcher: LauncherKind | None = None
    """As islands.each.launcher."""
    hosts: list[str] | None = None
    """As islands.each.hosts."""
    nproc_per_node: int | None = None
    """As islands.each.nproc_per_node."""
    device: Device | None = None
    """As islands.each.device."""
    parallel: Parallel | None = None
    """As islands.each.parallel."""
    batch: Any = None  # as above
    """As islands.each.batch."""
    accumulate: int | None = None
    """As islands.each.accumulate."""
    speed: float | None = None
    """As islands.each.speed."""
    step_share: float | None = None
    """As islands.each.step_share."""
    threads: int | None = None
    """As islands.each.threads."""
    env: dict[str, str] | None = None
    """Added to islands.each.env."""
    python: str | None = None
    """As islands.each.python."""
    workdir: str | None = None
    """As islands.each.workdir."""
    port: int | None = None
    """As islands.each.port."""
    ssh_args: list[str] | None = None
    """As islands.each.ssh_args."""
    tunnel: Tunnel | None = None
    """As islands.each.tunnel."""
    slurm: dict[str, str] | None = None
    """As islands.each.slurm."""


@dataclass
class IslandsConfig:
    """Where learners run: `count` islands named island-0, island-1, ... and what is special about some."""

    count: int = 4
    """How many islands: island-0 up to island-(count - 1)."""
    each: IslandConfig = field(default_factory=IslandConfig)
    """What all of them share."""
    named: dict[str, IslandOverride] = field(default_factory=dict)
    """What single ones have of their own, by name (islands.named.island-1.speed)."""
    joined: int = 0
    """Islands beyond `count` that have joined a running run (`diloco join`)."""


@dataclass
class LinkConfig:
    """One direction of one link; null: as the network says."""

    bandwidth: str | None = None
    """As network.bandwidth, for this direction."""
    latency: str | None = None
    """As network.latency, for this direction."""
    jitter: str | None = None
    """As network.jitter, for this direction."""


@dataclass
class IslandNetwork:
    """What one named island's link has of its own, both directions or each."""

    bandwidth: str | None = None
    """As network.bandwidth, for this island."""
    latency: str | None = None
    """As network.latency, for this island."""
    jitter: str | None = None
    """As network.jitter, for this island."""
    up: LinkConfig = field(default_factory=LinkConfig)
    """This island to syncer, where it differs."""
    down: LinkConfig = field(default_factory=LinkConfig)
    """Syncer to this island, where it differs."""


@dataclass
class NetworkConfig:
    """The links between islands and syncer, as emulated by the sender, and what travels on them."""

    bandwidth: str = "3gbps"
    """Bits per second, decimal (3gbps = 3e9 bit/s), or unlimited. Per island and direction."""
    latency: str = "40ms"
    """One-way delay of each direction."""
    jitter: str = "0ms"
    """Up to this much is added to the delay of each chunk, at random; order is kept."""
    up: LinkConfig = field(default_factory=LinkConfig)
    """Island to syncer, where it differs."""
    down: LinkConfig = field(default_factory=LinkConfig)
    """Syncer to island, where it differs."""
    named: dict[str, IslandNetwork] = field(default_factory=dict)
    """Single islands whose link differs, by name."""
    wire_up: WireType = WireType.bfloat16
    """Element type of contributions on the wire."""
    wire_down: WireType = WireType.bfloat16
    """Element type of merged fragments on the wire."""
    streams: int | None = None
    """Connections that each island's fragments are striped over; null: from rate and round-trip time."""
    bind: str | None = None
    """Address the syncer listens on; null: this machine only, or all if an island elsewhere needs it."""
    port: int = 0
    """0: any free port."""
    address: str | None = None
    """What islands on other machines dial, host or host:port; null: this machine's address towards them."""
    connect_timeout: str = "30s"
    """How long a learner tries to reach the syncer at start."""

    @property
    def connect_timeout_s(self) -> float:
        """Seconds."""
        return parse_duration_s(self.connect_timeout, "network.connect_timeout")


@dataclass
class FailureEvent:
    """One failure on purpose. Its target is an island (one rank of it, its link) or the syncer."""

    at: str = "30s"
    """A time since the start (30s), or a step of the foremost learner (step 200)."""
    kind: str = "crash"
    """crash, hang, slow, partition, degrade, preempt, corrupt or disk-full."""
    island: str | None = None
    """To which island."""
    rank: int | None = None
    """crash, hang, slow: only this rank of it; null: all."""
    link: str | None = None
    """partition, degrade: the same as island, the link of which is meant."""
    syncer: bool = False
    """crash, hang, slow, disk-full: to the syncer, instead of an island."""
    duration: str | None = None
    """How long it lasts; null: a crash or hang until it is restarted, everything else 5s."""
    factor: float = 0.5
    """slow: speed that is left, above 0 and below 1."""
    bandwidth: str | None = None
    """degrade: what is left of the rate, in both directions; null: as before."""
    latency: str | None = None
    """degrade: one-way delay meanwhile; null: as before."""
    loss: float = 0.0
    """degrade: share of packets that are lost, each costing a round trip until it is sent again."""
    payload: str = "nan"
    """corrupt: nan (the island's next contribution holds NaN) or bytes (a byte of it is changed on its way)."""


@dataclass
class RandomFailures:
    """Failures drawn before the run, for each island on its own."""

    mean_time_between: str | None = None
    """Mean time between two failures of an island; null: none."""
    repair_time: str = "30s"
    """Mean time that an island is away after a crash, or a failure of another kind lasts."""
    distribution: str = "exponential"
    """Of both times: exponential, weibull (shape 0.7: failures come in bursts) or fixed."""
    kinds: list[str] = field(default_factory=lambda: ["crash"])
    """What happens, each as likely as the others: crash, hang, slow, partition, degrade, preempt or corrupt."""
    seed: int | None = None
    """Null: run.seed."""
    horizon: str = "24h"
    """Nothing is drawn beyond this time."""


@dataclass
class FailuresConfig:
    """Failures on purpose, drawn before the run and stored in its folder."""

    events: list[FailureEvent] = field(default_factory=list)
    """A written schedule."""
    random: RandomFailures = field(default_factory=RandomFailures)
    """Failures drawn at random from rates."""


@dataclass
class InnerConfig:
    """The optimizer inside each learner."""

    optimizer: InnerOptimizerKind = InnerOptimizerKind.adamw
    """adamw, or muon for the matrices with adamw for the rest."""
    lr: float = 3e-3
    """Peak learning rate."""
    muon_lr: float = 0.02
    """Learning rate of the matrices under muon (embeddings, head and vectors use lr with AdamW)."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices; embeddings and vectors have none."""
    clip_norm: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    schedule: Schedule = Schedule.cosine
    """After the warm-up: cosine, wsd (stable, then a straight decay) or constant."""
    warmup_steps: int = 50
    """Steps in which the rate grows from zero to its peak, at most half of the run."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    decay_fraction: float = 0.2
    """wsd: the last share of the steps in which the rate decays."""
    rejoin_warmup_steps: int = 20
    """A learner that comes back without its optimizer's state: steps in which its rate grows from zero again."""
    autocast: Autocast = Autocast.auto
    """auto: bfloat16 where the device is made for it (not on CPUs)."""
    compile: bool = False
    """torch.compile the model."""


@dataclass
class OuterConfig:
    """The outer optimizer, run by the syncer once per merge (algorithm.md, Syncer 3 and 4)."""

    optimizer: OuterOptimizerKind = OuterOptimizerKind.nesterov
    """nesterov (SGD with Nesterov momentum) or sgd (momentum is not used)."""
    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Outer momentum (nesterov only)."""
    merge: MergeRule = MergeRule.rda
    """rda (embeddings and head are averaged all the same) or average."""
    anchor: Anchor = Anchor.base
    """base: a learner's drift since the version it started from; global: against today's parameters."""


@dataclass
class SyncConfig:
    """When fragments are collected, merged and installed."""

    algorithm: Algorithm = Algorithm.decoupled
    """decoupled, streaming or diloco (`algorithm=NAME` on the command line is short for `sync=NAME`)."""
    fragments: int = 24
    """P; cut to what the model allows."""
    strategy: FragmentStrategy = FragmentStrategy.balanced
    """balanced by size, or strided / sequential layers."""
    min_fragment_bytes: str = "64KiB"
    """No more fragments than leave each at least this large (as float32)."""
    inner_steps: int = 24
    """H: inner steps between two syncs of the same fragment."""
    overlap_steps: int = 2
    """tau: inner steps a sync may take in the background; also the most fragments under way at once."""
    quorum: int = 1
    """K: fewest learners whose contribution lets a merge go ahead."""
    grace_safety: float = 0.9
    """gamma: share of the slack that the grace window may use."""
    alpha: float = 0.0
    """Share of the learner's own value kept when a merged fragment is installed."""
    late: Late = Late.drop
    """A contribution that comes after its merge: dropped, or kept for the next round."""
    max_drift_steps: int | None = None
    """Most inner steps without any install before a learner waits; null: no bound."""
    heartbeat_interval: str = "1s"
    """A silent learner gives a sign of life this often; must be below heartbeat_timeout."""
    heartbeat_timeout: str = "10s"
    """A learner unheard of for this long counts in no quorum."""
    quorum_timeout: str = "2min"
    """With fewer learners than the quorum the run waits for them to come back, at most this long; then it ends."""
    shards: int = 1
    """Syncer processes that the fragments are spread over; one clock and one snapshot all the same."""
    record: bool = False
    """Keep every merged contribution in RUN/record/, so that `diloco replay` can repeat all merges."""

    @property
    def quorum_timeout_s(self) -> float:
        """Seconds."""
        return parse_duration_s(self.quorum_timeout, "sync.quorum_timeout")

    @property
    def min_fragment_num_bytes(self) -> int:
        """Bytes of float32."""
        return parse_bytes(self.min_fragment_bytes, "sync.min_fragment_bytes")

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds."""
        return parse_duration_s(self.heartbeat_interval, "sync.heartbeat_interval")

    @property
    def heartbeat_timeout_s(self) -> float:
        """Seconds."""
        return parse_duration_s(self.heartbeat_timeout, "sync.heartbeat_timeout")


@dataclass
class LauncherConfig:
    """How processes are started and ended."""

    kind: LauncherKind = LauncherKind.torchrun
    """torchrun, forkserver (this machine only, starts in a tenth of a second; for tests), ssh or slurm."""
    start_timeout: str = "120s"
    """Longest time from launch until a learner has joined."""
    stop_timeout: str = "8s"
    """Longest orderly end before processes are killed."""
    max_restarts: int = 10
    """Starts of an island or syncer in a row that come to nothing, before it is given up; 0: none is restarted."""
    restart_backoff: str = "1s"
    """Wait before the second such start; doubles with each, up to 30s. The first one is at once."""
    copy_wheel: bool = False
    """ssh: where the island's diloco differs from ours, copy ours over as a wheel, into the island's workdir."""
    ssh_timeout: str = "10s"
    """Longest time for reaching an island's machine, and of silence on the connection until it counts as lost."""
    debug: bool = False
    """Debug messages in logs/, and tracebacks with errors."""

    @property
    def ssh_timeout_s(self) -> float:
        """Seconds."""
        return parse_duration_s(self.ssh_timeout, "launcher.ssh_timeout")

    @property
    def start_timeout_s(self) -> float:
        """Seconds."""
        return parse_duration_s(self.start_timeout, "launcher.start_timeout")

    @property
    def stop_timeout_s(self) -> float:
        """Seconds."""
        return parse_duration_s(self.stop_timeout, "launcher.stop_timeout")

    @property
    def restart_backoff_s(self) -> float:
        """Seconds."""
        return parse_duration_s(self.restart_backoff, "launcher.restart_backoff")


@dataclass
class LoggingConfig:
    """What is written besides metrics.jsonl and events.jsonl."""

    interval: str = "0.5s"
    """Time between two metric lines of a source."""
    tensorboard: bool = False
    """Also write TensorBoard files (needs the extra `track`)."""
    wandb: bool = False
    """Also send to Weights & Biases (needs the extra `track`)."""
    wandb_project: str = "diloco"
    """Its project there."""

    @property
    def interval_s(self) -> float:
        """Seconds."""
        return parse_duration_s(self.interval, "logging.interval")


@dataclass
class RunConfig:
    """How long, from which seed, and what is checked on the way."""

    name: str = "run"
    """First part of the run folder's name."""
    dir: str = "runs"
    """Folder in which the run folder NAME-YYYYMMDD-HHMMSS is made."""
    steps: int = 1000
    """Inner steps of the fastest learner; see finish_tolerance and finish_wait for the others."""
    tokens: str | None = None
    """Instead of steps: total tokens over all islands (12b, 300m); steps follow from it."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the data."""
    deterministic: bool = False
    """Lock-step merges at fixed steps and torch's deterministic mode: same bits every time."""
    finish_tolerance: float = 0.1
    """When the first learner is done, those are waited for that need at most this share of the run's time more."""
    finish_wait: str = "10s"
    """Or at most this long. Slower hardware is not waited for: its learner ends where it is."""
    eval_every_steps: int = 0
    """Validation of island-0's parameters every that many steps; 0: only at the end."""
    eval_sequences: int = 256
    """Validation sequences per evaluation."""
    snapshot_every: str | None = "60s"
    """Time (60s) or steps (step 500) between two snapshots; null: only at the end."""
    snapshot_keep: int = 2
    """The newest so many snapshots are kept."""
    trace_samples: bool = False
    """Write the sample ids of every island and step to samples/ISLAND.jsonl."""

    @property
    def finish_wait_s(self) -> float:
        """`finish_wait` in seconds."""
        return parse_duration_s(self.finish_wait, "run.finish_wait")

    @property
    def snapshot_every_s(self) -> float | None:
        """Seconds between two snapshots; None if it is not a time."""
        text = self.snapshot_every
        return None if text is None or is_step(text) else parse_duration_s(text, "run.snapshot_every")

    @property
    def snapshot_every_steps(self) -> int | None:
        """Steps between two snapshots; None if they are not steps."""
        text = self.snapshot_every
        return parse_step(text, "run.snapshot_every") if text is not None and is_step(text) else None

    def target_steps(self, tokens_per_step: float) -> int:
        """Inner steps of the fastest learner, given the tokens that all islands together process meanwhile."""
        if self.tokens is None:
            return self.steps
        return max(1, math.ceil(parse_count(self.tokens, "run.tokens") / tokens_per_step))


@dataclass
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained."""
    data: DataConfig = field(default_factory=DataConfig)
    """What it is trained on."""
    islands: IslandsConfig = field(default_factory=IslandsConfig)
    """Where learners run."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The links between islands and syncer."""
    failures: FailuresConfig = field(default_factory=FailuresConfig)
    """Failures on purpose."""
    inner: InnerConfig = field(default_factory=InnerConfig)
    """The optimizer inside each learner."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    """The outer optimizer, run by the syncer."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """When fragments are collected, merged and installed."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """How processes are started and ended."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """What is written besides the run's own files."""
    run: RunConfig = field(default_factory=RunConfig)
    """How long, from which seed, and what is checked on the way."""

    def island_names(self) -> list[str]:
        """island-0, island-1, ... in order; those that joined later come last."""
        return [f"island-{i}" for i in range(self.islands.count + self.islands.joined)]

    def island(self, name: str) -> IslandConfig:
        """islands.each with what islands.named has for `name` put over it."""
        override = self.islands.named.get(name)
        if override is None:
            return dataclasses.replace(self.islands.each)
        own = {f.name: getattr(override, f.name) for f in dataclasses.fields(override)}
        own = {key: value for key, value in own.items() if value is not None}
        own["env"] = {**self.islands.each.env, **own.get("env", {})}
        return dataclasses.replace(self.islands.each, **own)

    def launcher_of(self, name: str) -> LauncherKind:
        """How island `name` is started."""
        island = self.island(name)
        return island.launcher or (LauncherKind.ssh if island.hosts else self.launcher.kind)

    def num_ranks(self, name: str) -> int:
        """Ranks of island `name` over all its machines."""
        island = self.island(name)
        return island.nproc_per_node * max(1, len(island.hosts))

    def bind_address(self) -> str:
        """Where the syncer listens: no further than an island needs."""
        if self.network.bind is not None:
            return self.network.bind
        elsewhere = (LauncherKind.ssh, LauncherKind.slurm)
        islands = [self.island(name) for name in self.island_names() if self.launcher_of(name) in elsewhere]
        return "0.0.0.0" if any(island.tunnel is Tunnel.none for island in islands) else "127.0.0.1"

    def link(self, name: str) -> Link:
        """The link of island `name`: network, then its direction, then the island, then its direction."""
        return Link(up=self._direction(name, "up"), down=self._direction(name, "down"))

    def _direction(self, name: str, direction: str) -> LinkDirection:
        layers: list[tuple[str, Any]] = [
            ("network", self.network),
            (f"network.{direction}", getattr(self.network, direction)),
        ]
        named = self.network.named.get(name)
        if named is not None:
            layers += [
                (f"network.named.{name}", named),
                (f"network.named.{name}.{direction}", getattr(named, direction)),
            ]

        def last(setting: str) -> tuple[str, str]:
            return [
                (getattr(layer, setting), f"{path}.{setting}")
                for path, layer in layers
                if getattr(layer, setting) is not None
            ][-1]

        return LinkDirection(
            rate_bps=parse_rate_bps(*last("bandwidth")),
            latency_s=parse_duration_s(*last("latency")),
            jitter_s=parse_duration_s(*last("jitter")),
        )

    def batch_tokens(self, name: str) -> int:
        """Tokens of one inner step of island `name` (without padding)."""
        return self.island(name).sequences * self.data.seq_len

    def open_batches(self) -> list[str]:
        """Islands whose batch is still to be measured."""
        return [name for name in self.island_names() if self.island(name).batch == AUTO]

    def step_shares(self) -> dict[str, float]:
        """Island -> its inner steps as a share of the fastest learner's: as measured, or by the emulated speeds.

        One that needs at most run.finish_tolerance of the run's time more is waited for, and so makes all steps.
        """
        islands = {name: self.island(name) for name in self.island_names()}
        speeds = {n: own.speed if own.step_share is None else own.step_share for n, own in islands.items()}
        fastest = max(speeds.values())
        waited_for = {name: fastest / speed - 1 <= self.run.finish_tolerance for name, speed in speeds.items()}
        return {name: 1.0 if waited_for[name] else speed / fastest for name, speed in speeds.items()}

    def target_steps(self) -> int:
        """Inner steps of the fastest learner: run.steps, or what run.tokens over all islands comes to."""
        if self.run.tokens is None:
            return self.run.steps
        return self.run.target_steps(sum(share * self.batch_tokens(n) for n, share in self.step_shares().items()))

    def planned_steps(self) -> int | None:
        """`target_steps`; None while run.tokens waits for a batch that is to be measured."""
        return None if self.run.tokens is not None and self.open_batches() else self.target_steps()


def dump_config(cfg: Config, path: Path) -> None:
    """Write `cfg` as YAML; `load_config` reads it back equal."""
    from omegaconf import OmegaConf

    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)), encoding="utf-8")


def load_config(path: Path) -> Config:
    """Read what `dump_config` wrote: types and keys are checked, nothing is built from names in the file."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        loaded = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
        cfg = OmegaConf.to_object(loaded)
    except FileNotFoundError:
        raise ConfigError("there is no configuration", where=str(path)) from None
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError("the configuration cannot be read", where=str(path), why=reason) from error
    assert isinstance(cfg, Config)
    return cfg

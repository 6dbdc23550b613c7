"""The typed configuration: every group of conf/ as a dataclass, with its meaning under each field.

Owns: field names, defaults, ranges. Quantities stay as people wrote them ("3gbps", "40ms") and are
read through the `..._bps`, `..._s`, `..._bytes` properties, so that config.yaml shows what was meant.
Must not import anything heavy: every process of a run reads its settings from here.
Called by: config.compose (builds it with Hydra), every other layer (reads it).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from diloco_cli.config.quantities import parse_bytes, parse_duration_s, parse_rate_bps


class ModelKind(str, Enum):
    llama = "llama"
    huggingface = "huggingface"
    entry_point = "entry_point"


class DataKind(str, Enum):
    auto = "auto"
    stdlib = "stdlib"
    text = "text"
    jsonl = "jsonl"
    huggingface = "huggingface"
    tokens = "tokens"


class Parallel(str, Enum):
    ddp = "ddp"
    fsdp = "fsdp"


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


class WireType(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"
    int4 = "int4"
    e3m0 = "e3m0"


class Algorithm(str, Enum):
    decoupled = "decoupled"
    streaming = "streaming"
    diloco = "diloco"
    data_parallel = "data_parallel"


class FragmentStrategy(str, Enum):
    balanced = "balanced"
    strided = "strided"
    sequential = "sequential"


class MergeRule(str, Enum):
    rda = "rda"
    average = "average"


class Anchor(str, Enum):
    base = "base"
    global_ = "global"


class Late(str, Enum):
    drop = "drop"
    next = "next"


class InnerOptimizerKind(str, Enum):
    adamw = "adamw"
    muon = "muon"


class Schedule(str, Enum):
    cosine = "cosine"
    wsd = "wsd"
    constant = "constant"


class OuterOptimizerKind(str, Enum):
    nesterov = "nesterov"
    sgd = "sgd"


class Autocast(str, Enum):
    auto = "auto"
    off = "off"
    bfloat16 = "bfloat16"


class LauncherKind(str, Enum):
    torchrun = "torchrun"
    forkserver = "forkserver"


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
    num_heads: int = 4
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
    norm_eps: float = 1e-5
    num_experts: int = 0
    """0: dense. Above: mixture of experts with that many experts in each layer."""
    experts_per_token: int = 2
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

    hosts: list[str] = field(default_factory=list)
    """Empty: this machine."""
    nproc_per_node: int = 1
    """Ranks in the island's torchrun group."""
    device: Device = Device.auto
    parallel: Parallel = Parallel.ddp
    batch: int = 8
    """Sequences per inner step over the whole island (all ranks, all accumulation steps)."""
    accumulate: int = 1
    """Micro-batches per inner step; batch must divide by nproc_per_node * accumulate."""
    speed: float = 1.0
    """Below 1: emulate slower hardware (0.5 = every step takes twice as long)."""
    threads: int | None = None
    """CPU threads per rank; null: this machine's cores shared out among its ranks."""
    env: dict[str, str] = field(default_factory=dict)
    """Extra environment variables for the island's processes."""


@dataclass
class IslandOverride:
    """What one named island has of its own (islands.named.<name>); null: as in islands.each."""

    hosts: list[str] | None = None
    nproc_per_node: int | None = None
    device: Device | None = None
    parallel: Parallel | None = None
    batch: int | None = None
    accumulate: int | None = None
    speed: float | None = None
    threads: int | None = None
    env: dict[str, str] | None = None


@dataclass
class IslandsConfig:
    """Where learners run: `count` islands named island-0, island-1, ... and what is special about some."""

    count: int = 4
    each: IslandConfig = field(default_factory=IslandConfig)
    named: dict[str, IslandOverride] = field(default_factory=dict)


@dataclass
class LinkConfig:
    """One direction of one link; null: as the network says."""

    bandwidth: str | None = None
    latency: str | None = None
    jitter: str | None = None


@dataclass
class IslandNetwork:
    """What one named island's link has of its own, both directions or each."""

    bandwidth: str | None = None
    latency: str | None = None
    jitter: str | None = None
    up: LinkConfig = field(default_factory=LinkConfig)
    down: LinkConfig = field(default_factory=LinkConfig)


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
    bind: str = "127.0.0.1"
    """Address the syncer listens on."""
    port: int = 0
    """0: any free port."""
    connect_timeout: str = "30s"
    """How long a learner tries to reach the syncer at start."""


@dataclass
class FailureEvent:
    """One failure on purpose."""

    at: str = "30s"
    """A time (30s) or a step (step 200)."""
    kind: str = "crash"
    island: str | None = None


@dataclass
class FailuresConfig:
    """Failures on purpose."""

    events: list[FailureEvent] = field(default_factory=list)
    random: dict[str, Any] | None = None


@dataclass
class InnerConfig:
    """The optimizer inside each learner."""

    optimizer: InnerOptimizerKind = InnerOptimizerKind.adamw
    lr: float = 3e-3
    muon_lr: float = 0.02
    """Learning rate of the matrices under muon (embeddings, head and vectors use lr with AdamW)."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    schedule: Schedule = Schedule.cosine
    warmup_steps: int = 50
    min_lr_ratio: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    decay_fraction: float = 0.2
    """wsd: the last share of the steps in which the rate decays."""
    autocast: Autocast = Autocast.auto
    """auto: bfloat16 where the device is made for it (not on CPUs)."""
    compile: bool = False
    """torch.compile the model."""


@dataclass
class OuterConfig:
    """The outer optimizer, run by the syncer once per merge (algorithm.md, Syncer 3 and 4)."""

    optimizer: OuterOptimizerKind = OuterOptimizerKind.nesterov
    lr: float = 0.7
    momentum: float = 0.9
    merge: MergeRule = MergeRule.rda
    """rda (embeddings and head are averaged all the same) or average."""
    anchor: Anchor = Anchor.base
    """base: a learner's drift since the version it started from; global: against today's parameters."""


@dataclass
class SyncConfig:
    """When fragments are collected, merged and installed."""

    algorithm: Algorithm = Algorithm.decoupled
    fragments: int = 24
    """P; cut to what the model allows."""
    strategy: FragmentStrategy = FragmentStrategy.balanced
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
    heartbeat_timeout: str = "10s"
    """A learner unheard of for this long counts in no quorum."""


@dataclass
class LauncherConfig:
    """How processes are started and ended."""

    kind: LauncherKind = LauncherKind.torchrun
    """torchrun, or forkserver (this machine only, starts in a tenth of a second; for tests)."""
    start_timeout: str = "120s"
    """Longest time from launch until a learner has joined."""
    stop_timeout: str = "8s"
    """Longest orderly end before processes are killed."""
    debug: bool = False


@dataclass
class LoggingConfig:
    """What is written besides metrics.jsonl and events.jsonl."""

    interval: str = "0.5s"
    """Seconds between two metric lines of a source."""
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "diloco"


@dataclass
class RunConfig:
    """How long, from which seed, and what is checked on the way."""

    name: str = "run"
    dir: str = "runs"
    """Folder in which the run folder NAME-YYYYMMDD-HHMMSS is made."""
    steps: int = 1000
    """Inner steps of the fastest learner; see finish_tolerance for the others."""
    tokens: str | None = None
    """Instead of steps: total tokens over all islands (12b, 300m); steps follow from it."""
    seed: int = 0
    deterministic: bool = False
    """Lock-step merges at fixed steps and torch's deterministic mode: same bits every time."""
    finish_tolerance: float = 0.2
    """Learners at or beyond (1 - this) of run.steps when the first is done are waited for."""
    eval_every_steps: int = 0
    """Validation of island-0's parameters every that many steps; 0: only at the end."""
    eval_sequences: int = 256
    """Validation sequences per evaluation."""
    trace_samples: bool = False
    """Write the sample ids of every island and step to samples/ISLAND.jsonl."""


@dataclass
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    islands: IslandsConfig = field(default_factory=IslandsConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    failures: FailuresConfig = field(default_factory=FailuresConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run: RunConfig = field(default_factory=RunConfig)

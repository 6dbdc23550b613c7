"""What a run needs from this machine, checked before it starts: `diloco doctor`.

Owns: the checks, each a function of the configuration that returns findings and leaves nothing behind (a folder made
for a probe is removed, a port taken for one is given back). Where another module refuses the same thing at the start
of a run, that module's own rule is asked. Must not start a process of a run.
Called by: cli.inspect.

Arithmetic of the disk: a snapshot holds the parameters and the outer momentum (8 bytes a parameter), and per island
model and optimizer (12); run.snapshot_keep of them stay while one more is written. Of the memory: run.plan's bytes per
rank, and for every process what Python and torch take by themselves; activations come on top.
"""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from diloco_cli.config.quantities import format_bytes, format_count
from diloco_cli.config.schema import Config, DataKind, Device, LauncherKind, ModelKind
from diloco_cli.errors import DilocoError, EnvironmentNotReady

Status = Literal["pass", "warn", "fail"]
FILES_READ_MAX = 1000
"""So many files of a data folder are opened; a run reads them all."""
SHM_BYTES_MIN = 64 * 2**20
BASE_FILES, FILES_PER_ISLAND = 128, 8
"""Open files: a process's own (libraries, logs), and sockets and pipes per island in syncer and launcher."""
PYTHON_MIN = (3, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor. `fix`: what to do about it; empty where there is nothing to do."""

    name: str
    status: Status
    says: str
    fix: str = ""


def check(cfg: Config) -> list[Finding]:
    """All checks, in the order in which they would stop a run."""
    findings = [*packages(), *extras(cfg), *clock()]
    for look in (devices, port, run_dir, tokenizer, data, processors, open_files, shared_memory):
        findings += _guarded(look.__name__, look, cfg)
    try:
        from diloco_cli.run.plan import make_plan

        plan = make_plan(cfg)
    except DilocoError as error:
        return [*findings, _failed("model", error)]
    findings.append(_passed("model", f"{format_count(plan['parameters'])} parameters, vocabulary {plan['vocab_size']}"))
    findings += _guarded("disk", lambda c: disk(c, plan["parameters"]), cfg)
    return findings + _guarded("memory", lambda c: memory(c, plan), cfg)


def _guarded(name: str, look: Callable[[Config], list[Finding]], cfg: Config) -> list[Finding]:
    """A check that breaks is a finding as well."""
    try:
        return look(cfg)
    except DilocoError as error:
        return [_failed(name.replace("_", " "), error)]
    except OSError as error:
        return [Finding(name.replace("_", " "), "warn", f"could not be checked: {error.strerror or error}")]


def _passed(name: str, says: str) -> Finding:
    return Finding(name, "pass", says)


def _failed(name: str, error: DilocoError) -> Finding:
    where = f" ({error.where})" if error.where and error.where not in error.what else ""
    why = f": {error.why}" if error.why else ""
    return Finding(name, "fail", f"{error.what}{why}{where}", error.hint)


# ---- software -------------------------------------------------------------------------------------


def packages() -> list[Finding]:
    """Python, and every package that diloco itself requires, against the versions that it requires."""
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < PYTHON_MIN:
        old = Finding("python", "fail", f"{python} is too old", "Python 3.11 or newer")
        return [old]
    found = [_passed("python", python)]
    try:
        required = metadata.requires("diloco") or []
    except metadata.PackageNotFoundError:
        return [*found, Finding("packages", "warn", "diloco is not installed as a package", "pip install .")]
    good, bad = [], []
    for text in required:
        requirement, _, marker = text.partition(";")
        if "extra" in marker:
            continue
        name, wanted = _split_requirement(requirement)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            bad.append((f"{name} is missing", f"{name}{wanted}"))
            continue
        if satisfies(version, wanted):
            good.append(f"{name} {version}")
        else:
            bad.append((f"{name} is {version}, not {wanted}", f"{name}{wanted}"))
    if bad:
        fix = "pip install " + " ".join(f'"{requirement}"' for _, requirement in bad)
        return [*found, Finding("packages", "fail", "; ".join(says for says, _ in bad), fix)]
    return [*found, _passed("packages", ", ".join(good))]


def _split_requirement(text: str) -> tuple[str, str]:
    """`torch<2.14,>=2.9` -> (torch, <2.14,>=2.9)."""
    match = re.match(r"\s*([A-Za-z0-9._-]+?)\s*((?:[<>=!~].*)?)$", text)
    return (match.group(1), match.group(2).replace(" ", "")) if match else (text.strip(), "")


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version is within `>=2.9,<2.14`. Only those two signs: our own requirements use no others."""
    have = _numbers(version)
    for part in filter(None, wanted.split(",")):
        if part.startswith(">=") and have < _numbers(part[2:]):
            return False
        if part.startswith("<") and not part.startswith("<=") and have >= _numbers(part[1:]):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The release part: 2.13.0+cpu -> (2, 13); zeros at the end say nothing."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match.group(0).split(".")] if match else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def extras(cfg: Config) -> list[Finding]:
    """Packages of the extras that this configuration uses. What only records a run is a warning, as in `train`."""
    wanted: list[tuple[str, str, Status, str]] = []
    if cfg.model.kind is ModelKind.huggingface:
        wanted.append(("transformers", "hf", "fail", "model.kind=huggingface"))
    if cfg.data.kind is DataKind.huggingface:
        wanted.append(("datasets", "hf", "fail", "data.kind=huggingface"))
    if cfg.logging.tensorboard:
        wanted.append(("tensorboard", "track", "warn", "logging.tensorboard=true"))
    if cfg.logging.wandb:
        wanted.append(("wandb", "track", "warn", "logging.wandb=true"))
    findings = []
    for package, extra, status, key in wanted:
        if find_spec(package) is None:
            fix = f'pip install "diloco[{extra}]"'
            findings.append(Finding("extras", status, f"{package} is missing, which {key} needs", fix))
        else:
            findings.append(_passed("extras", f"{package} for {key}"))
    return findings


def clock() -> list[Finding]:
    """Time must not go back: rates, timeouts and the tape are measured with this clock."""
    steady = time.get_clock_info("monotonic").monotonic
    readings = [time.monotonic() for _ in range(1000)]
    if not steady or any(b < a for a, b in itertools.pairwise(readings)):
        return [Finding("clock", "fail", "the monotonic clock of this machine goes back", "another machine or kernel")]
    return [_passed("clock", "monotonic")]


# ---- devices, cores, memory -----------------------------------------------------------------------


def devices(cfg: Config) -> list[Finding]:
    """The devices that the islands ask for."""
    from diloco_cli.train.island import resolve_device

    findings = []
    for names, asked, ranks in _alike(cfg):
        try:
            device = resolve_device(asked, ranks, ranks - 1)
        except EnvironmentNotReady as error:
            error.what = f"{names}: {error.what}"
            error.hint = f"islands.each.{error.hint}"
            findings.append(_failed("devices", error))
        else:
            one = f"{ranks} ranks on {device.type}" if ranks > 1 else device.type
            findings.append(_passed("devices", f"{names}: {one}{' (auto)' if asked is Device.auto else ''}"))
    return findings


def _alike(cfg: Config) -> Iterator[tuple[str, Device, int]]:
    """Islands with the same device and ranks, by name: ("island-0 and 3 more", cpu, 1)."""
    groups: dict[tuple[Device, int], list[str]] = {}
    for name in cfg.island_names():
        island = cfg.island(name)
        groups.setdefault((island.device, island.nproc_per_node), []).append(name)
    for (device, ranks), names in groups.items():
        yield names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), device, ranks


def processors(cfg: Config) -> list[Finding]:
    """CPU threads against cores."""
    from diloco_cli.run.children import available_cores, threads_per_rank

    cores = available_cores()
    on_cpu = [name for name in cfg.island_names() if _device_type(cfg, name) == "cpu"]
    ranks = sum(cfg.island(name).nproc_per_node for name in on_cpu)
    threads = sum(cfg.island(name).nproc_per_node * threads_per_rank(cfg, name) for name in on_cpu)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    says = f"{ranks} ranks on the CPU with {threads} threads in all, {cores} cores"
    says += f", OMP_NUM_THREADS={asked}" if asked else ""
    if ranks > cores:
        fix = f"islands.count={max(1, cores)}, or know that every step takes {ranks / cores:.1f} times as long"
        return [Finding("processors", "warn", says, fix)]
    if threads > cores:
        return [Finding("processors", "warn", f"{says}: they get in each other's way", _fewer_threads(cores, ranks))]
    return [_passed("processors", says)]


def _fewer_threads(cores: int, ranks: int) -> str:
    return f"islands.each.threads={max(1, cores // ranks)}, and OMP_NUM_THREADS not set"


def _device_type(cfg: Config, name: str) -> str:
    from diloco_cli.train.island import resolve_device

    island = cfg.island(name)
    try:
        return resolve_device(island.device, island.nproc_per_node, 0).type
    except EnvironmentNotReady:
        return island.device.value  # `devices` says so


def memory(cfg: Config, plan: dict[str, Any]) -> list[Finding]:
    """The plan's bytes per process against what is free, on this machine and on each of its GPUs."""
    base = _own_bytes()
    # torchrun's agent is a process of its own beside an island's ranks.
    host = base * len(cfg.island_names()) if cfg.launcher.kind is LauncherKind.torchrun else 0
    gpus: dict[int, int] = {}
    for process in plan["processes"]:
        ranks, each = process["ranks"], process["memory_bytes"]["total"]
        host += ranks * base
        on_gpu = process["process"] != "syncer" and _device_type(cfg, process["process"]) == "cuda"
        if on_gpu:
            for index in range(ranks):
                gpus[index] = gpus.get(index, 0) + each
        else:
            host += ranks * each
    return [_memory_finding(host, _available_bytes()), *_gpu_findings(gpus)]


def _memory_finding(needed: int, available: int | None) -> Finding:
    fix = "a smaller model, fewer islands, or islands.each.parallel=fsdp"
    if available is None:
        return Finding("memory", "warn", f"{format_bytes(needed)} needed; what is free is not known here")
    says = f"{format_bytes(needed)} needed without activations, {format_bytes(available)} available"
    if needed > available:
        return Finding("memory", "fail", says, fix)
    if needed > 0.8 * available:
        return Finding("memory", "warn", f"{says}: little is left for activations", f"{fix}, or a smaller batch")
    return _passed("memory", says)


def _gpu_findings(needed: dict[int, int]) -> list[Finding]:
    findings = []
    for index, num_bytes in sorted(needed.items()):
        import torch

        if index >= torch.cuda.device_count():
            continue  # `devices` says so
        free = torch.cuda.mem_get_info(index)[0]
        says = f"GPU {index}: {format_bytes(num_bytes)} needed without activations, {format_bytes(free)} free"
        fix = "a smaller model, islands.each.parallel=fsdp, or end what else is on it"
        findings.append(Finding("memory", "fail", says, fix) if num_bytes > free else _passed("memory", says))
    return findings


def _own_bytes() -> int:
    """Resident bytes of a process that has torch loaded: this one."""
    import torch  # noqa: F401

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        # Not Linux: the largest that it ever was, in bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _available_bytes() -> int | None:
    """Memory that new processes can have: what the kernel says, or the control group's limit if that is less."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            found.append(max(0, int(limit) - int((group / "memory.current").read_text())))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def open_files(cfg: Config) -> list[Finding]:
    """The limit of open files (ulimit -n) against islands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BASE_FILES + FILES_PER_ISLAND * len(cfg.island_names())
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return [_passed("open files", f"{'no limit' if soft == resource.RLIM_INFINITY else soft}, {needed} needed")]
    may = hard == resource.RLIM_INFINITY or hard >= needed
    fix = f"ulimit -n {needed}" if may else "a higher limit from the administrator, or fewer islands"
    return [Finding("open files", "fail", f"this shell allows {soft}, {needed} are needed", fix)]


def shared_memory(cfg: Config, path: Path = Path("/dev/shm")) -> list[Finding]:
    """Shared memory: the GPU ranks of one island talk through it; nothing else of ours does."""
    used = any(cfg.island(name).nproc_per_node > 1 and _device_type(cfg, name) == "cuda" for name in cfg.island_names())
    if not path.is_dir():
        return [_passed("shared memory", f"there is no {path}; it is not needed here")] if not used else []
    free = shutil.disk_usage(path).free
    says = f"{format_bytes(free)} free in {path}"
    if used and free < SHM_BYTES_MIN:
        return [
            Finding("shared memory", "warn", f"{says}; ranks of one island talk through it", "--shm-size=1g (docker)")
        ]
    return [_passed("shared memory", says if used else f"{says}; not needed here")]


# ---- network, disk, data --------------------------------------------------------------------------


def port(cfg: Config) -> list[Finding]:
    """The syncer's address can be had."""
    from diloco_cli.run.launcher import listening_socket

    with listening_socket(cfg) as sock:
        taken = sock.getsockname()[1]
    which = f"port {taken} is free" if cfg.network.port else "any free port"
    return [_passed("port", f"{cfg.bind_address()}: {which}")]


def run_dir(cfg: Config) -> list[Finding]:
    """run.dir (or the nearest folder above that is there) can be written, and knows locks."""
    from diloco_cli.run.rundir import RunDir, hold_lock

    parent = _existing(Path(cfg.run.dir))
    try:
        with tempfile.TemporaryDirectory(prefix=".diloco-doctor-", dir=parent) as made:
            (Path(made) / "probe").write_bytes(b"x" * 4096)
            hold_lock(RunDir(Path(made))).close()
    except OSError as error:
        says = f"{parent} cannot be written: {error.strerror or error}"
        return [Finding("run dir", "fail", says, "run.dir=FOLDER, or --run-dir FOLDER")]
    return [_passed("run dir", f"{cfg.run.dir} can be written")]


def _existing(path: Path) -> Path:
    path = path.expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def disk(cfg: Config, parameters: int) -> list[Finding]:
    """Space in run.dir for the snapshots that are kept, one in the making, and the final parameters."""
    snapshots = cfg.run.snapshot_keep + 1
    needed = snapshots * snapshot_bytes(cfg, parameters) + 4 * parameters
    free = shutil.disk_usage(_existing(Path(cfg.run.dir))).free
    says = (
        f"{format_bytes(needed)} for {snapshots} snapshots and the result, {format_bytes(free)} free in {cfg.run.dir}"
    )
    fix = "free some, or run.dir on another disk, or run.snapshot_keep=1"
    if needed > free:
        return [Finding("disk", "fail", says, fix)]
    if cfg.sync.record:
        says += "; sync.record=true keeps every contribution on top"
        return [Finding("disk", "warn", says, "sync.record=false, unless the run is to be replayed")]
    if needed > free / 2:
        return [Finding("disk", "warn", f"{says}: more than half of it", fix)]
    return [_passed("disk", says)]


def snapshot_bytes(cfg: Config, parameters: int) -> int:
    """One snapshot: parameters and momentum, and per island model and optimizer."""
    return parameters * (8 + 12 * len(cfg.island_names()))


def tokenizer(cfg: Config) -> list[Finding]:
    """It can be read."""
    from diloco_cli.train.tokenizer import load_tokenizer

    size = load_tokenizer(cfg.data.tokenizer).vocab_size
    return [_passed("tokenizer", f"{cfg.data.tokenizer}, vocabulary {size}")]


def data(cfg: Config) -> list[Finding]:
    """Every file (of a large folder: the first thousand) can be opened and holds something to read."""
    findings = _source(cfg, cfg.data.path, "data.path")
    if cfg.data.validation_path is not None:
        findings += _source(cfg, cfg.data.validation_path, "data.validation_path")
    return findings


def _source(cfg: Config, path: str | None, key: str) -> list[Finding]:
    from diloco_cli.train.documents import JSONL_SUFFIXES, list_files, resolve_kind

    kind = resolve_kind(cfg.data.kind, path)
    if kind is DataKind.stdlib:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(root.glob("*.py"))
    elif path is None or not (root := Path(path).expanduser()).exists():
        return [Finding("data", "fail", f"there is no {path!r}", f"{key}=FILE or FOLDER")]
    elif kind is DataKind.huggingface:
        files = sorted(file for file in root.rglob("*") if file.is_file())
    else:
        suffixes = {DataKind.jsonl: JSONL_SUFFIXES, DataKind.tokens: (".bin",)}.get(kind, ())
        files = [file for _, file in list_files(root, cfg.data.pattern, suffixes, None, key)]
    if not files:
        return [Finding("data", "fail", f"there is no file in {root}", f"{key}=FILE or FOLDER")]
    total = 0
    for file in files[:FILES_READ_MAX]:
        try:
            with open(file, "rb") as opened:
                opened.read(4096)
                total += os.fstat(opened.fileno()).st_size
        except OSError as error:
            fix = "data.pattern without it" if len(files) > 1 else f"{key}=FILE or FOLDER"
            fix = f"chmod +r {file}, or {fix}" if isinstance(error, PermissionError) else fix
            return [Finding("data", "fail", f"{file} cannot be read: {error.strerror or error}", fix)]
    if not total:
        return [Finding("data", "fail", f"all files in {root} are empty", f"{key}=FILE or FOLDER")]
    read = f"the first {FILES_READ_MAX} of {len(files)} files" if len(files) > FILES_READ_MAX else f"{len(files)} files"
    return [_passed("data", f"{kind.value} in {root}: {read} can be read, {format_bytes(total)}")]

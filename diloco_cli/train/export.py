"""The trained parameters on disk, and what one does with them afterwards.

Owns: RUN/final/ (model.safetensors, config.json, tokenizer files), loading it back, validation and sampling from it,
and the export to the layout that transformers loads. Must not run anything that a file names: tensors come
from safetensors, settings from JSON, and a model.entry_point found in a run folder is imported only when the caller
passes the same name as `allow_entry_point` (the run folder may be somebody else's).
Called by: run.syncer_main (save_final), `diloco evaluate`, `diloco generate`, `diloco export`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import shutil
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from diloco_cli.config.schema import Config, DataConfig, ModelConfig, ModelKind
from diloco_cli.errors import ConfigError, DilocoError
from diloco_cli.train.loop import evaluating, token_loss_sum
from diloco_cli.train.tensor_file import write_tensors
from diloco_cli.train.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer

FORMAT_VERSION = 1
MODEL_FILE, CONFIG_FILE, HF_CONFIG_FILE = "model.safetensors", "config.json", "hf_config.json"
T = TypeVar("T")


class LoadedRun(NamedTuple):
    """model: on the CPU, in evaluation mode; cfg: of it, only model, data and run.seed are those of the run."""

    model: nn.Module
    tokenizer: Tokenizer
    cfg: Config


# ---- saving -------------------------------------------------------------------------------------


def save_final(run_dir: str | Path, tensors: Mapping[str, Tensor], cfg: Config, tokenizer: Tokenizer) -> Path:
    """Write RUN/final/ so that it is there whole or not at all; an older one is replaced.

    Args:
        tensors: of all names of train.model.tensor_inventory, in the model's shapes; never all in memory at once.
        tokenizer: writes its own file.
    """
    run_dir = Path(run_dir)
    final, fresh, old = run_dir / "final", run_dir / ".final-new", run_dir / ".final-old"
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_tensors(fresh / MODEL_FILE, tensors)
    settings = {
        "format": "diloco",
        "format_version": FORMAT_VERSION,
        "model": dataclasses.asdict(cfg.model),
        "data": dataclasses.asdict(cfg.data),
        "vocab_size": int(tokenizer.vocab_size),
        "seed": cfg.run.seed,
    }
    _write_json(fresh / CONFIG_FILE, settings)
    tokenizer.save(fresh)
    if cfg.model.kind is ModelKind.huggingface and cfg.model.hf_config:
        source = Path(cfg.model.hf_config).expanduser()
        shutil.copyfile(source / CONFIG_FILE if source.is_dir() else source, fresh / HF_CONFIG_FILE)
    for path in fresh.iterdir():
        _flush_to_disk(path)
    if final.exists():
        os.replace(final, old)
    os.replace(fresh, final)
    _flush_to_disk(run_dir)
    shutil.rmtree(old, ignore_errors=True)
    return final


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=False) + "\n", encoding="utf-8")


def _flush_to_disk(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets a folder be opened and flushed
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ---- loading ------------------------------------------------------------------------------------


def final_folder(run_dir: str | Path) -> Path:
    """RUN/final, or an error that says what is missing."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        others = [p.name for p in run_dir.parent.iterdir() if p.is_dir()] if run_dir.parent.is_dir() else []
        close = difflib.get_close_matches(run_dir.name, sorted(others), n=1, cutoff=0.4)
        hint = (
            f"did you mean {run_dir.parent / close[0]}?" if close else "give a run folder, such as runs/NAME-DATE-TIME"
        )
        raise DilocoError(f"no such run: {run_dir}", where=str(run_dir), hint=hint)
    final = run_dir / "final"
    if not (final / MODEL_FILE).is_file() or not (final / CONFIG_FILE).is_file():
        raise DilocoError(
            f"run {run_dir.name} has no final parameters",
            where=str(final),
            why="they are written when a run reaches its target or is stopped in order",
            hint=f"look at {run_dir / 'logs'} for why it ended, or wait until it has",
        )
    return final


def load_final(run_dir: str | Path, *, allow_entry_point: str | None = None) -> LoadedRun:
    """The model of RUN/final with its tokenizer and settings.

    Args:
        allow_entry_point: the package.module:function that may be imported; only if the run names this very one.
    """
    from diloco_cli.train.model import build_model, meta_model, state_tensors

    final = final_folder(run_dir)
    settings = _read_settings(final / CONFIG_FILE)
    cfg = Config(
        model=from_plain(ModelConfig, settings.get("model"), where=f"{final / CONFIG_FILE}: model"),
        data=from_plain(DataConfig, settings.get("data"), where=f"{final / CONFIG_FILE}: data"),
    )
    seed, vocab_size = settings.get("seed", 0), settings.get("vocab_size")
    if type(seed) is not int or type(vocab_size) is not int:
        raise _damaged(final / CONFIG_FILE, "seed and vocab_size must be integers")
    cfg.run.seed = seed
    if cfg.model.kind is ModelKind.entry_point and (
        not allow_entry_point or allow_entry_point != cfg.model.entry_point
    ):
        raise DilocoError(
            f"this run's model is code of its own: {cfg.model.entry_point}",
            where=str(final / CONFIG_FILE),
            why=f"you allowed {allow_entry_point}" if allow_entry_point else "a run folder's code is not run unasked",
            hint=f"if you trust it: --trust-entry-point {cfg.model.entry_point}",
        )
    if (final / HF_CONFIG_FILE).is_file():
        cfg.model.hf_config = str(final / HF_CONFIG_FILE)
    tensors = _read_tensors(final / MODEL_FILE)
    if cfg.model.kind is ModelKind.llama:
        # Compared without storage first: a forged config.json must not make us allocate more than the file has.
        if max(cfg.model.num_layers, cfg.model.num_experts) > len(tensors):
            raise _damaged(final / MODEL_FILE, f"{len(tensors)} tensors are too few for the model in {CONFIG_FILE}")
        _check_shapes(state_tensors(meta_model(cfg.model, vocab_size)), tensors, final / MODEL_FILE)
    model = build_model(cfg.model, vocab_size, seed=0)
    _fill(state_tensors(model), tensors, final / MODEL_FILE)
    return LoadedRun(model.eval(), _load_tokenizer(final), cfg)


def _load_tokenizer(final: Path) -> Tokenizer:
    try:
        return load_tokenizer(str(final))
    except ConfigError as error:  # the user's configuration is not at fault here
        raise _damaged(final / TOKENIZER_FILE, error.what) from None


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(settings, dict) or settings.get("format") != "diloco":
        raise _damaged(path, "it is not a configuration that diloco has written")
    if settings.get("format_version") != FORMAT_VERSION:
        version = settings.get("format_version")
        raise DilocoError(
            f"format_version {version!r} is not known to this diloco",
            where=str(path),
            why=f"this one reads version {FORMAT_VERSION}",
            hint="use the diloco that wrote the run",
        )
    return settings


def _damaged(path: Path, why: str) -> DilocoError:
    return DilocoError(f"{path.name} is damaged", where=str(path), why=why, hint="take it from a copy of the run")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise _damaged(path, f"{error} (size {path.stat().st_size} bytes)") from None


def _check_shapes(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path) -> None:
    for name in sorted(targets.keys() ^ tensors.keys()):
        raise _damaged(path, f"tensor {name!r} is {'missing' if name in targets else 'not part of the model'}")
    for name, target in targets.items():
        if tensors[name].shape != target.shape:
            raise _damaged(path, f"tensor {name!r} has shape {list(tensors[name].shape)}, not {list(target.shape)}")


def _fill(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path) -> None:
    _check_shapes(targets, tensors, path)
    with torch.no_grad():
        for name, target in targets.items():
            value = tensors[name]
            if not target.is_floating_point() and value.is_floating_point():
                value = value >= 0.5 if target.dtype is torch.bool else value.round()
            target.copy_(value)


def from_plain(kind: type[T], value: Any, *, where: str) -> T:
    """A dataclass from plain JSON values; an unknown field or a wrong type is an error, nothing is looked up."""
    if not isinstance(value, dict):
        raise DilocoError("settings are missing", where=where)
    hints = typing.get_type_hints(kind)
    arguments = {}
    for name, item in value.items():
        if name not in hints:
            raise DilocoError(f"unknown setting {name!r}", where=where, hint="use the diloco that wrote the run")
        arguments[name] = _convert(hints[name], item, f"{where}.{name}")
    return kind(**arguments)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in typing.get_args(hint):
            return None
        return _convert(next(a for a in typing.get_args(hint) if a is not type(None)), value, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        if value in [member.value for member in hint]:
            return hint(value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise DilocoError(f"{value!r} is not a valid value", where=where)


# ---- validation and sampling --------------------------------------------------------------------


def pick_device(name: str = "auto") -> torch.device:
    """auto: cuda, mps or cpu, in this order of preference."""
    from diloco_cli.config.schema import Device
    from diloco_cli.train.island import resolve_device

    return resolve_device(Device(name), 1, 0)


def evaluate_run(
    run_dir: str | Path, max_sequences: int = 256, *, allow_entry_point: str | None = None, device: str = "auto"
) -> dict[str, Any]:
    """Loss of RUN/final on the validation text that its configuration names.

    Returns:
        run_dir; loss {validation, bigram} in nats per token (bigram: null where it was not measured); perplexity;
        tokens and sequences: how much was read.
    """
    from diloco_cli.train.data import bigram_loss, build_corpus, validation_batches

    run = load_final(run_dir, allow_entry_point=allow_entry_point)
    corpus = build_corpus(run.cfg.data, run.cfg.model.vocab_size)
    if corpus.tokenizer.vocab_size != run.tokenizer.vocab_size:
        raise DilocoError(
            f"the tokenizer now has {corpus.tokenizer.vocab_size} tokens, the run's had {run.tokenizer.vocab_size}",
            where=f"data.tokenizer={run.cfg.data.tokenizer}",
        )
    where = pick_device(device)
    model = run.model.to(where)
    total, tokens, sequences = 0.0, 0, 0
    with evaluating(model):
        for inputs, targets in validation_batches(corpus, run.cfg.data.seq_len, 8, max_sequences):
            total += float(token_loss_sum(model(inputs.to(where)), targets.to(where)))
            tokens += int((targets >= 0).sum())
            sequences += len(inputs)
    if not tokens:
        raise DilocoError("there is no validation text", where="data.validation_fraction, data.validation_path")
    loss = total / tokens
    return {
        "run_dir": str(run_dir),
        "loss": {"validation": loss, "bigram": bigram_loss(corpus, max_sequences=max_sequences)},
        "perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()),
        "tokens": tokens,
        "sequences": sequences,
    }


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    context: int | None = None,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """Continue a prompt; returns the new text only.

    Args:
        prompt: an empty one counts as a line break.
        temperature: 0 takes the likeliest token every time.
        top_k: sample among the k likeliest; 0: among all.
        seed: same seed, same text (on the same device).
        context: most recent tokens that the model sees (the window slides); at most what it was built for. The
            length it was trained with (data.seq_len) is the sensible value; None: no bound.
        on_text: called with each new piece of text as soon as its characters are complete.
    """
    if max_new_tokens < 0 or temperature < 0 or top_k < 0 or (context is not None and context < 1):
        raise DilocoError("max_new_tokens, temperature and top_k must not be negative, context at least 1")
    ids = [int(i) for i in tokenizer.encode(prompt or "\n")]
    device = next(model.parameters()).device
    # On the CPU whatever the model's device: one seed then means one text on every kind of machine, up to rounding.
    generator = torch.Generator().manual_seed(seed)
    start, shown = len(ids), 0
    with evaluating(model):
        for _ in range(max_new_tokens):
            window = ids[-context:] if context else ids
            logits = model(torch.tensor([window], device=device))[0, -1].float().cpu()
            ids.append(_sample(logits[: tokenizer.vocab_size], temperature, top_k, generator))
            if on_text is not None:
                text = tokenizer.decode(ids[start:])
                if not text.endswith("\ufffd") or len(text) - shown > 8:  # half a character: wait for the rest
                    on_text(text[shown:])
                    shown = len(text)
    text = str(tokenizer.decode(ids[start:]))
    if on_text is not None and len(text) > shown:
        on_text(text[shown:])
    return text


def _sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if 0 < top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = float("-inf")
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


# ---- export -------------------------------------------------------------------------------------


def export_llama(run_dir: str | Path, to_dir: str | Path, *, allow_entry_point: str | None = None) -> Path:
    """Write RUN/final in the layout that transformers' AutoModelForCausalLM and AutoTokenizer load.

    The built-in dense model becomes LlamaForCausalLM, the one with experts MixtralForCausalLM (same arithmetic: softmax
    over all experts, best k renormalised). transformers itself is not needed, except for model.kind=huggingface.
    """
    from safetensors.torch import save_file

    from diloco_cli.train.model import state_tensors

    to_dir = Path(to_dir)
    if to_dir.exists() and (not to_dir.is_dir() or any(to_dir.iterdir())):
        raise DilocoError(
            f"{to_dir} is there already and is not empty",
            where=str(to_dir),
            hint="give a new folder; nothing was written",
        )
    run = load_final(run_dir, allow_entry_point=allow_entry_point)
    model = run.cfg.model
    if model.kind is ModelKind.entry_point:
        raise DilocoError(
            "a model of your own has no Hugging Face layout",
            where=f"model.entry_point={model.entry_point}",
            hint=f"its tensors are in {final_folder(run_dir) / MODEL_FILE} (safetensors)",
        )
    to_dir.mkdir(parents=True, exist_ok=True)
    if model.kind is ModelKind.huggingface:
        typing.cast(Any, run.model).inner.save_pretrained(to_dir)
    else:
        tensors = {name: tensor.detach().contiguous() for name, tensor in state_tensors(run.model).items()}
        save_file(tensors, to_dir / MODEL_FILE, metadata={"format": "pt"})
        _write_json(to_dir / CONFIG_FILE, llama_config(model, tensors["model.embed_tokens.weight"].shape[0]))
        _write_json(to_dir / "generation_config.json", {"do_sample": True, "temperature": 0.8})
    _export_tokenizer(final_folder(run_dir), to_dir, model.max_seq_len)
    return to_dir


def llama_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """config.json for transformers (LlamaConfig or MixtralConfig), of version 4 and 5 alike."""
    experts = {
        "model_type": "mixtral",
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.router_aux_weight,
        "output_router_logits": False,
        "sliding_window": None,
    }
    dense = {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
    return {
        "architectures": ["MixtralForCausalLM" if model.num_experts else "LlamaForCausalLM"],
        **(experts if model.num_experts else dense),
        "vocab_size": vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.dim // model.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # version 4
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},  # version 5
        "tie_word_embeddings": model.tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }


def _export_tokenizer(final: Path, to_dir: Path, max_length: int) -> None:
    shutil.copyfile(final / TOKENIZER_FILE, to_dir / TOKENIZER_FILE)  # the byte tokenizer has one as well
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    _write_json(to_dir / "tokenizer_config.json", settings)

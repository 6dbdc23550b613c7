"""What is trained: the built-in Llama-style decoder, a Hugging Face causal model, or the user's own module.

Owns: construction and seeded initialisation on the CPU in float32, the parameter inventory that fragments are
made from, and counting parameters without allocating them. Every model maps tokens [B, T] (int64) to logits [B, T, V].
The built-in decoder has the names and the arithmetic of transformers' LlamaForCausalLM (with experts: of
MixtralForCausalLM's checkpoints), so that an export is a renaming of nothing.
Must not know of islands, optimizers or the network, nor touch torch's global random state.
Called by: train.loop, train.island, train.export, `diloco train --dry-run`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco_cli.config.schema import ModelConfig, ModelKind
from diloco_cli.core.fragments import TensorSpec
from diloco_cli.errors import ConfigError, EnvironmentNotReady


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; reduced in float32 whatever the input's type."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., dim]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary:
    """Tables of the rotary position embedding, made once per device and type.

    Not a module and not a buffer on purpose: DDP would broadcast buffers at every step, and a cast of the
    model to bfloat16 would round the angles.
    """

    def __init__(self, head_dim: int, theta: float, max_seq_len: int) -> None:
        self.head_dim, self.theta, self.max_seq_len = head_dim, theta, max_seq_len
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, seq_len: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [seq_len, 1, head_dim] of positions 0..seq_len-1; sin has the half-rotation's sign in it."""
        if seq_len > self.max_seq_len:
            raise ConfigError(
                f"a sequence of {seq_len} tokens is longer than the model's longest, {self.max_seq_len}",
                where="model.max_seq_len",
                hint=f"model.max_seq_len={seq_len} or data.seq_len={self.max_seq_len}",
            )
        key = (like.device, like.dtype)
        found = self._tables.get(key)
        if found is None or found[0].shape[0] < seq_len:
            found = self._tables[key] = self._compute(min(self.max_seq_len, max(256, 2 * seq_len)), like)
        return found[0][:seq_len], found[1][:seq_len]

    def _compute(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        half = self.head_dim // 2
        with torch.no_grad(), torch.device(like.device):
            inverse = 1.0 / self.theta ** (torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)
            angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
            cos = torch.cat((angles.cos(), angles.cos()), -1)
            sin = torch.cat((-angles.sin(), angles.sin()), -1)
        assert cos.shape == (length, 2 * half)
        return cos.to(like.dtype).unsqueeze(1), sin.to(like.dtype).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to heads [B, T, heads, head_dim] (transformers' half-rotation convention).

    x * cos + rotate_half(x) * sin, the minus sign of rotate_half being in the table.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.head_dim = cfg.dim // cfg.num_heads
        self.grouped = cfg.num_kv_heads != cfg.num_heads
        kv_dim = cfg.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.k_proj = nn.Linear(cfg.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(cfg.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(cfg.dim, cfg.dim, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Attend within [B, T, dim]."""
        batch, seq, _ = x.shape
        heads = (batch, seq, -1, self.head_dim)
        q, k, v = self.q_proj(x).view(heads), self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        cos, sin = rotary.tables(seq, q)
        q, k, v = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, seq, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Expert(nn.Module):
    """The same block under the names of Mixtral's checkpoints: w2(silu(w1(x)) * w3(x))."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, dim] -> [N, dim]."""
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class MixtureOfExperts(nn.Module):
    """Mixtral's sparse block: softmax over all experts, the best k renormalised, their outputs summed.

    After a forward in training mode `aux` holds this layer's load-balancing loss (Switch Transformer, eq. 4, summed
    over the k choices as in transformers): E * sum_e(choices of e per token * mean probability of e), k when uniform.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.top_k = cfg.experts_per_token
        self.gate = nn.Linear(cfg.dim, cfg.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(cfg.dim, cfg.ffn_dim) for _ in range(cfg.num_experts))
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Route [B, T, dim]; every token passes through exactly k experts, none is dropped."""
        flat = x.reshape(-1, x.shape[-1])
        probabilities = self.gate(flat).float().softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        if self.training:
            share = counts.to(probabilities.dtype) / flat.shape[0]
            self.aux = len(self.experts) * (share * probabilities.mean(0)).sum()
        order = chosen.flatten().argsort(stable=True)
        groups = torch.split(flat[order // self.top_k], counts.tolist())
        # Experts without a token run on zero rows: their (zero) gradients exist, which DDP and FSDP wait for.
        y = torch.cat([expert(group) for expert, group in zip(self.experts, groups, strict=True)])
        y = y[order.argsort()].view(flat.shape[0], self.top_k, -1)
        return torch.einsum("nk,nkd->nd", weights.to(y.dtype), y).view(x.shape)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.dim, cfg.norm_eps)
        # The two names are those of Llama's and of Mixtral's checkpoints.
        if cfg.num_experts:
            self.block_sparse_moe = MixtureOfExperts(cfg)
        else:
            self.mlp = FeedForward(cfg.dim, cfg.ffn_dim)
        self.sparse = bool(cfg.num_experts)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """[B, T, dim] -> [B, T, dim]."""
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        feed_forward = self.block_sparse_moe if self.sparse else self.mlp
        out: Tensor = x + feed_forward(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and the last norm; the part called `model` in Llama's parameter names."""

    def __init__(self, cfg: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, cfg.dim)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.rotary = Rotary(cfg.dim // cfg.num_heads, cfg.rope_theta, cfg.max_seq_len)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [B, T] -> [B, T, dim]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        y: Tensor = self.norm(x)
        return y


class Llama(nn.Module):
    """The built-in language model. With a tied head there is no `lm_head`: the embedding is used twice."""

    def __init__(self, cfg: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.model = Decoder(cfg, vocab_size)
        self.lm_head = None if cfg.tied else nn.Linear(cfg.dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [B, T] -> logits [B, T, V]."""
        x = self.model(tokens)
        y: Tensor = F.linear(x, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)
        return y


class HuggingFaceLM(nn.Module):
    """A transformers causal model that returns its logits only."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [B, T] -> logits [B, T, V]."""
        logits: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits


# ---- construction -------------------------------------------------------------------------------


def build_model(cfg: ModelConfig, vocab_size: int, seed: int) -> nn.Module:
    """The model on the CPU in float32, its initial values a function of (cfg, vocab_size, seed) alone.

    Args:
        vocab_size: the tokenizer's; `cfg.vocab_size` wins where it is set.
        seed: of this model's values; torch's global random state is left as it was.
    """
    vocab_size = resolve_vocab_size(cfg, vocab_size)
    if cfg.kind is ModelKind.llama:
        model: nn.Module = _build_llama(cfg, vocab_size, seed)
    else:
        build = _build_huggingface if cfg.kind is ModelKind.huggingface else _build_entry_point
        model = _seeded(seed, lambda: build(cfg, vocab_size)).to(torch.float32)
    return model.train()


def initial_values(cfg: ModelConfig, vocab_size: int, seed: int) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
    """What build_model makes, for whoever copies every value elsewhere: the built-in model never exists as a whole.

    Returns:
        A module with the names, shapes and types of build_model's (it may be without storage), and its state_tensors
        one after the other, each to be copied before the next is asked for.
    """
    if cfg.kind is not ModelKind.llama:
        whole = build_model(cfg, vocab_size, seed)
        return whole, iter(state_tensors(whole).items())
    model = meta_model(cfg, vocab_size)
    assert isinstance(model, Llama)
    assert len(state_tensors(model)) == len(list(model.parameters())), "a buffer's values would be missing"
    return model, _llama_values(model, seed)


def resolve_vocab_size(cfg: ModelConfig, tokenizer_vocab: int) -> int:
    """`model.vocab_size` if set (it may be padded up, never cut), else the tokenizer's."""
    if cfg.vocab_size is None:
        return tokenizer_vocab
    if cfg.vocab_size < tokenizer_vocab:
        raise ConfigError(
            f"model.vocab_size={cfg.vocab_size} is smaller than the tokenizer's vocabulary of {tokenizer_vocab}",
            where="model.vocab_size",
            hint=f"model.vocab_size={tokenizer_vocab} or null",
        )
    return cfg.vocab_size


def meta_model(cfg: ModelConfig, vocab_size: int) -> nn.Module:
    """The model without storage, for plans (`--dry-run`); its inventory is that of build_model.

    An entry point is called as it is, on the CPU: not every module can be made without storage.
    """
    vocab_size = resolve_vocab_size(cfg, vocab_size)
    if cfg.kind is ModelKind.entry_point:
        return build_model(cfg, vocab_size, seed=0)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        if cfg.kind is ModelKind.huggingface:
            return _build_huggingface(cfg, vocab_size)
        _check_llama(cfg, vocab_size)
        return Llama(cfg, vocab_size)


def count_parameters(cfg: ModelConfig, vocab_size: int) -> int:
    """Parameters, tied ones once, without allocating them (but see meta_model on entry points)."""
    return sum(p.numel() for p in meta_model(cfg, vocab_size).parameters())


def _check_llama(cfg: ModelConfig, vocab_size: int) -> None:
    sizes = {k: getattr(cfg, k) for k in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len")}
    for name, value in {**sizes, "vocab_size": vocab_size}.items():
        if value < 1:
            raise ConfigError(f"model.{name}={value} must be at least 1", where=f"model.{name}")
    if cfg.dim % cfg.num_heads or cfg.dim // cfg.num_heads % 2:
        raise ConfigError(
            f"model.dim={cfg.dim} must be an even multiple of model.num_heads={cfg.num_heads}",
            where="model.dim",
            why="each head rotates pairs of dim / num_heads features",
            hint=f"model.dim={2 * cfg.num_heads * max(1, round(cfg.dim / (2 * cfg.num_heads)))}",
        )
    if cfg.num_heads % cfg.num_kv_heads:
        fitting = [n for n in range(1, cfg.num_heads + 1) if cfg.num_heads % n == 0]
        raise ConfigError(
            f"model.num_kv_heads={cfg.num_kv_heads} must divide model.num_heads={cfg.num_heads}",
            where="model.num_kv_heads",
            hint=f"model.num_kv_heads={min(fitting, key=lambda n: abs(n - cfg.num_kv_heads))}",
        )
    if cfg.num_experts < 0 or (cfg.num_experts and not 1 <= cfg.experts_per_token <= cfg.num_experts):
        raise ConfigError(
            f"model.experts_per_token={cfg.experts_per_token} must lie between 1 and "
            f"model.num_experts={cfg.num_experts}",
            where="model.experts_per_token",
        )


def init_std(dim: int) -> float:
    """Standard deviation of every weight matrix at the start: sqrt(2 / (5 dim)), SmallInit (arXiv 1910.05895).

    It is Llama's 0.02 at 1000 features, and larger for narrow models: the tiny one, after 400 steps of one seed on
    the standard library, had a validation loss of 1.73 with it and of 1.83 with 0.02.
    """
    return math.sqrt(2 / (5 * dim))


def _build_llama(cfg: ModelConfig, vocab_size: int, seed: int) -> Llama:
    _check_llama(cfg, vocab_size)
    # Made on the meta device, so that torch's own initialisation (slow, and from the global random state) never runs.
    with torch.device("meta"):
        model = Llama(cfg, vocab_size)
    model.to_empty(device="cpu")
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, values in _llama_values(model, seed):
            parameters[name].copy_(values)
    return model


def _llama_values(model: Llama, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Initial values, parameter by parameter in name order; `model` is asked for shapes only."""
    std = init_std(model.model.embed_tokens.embedding_dim)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        values = torch.empty(parameter.shape)
        yield name, values.fill_(1.0) if values.dim() == 1 else values.normal_(0.0, std, generator=generator)


def _seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """Run somebody else's constructor with a seeded CPU generator; put the global one back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def _build_huggingface(cfg: ModelConfig, vocab_size: int) -> nn.Module:
    if not cfg.hf_config:
        raise ConfigError("model.kind=huggingface needs model.hf_config", where="model.hf_config", hint="a config.json")
    path = Path(cfg.hf_config).expanduser()
    if not path.exists():
        raise ConfigError(f"no such file or folder: {path}", where="model.hf_config")
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read a Hugging Face config: {file}", where="model.hf_config", why=str(error)
        ) from None
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise EnvironmentNotReady(
            "model.kind=huggingface needs the package transformers", why=str(error), hint="pip install 'diloco[hf]'"
        ) from None
    try:
        kind = settings.pop("model_type")
        config = AutoConfig.for_model(kind, **settings)
        if cfg.vocab_size is not None:
            config.vocab_size = vocab_size
        inner = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises whatever the model's own code raises
        raise ConfigError(
            f"transformers cannot build a causal model from {file}",
            where="model.hf_config",
            why=f"{type(error).__name__}: {error}",
        ) from error
    if config.vocab_size < vocab_size:
        raise ConfigError(
            f"the vocabulary of {config.vocab_size} in {file} is smaller than the tokenizer's {vocab_size}",
            where="model.hf_config",
            hint=f"model.vocab_size={vocab_size}",
        )
    return HuggingFaceLM(inner)


def _load_entry_point(name: str) -> Callable[..., Any]:
    """Import `package.module:function`; the working folder counts as importable, behind what is installed."""
    where = "model.entry_point"
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ConfigError(f"{name!r} is not of the form package.module:function", where=where)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        ours = missing == module_name or module_name.startswith(missing + ".")
        what = f"no module named {missing!r}" if ours else f"{module_name} imports {missing!r}, which is not installed"
        hint = f"looked in the working folder {os.getcwd()} and in the installed packages" if ours else ""
        raise ConfigError(what, where=where, hint=hint) from None
    except Exception as error:
        raise ConfigError(f"cannot import {module_name}", where=_deepest(error), why=_brief(error)) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None or not callable(function):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(
            f"{module_name} ({getattr(module, '__file__', '?')}) has no function {function_name!r}",
            where=where,
            hint=f"it has {', '.join(sorted(names)[:8])}" if names else "",
        )
    return function


def _build_entry_point(cfg: ModelConfig, vocab_size: int) -> nn.Module:
    """Call the user's function with entry_args (and vocab_size, where it takes one), and try the result once."""
    if not cfg.entry_point:
        raise ConfigError(
            "model.kind=entry_point needs model.entry_point=package.module:function", where="model.entry_point"
        )
    function = _load_entry_point(cfg.entry_point)
    arguments = dict(cfg.entry_args)
    signature = inspect.signature(function)
    if "vocab_size" in signature.parameters:
        arguments.setdefault("vocab_size", vocab_size)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{cfg.entry_point}{signature} does not take model.entry_args={arguments}",
            where="model.entry_args",
            why=str(error),
        ) from None
    try:
        model = function(**arguments)
    except Exception as error:
        raise ConfigError(f"{cfg.entry_point} failed", where=_deepest(error), why=_brief(error)) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{cfg.entry_point} returned {type(model).__name__}, not a torch.nn.Module", where="model.entry_point"
        )
    _probe(model, cfg.entry_point, vocab_size)
    return model


def _probe(model: nn.Module, name: str, vocab_size: int) -> None:
    """Two short sequences through the model: it must give [B, T, V] with V at least the vocabulary."""
    model.eval()
    try:
        with torch.no_grad():
            logits = model(torch.arange(16).remainder(vocab_size).view(2, 8))
    except Exception as error:
        raise ConfigError(
            f"the model of {name} fails on tokens int64 [2, 8]", where=_deepest(error), why=_brief(error)
        ) from error
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(logits, Tensor) or logits.dim() != 3 or shape[:2] != (2, 8) or logits.shape[2] < vocab_size:
        raise ConfigError(
            f"the model of {name} maps tokens [2, 8] to {shape}, not to logits [2, 8, {vocab_size}]",
            where="model.entry_point",
            why=f"the vocabulary has {vocab_size} entries (model.vocab_size, or the tokenizer's)",
        )


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _deepest(error: BaseException) -> str:
    """File and line where an exception was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""


# ---- what the rest of the program asks of a model -----------------------------------------------


def tensor_inventory(model: nn.Module) -> list[TensorSpec]:
    """Name, shape and role of every tensor that is synchronised, in name order.

    Parameters that are tied appear once, under the first of their names; buffers are those that a state_dict has.
    """
    embeddings, heads = _embeddings_and_heads(model)
    specs = []
    for name, tensor in state_tensors(model).items():
        role = "weight" if isinstance(tensor, nn.Parameter) else "buffer"
        if id(tensor) in embeddings:
            role = "embedding"
        elif id(tensor) in heads:
            role = "head"
        specs.append(TensorSpec(name, tuple(tensor.shape), role))
    return specs


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live tensors of tensor_inventory by name, in name order (not copies, not detached)."""
    found: dict[str, Tensor] = dict(model.named_parameters())  # without duplicates: a tied one has its first name
    seen = {id(tensor) for tensor in found.values()}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            persistent = name.rpartition(".")[2] not in module._non_persistent_buffers_set
            if persistent and id(buffer) not in seen:
                seen.add(id(buffer))
                found[name] = buffer
    return dict(sorted(found.items()))


def _embeddings_and_heads(model: nn.Module) -> tuple[set[int], set[int]]:
    """Identities of the embedding and the head weights; a tied weight counts as embedding only."""
    if isinstance(model, Llama):
        embeddings, heads = [model.model.embed_tokens], [model.lm_head]
    elif isinstance(model, HuggingFaceLM):
        inner: Any = model.inner
        embeddings, heads = [inner.get_input_embeddings()], [inner.get_output_embeddings()]
    else:
        # Nothing tells which linear layer of somebody's module is its head: it is merged like any other matrix.
        embeddings, heads = [m for m in model.modules() if isinstance(m, nn.Embedding)], []
    tied = {id(m.weight) for m in embeddings if m is not None}
    return tied, {id(m.weight) for m in heads if m is not None} - tied


def layer_modules(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in order, each to be sharded on its own (FSDP); the longest ModuleList, or nothing."""
    if isinstance(model, Llama):
        return list(model.model.layers)
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


def aux_loss(model: nn.Module) -> Tensor | None:
    """Load-balancing loss of the last training forward, mean over the layers (k when uniform); None without experts.

    Unweighted: the caller multiplies by model.router_aux_weight. Taken once: the graph isn't kept alive between steps.
    """
    losses = []
    for module in model.modules():
        if isinstance(module, MixtureOfExperts) and module.aux is not None:
            losses.append(module.aux)
            module.aux = None
    return torch.stack(losses).mean() if losses else None

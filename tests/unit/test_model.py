"""The built-in decoder against a slow reference written from the equations, and what is asked of every model."""

import math
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diloco_cli.config.compose import compose
from diloco_cli.config.schema import ModelConfig, ModelKind
from diloco_cli.errors import ConfigError, EnvironmentNotReady
from diloco_cli.train.model import (
    MixtureOfExperts,
    Rotary,
    aux_loss,
    build_model,
    count_parameters,
    initial_values,
    layer_modules,
    meta_model,
    rotate,
    state_tensors,
    tensor_inventory,
)

SMALL = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48}
VOCAB = 61


def config(**kwargs):
    return ModelConfig(**{**SMALL, **kwargs})


def noisy(cfg, seed=0, vocab=VOCAB):
    """A model whose every parameter matters (fresh norms are all ones, fresh logits almost zero)."""
    model = build_model(cfg, vocab, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def some_tokens(batch=2, seq=17, vocab=VOCAB, seed=5):
    return torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


# ---- reference ----------------------------------------------------------------------------------


def reference_logits(tensors, cfg, sequence):
    """Logits of one sequence in float64, position by position and head by head, from the published equations."""
    t = {name: tensor.detach().double() for name, tensor in tensors.items()}
    head_dim = cfg.dim // cfg.num_heads
    queries_per_kv = cfg.num_heads // cfg.num_kv_heads

    def norm(x, weight):
        return x / math.sqrt(float((x * x).mean()) + cfg.norm_eps) * weight

    def turned(x, position):
        """Pair (i, i + head_dim/2) turned by position * theta^(-2i/head_dim)."""
        y, half = torch.empty_like(x), head_dim // 2
        for i in range(half):
            angle = position * cfg.rope_theta ** (-2 * i / head_dim)
            a, b = float(x[i]), float(x[i + half])
            y[i], y[i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
        return y

    def swiglu(x, gate, up, down):
        return down @ (F.silu(gate @ x) * (up @ x))

    def feed_forward(x, prefix):
        if not cfg.num_experts:
            return swiglu(x, *(t[f"{prefix}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))
        prefix += ".block_sparse_moe"
        shares = torch.softmax(t[f"{prefix}.gate.weight"] @ x, 0)
        best = sorted(range(cfg.num_experts), key=lambda e: -float(shares[e]))[: cfg.experts_per_token]
        total = sum(float(shares[e]) for e in best)
        parts = (
            float(shares[e]) / total * swiglu(x, *(t[f"{prefix}.experts.{e}.w{n}.weight"] for n in (1, 3, 2)))
            for e in best
        )
        return sum(parts)

    stream = [t["model.embed_tokens.weight"][int(token)] for token in sequence]
    for layer in range(cfg.num_layers):
        prefix = f"model.layers.{layer}"
        keys, values = [], []
        for position, x in enumerate(stream):
            normed = norm(x, t[f"{prefix}.input_layernorm.weight"])
            q, k, v = ((t[f"{prefix}.self_attn.{n}_proj.weight"] @ normed).view(-1, head_dim) for n in ("q", "k", "v"))
            keys.append([turned(head, position) for head in k])
            values.append(list(v))
            heads = []
            for h in range(cfg.num_heads):
                kv, query = h // queries_per_kv, turned(q[h], position)
                scores = torch.stack([query @ key[kv] / math.sqrt(head_dim) for key in keys])
                weights = torch.softmax(scores, 0)
                heads.append(sum(w * value[kv] for w, value in zip(weights, values, strict=True)))
            x = x + t[f"{prefix}.self_attn.o_proj.weight"] @ torch.cat(heads)
            stream[position] = x + feed_forward(norm(x, t[f"{prefix}.post_attention_layernorm.weight"]), prefix)
    head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return torch.stack([head @ norm(x, t["model.norm.weight"]) for x in stream])


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"tied": False, "rope_theta": 500.0, "norm_eps": 1e-2},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1, "num_heads": 2},
        {"num_experts": 4, "experts_per_token": 2, "tied": False},
        {"num_experts": 3, "experts_per_token": 1},
    ],
)
def test_logits_equal_the_slow_reference(kwargs):
    cfg = config(**kwargs)
    model = noisy(cfg)
    tokens = some_tokens(2, 9)
    with torch.no_grad():
        logits = model(tokens)
    assert logits.shape == (2, 9, VOCAB)
    for row, sequence in zip(logits, tokens, strict=True):
        torch.testing.assert_close(
            row.double(), reference_logits(state_tensors(model), cfg, sequence), rtol=1e-4, atol=1e-4
        )


def transformers_model(folder, cfg, model):
    """The same weights, saved as they are and loaded by transformers."""
    transformers = pytest.importorskip(
        "transformers", reason="NOT TESTED: equality with Hugging Face Llama and Mixtral (transformers is missing)"
    )
    from safetensors.torch import save_file

    common = {
        "vocab_size": VOCAB,
        "hidden_size": cfg.dim,
        "intermediate_size": cfg.ffn_dim,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "tie_word_embeddings": cfg.tied,
    }
    if cfg.num_experts:
        hf = transformers.MixtralConfig(
            **common, num_local_experts=cfg.num_experts, num_experts_per_tok=cfg.experts_per_token, sliding_window=None
        )
        hf.architectures = ["MixtralForCausalLM"]
    else:
        hf = transformers.LlamaConfig(**common)
        hf.architectures = ["LlamaForCausalLM"]
    hf.save_pretrained(folder)
    save_file({k: v.detach() for k, v in state_tensors(model).items()}, folder / "model.safetensors", {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("kwargs", [{}, {"tied": False}, {"num_experts": 4, "tied": False}])
def test_transformers_loads_the_tensors_as_they_are_with_equal_logits(tmp_path, kwargs):
    cfg = config(**kwargs)
    model = noisy(cfg)
    other = transformers_model(tmp_path, cfg, model)
    tokens = some_tokens(2, 300)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), other(tokens).logits, rtol=1e-4, atol=1e-4)


# ---- properties of the decoder ------------------------------------------------------------------


@pytest.mark.parametrize("experts", [0, 4])
def test_a_later_token_changes_no_earlier_logits(experts):
    model = noisy(config(num_experts=experts)).eval()
    tokens = some_tokens(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-5, atol=1e-6)
    assert ((before[:, 7:] - after[:, 7:]).abs().amax(-1) > 1e-4).all()  # every later position sees it


def test_grouped_queries_equal_repeated_key_heads():
    grouped_cfg, full_cfg = config(num_kv_heads=2), config(num_kv_heads=4)
    grouped, full = noisy(grouped_cfg), noisy(full_cfg)
    state = dict(grouped.state_dict())
    for name in [n for n in state if "k_proj" in n or "v_proj" in n]:
        state[name] = state[name].view(2, 1, 8, 32).repeat(1, 2, 1, 1).reshape(32, 32)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(some_tokens()), full(some_tokens()), rtol=1e-5, atol=1e-5)


def test_rotation_keeps_norms_and_sees_only_distances():
    rotary = Rotary(head_dim=8, theta=100.0, max_seq_len=64)
    q, k = torch.randn(8, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 8)
    cos, sin = rotary.tables(40, q)
    turned_q = rotate(q.expand(1, 40, 1, 8), cos, sin)[0, :, 0]
    turned_k = rotate(k.expand(1, 40, 1, 8), cos, sin)[0, :, 0]
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(40))
    products = turned_q @ turned_k.T
    for distance in range(-10, 11):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert (products[0, 1:10] - products[0, 0]).abs().min() > 1e-3
    torch.testing.assert_close(turned_q[0], q)


def test_rotary_tables_grow_and_end_at_max_seq_len():
    model = noisy(config(max_seq_len=700))
    model.eval()
    tokens = some_tokens(1, 700)
    with torch.no_grad():
        short = model(tokens[:, :5])
        long = model(tokens)
    torch.testing.assert_close(short, long[:, :5], rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"a sequence of 701 tokens is longer than the model's longest, 700"):
        model(some_tokens(1, 701))


def test_every_parameter_gets_a_gradient_also_of_experts_without_tokens():
    model = noisy(config(num_experts=8, experts_per_token=1, tied=False))
    model(some_tokens(1, 2)).sum().backward()  # two tokens reach at most two of eight experts
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_agree_with_differences():
    cfg = config(num_layers=1)
    model = noisy(cfg).double()
    tokens, targets = some_tokens(2, 6), some_tokens(2, 6, seed=9)

    def loss():
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    loss().backward()
    for name, parameter in model.named_parameters():
        index = int(parameter.grad.abs().argmax())
        flat, step = parameter.data.view(-1), 1e-6
        flat[index] += step
        above = loss().item()
        flat[index] -= 2 * step
        below = loss().item()
        flat[index] += step
        expected = (above - below) / (2 * step)
        assert float(parameter.grad.view(-1)[index]) == pytest.approx(expected, rel=1e-4, abs=1e-8), name


# ---- experts ------------------------------------------------------------------------------------


def test_aux_loss_of_uniform_and_of_collapsed_routing():
    cfg = config(num_experts=4, experts_per_token=2)
    block = build_model(cfg, VOCAB, 0).model.layers[0].block_sparse_moe
    assert isinstance(block, MixtureOfExperts)
    x = torch.randn(8, 16, cfg.dim, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        block.gate.weight.zero_()  # all probabilities 1/4: E * sum_e(choices_e / 4) = k whatever is chosen
    block(x)
    assert block.aux.item() == pytest.approx(2.0)
    with torch.no_grad():
        block.gate.weight[0], block.gate.weight[1] = 1000.0, 500.0
    block(x.abs())  # all tokens to experts 0 (probability 1) and 1 (probability 0): E * (1 * 1 + 1 * 0)
    assert block.aux.item() == pytest.approx(4.0)


def test_aux_loss_is_the_mean_over_layers_once_and_has_a_gradient():
    model = noisy(config(num_experts=4))
    model(some_tokens())
    expected = sum(layer.block_sparse_moe.aux.item() for layer in model.model.layers) / 2
    loss = aux_loss(model)
    assert float(loss.detach()) == pytest.approx(expected)
    loss.backward()
    assert all(float(layer.block_sparse_moe.gate.weight.grad.abs().max()) > 0 for layer in model.model.layers)
    assert aux_loss(model) is None
    model.eval()
    model(some_tokens())
    assert aux_loss(model) is None
    assert aux_loss(build_model(config(), VOCAB, 0)) is None


# ---- construction -------------------------------------------------------------------------------


def test_initialisation_is_the_seeds_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = build_model(config(), VOCAB, 3)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    b, c = build_model(config(), VOCAB, 3), build_model(config(), VOCAB, 4)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.model.embed_tokens.weight, c.model.embed_tokens.weight)
    weights = torch.cat([p.detach().flatten() for p in a.parameters() if p.dim() > 1])
    assert float(weights.std()) == pytest.approx(math.sqrt(2 / (5 * 32)), rel=0.02)
    assert float(weights.mean()) == pytest.approx(0.0, abs=2e-3)
    assert all((p == 1).all() for p in a.parameters() if p.dim() == 1)
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in a.parameters())


@pytest.mark.parametrize("kwargs", [{}, {"tied": False}, {"num_experts": 4}, {"num_kv_heads": 1}])
def test_counted_parameters_are_the_allocated_ones(kwargs):
    cfg = config(**kwargs)
    model = build_model(cfg, VOCAB, 0)
    assert count_parameters(cfg, VOCAB) == sum(p.numel() for p in model.parameters())
    assert tensor_inventory(meta_model(cfg, VOCAB)) == tensor_inventory(model)


def test_a_large_model_is_counted_without_memory():
    cfg = ModelConfig(
        dim=5120, num_layers=38, num_heads=40, num_kv_heads=8, ffn_dim=14336, vocab_size=131072, tied=False
    )
    attention, ffn = 5120 * 5120 * 2 + 2 * 5120 * 1024, 3 * 5120 * 14336
    assert count_parameters(cfg, 256) == 38 * (attention + ffn + 2 * 5120) + 2 * 131072 * 5120 + 5120


def test_inventory_names_shapes_and_roles():
    tied = {s.name: s for s in tensor_inventory(build_model(config(), VOCAB, 0))}
    assert list(tied) == sorted(tied)
    assert tied["model.embed_tokens.weight"].shape == (VOCAB, 32)
    assert {s.role for s in tied.values()} == {"embedding", "weight"}
    assert "lm_head.weight" not in tied
    untied = {s.name: s.role for s in tensor_inventory(build_model(config(tied=False), VOCAB, 0))}
    assert [n for n, role in untied.items() if role == "head"] == ["lm_head.weight"]
    assert [n for n, role in untied.items() if role == "embedding"] == ["model.embed_tokens.weight"]
    assert {"model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"} <= set(untied)


class Foreign(nn.Module):
    """Tied weights, a persistent and a fleeting buffer, an integer one, and blocks in a list."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])
        self.head = nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, tokens):
        return self.head(self.blocks[0](self.embed(tokens).transpose(1, 2)).transpose(1, 2))


def test_inventory_of_a_foreign_module():
    model = Foreign()
    specs = {s.name: s.role for s in tensor_inventory(model)}
    assert specs["embed.weight"] == "embedding"
    assert "head.weight" not in specs
    assert "cache" not in specs
    assert specs["scale"] == specs["blocks.1.running_mean"] == specs["blocks.0.num_batches_tracked"] == "buffer"
    assert state_tensors(model)["scale"] is model.scale
    assert state_tensors(model)["embed.weight"] is model.head.weight
    assert list(state_tensors(model)) == list(specs)
    assert layer_modules(model) == list(model.blocks)
    assert len(layer_modules(build_model(config(), VOCAB, 0))) == 2
    assert layer_modules(nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dim": 30}, "model.dim=30 must be an even multiple of model.num_heads=4"),
        ({"dim": 36}, "model.dim=36 must be an even multiple"),  # heads of 9 cannot be rotated in pairs
        ({"num_kv_heads": 3}, r"num_kv_heads=3 must divide model\.num_heads=4[\s\S]*num_kv_heads=[24]"),
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token=3 must lie between 1 and model.num_experts=2"),
        ({"num_experts": -1}, "num_experts=-1"),
        ({"vocab_size": 10}, "model.vocab_size=10 is smaller than the tokenizer's vocabulary of 61"),
    ],
)
def test_bad_shapes_are_refused_before_anything_is_made(kwargs, message):
    for make in (lambda: build_model(config(**kwargs), VOCAB, 0), lambda: count_parameters(config(**kwargs), VOCAB)):
        with pytest.raises(ConfigError, match=message):
            make()


def test_a_padded_vocabulary_is_the_models():
    assert build_model(config(vocab_size=64), VOCAB, 0)(some_tokens(1, 2)).shape == (1, 2, 64)


# ---- entry points -------------------------------------------------------------------------------

USER_MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
    def forward(self, tokens):
        return self.head(self.embed(tokens))

def make(vocab_size, width=8):
    return Net(vocab_size, width)
def narrow():
    return Net(7, 8)
def two_d(vocab_size):
    return nn.Sequential(Net(vocab_size, 8), nn.Flatten())
def no_module():
    return "a string"
def broken():
    raise RuntimeError("out of ideas")
def wrong_input():
    return nn.Linear(3, 3)
constant = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_net.py").write_text(textwrap.dedent(USER_MODULE))
    (tmp_path / "needy_net.py").write_text("import surely_not_installed\n")
    (tmp_path / "typo_net.py").write_text("def f(:\n")
    yield tmp_path
    for name in ("my_net", "needy_net", "typo_net"):
        sys.modules.pop(name, None)


def entry(name, **arguments):
    return ModelConfig(kind=ModelKind.entry_point, entry_point=name, entry_args=arguments)


def test_an_entry_point_in_the_working_folder(user_module):
    cfg = entry("my_net:make", width=6)
    before = torch.get_rng_state()
    model, again, other = build_model(cfg, VOCAB, 1), build_model(cfg, VOCAB, 1), build_model(cfg, VOCAB, 2)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    assert model(some_tokens()).shape == (2, 17, VOCAB)
    assert torch.equal(model.head.weight, again.head.weight)
    assert not torch.equal(model.head.weight, other.head.weight)
    assert {s.name: s.role for s in tensor_inventory(model)} == {
        "embed.weight": "embedding",
        "head.weight": "weight",
        "head.bias": "weight",
    }
    assert count_parameters(cfg, VOCAB) == VOCAB * 6 + VOCAB * 6 + VOCAB


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("my_net", {}, "'my_net' is not of the form package.module:function"),
        ("no_such_net:make", {}, r"no module named 'no_such_net'[\s\S]*looked in the working folder"),
        ("my_net.deeper:make", {}, "my_net"),
        ("needy_net:make", {}, "needy_net imports 'surely_not_installed', which is not installed"),
        ("typo_net:f", {}, r"cannot import typo_net[\s\S]*SyntaxError"),
        ("my_net:mke", {}, r"my_net.py\) has no function 'mke'[\s\S]*make"),
        ("my_net:constant", {}, "no function 'constant'"),
        ("my_net:make", {"depth": 2}, r"does not take model.entry_args=[\s\S]*'depth'"),
        ("my_net:broken", {}, r"my_net:broken failed[\s\S]*my_net.py:\d+[\s\S]*RuntimeError: out of ideas"),
        ("my_net:no_module", {}, r"returned str, not a torch\.nn\.Module"),
        ("my_net:narrow", {}, r"fails on tokens int64 \[2, 8\][\s\S]*IndexError"),
        ("my_net:two_d", {}, r"maps tokens \[2, 8\] to \(2, 488\), not to logits \[2, 8, 61\]"),
        ("my_net:wrong_input", {}, r"fails on tokens int64 \[2, 8\]"),
    ],
)
def test_entry_point_errors(user_module, name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_model(entry(name, **arguments), VOCAB, 0)


# ---- Hugging Face -------------------------------------------------------------------------------


def huggingface(path, **kwargs):
    return ModelConfig(kind=ModelKind.huggingface, hf_config=str(path), **kwargs)


HF_JSON = (
    '{"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,'
    ' "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": %s, "torch_dtype": "bfloat16"}'
)


@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_model_from_its_config(tmp_path, tied):
    pytest.importorskip("transformers", reason="NOT TESTED: kind=huggingface (transformers is missing)")
    (tmp_path / "config.json").write_text(HF_JSON % str(tied).lower())
    before = torch.get_rng_state()
    model, again = build_model(huggingface(tmp_path), VOCAB, 1), build_model(huggingface(tmp_path), VOCAB, 1)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert model(some_tokens()).shape == (2, 17, VOCAB)
    roles = {s.name: s.role for s in tensor_inventory(model) if s.role != "weight"}
    expected = {"inner.model.embed_tokens.weight": "embedding"}
    assert roles == (expected if tied else {**expected, "inner.lm_head.weight": "head"})
    file = tmp_path / "config.json"
    assert count_parameters(huggingface(file), VOCAB) == sum(p.numel() for p in model.parameters())
    assert tensor_inventory(meta_model(huggingface(file), VOCAB)) == tensor_inventory(model)
    assert len(layer_modules(model)) == 2
    assert build_model(huggingface(file, vocab_size=70), VOCAB, 0)(some_tokens()).shape[-1] == 70
    with pytest.raises(ConfigError, match="vocabulary of 61"):
        build_model(huggingface(file), 100, 0)


def test_hugging_face_errors(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no such file or folder"):
        build_model(huggingface(tmp_path / "x"), VOCAB, 0)
    with pytest.raises(ConfigError, match=r"cannot read a Hugging Face config: .*config\.json"):
        build_model(huggingface(tmp_path), VOCAB, 0)
    (tmp_path / "config.json").write_text(HF_JSON % "true")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EnvironmentNotReady, match=r"needs the package transformers[\s\S]*diloco\[hf\]"):
        build_model(huggingface(tmp_path), VOCAB, 0)


def test_an_unknown_hugging_face_model_type_is_refused(tmp_path):
    pytest.importorskip("transformers", reason="NOT TESTED: kind=huggingface (transformers is missing)")
    (tmp_path / "config.json").write_text('{"model_type": "llamma"}')
    with pytest.raises(ConfigError, match=r"cannot build a causal model from .*config\.json[\s\S]*llamma"):
        build_model(huggingface(tmp_path), VOCAB, 0)
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(ConfigError, match="model_type"):
        build_model(huggingface(tmp_path), VOCAB, 0)


@pytest.mark.parametrize("name", ["tiny", "moe-tiny"])
def test_values_made_one_by_one_are_those_of_the_whole_model(name):
    cfg = compose([f"model={name}"], None).model
    whole = state_tensors(build_model(cfg, 256, seed=5))
    names, values = initial_values(cfg, 256, seed=5)
    assert all(t.is_meta for t in state_tensors(names).values())
    assert tensor_inventory(names) == tensor_inventory(build_model(cfg, 256, seed=5))
    found = {name: t.clone() for name, t in values}
    assert list(found) == list(whole)
    assert all(torch.equal(found[name], whole[name]) for name in whole)

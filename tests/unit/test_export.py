"""RUN/final: written whole, read back bit for bit, damaged or hostile files refused, sampling and export."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch

from diloco_cli.config.schema import Config, DataConfig, DataKind, ModelConfig, ModelKind
from diloco_cli.errors import DilocoError
from diloco_cli.train import export
from diloco_cli.train.data import bigram_loss, build_corpus
from diloco_cli.train.model import build_model, state_tensors
from diloco_cli.train.tokenizer import ByteTokenizer


def config(**model) -> Config:
    sizes = {"dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, "max_seq_len": 64}
    return Config(model=ModelConfig(**(sizes | model)), data=DataConfig(seq_len=16))


def saved(run_dir: Path, cfg: Config, seed: int = 4):
    tensors = {n: t.detach().clone() for n, t in state_tensors(build_model(cfg.model, 256, seed)).items()}
    run_dir.mkdir(exist_ok=True)
    export.save_final(run_dir, tensors, cfg, ByteTokenizer())
    return tensors


def edit_config(run_dir: Path, **changes):
    path = run_dir / "final" / "config.json"
    settings = json.loads(path.read_text())
    for key, value in changes.items():
        group, _, field = key.partition("__")
        if field:
            settings[group][field] = value
        else:
            settings[group] = value
    path.write_text(json.dumps(settings))


# ---- save and load ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{}, {"tied": False}, {"num_experts": 3}])
def test_loads_back_bit_for_bit(tmp_path, model):
    cfg = config(**model)
    cfg.run.seed = 11
    cfg.data.heterogeneity = 0.5
    tensors = saved(tmp_path / "run", cfg)
    run = export.load_final(tmp_path / "run")
    found = state_tensors(run.model)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert run.cfg.model == cfg.model
    assert run.cfg.data == cfg.data
    assert run.cfg.run.seed == 11
    assert run.tokenizer.vocab_size == 256
    assert not run.model.training
    assert sorted(p.name for p in (tmp_path / "run" / "final").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_saving_again_replaces_and_a_failed_save_leaves_the_old_one(tmp_path):
    cfg = config()
    saved(tmp_path, cfg, seed=1)
    second = saved(tmp_path, cfg, seed=2)

    class Broken(ByteTokenizer):
        def save(self, folder):
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        export.save_final(tmp_path, saved(tmp_path / "other", cfg, seed=3), cfg, Broken())
    found = state_tensors(export.load_final(tmp_path).model)
    assert all(torch.equal(found[name], second[name]) for name in second)
    third = saved(tmp_path, cfg, seed=3)
    found = state_tensors(export.load_final(tmp_path).model)
    assert all(torch.equal(found[name], third[name]) for name in third)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_environment_of_islands_is_not_written(tmp_path):
    cfg = config()
    cfg.islands.each.env = {"WANDB_API_KEY": "hunter2"}
    saved(tmp_path, cfg)
    assert all(b"hunter2" not in p.read_bytes() for p in (tmp_path / "final").iterdir())


# ---- refusals -----------------------------------------------------------------------------------


def test_unknown_run_names_the_nearest(tmp_path):
    saved(tmp_path / "first-run-20260101-101010", config())
    with pytest.raises(DilocoError) as error:
        export.load_final(tmp_path / "first-run-20260101-101011")
    assert "no such run" in error.value.what
    assert "first-run-20260101-101010" in error.value.hint


def test_run_without_final(tmp_path):
    with pytest.raises(DilocoError, match="no final parameters"):
        export.load_final(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_tensors_are_refused(tmp_path, keep):
    saved(tmp_path, config())
    path = tmp_path / "final" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DilocoError, match=r"model\.safetensors is damaged") as error:
        export.load_final(tmp_path)
    assert str(path) in error.value.where


def test_a_header_that_announces_the_world_is_refused(tmp_path):
    saved(tmp_path, config())
    path = tmp_path / "final" / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 10**15) + path.read_bytes()[8:])
    with pytest.raises(DilocoError, match="damaged"):
        export.load_final(tmp_path)


def test_tensors_of_another_model_are_refused(tmp_path):
    saved(tmp_path, config())
    edit_config(tmp_path, model__ffn_dim=32)
    with pytest.raises(DilocoError) as error:
        export.load_final(tmp_path)
    assert "has shape" in error.value.why
    edit_config(tmp_path, model__ffn_dim=24, model__num_layers=3)
    with pytest.raises(DilocoError) as error:
        export.load_final(tmp_path)
    assert "missing" in error.value.why
    # Nothing of this size may be allocated before the file has been found not to hold it.
    for changes in ({"model__num_layers": 10**9}, {"model__num_layers": 2, "model__dim": 2**24}):
        edit_config(tmp_path, **changes)
        with pytest.raises(DilocoError, match="damaged"):
            export.load_final(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__dim": "16"}, "not a valid value"),
        ({"model__dim": True}, "not a valid value"),
        ({"model__kind": "pickle"}, "not a valid value"),
        ({"model___target_": "os.system"}, "unknown setting"),
        ({"model": None}, "settings are missing"),
        ({"format": "other"}, "damaged"),
        ({"format_version": 99}, "format_version 99"),
        ({"vocab_size": "many"}, "damaged"),
    ],
)
def test_strange_settings_are_refused(tmp_path, changes, message):
    saved(tmp_path, config())
    edit_config(tmp_path, **changes)
    with pytest.raises(DilocoError, match=message):
        export.load_final(tmp_path)


def test_settings_that_are_no_json_are_refused(tmp_path):
    saved(tmp_path, config())
    (tmp_path / "final" / "config.json").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(DilocoError, match=r"config\.json is damaged"):
        export.load_final(tmp_path)


@pytest.fixture
def marker_module(tmp_path, monkeypatch):
    """An importable module that leaves a mark when imported and when called."""
    mark = tmp_path / "mark"
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "marker_of_export.py").write_text(
        "import torch\n"
        "def leave(word):\n"
        f"    with open({str(mark)!r}, 'a') as file:\n"
        "        file.write(word)\n"
        "leave('imported ')\n"
        "def build(vocab_size):\n"
        "    leave('called ')\n"
        "    return torch.nn.Sequential(torch.nn.Embedding(vocab_size, 4), torch.nn.Linear(4, vocab_size))\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    yield mark
    sys.modules.pop("marker_of_export", None)


def test_code_that_a_run_folder_names_is_not_run_unasked(tmp_path, marker_module):
    name = "marker_of_export:build"
    run_dir = tmp_path / "run"
    saved(run_dir, config())
    edit_config(run_dir, model__kind="entry_point", model__entry_point=name)
    for attempt in (
        lambda: export.load_final(run_dir),
        lambda: export.load_final(run_dir, allow_entry_point="something.else:build"),
        lambda: export.load_final(run_dir, allow_entry_point=""),
        lambda: export.evaluate_run(run_dir),
        lambda: export.export_llama(run_dir, tmp_path / "out"),
    ):
        with pytest.raises(DilocoError) as error:
            attempt()
        assert f"--trust-entry-point {name}" in error.value.hint
    assert not marker_module.exists()
    assert "marker_of_export" not in sys.modules


def test_code_that_the_caller_names_is_run(tmp_path, marker_module):
    name = "marker_of_export:build"
    cfg = config(kind=ModelKind.entry_point, entry_point=name)
    tensors = saved(tmp_path / "run", cfg)
    assert "called" in marker_module.read_text()
    run = export.load_final(tmp_path / "run", allow_entry_point=name)
    assert torch.equal(state_tensors(run.model)["0.weight"], tensors["0.weight"])
    with pytest.raises(DilocoError, match="no Hugging Face layout"):
        export.export_llama(tmp_path / "run", tmp_path / "out", allow_entry_point=name)
    assert not (tmp_path / "out").exists()


# ---- validation and sampling --------------------------------------------------------------------


def test_evaluate_run_is_the_mean_over_the_held_out_text(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(10):
        (text / f"{i}.txt").write_text(f"{i} one fish two fish red fish blue fish. " * 20)
    cfg = config()
    cfg.data = DataConfig(kind=DataKind.text, path=str(text), seq_len=16, validation_fraction=0.2)
    saved(tmp_path / "run", cfg)
    report = export.evaluate_run(tmp_path / "run", 7, device="cpu")
    corpus = build_corpus(cfg.data)
    assert report["sequences"] == 7
    assert report["tokens"] == 7 * 16
    assert report["loss"]["bigram"] == bigram_loss(corpus, max_sequences=7)
    assert report["perplexity"] == pytest.approx(2.718281828 ** report["loss"]["validation"], rel=1e-6)
    whole = export.evaluate_run(tmp_path / "run", 10**6, device="cpu")
    assert whole["tokens"] == corpus.validation.num_tokens - 1
    text = torch.empty(corpus.validation.num_tokens, dtype=torch.int64)
    corpus.validation.read(0, text.numpy())
    model, nats = export.load_final(tmp_path / "run").model, 0.0
    with torch.no_grad():
        for start in range(0, len(text) - 1, 16):
            piece = text[start : start + 17]
            nats -= float(model(piece[None, :-1])[0].log_softmax(-1).gather(1, piece[1:, None]).sum())
    assert whole["loss"]["validation"] == pytest.approx(nats / (len(text) - 1), rel=1e-5)


class Alphabet(torch.nn.Module):
    """The next letter for sure: tells whether sampling looks at the last token, and how long the window was."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(50.0))
        self.lengths = []

    def forward(self, tokens):
        self.lengths.append(tokens.shape[1])
        return torch.nn.functional.one_hot((tokens + 1) % 256, 256) * self.scale


def test_generate_slides_its_window_and_streams_whole_characters():
    model, pieces = Alphabet(), []
    text = export.generate(
        model, ByteTokenizer(), "ab", max_new_tokens=6, temperature=0, context=4, on_text=pieces.append
    )
    assert text == "cdefgh"
    assert "".join(pieces) == text
    assert model.lengths == [2, 3, 4, 4, 4, 4]
    assert model.training

    class Euro(Alphabet):
        def forward(self, tokens):
            after = {0x20: 0xE2, 0xE2: 0x82, 0x82: 0xAC, 0xAC: 0x20}
            following = torch.tensor([[after[int(t)] for t in row] for row in tokens])
            return torch.nn.functional.one_hot(following, 256) * self.scale

    pieces.clear()
    assert export.generate(Euro(), ByteTokenizer(), " ", max_new_tokens=7, on_text=pieces.append) == "€ €"
    assert pieces == ["€", " ", "€"]


def test_generate_is_a_function_of_the_seed():
    model = build_model(config().model, 256, 0)

    def sample(**options):
        return export.generate(model, ByteTokenizer(), "x", max_new_tokens=20, **options)

    assert sample(seed=1) == sample(seed=1)
    assert sample(seed=1) != sample(seed=2)
    assert sample(seed=1, top_k=1) == sample(seed=2, temperature=0)
    assert export.generate(model, ByteTokenizer(), "", max_new_tokens=3, seed=1)
    assert sample(temperature=0, context=5) is not None
    with pytest.raises(DilocoError):
        sample(temperature=-1)


# ---- export -------------------------------------------------------------------------------------


def test_export_has_the_layout_that_transformers_loads(tmp_path):
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    tensors = saved(tmp_path / "run", config(tied=False))
    out = export.export_llama(tmp_path / "run", tmp_path / "hf")
    settings = json.loads((out / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert (settings["hidden_size"], settings["num_key_value_heads"], settings["vocab_size"]) == (16, 1, 256)
    assert settings["tie_word_embeddings"] is False
    found = load_file(out / "model.safetensors")
    assert found.keys() == tensors.keys() >= {"model.layers.1.self_attn.k_proj.weight", "lm_head.weight"}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    text = "def f():\n\treturn 'né€😀'  # two  spaces\x00"
    ids = Tokenizer.from_file(str(out / "tokenizer.json")).encode(text).ids
    assert ids == list(text.encode())
    assert (out / "generation_config.json").is_file()
    assert (out / "tokenizer_config.json").is_file()


def test_experts_become_mixtral(tmp_path):
    saved(tmp_path / "run", config(num_experts=3, experts_per_token=2))
    settings = json.loads((export.export_llama(tmp_path / "run", tmp_path / "hf") / "config.json").read_text())
    assert settings["architectures"] == ["MixtralForCausalLM"]
    assert (settings["num_local_experts"], settings["num_experts_per_tok"]) == (3, 2)


def test_export_overwrites_nothing(tmp_path):
    saved(tmp_path / "run", config())
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    with pytest.raises(DilocoError, match="not empty"):
        export.export_llama(tmp_path / "run", full)
    with pytest.raises(DilocoError, match="not empty"):
        export.export_llama(tmp_path / "run", full / "thesis.txt")
    assert [p.name for p in full.iterdir()] == ["thesis.txt"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert export.export_llama(tmp_path / "run", empty) == empty

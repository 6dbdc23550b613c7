"""Corpus, shards and cursor: against the text itself, by properties, and every error by its file and place."""

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.schema import DataConfig, DataKind
from diloco_cli.errors import ConfigError, EnvironmentNotReady
from diloco_cli.train import data as data_module
from diloco_cli.train.data import (
    IGNORE,
    Corpus,
    ShardCursor,
    TokenStream,
    bigram_loss,
    build_corpus,
    shard_windows,
    validation_batches,
)
from diloco_cli.train.documents import Document, holdout_cuts
from diloco_cli.train.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer


def stream_of(*pieces, **kwargs):
    documents = [Document(f"d{i}", f"/f{i}", np.asarray(p, dtype=np.uint16)) for i, p in enumerate(pieces)]
    return TokenStream(documents, **kwargs)


def corpus_of(train, validation=(1, 2, 3), *, seq_len=4, vocab_size=65536):
    train = train if isinstance(train, TokenStream) else stream_of(train)
    return Corpus(train, stream_of(validation), ByteTokenizer(), vocab_size, seq_len, "digest")


def text_config(path, **kwargs):
    return DataConfig(kind=DataKind.auto, path=str(path), **{"seq_len": 8, **kwargs})


def write_tree(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


# ---- windows ------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda s: sum(s) >= 2),
    seq_len=st.integers(1, 17),
)
@settings(max_examples=150, deadline=None)
def test_every_token_but_the_first_is_predicted_once_from_its_predecessor(sizes, seq_len):
    total = sum(sizes)
    pieces = np.split(np.arange(total), np.cumsum(sizes)[:-1])  # segments, empty ones among them
    stream = stream_of(*pieces)
    tokens, targets = stream.windows(range(stream.num_windows(seq_len)), seq_len)
    real = targets != IGNORE
    assert targets[real].tolist() == list(range(1, total))
    assert (targets[real] - 1).tolist() == tokens[real].tolist()
    assert (tokens[~real][1:] == 0).all()  # the first padded target's input may be the stream's last token
    assert tokens.dtype == targets.dtype
    assert str(tokens.dtype) == "torch.int64"


def test_only_the_last_window_is_padded():
    tokens, targets = stream_of(range(10, 20)).windows([0, 1, 2], 4)
    assert tokens.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19, 0, 0]]
    assert targets.tolist() == [[11, 12, 13, 14], [15, 16, 17, 18], [19, IGNORE, IGNORE, IGNORE]]
    assert stream_of(range(9)).num_windows(4) == 2  # 8 predictions fill two windows


# ---- shards and cursor --------------------------------------------------------------------------

shard_cases = {
    "num_windows": st.integers(8, 400),
    "seed": st.integers(0, 2**31),
    "heterogeneity": st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
}


@given(num_learners=st.integers(1, 8), **shard_cases)
@settings(max_examples=150, deadline=None)
def test_shards_are_disjoint_complete_and_even(num_windows, num_learners, seed, heterogeneity):
    shards = [shard_windows(num_windows, i, num_learners, seed, heterogeneity) for i in range(num_learners)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(num_windows))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(batch=st.sampled_from([2, 4, 6, 10]), **shard_cases)
@settings(max_examples=60, deadline=None)
def test_one_epoch_of_4_learners_with_2_ranks_reads_every_window_once(num_windows, seed, heterogeneity, batch):
    corpus = corpus_of(range(num_windows * 4 + 1))
    assert corpus.num_windows == num_windows
    found = []
    for learner in range(4):
        ranks = [ShardCursor(corpus, learner, 4, rank, 2, batch, seed, heterogeneity) for rank in range(2)]
        shard = len(ranks[0].shard)
        ids = []
        while len(ids) < shard:
            for cursor in ranks:
                tokens, targets, names = cursor.next_batch()
                assert tokens.shape == targets.shape == (batch // 2, 4)
                assert tokens[:, 0].tolist() == [int(name) * 4 for name in names]  # ids are those of the content
                ids += names
        assert len(set(ids[:shard])) == shard
        found += ids[:shard]
    assert sorted(map(int, found)) == list(range(num_windows))


def test_heterogeneity_moves_from_one_mix_to_contiguous_slices():
    windows, learners = 4000, 4

    def own_slice_share(heterogeneity):
        shard = shard_windows(windows, 2, learners, 7, heterogeneity)
        return np.mean((shard >= 2000) & (shard < 3000))

    assert own_slice_share(1.0) == 1.0
    assert own_slice_share(0.0) == pytest.approx(0.25, abs=0.04)
    assert own_slice_share(0.5) == pytest.approx(0.5 + 0.5 * 0.25, abs=0.04)


def test_epochs_come_in_different_orders_and_a_batch_reaches_over_the_border():
    corpus = corpus_of(range(10 * 4 + 1))
    cursor = ShardCursor(corpus, 0, 1, 0, 1, 4, 3)
    ids = [i for _ in range(5) for i in cursor.next_batch()[2]]  # 20 ids = two epochs
    assert sorted(map(int, ids[:10])) == sorted(map(int, ids[10:])) == list(range(10))
    assert ids[:10] != ids[10:]
    assert cursor.epoch == 2


@given(
    steps=st.integers(0, 30),
    batch=st.sampled_from([2, 8]),
    rank=st.integers(0, 1),
    heterogeneity=st.sampled_from([0.0, 0.4]),
)
@settings(max_examples=40, deadline=None)
def test_a_resumed_cursor_goes_on_as_the_uninterrupted_one(steps, batch, rank, heterogeneity):
    corpus = corpus_of(range(101))

    def cursor():
        return ShardCursor(corpus, 1, 2, rank, 2, batch, 5, heterogeneity)

    straight, stopped, resumed = cursor(), cursor(), cursor()
    for _ in range(steps):
        straight.next_batch()
        stopped.next_batch()
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for _ in range(12):
        a, b = straight.next_batch(), resumed.next_batch()
        assert a[2] == b[2]
        assert a[0].equal(b[0])
        assert a[1].equal(b[1])


def test_a_position_in_another_shard_is_refused():
    corpus = corpus_of(range(101))
    state = ShardCursor(corpus, 0, 4, 0, 1, 4, 5).state_dict()
    with pytest.raises(ConfigError, match="learner_index=0, this run has learner_index=1"):
        ShardCursor(corpus, 1, 4, 0, 1, 4, 5).load_state_dict(state)


def test_permutations_are_pinned_bit_for_bit():
    # Islands with different releases of numpy must agree on the shards, else they share samples.
    assert data_module.permutation(12, "shards", 0).tolist() == [9, 11, 5, 7, 4, 2, 3, 0, 8, 10, 1, 6]
    assert data_module.permutation(12, "shards", 1).tolist() != [9, 11, 5, 7, 4, 2, 3, 0, 8, 10, 1, 6]


def test_cursor_errors():
    corpus = corpus_of(range(41))
    with pytest.raises(ConfigError, match="batch of 3 sequences does not divide among 2 ranks"):
        ShardCursor(corpus, 0, 1, 0, 2, 3, 0)
    with pytest.raises(ConfigError, match=r"heterogeneity=1\.5"):
        ShardCursor(corpus, 0, 1, 0, 1, 1, 0, 1.5)
    with pytest.raises(ConfigError, match="10 windows of 4 tokens are too few for 11 learners"):
        ShardCursor(corpus, 0, 11, 0, 1, 1, 0)


# ---- hold-out -----------------------------------------------------------------------------------


def windows_text(corpus, stream):
    """Every (input, target) row of a stream as bytes."""
    tokens, targets = stream.windows(range(stream.num_windows(corpus.seq_len)), corpus.seq_len)
    rows = np.concatenate((tokens[:, :1].numpy(), np.where(targets.numpy() == IGNORE, 0, targets.numpy())), axis=1)
    return [bytes(row.astype(np.uint8)) for row in rows]


def test_validation_documents_are_never_trained_on(tmp_path):
    rng = np.random.default_rng(0)
    files = {f"f{i:02}.txt": bytes(rng.integers(97, 123, 200).astype(np.uint8)) for i in range(40)}
    corpus = build_corpus(text_config(write_tree(tmp_path, files), validation_fraction=0.1))
    held_out = set(corpus.validation.names)
    assert held_out | set(corpus.train.names) == set(files)
    assert not held_out & set(corpus.train.names)
    assert len(held_out) == 4
    learners = [ShardCursor(corpus, i, 2, 0, 1, 4, 0) for i in range(2)]
    seen = {int(i) for cursor in learners for _ in range(len(cursor.shard)) for i in cursor.next_batch()[2]}
    assert seen == set(range(corpus.num_windows))
    trained = [files[n] for n in corpus.train.names]
    for row in windows_text(corpus, corpus.train):
        pieces = [p for p in row.split(b"\0") if p]
        assert all(any(piece in text for text in trained) for piece in pieces)
        assert not any(piece in files[name] for name in held_out for piece in pieces if len(piece) > 5)
    validated = bytes(corpus.validation.segments[0])
    assert validated == b"".join(files[name] + b"\0" for name in sorted(held_out))


def test_one_document_keeps_its_end_for_validation_without_overlap(tmp_path):
    text = bytes(range(1, 201))
    path = tmp_path / "book.txt"
    path.write_bytes(text)
    corpus = build_corpus(text_config(path, validation_fraction=0.1))
    assert corpus.train.num_tokens == 181  # 180 and the separator
    train, validation = (np.concatenate(s.segments).tolist() for s in (corpus.train, corpus.validation))
    assert bytes(train[:-1]) == text[:180]
    assert bytes(validation[:-1]) == text[180:]


@given(sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=200), fraction=st.floats(0.01, 0.5))
@settings(max_examples=150, deadline=None)
def test_holdout_is_close_to_the_fraction_and_never_everything(sizes, fraction):
    cuts = holdout_cuts([f"n{i}" for i in range(len(sizes))], sizes, fraction)
    held = sum(s - c for s, c in zip(sizes, cuts, strict=True))
    assert all(0 <= c <= s for s, c in zip(sizes, cuts, strict=True))
    assert held <= fraction * sum(sizes) + 0.5 * len(sizes)
    assert held >= 0.5 * fraction * sum(sizes) - 0.5 * len(sizes)


def test_validation_path_inside_the_training_folder_is_not_trained_on(tmp_path):
    write_tree(tmp_path, {"a.txt": "a" * 100, "b.txt": "b" * 100, "held/v.txt": "v" * 50})
    corpus = build_corpus(text_config(tmp_path, validation_path=str(tmp_path / "held")))
    assert corpus.train.names == ["a.txt", "b.txt"]
    assert corpus.validation.names == ["v.txt"]
    assert ord("v") not in corpus.train.segments[0]


def test_validation_windows_are_spread_and_the_same_each_time():
    corpus = corpus_of(range(100), range(0, 401), seq_len=4)
    firsts = [int(t) for tokens, _ in validation_batches(corpus, 4, 3, 5) for t in tokens[:, 0]]
    assert firsts == [0, 80, 160, 240, 320]
    assert sum(len(t) for t, _ in validation_batches(corpus, 4, 16)) == 100


def test_stdlib_is_read_without_tests_and_split_by_files():
    corpus = build_corpus(DataConfig())
    names = corpus.train.names + corpus.validation.names
    assert "json/decoder.py" in names
    assert not [n for n in names if {"test", "tests", "idlelib", "lib2to3", "site-packages"} & set(n.split("/")[:-1])]
    total = corpus.train.num_tokens + corpus.validation.num_tokens
    assert total > 5_000_000
    assert 0.04 < corpus.validation.num_tokens / total < 0.06
    assert corpus.digest == build_corpus(DataConfig()).digest
    assert corpus.digest != build_corpus(DataConfig(validation_fraction=0.06)).digest


# ---- bigram -------------------------------------------------------------------------------------


def test_bigram_by_hand():
    # Training 0 0 1 0: pairs 00, 01, 10. Row 0: counts (1, 1) of 2; row 1: (1, 0) of 1. V = 2.
    # Validation 0 1 1: P(1|0) = 2/4, P(1|1) = 1/3.
    corpus = corpus_of([0, 0, 1, 0], [0, 1, 1], seq_len=4, vocab_size=2)
    assert bigram_loss(corpus) == pytest.approx(-(math.log(2 / 4) + math.log(1 / 3)) / 2)
    # One window of one prediction only: what the model is evaluated on.
    assert bigram_loss(corpus, seq_len=1, max_sequences=1) == pytest.approx(-math.log(2 / 4))
    assert bigram_loss(corpus, max_vocab=1) is None


def test_bigram_counts_pairs_over_segment_and_chunk_borders(monkeypatch):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 5, 1000)
    whole = corpus_of(tokens, tokens[:200], vocab_size=5)
    cut = corpus_of(stream_of(*np.split(tokens, [3, 3, 500])), tokens[:200], vocab_size=5)
    expected = bigram_loss(whole)
    monkeypatch.setattr(TokenStream, "chunks", lambda self, size, chunks=TokenStream.chunks: chunks(self, 7))
    assert bigram_loss(cut) == pytest.approx(expected, rel=1e-12)


# ---- sources and their errors -------------------------------------------------------------------


def test_kinds_are_told_from_the_path(tmp_path):
    write_tree(tmp_path, {"t/a.md": "x", "j/a.jsonl": "{}", "b/a.bin": b"1234", "h/dataset_info.json": "{}"})
    kinds = {n: data_module.resolve_kind(DataKind.auto, str(tmp_path / n)).value for n in ("t", "j", "b", "h")}
    assert kinds == {"t": "text", "j": "jsonl", "b": "tokens", "h": "huggingface"}
    assert data_module.resolve_kind(DataKind.auto, None) is DataKind.stdlib


def test_text_folder_pattern_hidden_and_empty_files(tmp_path):
    files = {"a.py": "a" * 90, "sub/b.py": "b" * 90, "c.txt": "c" * 90, ".git/d.py": "d" * 90, "e.py": ""}
    corpus = build_corpus(text_config(write_tree(tmp_path, files), pattern="**/*.py"))
    assert sorted({*corpus.train.names, *corpus.validation.names}) == ["a.py", "sub/b.py"]
    assert len(corpus.warnings) == 1
    assert "1 empty documents skipped" in corpus.warnings[0]
    assert str(tmp_path / "e.py") in corpus.warnings[0]


def test_json_lines(tmp_path):
    lines = [json.dumps({"body": f"line {i} ü" * 5}) for i in range(50)]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(lines) + "\n\n")
    corpus = build_corpus(text_config(path, text_field="body"))
    assert len(corpus.train.names) + len(corpus.validation.names) == 50
    assert "line 7 ü" in corpus.tokenizer.decode(corpus.train.segments[0]) + corpus.tokenizer.decode(
        corpus.validation.segments[0]
    )


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ('{"text": ', r"x\.jsonl, line 2 \(byte 14\): not valid JSON"),
        ('{"txt": "a"}', r"x\.jsonl, line 2 \(byte 14\): no key 'text'"),
        ('{"text": 3}', r"x\.jsonl, line 2 \(byte 14\): 'text' is int, not text"),
        ("[1]", r"x\.jsonl, line 2 \(byte 14\): no key 'text'"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, second, message):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' + second + "\n")
    with pytest.raises(ConfigError, match=message):
        build_corpus(text_config(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "nothing.txt", "no such file or folder: .*nothing.txt"),
        ({"e.txt": ""}, "e.txt", r"no text in .*e\.txt: all of its 1 documents are empty"),
        ({"d/.hidden": "x"}, "d", r"no files in .*/d match"),
        ({"s.txt": "short"}, "s.txt", r"s\.txt has \d tokens to train on, too few for one window of 8 \+ 1"),
        ({"o.bin": b"123"}, "o.bin", r"o\.bin has 3 bytes, not a multiple of 2"),
        ({"o.bin": b""}, "o.bin", r"o\.bin is empty"),
    ],
)
def test_source_errors_name_the_file(tmp_path, files, path, message):
    write_tree(tmp_path, files)
    with pytest.raises(ConfigError, match=message):
        build_corpus(text_config(tmp_path / path))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that even root cannot read")
@pytest.mark.parametrize("kind", [DataKind.text, DataKind.jsonl])
def test_an_unreadable_file_is_named(kind):
    with pytest.raises(ConfigError, match="cannot read /proc/self/mem"):
        build_corpus(DataConfig(kind=kind, path="/proc/self/mem"))


def test_file_names_need_not_be_utf8(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "wb") as file:
        file.write(b"x" * 300)
    write_tree(tmp_path, {"a.txt": "a" * 300})
    assert build_corpus(text_config(tmp_path)).train.num_tokens > 500


@pytest.mark.parametrize("pattern", ["", "/abs/*"])
def test_a_bad_pattern_is_refused(tmp_path, pattern):
    write_tree(tmp_path, {"a.txt": "a"})
    with pytest.raises(ConfigError, match="is no file pattern"):
        build_corpus(text_config(tmp_path, pattern=pattern))


@pytest.mark.parametrize("key", [{"validation_fraction": 0.0}, {"validation_fraction": 1.0}, {"seq_len": 0}])
def test_bad_settings_are_refused(tmp_path, key):
    write_tree(tmp_path, {"a.txt": "a" * 100})
    with pytest.raises(ConfigError, match=next(iter(key))):
        build_corpus(text_config(tmp_path / "a.txt", **key))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_mapped_joined_and_checked(tmp_path, dtype):
    a, b = np.arange(300), np.arange(300, 500)
    for name, tokens in {"a.bin": a, "b.bin": b}.items():
        tokens.astype(dtype).tofile(tmp_path / name)
    cfg = text_config(tmp_path, token_dtype=dtype, validation_fraction=0.1)
    corpus = build_corpus(cfg, vocab_size=500)
    # Two files cannot give a tenth as a whole, so each keeps its end.
    assert [len(s) for s in corpus.train.segments] == [270, 180]
    assert np.concatenate(corpus.validation.segments).tolist() == [*range(270, 300), *range(480, 500)]
    tokens, _ = corpus.train.windows([0, 33], 8)
    assert tokens[1].tolist() == [264, 265, 266, 267, 268, 269, 300, 301]
    place = (
        rf"b\.bin: token id 450 at token 150 \(byte {150 * np.dtype(dtype).itemsize}\) is outside the vocabulary of 450"
    )
    with pytest.raises(ConfigError, match=place):
        build_corpus(cfg, vocab_size=450)
    with pytest.raises(ConfigError, match=r"a\.bin: token id 256 at token 256"):
        build_corpus(cfg)
    # The held-out end is checked too, and named by its place in the file, not in the part.
    with pytest.raises(ConfigError, match=r"b\.bin: token id 490 at token 190"):
        build_corpus(cfg, vocab_size=490)


def test_large_token_files_are_checked_as_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(data_module, "SCAN_LIMIT_BYTES", 10)
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "a.bin")
    corpus = build_corpus(text_config(tmp_path / "a.bin"), vocab_size=200)
    corpus.train.windows([0], 8)
    with pytest.raises(ConfigError, match=r"a\.bin: token id 200 at token 200 \(byte 400\)"):
        corpus.train.windows([24], 8)


def test_a_token_file_that_gets_shorter_is_named_and_kills_nobody(tmp_path):
    """A map of a file that was truncated is a SIGBUS: the process would be gone without a word."""
    file = tmp_path / "a.bin"
    np.arange(300, dtype=np.uint16).tofile(file)
    corpus = build_corpus(text_config(file), vocab_size=300)
    corpus.train.windows([20], 8)
    os.truncate(file, 100)
    corpus.train.windows([0], 8)
    with pytest.raises(ConfigError, match=r"a\.bin: the file ends at byte 100, and is read up to byte 338"):
        corpus.train.windows([20], 8)
    file.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*a\.bin"):
        corpus.train.windows([0], 8)


def test_a_file_that_cannot_be_read_is_named_with_the_place():
    # Reading the memory of a process at address 0 is an I/O error, for root too.
    with pytest.raises(ConfigError, match=r"cannot read /proc/self/mem at byte 0") as caught:
        build_corpus(text_config(Path("/proc/self/mem")))
    assert "Input/output error" in caught.value.why


def test_hugging_face_data_set(tmp_path):
    datasets = pytest.importorskip(
        "datasets", reason="NOT TESTED: Hugging Face data sets (package datasets is missing)"
    )
    rows = datasets.Dataset.from_dict({"text": [f"row {i} " * 20 for i in range(40)]})
    rows.save_to_disk(str(tmp_path / "set"))
    corpus = build_corpus(text_config(tmp_path / "set"))
    assert len(corpus.train.names) + len(corpus.validation.names) == 40
    with pytest.raises(ConfigError, match="no column 'body'"):
        build_corpus(text_config(tmp_path / "set", text_field="body"))


@pytest.mark.parametrize(("package", "kind"), [("datasets", DataKind.huggingface), ("tokenizers", DataKind.text)])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package, kind):
    monkeypatch.setitem(sys.modules, package, None)
    write_tree(tmp_path, {"set/dataset_info.json": "{}", "tokenizer.json": "{}"})
    cfg = DataConfig(kind=kind, path=str(tmp_path / "set"))
    if package == "tokenizers":
        cfg.tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(EnvironmentNotReady, match=rf"needs the package {package}[\s\S]*diloco\[hf\]"):
        build_corpus(cfg)


# ---- tokenizers ---------------------------------------------------------------------------------


def trained_tokenizer(folder, special=()):
    tokenizers = pytest.importorskip("tokenizers", reason="NOT TESTED: tokenizer files (package tokenizers is missing)")
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(["the cat sat on the mat, the end"] * 20, trainer)
    found.enable_truncation(4)
    path = folder / "tokenizer.json"
    found.save(str(path))
    return path


def test_a_tokenizer_file_cuts_text_and_separates_documents(tmp_path):
    path = trained_tokenizer(tmp_path, ["<|endoftext|>"])
    write_tree(tmp_path / "text", {f"{i:02}.txt": f"the cat {i} sat on the mat. " * 9 for i in range(30)})
    write_tree(tmp_path / "text", {"99.txt": b"the \xff\xfe end " * 9})
    corpus = build_corpus(text_config(tmp_path / "text", tokenizer=str(path), pattern="*.txt"))
    assert corpus.vocab_size == corpus.tokenizer.vocab_size <= 300
    assert corpus.train.segments[0].dtype == np.uint16
    assert np.count_nonzero(corpus.train.segments[0] == corpus.tokenizer.separator) == len(corpus.train.names)
    text = corpus.tokenizer.decode(corpus.train.segments[0])
    assert "the cat 3 sat on the mat. the cat" in text  # not truncated, although the file says so
    assert corpus.train.num_tokens < 0.7 * len(text)
    assert "1 documents are not UTF-8" in corpus.warnings[0]
    assert "99.txt" in corpus.warnings[0]


def test_bytes_do_not_care_about_utf8(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe" * 100)
    corpus = build_corpus(text_config(tmp_path / "x.txt"))
    assert not corpus.warnings
    assert corpus.train.segments[0][:2].tolist() == [255, 254]


def test_saved_tokenizers_load_again(tmp_path):
    tokenizer = ByteTokenizer()
    text = "def f(x): \n\treturn 'ä→' + \x00 "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    tokenizer.save(tmp_path)
    assert isinstance(load_tokenizer(str(tmp_path)), ByteTokenizer)
    pytest.importorskip("tokenizers", reason="NOT TESTED: tokenizer files (package tokenizers is missing)")
    library = FileTokenizer(tmp_path / "tokenizer.json")  # the library reads the same mapping from it
    assert library.vocab_size == 256
    assert library.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert library.decode(library.encode(text)) == text
    (tmp_path / "b").mkdir()
    library.save(tmp_path / "b")
    assert (tmp_path / "b/tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()


def test_tokenizer_errors(tmp_path):
    with pytest.raises(ConfigError, match="no such tokenizer: 'byts'"):
        load_tokenizer("byts")
    (tmp_path / "tokenizer.json").write_text("{}")
    pytest.importorskip("tokenizers", reason="NOT TESTED: tokenizer files (package tokenizers is missing)")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_ids_of_a_padded_vocabulary_decode_to_nothing():
    assert ByteTokenizer().decode([104, 300, 105]) == "hi"

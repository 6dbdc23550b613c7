"""Text to token ids and back: raw bytes, or a tokenizer.json of the `tokenizers` library.

Owns: the two tokenizers and which id separates documents. Both are saved as a tokenizer.json that transformers loads.
Must not know of corpora or models. The `tokenizers` package is imported only when a file is asked for.
Called by: train.data (to build a corpus), train.export (to save), `diloco generate`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco_cli.errors import ConfigError, EnvironmentNotReady

TOKENIZER_FILE = "tokenizer.json"
END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]", "<|im_end|>")
"""Names under which a tokenizer file may have its end-of-document token, in order of preference."""

Tokens = npt.NDArray[np.generic]


class Tokenizer(Protocol):
    """What the rest of the program needs of a tokenizer.

    Attributes:
        vocab_size: ids are 0..vocab_size-1.
        separator: id put behind every document, or None.
        dtype: smallest of uint8, uint16, uint32 that holds every id.
    """

    vocab_size: int
    separator: int | None
    dtype: np.dtype[Any]

    def encode(self, text: str) -> Tokens:
        """Ids [n] of `dtype`, without separator."""

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """Text of the ids; what is no text becomes U+FFFD."""

    def save(self, folder: Path) -> Path:
        """Write tokenizer.json into the folder."""


class ByteTokenizer:
    """One id per byte of UTF-8. NUL, which no text contains, separates documents."""

    vocab_size = 256
    separator: int | None = 0
    dtype: np.dtype[Any] = np.dtype(np.uint8)

    def encode(self, text: str) -> Tokens:
        """UTF-8 bytes; lone surrogates (possible in JSON) become '?'."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """Bytes to text; ids above 255 (of a padded vocabulary) are left out."""
        array = np.asarray(ids)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, folder: Path) -> Path:
        """Write the same mapping in the format of the `tokenizers` library."""
        path = Path(folder) / TOKENIZER_FILE
        path.write_text(json.dumps(_byte_tokenizer_json(), ensure_ascii=False, indent=1), encoding="utf-8")
        return path


class FileTokenizer:
    """A tokenizer.json of the `tokenizers` library, used without adding special tokens."""

    def __init__(self, path: Path) -> None:
        try:
            self._json = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the tokenizer file {path}", where="data.tokenizer", why=str(error)
            ) from None
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise EnvironmentNotReady(
                "a tokenizer file needs the package tokenizers", why=str(error), hint="pip install 'diloco[hf]'"
            ) from None
        try:
            self._library = Library.from_str(self._json)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} is no tokenizer.json", where="data.tokenizer", why=str(error)) from None
        # Files may have truncation or padding switched on; neither may touch training text.
        self._library.no_truncation()
        self._library.no_padding()
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(f"{path} has an empty vocabulary", where="data.tokenizer")
        self.vocab_size: int = max(vocabulary.values()) + 1  # ids may have gaps
        self.separator: int | None = next((vocabulary[t] for t in END_TOKENS if t in vocabulary), None)
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode(self, text: str) -> Tokens:
        """Ids of one text."""
        return np.asarray(self._library.encode(text, add_special_tokens=False).ids, dtype=self.dtype)

    def encode_batch(self, texts: list[str]) -> list[Tokens]:
        """Ids of many texts, on all cores."""
        found = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(item.ids, dtype=self.dtype) for item in found]

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """Text of the ids, special tokens left out."""
        text: str = self._library.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def save(self, folder: Path) -> Path:
        """Write the file as it was read."""
        path = Path(folder) / TOKENIZER_FILE
        path.write_text(self._json, encoding="utf-8")
        return path


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a tokenizer.json, or a folder that has one (a byte tokenizer's own file needs no library)."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if not path.is_file():
        raise ConfigError(
            f"no such tokenizer: {name!r}", where="data.tokenizer", hint="bytes, or the path of a tokenizer.json"
        )
    try:
        if json.loads(path.read_text(encoding="utf-8")) == _byte_tokenizer_json():
            return ByteTokenizer()
    except (OSError, ValueError):
        pass  # FileTokenizer says what is wrong with it
    return FileTokenizer(path)


def _byte_tokenizer_json() -> dict[str, Any]:
    """A merge-free byte-level BPE whose id of a byte is the byte's value.

    The library writes bytes as printable characters (GPT-2's bytes_to_unicode): printable Latin-1 as itself,
    the others counted up from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }

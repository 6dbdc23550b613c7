"""Documents of every kind of source, and which of them are held out.

Owns: finding and reading files, JSON lines, rows and token files, with errors that name file, line and offset; the
hold-out rule. `datasets` is imported only when asked for. Must not know of windows, shards or learners.
Called by: train.data.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diloco_cli.config.schema import DataConfig, DataKind
from diloco_cli.errors import ConfigError, EnvironmentNotReady
from diloco_cli.train.tokenizer import FileTokenizer, Tokenizer, Tokens

ANY_FILE = "**/*"
JSONL_SUFFIXES = (".jsonl", ".ndjson")
STDLIB_SKIPPED = {"test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """One document: its name (unique, what it is ordered and held out by), where it is, and its tokens [n]."""

    name: str
    path: str
    tokens: Tokens

    def part(self, start: int, stop: int) -> Document:
        """The same document from token `start` to `stop` (a view)."""
        return Document(self.name, self.path, self.tokens[start:stop])


def resolve_kind(kind: DataKind, path: str | None) -> DataKind:
    """What `auto` means for this path: told from names only."""
    if kind is not DataKind.auto:
        return kind
    if path is None:
        return DataKind.stdlib
    root = Path(path).expanduser()
    if root.is_dir():
        if any((root / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
            return DataKind.huggingface
        suffixes = {p.suffix for p in root.rglob("*") if p.is_file() and not p.name.startswith(".")}
    else:
        suffixes = {root.suffix}
    if suffixes == {".bin"}:
        return DataKind.tokens
    return DataKind.jsonl if suffixes and suffixes <= set(JSONL_SUFFIXES) else DataKind.text


_READ_BYTES = 1 << 20


class Reader:
    """Documents of every kind of source; counts what it had to skip or replace."""

    def __init__(self, cfg: DataConfig, tokenizer: Tokenizer) -> None:
        self.cfg, self.tokenizer = cfg, tokenizer
        self.empty: list[str] = []
        self.not_utf8: list[str] = []

    def read(self, kind: DataKind, path: str | None, key: str, excluded: str | None = None) -> list[Document]:
        """All documents under `path`, in the order of their names; empty ones skipped."""
        if kind is DataKind.stdlib:
            return self._stdlib()
        if path is None:
            raise ConfigError(f"data.kind={kind.value} needs {key}", where=key)
        root = Path(path).expanduser()
        if not root.exists():
            raise ConfigError(f"no such file or folder: {root}", where=key)
        if kind is DataKind.huggingface:
            documents = self._encode(self._huggingface_rows(root, key))
        else:
            suffixes = {DataKind.jsonl: JSONL_SUFFIXES, DataKind.tokens: (".bin",)}.get(kind, ())
            files = list_files(root, self.cfg.pattern, suffixes, excluded, key)
            if kind is DataKind.tokens:
                return [self._token_file(name, file) for name, file in files]
            if kind is DataKind.jsonl:
                documents = self._encode(row for name, file in files for row in self._json_lines(name, file))
            else:
                documents = self._encode((name, str(file), _read_bytes(file, key)) for name, file in files)
        if not documents:
            what = f"all of its {len(self.empty)} documents are empty" if self.empty else "there are no documents in it"
            raise ConfigError(f"no text in {root}: {what}", where=key, why=_some(self.empty))
        return documents

    def warnings(self) -> Iterator[str]:
        """One sentence for each kind of irregularity."""
        if self.empty:
            yield f"{len(self.empty)} empty documents skipped: {_some(self.empty)}"
        if self.not_utf8:
            yield f"{len(self.not_utf8)} documents are not UTF-8, bad bytes replaced: {_some(self.not_utf8)}"

    def _stdlib(self) -> list[Document]:
        root = sysconfig.get_paths()["stdlib"]
        files = []
        for folder, folders, names in os.walk(root):
            folders[:] = [f for f in folders if f not in STDLIB_SKIPPED]
            files += [os.path.join(folder, name) for name in names if name.endswith(".py")]
        named = sorted((os.path.relpath(file, root).replace(os.sep, "/"), file) for file in files)
        documents = self._encode((name, file, _read_bytes(Path(file), "data.kind")) for name, file in named)
        self.empty.clear()  # empty __init__.py files are nothing to warn of
        if not documents:
            raise EnvironmentNotReady(
                f"this Python has no sources of its standard library in {root}",
                where="data.kind=stdlib",
                hint="data.kind=text data.path=FOLDER",
            )
        return documents

    def _encode(self, sources: Iterable[tuple[str, str, bytes | str]]) -> list[Document]:
        """(name, path, content) to documents. Bytes stay as they are under the byte tokenizer, UTF-8 or not."""
        documents: list[Document] = []
        pending: list[tuple[str, str, str]] = []
        for name, path, content in sources:
            if not content:
                self.empty.append(path)
            elif not isinstance(self.tokenizer, FileTokenizer):
                text = content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
                documents.append(Document(name, path, np.frombuffer(text, dtype=np.uint8)))
            else:
                pending.append((name, path, content if isinstance(content, str) else self._decode(content, path)))
                if len(pending) == 256:
                    documents += self._encode_pending(pending)
        return documents + self._encode_pending(pending)

    def _encode_pending(self, pending: list[tuple[str, str, str]]) -> list[Document]:
        if not pending:
            return []
        assert isinstance(self.tokenizer, FileTokenizer)
        encoded = self.tokenizer.encode_batch([text for _, _, text in pending])
        found = [Document(n, p, t) for (n, p, _), t in zip(pending, encoded, strict=True) if len(t)]
        pending.clear()
        return found

    def _decode(self, content: bytes, path: str) -> str:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            self.not_utf8.append(f"{path} (byte {error.start})")
            return content.decode("utf-8", errors="replace")

    def _json_lines(self, name: str, file: Path) -> Iterator[tuple[str, str, str]]:
        key, offset = self.cfg.text_field, 0
        try:
            with open(file, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{name}:{number}", f"{file}:{number}", _text_of_line(line, key, file, number, offset)
                    offset += len(line)
        except OSError as error:
            raise ConfigError(f"cannot read {file} at byte {offset}", where="data.path", why=str(error)) from None

    def _huggingface_rows(self, root: Path, key: str) -> Iterator[tuple[str, str, str]]:
        try:
            import datasets
        except ImportError as error:
            raise EnvironmentNotReady(
                "data.kind=huggingface needs the package datasets", why=str(error), hint="pip install 'diloco[hf]'"
            ) from None
        try:
            found = datasets.load_from_disk(str(root))
        except Exception as error:
            raise ConfigError(f"{root} is no saved Hugging Face data set", where=key, why=str(error)) from None
        if isinstance(found, datasets.DatasetDict):
            if "train" not in found:
                raise ConfigError(
                    f"{root} has no split 'train'", where=key, hint=f"one of its folders: {', '.join(found)}"
                )
            found = found["train"]
        column = self.cfg.text_field
        if column not in found.column_names:
            raise ConfigError(
                f"{root} has no column {column!r}",
                where="data.text_field",
                hint=f"its columns are {', '.join(found.column_names)}",
            )
        for number, text in enumerate(found[column]):
            if not isinstance(text, str):
                raise ConfigError(f"{root}: row {number} of column {column!r} is no text", where="data.text_field")
            yield f"{number:012d}", f"{root}:{number}", text

    def _token_file(self, name: str, file: Path) -> Document:
        sizes = {"uint16": "<u2", "uint32": "<u4"}
        if self.cfg.token_dtype not in sizes:
            raise ConfigError(
                f"data.token_dtype={self.cfg.token_dtype} is unknown", where="data.token_dtype", hint="uint16 or uint32"
            )
        dtype = np.dtype(sizes[self.cfg.token_dtype])
        try:
            size = file.stat().st_size
            if size == 0 or size % dtype.itemsize:
                what = "is empty" if size == 0 else f"has {size} bytes, not a multiple of {dtype.itemsize}"
                raise ConfigError(f"{file} {what}", where="data.path", why=f"data.token_dtype={self.cfg.token_dtype}")
            # The view forgets that it is a memmap: slicing a plain array is several times faster.
            return Document(name, str(file), np.asarray(np.memmap(file, dtype=dtype, mode="r")))
        except OSError as error:
            raise ConfigError(f"cannot read {file}", where="data.path", why=str(error)) from None


def list_files(
    root: Path, pattern: str, suffixes: tuple[str, ...], excluded: str | None, key: str
) -> list[tuple[str, Path]]:
    """(name, file) of a file or of a folder's files by pattern, sorted by relative name; hidden ones are left out.

    Args:
        suffixes: with the default pattern only such files (any, if empty). excluded: a file or folder not to be read.
    """
    if not root.is_dir():
        return [(root.name, root)]
    try:
        found = [p for p in root.glob(pattern) if p.is_file()]
    except OSError as error:
        where = error.filename or root
        raise ConfigError(f"cannot read the folder {where}", where=key, why=error.strerror or str(error)) from None
    except (ValueError, NotImplementedError, IndexError) as error:
        raise ConfigError(f"{pattern!r} is no file pattern", where="data.pattern", why=str(error)) from None
    if pattern == ANY_FILE and suffixes:
        found = [p for p in found if p.suffix in suffixes]
    if excluded is not None:
        barred = Path(excluded).expanduser().resolve()
        found = [p for p in found if barred != p.resolve() and barred not in p.resolve().parents]
    named = [(p.relative_to(root).as_posix(), p) for p in found]
    named = sorted((n, p) for n, p in named if not any(part.startswith(".") for part in n.split("/")))
    if not named:
        raise ConfigError(f"no files in {root} match {pattern!r}", where=key, hint="see data.pattern")
    return named


def _read_bytes(file: Path, key: str) -> bytes:
    content = bytearray()
    try:
        with open(file, "rb") as handle:
            while piece := handle.read(_READ_BYTES):
                content += piece
    except OSError as error:
        at = f" at byte {len(content)}" if content or error.errno == errno.EIO else ""
        raise ConfigError(f"cannot read {file}{at}", where=key, why=error.strerror or str(error)) from None
    return bytes(content)


def _text_of_line(line: bytes, key: str, file: Path, number: int, offset: int) -> str:
    """The text of one JSON line; what is wrong with it by file, line and byte offset."""
    place = f"{file}, line {number} (byte {offset})"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not valid JSON", where="data.path", why=str(error)) from None
    if not isinstance(row, dict) or key not in row:
        keys = ", ".join(list(row)[:8]) if isinstance(row, dict) else ""
        raise ConfigError(
            f"{place}: no key {key!r}", where="data.text_field", hint=f"its keys are {keys}" if keys else ""
        )
    if not isinstance(row[key], str):
        raise ConfigError(f"{place}: {key!r} is {type(row[key]).__name__}, not text", where="data.text_field")
    text: str = row[key]
    return text


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")


def holdout_cuts(names: list[str], sizes: list[int], fraction: float) -> list[int]:
    """For each document the token where validation begins: its size (all trained on), 0 (held out whole), or between.

    No randomness: the order is that of a hash of the names, so more documents move few of the others.
    """
    target = fraction * sum(sizes)
    cuts = list(sizes)
    taken = 0
    for i in sorted(range(len(names)), key=lambda i: hashlib.blake2b(os.fsencode(names[i]), digest_size=8).digest()):
        if taken + sizes[i] <= target:
            taken += sizes[i]
            cuts[i] = 0
        if taken >= 0.9 * target:
            break
    if taken >= 0.5 * target:
        return cuts
    return [size - round(size * fraction) for size in sizes]

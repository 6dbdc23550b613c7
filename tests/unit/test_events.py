"""JSON lines: writing under trouble, reading what trouble left, following a growing file."""

import json
import math
import os
import subprocess
import sys
import threading
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_cli.observe import events
from diloco_cli.observe.events import JsonlWriter, Tail, read_jsonl


class Colour(StrEnum):
    red = "red"


def test_what_is_written_is_read_and_non_finite_numbers_are_null(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"loss": math.nan, "nested": {"a": [math.inf, 1.5, (-math.inf, 2)]}, "name": "ü\u2028\n", 3: True})
        writer.write({"scalar": np.float32(0.5), "bad": np.float32("nan"), "int": np.int64(7), "enum": Colour.red})
        writer.write({"lone": "\ud800", "path": Path("/x"), "set": {"b", "a"}})
    first, second, third = read_jsonl(path)
    assert first == {"loss": None, "nested": {"a": [None, 1.5, [None, 2]]}, "name": "ü\u2028\n", "3": True}
    assert second == {"scalar": 0.5, "bad": None, "int": 7, "enum": "red"}
    assert third == {"lone": "\ud800", "path": "/x", "set": ["a", "b"]}
    assert path.read_bytes().count(b"\n") == 3
    assert b"NaN" not in path.read_bytes()


def test_a_full_disk_never_raises_keeps_lines_and_says_so() -> None:
    writer = JsonlWriter("/dev/full")  # the kernel's own ENOSPC
    assert writer.failed is None
    for index in range(3):
        writer.write({"n": index})
    assert writer.failed is not None
    assert "No space left" in writer.failed
    assert writer.num_failures == 3
    assert writer.lost_lines == 0
    writer.close()
    writer.write({"n": 4})  # after close: no exception either
    assert "closed" in (writer.failed or "")


def test_lines_kept_during_a_failure_are_written_in_order_afterwards(tmp_path: Path) -> None:
    writer = JsonlWriter("/dev/full")
    writer.write({"n": 0})
    writer.write({"n": 1})
    path = tmp_path / "later.jsonl"  # space comes back: the same descriptor now leads to a disk with room
    replacement = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(replacement, writer._fd)
    os.close(replacement)
    writer.write({"n": 2})
    assert writer.failed is None
    assert [r["n"] for r in read_jsonl(path)] == [0, 1, 2]
    writer.close()


def test_waiting_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PENDING_LINES_MAX", 5)
    writer = JsonlWriter("/dev/full")
    for index in range(12):
        writer.write({"n": index})
    assert writer.lost_lines == 7
    assert [json.loads(line)["n"] for line in writer._pending] == [7, 8, 9, 10, 11]
    writer.close()


def test_a_line_cut_by_the_disk_is_ended_and_repeated(tmp_path: Path) -> None:
    # A file size limit gives a real short write: the child may write 10 bytes, then is given room.
    path = tmp_path / "m.jsonl"
    code = f"""
import resource, signal
from diloco_cli.observe.events import JsonlWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = JsonlWriter({str(path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
writer.write({{"key": "long enough to be cut"}})
assert writer.failed, writer.failed
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write({{"key": 2}})
assert writer.failed is None, writer.failed
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert read_jsonl(path) == [{"key": "long enough to be cut"}, {"key": 2}]
    assert len(path.read_bytes().splitlines()) == 3  # the cut one is there, as garbage


def test_appending_to_a_file_that_ends_in_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2, "to')
    with JsonlWriter(path) as writer:
        writer.write({"n": 3})
    assert [r["n"] for r in read_jsonl(path)] == [1, 3]


def test_threads_and_processes_append_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    code = (
        "import sys; from diloco_cli.observe.events import JsonlWriter\n"
        f"w = JsonlWriter({str(path)!r})\n"
        "[w.write({'who': sys.argv[1], 'n': i, 'pad': 'x' * 5000}) for i in range(100)]"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, f"p{i}"]) for i in range(2)]
    writer = JsonlWriter(path)

    def work(name: str) -> None:
        for index in range(100):
            writer.write({"who": name, "n": index, "pad": "y" * 5000})

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [child.wait(60) for child in children] == [0, 0]
    tail = Tail(path)
    records = tail.poll()
    assert tail.garbage_lines == 0
    for who in ("p0", "p1", "t0", "t1"):
        assert [r["n"] for r in records if r["who"] == who] == list(range(100))
    writer.close()


def test_read_jsonl_torn_last_line_and_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"n": 1}\nnot json\n[1]\n\n{"n": NaN}\n{"n": 4')
    assert read_jsonl(path) == [{"n": 1}, {"n": None}]
    path.write_bytes(b'{"n": 1}\n{"n": 2}')
    assert read_jsonl(path) == [{"n": 1}, {"n": 2}]
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "none.jsonl")


def test_tail_of_a_file_that_is_not_there_yet_then_grows_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    tail = Tail(path)
    assert tail.poll() == []
    with open(path, "ab", buffering=0) as file:
        file.write(b'{"n": 1}\n{"n"')
        assert tail.poll() == [{"n": 1}]
        assert tail.poll() == []
        file.write(b": 2}")
        assert tail.poll() == []  # not ended yet
        file.write(b"\n\xff\xfe garbage\n" + b"[" * 200_000 + b"\n" + b"1" * 9000 + b'\n{"n": 3}\n')
        assert tail.poll() == [{"n": 2}, {"n": 3}]
    assert tail.garbage_lines == 3
    assert tail.poll() == []


def test_tail_starts_over_when_the_file_is_replaced_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n')
    tail = Tail(path)
    assert len(tail.poll()) == 2
    path.write_bytes(b'{"n": 3}\n')
    assert tail.poll() == [{"n": 3}]
    other = tmp_path / "other"
    other.write_bytes(b'{"n": 4}\n{"n": 5}\n')
    os.replace(other, path)
    assert [r["n"] for r in tail.poll()] == [4, 5]


def test_tail_skips_a_line_without_end_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LINE_BYTES_MAX", 100)
    path = tmp_path / "e.jsonl"
    tail = Tail(path)
    with open(path, "ab", buffering=0) as file:
        for _ in range(5):
            file.write(b"x" * 90)
            assert tail.poll() == []
            assert len(tail.partial) <= 100
        file.write(b'tail\n{"n": 1}\n')
    assert tail.poll() == [{"n": 1}]
    assert tail.garbage_lines == 1


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=3), max_size=5), data=st.data())
def test_tail_gives_the_same_records_however_the_bytes_arrive(
    tmp_path: Path, records: list[dict[str, object]], data: st.DataObject
) -> None:
    path = tmp_path / f"t{len(list(tmp_path.iterdir()))}.jsonl"
    content = b"".join(events.to_line(record) for record in records)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
    tail, seen = Tail(path), []
    with open(path, "ab", buffering=0) as file:
        for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            file.write(content[start:end])
            seen += tail.poll()
    assert seen == records
    assert tail.garbage_lines == 0

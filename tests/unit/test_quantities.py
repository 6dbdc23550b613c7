"""Quantities: every spelling that is right, refusals with the nearest right one, and round trips."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.config.quantities import (
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    parse_bytes,
    parse_count,
    parse_duration_s,
    parse_rate_bps,
)
from diloco_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("3gbps", 3e9),
        ("3Gbps", 3e9),
        ("3 gbps", 3e9),
        ("3Gbit/s", 3e9),
        ("3Gb/s", 3e9),
        ("3gb/s", 3e9),
        ("3000mbps", 3e9),
        ("3GB/s", 24e9),
        ("375MB/s", 3e9),
        ("250mbps", 250e6),
        ("0.3gbps", 3e8),
        ("56kbps", 56e3),
        ("9600bps", 9600.0),
        ("1MiB/s", 8 * 2**20),
        ("1tbps", 1e12),
        ("unlimited", math.inf),
    ],
)
def test_rates_are_bits_and_decimal(text: str, bps: float) -> None:
    assert parse_rate_bps(text) == bps


def test_a_hundred_million_floats_at_3gbps_take_1_067_seconds() -> None:
    assert 100e6 * 32 / parse_rate_bps("3gbps") == pytest.approx(1.0667, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("3", '"3gbps"'),
        ("3g", '"3gbps"'),
        ("3gbs", '"3gbps"'),
        ("3gps", '"3gbps"'),
        ("3mbs", '"3mbps"'),
        ("3gbit", '"3Gbit/s"'),
        ("-1gbps", '"1gbps"'),
        ("+1gbps", '"1gbps"'),
        ("0gbps", "above zero"),
        ("0.0GB/s", "above zero"),
        ("nan", '"3gbps"'),
        ("nangbps", '"3gbps"'),
        ("inf gbps", '"3gbps"'),
        ("infinity", '"3gbps"'),
        ("1e9bps", '"3gbps"'),
        ("", '"3gbps"'),
        (".5gbps", '"0.5gbps"'),
        ("1_000mbps", '"1000mbps"'),
        ("3GBps", '"3gbps" (bits) or "3GB/s" (bytes)'),
        ("40MBps", '"40mbps" (bits) or "40MB/s" (bytes)'),
        ("3gbps;4gbps", '"3gbps"'),
        ("٣gbps", '"3gbps"'),
        ("9" * 4000 + "gbps", '"3gbps"'),
    ],
)
def test_wrong_rates_are_refused_with_the_nearest_right_spelling(text: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rate_bps(text, "network.bandwidth")
    assert right in caught.value.hint
    assert caught.value.what.startswith("network.bandwidth: ")
    assert "\n" not in caught.value.what
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("40ms", 0.04), ("1.5h", 5400.0), ("2s", 2.0), ("0s", 0.0), ("250us", 250e-6), ("3min", 180.0), ("1d", 86400.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "right"),
    [("40", '"40ms"'), ("-3s", '"3s"'), ("2sec", '"2s"'), ("1hour", '"1h"'), ("5m", '"5ms"'), ("soon", '"40ms"')],
)
def test_wrong_durations(text: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration_s(text)
    assert right in caught.value.hint


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 * 2**20), ("64KiB", 65536), ("1GB", 10**9), ("1.5MB", 1_500_000), ("12B", 12), ("1gB", 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "right"), [("64", '"64MiB"'), ("64mb", '"64MB"'), ("64M", '"64MB"'), ("0B", "zero"), ("0.1B", "one byte")]
)
def test_wrong_sizes(text: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert right in caught.value.hint


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12b", 12 * 10**9),
        ("12B", 12 * 10**9),
        ("300m", 3 * 10**8),
        ("1.5k", 1500),
        ("12000", 12000),
        ("2t", 2 * 10**12),
    ],
)
def test_counts(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize(
    ("text", "right"), [("1.5", '"2"'), ("12,000", '"12000"'), ("0", "above zero"), ("-5k", '"5k"'), ("12bn", '"12b"')]
)
def test_wrong_counts(text: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_count(text)
    assert right in caught.value.hint


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (format_rate(3e9), "3gbps"),
        (format_rate(287.4e6), "287.4mbps"),
        (format_rate(math.inf), "unlimited"),
        (format_rate(999.99e6), "1gbps"),
        (format_duration(0.04), "40ms"),
        (format_duration(90), "1.5min"),
        (format_duration(0), "0s"),
        (format_bytes(64 * 2**20), "64MiB"),
        (format_bytes(1500), "1.465KiB"),
        (format_count(12e9), "12b"),
        (format_count(48), "48"),
        (format_count(5e15), "5000t"),
    ],
)
def test_formats(shown: str, text: str) -> None:
    assert shown == text


@given(st.floats(min_value=1.0, max_value=1e15))
def test_rates_read_back_to_four_digits(bps: float) -> None:
    assert parse_rate_bps(format_rate(bps)) == pytest.approx(bps, rel=1e-3)


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_durations_read_back_to_four_digits(seconds: float) -> None:
    assert parse_duration_s(format_duration(seconds)) == pytest.approx(seconds, rel=1e-3)


@given(st.integers(min_value=1, max_value=10**15))
def test_sizes_read_back_to_four_digits(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=1e-3, abs=0.5)


@given(st.integers(min_value=1, max_value=10**14))
def test_counts_read_back_to_four_digits(number: int) -> None:
    assert parse_count(format_count(number)) == pytest.approx(number, rel=1e-3)


@given(st.text(max_size=30))
def test_any_text_is_a_number_above_zero_or_one_plain_refusal(text: str) -> None:
    for parse in (parse_rate_bps, parse_bytes, parse_count):
        try:
            value, hint = parse(text), "write "
        except ConfigError as error:
            value, hint = 1, error.hint
        assert value > 0
        assert hint.startswith("write ")


@given(
    st.sampled_from(["-", "", "0"]),
    st.sampled_from(["3", "0.5", "1e3", "inf", "nan", "0x10"]),
    st.sampled_from(["", " ", "  "]),
    st.sampled_from(["gbps", "GB/s", "gbs", "GBps", "MiB/s", "gb", "bps", "/s"]),
)
def test_the_suggested_spelling_is_itself_right(sign: str, number: str, blank: str, unit: str) -> None:
    hint = ""
    try:
        parse_rate_bps(f"{sign}{number}{blank}{unit}")
    except ConfigError as error:
        hint = error.hint
    for quoted in hint.split('"')[1::2]:
        assert parse_rate_bps(quoted) > 0

"""Codecs: how the float32 values of a fragment become the bytes of a payload, and back.

    float32    4 bytes each, as they are
    bfloat16   2 bytes each, rounded to nearest even
    int8       block scale s = max|x| / 127;  code = round(x / s), two's complement, one byte each
    int4       block scale s = max|x| / 7;    code = round(x / s) + 8, two codes per byte
    e3m0       block scale s = max|x|;        code = sign * 8 + e, two codes per byte: value = +-s * 2**(e - 7) for
               e in 1..7, and 0 for e = 0. Nearest in value: ties go to the larger magnitude

The last three cut the vector into blocks of BLOCK elements. Layout: all scales (float32, one per block), then all
codes. Of two codes in a byte the first is the low half; an odd last byte has a zero high half. A block of zeros has
scale 0 and decodes to zeros; finite input decodes to finite values. All little-endian.
Theory: int8 and int4 err by at most s/2; e3m0 by at most a third of the value, or s/128 near zero. What was lost in
one send can be added to the next (ErrorFeedback), so that over many sends the sums agree.
Work goes in chunks that stay in the cache, with scratch reused: no temporary of the fragment's size is made.

Owns: element formats. Must not: know of frames or sockets. Called by: run.learner_main, run.syncer_main.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

WIRES = ("float32", "bfloat16", "int8", "int4", "e3m0")
# Sent as drift since the base with error feedback, not as parameters (algorithm.md, Wire types).
DRIFT_WIRES = ("int8", "int4", "e3m0")
BLOCK = 256
# Elements worked on at once: 256 KiB of float32, several of which fit a core's L2 cache.
CHUNK = 64 * 1024
_E3M0_VALUES = torch.tensor([0.0] + [2.0 ** (e - 7) for e in range(1, 8)])
_LARGEST = torch.finfo(torch.float32).max
_BITS_OF_2_TO_MINUS_7 = 0x3C000000
_E3M0_TABLE = torch.cat([_E3M0_VALUES, -_E3M0_VALUES])


def encoded_bytes(numel: int, wire: str) -> int:
    """Size of the payload of `numel` elements."""
    if wire == "float32":
        return 4 * numel
    if wire == "bfloat16":
        return 2 * numel
    scales = 4 * -(-numel // BLOCK)
    if wire == "int8":
        return scales + numel
    if wire in ("int4", "e3m0"):
        return scales + -(-numel // 2)
    raise ValueError(f"unknown wire type {wire!r}")


def encode(flat: Tensor, wire: str, out: Tensor | None = None) -> Tensor:
    """Payload of `flat`.

    Args:
        flat: float32 [n], contiguous, on the CPU.
        wire: one of WIRES.
        out: uint8 [encoded_bytes(n, wire)], contiguous, to write into; made when None.

    Returns:
        `out`.
    """
    _check(flat, torch.float32, flat.numel())
    size = encoded_bytes(flat.numel(), wire)
    if out is None:
        out = torch.empty(size, dtype=torch.uint8)
    _check(out, torch.uint8, size)
    if wire in _PLAIN:
        _viewed(out, _PLAIN[wire]).copy_(flat)
        return out
    _encode_blocks(flat, out, _BLOCK_CODECS[wire])
    return out


def decode(payload: Tensor, wire: str, numel: int, out: Tensor | None = None) -> Tensor:
    """Values of a payload.

    Args:
        payload: uint8 [encoded_bytes(numel, wire)], contiguous.
        wire: one of WIRES.
        numel: number of elements.
        out: float32 [numel], contiguous, to write into; made when None.

    Returns:
        `out`. Values are what the bytes say: NaN and infinity in a hostile payload come out as such.
    """
    size = encoded_bytes(numel, wire)
    _check(payload, torch.uint8, size)
    if out is None:
        out = torch.empty(numel, dtype=torch.float32)
    _check(out, torch.float32, numel)
    if wire in _PLAIN:
        out.copy_(_viewed(payload, _PLAIN[wire]))
        return out
    _decode_blocks(payload, out, _BLOCK_CODECS[wire])
    return out


class ErrorFeedback:
    """Compensated encoding: what one payload could not say is added to the next.

    Invariant: residual = sum of the inputs - sum of the decoded payloads, up to float32 rounding. Costs one float32
    vector of the fragment's size, per fragment.
    """

    def __init__(self, numel: int) -> None:
        self.residual = torch.zeros(numel)
        self._decoded = torch.empty(min(numel, CHUNK))

    def encode(self, flat: Tensor, wire: str, out: Tensor | None = None) -> Tensor:
        """Payload of `flat` + residual; see encode. `flat` is left as it is."""
        self.residual += flat
        payload = encode(self.residual, wire, out)
        numel = self.residual.numel()
        if wire in _PLAIN:
            view = _viewed(payload, _PLAIN[wire])
            for start in range(0, numel, CHUNK):
                self.residual[start : start + CHUNK] -= view[start : start + CHUNK]
            return payload
        _decode_blocks(payload, self.residual, _BLOCK_CODECS[wire], subtract=self._decoded)
        return payload

    def reset(self) -> None:
        """Forget what was lost (the base of the next value is another one)."""
        self.residual.zero_()


# ---- block formats ------------------------------------------------------------------------------

_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _BlockCodec(Protocol):
    """One blocked format. `values` is float32 [blocks, BLOCK], `scales` float32 [blocks, 1]."""

    packed: bool
    levels: float  # scale = max|x| / levels

    def quantise(self, values: Tensor, codes: Tensor) -> None:
        """Codes (uint8, same shape) of values that are divided by their scales; destroys `values`."""

    def dequantise(self, codes: Tensor, values: Tensor) -> None:
        """Values, before they are multiplied by their scales."""


class _Integers:
    """Symmetric integers -levels..levels with an offset; int8 as two's complement, int4 shifted to 1..15."""

    def __init__(self, levels: int, offset: int, packed: bool) -> None:
        self.levels, self.offset, self.packed = float(levels), offset, packed

    def quantise(self, values: Tensor, codes: Tensor) -> None:
        values.round_().clamp_(-self.levels, self.levels)
        if self.packed:
            codes.copy_(values.add_(self.offset))
        else:
            codes.view(torch.int8).copy_(values)

    def dequantise(self, codes: Tensor, values: Tensor) -> None:
        if self.packed:
            values.copy_(codes)
            values -= self.offset
        else:
            values.copy_(codes.view(torch.int8))


class _E3M0:
    packed = True
    levels = 1.0

    def quantise(self, values: Tensor, codes: Tensor) -> None:
        # On the bits: adding half a mantissa carries into the exponent from 1.5 * 2**k on, the middle between 2**k and
        # 2**(k + 1). Only between 0 and 2**-6 is the middle elsewhere, at 2**-7.
        bits = values.view(torch.int32)
        negative = bits < 0
        bits &= 0x7FFFFFFF
        at_least_one = bits >= _BITS_OF_2_TO_MINUS_7
        bits += 0x00400000
        bits >>= 23
        bits -= 127 - 7
        bits.clamp_(0, 7)
        torch.maximum(bits, at_least_one, out=bits)
        codes.copy_(bits)
        codes += negative.view(torch.uint8) * 8

    def dequantise(self, codes: Tensor, values: Tensor) -> None:
        torch.index_select(_E3M0_TABLE, 0, codes.reshape(-1).to(torch.int32), out=values.view(-1))


_BLOCK_CODECS: dict[str, _BlockCodec] = {
    "int8": _Integers(127, 0, packed=False),
    "int4": _Integers(7, 8, packed=True),
    "e3m0": _E3M0(),
}


def _check(tensor: Tensor, dtype: torch.dtype, numel: int) -> None:
    good = tensor.dtype == dtype and tensor.shape == (numel,) and tensor.is_contiguous() and tensor.device.type == "cpu"
    assert good, f"contiguous {dtype} [{numel}] expected, got {tensor.dtype} {tuple(tensor.shape)}"


def _viewed(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """The payload's bytes as elements of another type (same memory)."""
    return payload.view(dtype)


def _split(payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """(scales as bytes [4 * blocks], codes as bytes) of a payload."""
    scale_bytes = 4 * -(-numel // BLOCK)
    return payload[:scale_bytes], payload[scale_bytes:]


def _encode_blocks(flat: Tensor, out: Tensor, codec: _BlockCodec) -> None:
    numel = flat.numel()
    scale_bytes, codes_out = _split(out, numel)
    scales_out = _viewed(scale_bytes, torch.float32)
    rows = CHUNK // BLOCK
    scratch = torch.empty(rows, BLOCK)
    codes = torch.empty(rows, BLOCK, dtype=torch.uint8)
    for start in range(0, numel, CHUNK):
        count = min(CHUNK, numel - start)
        blocks = -(-count // BLOCK)
        values = scratch[:blocks]
        if count < blocks * BLOCK:
            values[-1].zero_()
        values.view(-1)[:count].copy_(flat[start : start + count])
        scales = scales_out[start // BLOCK : start // BLOCK + blocks]
        _scale_to_levels(values, scales, codec.levels)
        codec.quantise(values, codes[:blocks])
        _put_codes(codes[:blocks].view(-1), count, codes_out, start, codec.packed)


def _scale_to_levels(values: Tensor, scales: Tensor, levels: float) -> None:
    """Write each block's scale and divide the block by it."""
    torch.maximum(values.amax(dim=1), values.amin(dim=1).neg_(), out=scales)
    if levels != 1.0:
        scales /= levels
        # Rounded up, the scale of the largest float32 would decode to infinity.
        scales.clamp_(max=_LARGEST / levels * (1 - 2.0**-23))
    # A subnormal scale has no finite inverse, and a scale of zero none at all: divide, and mend 0 / 0.
    divisors = scales.unsqueeze(1)
    values /= torch.where(divisors > 0, divisors, torch.ones_like(divisors))


def _put_codes(codes: Tensor, count: int, out: Tensor, start: int, packed: bool) -> None:
    if not packed:
        out[start : start + count].copy_(codes[:count])
        return
    if count % 2:
        codes[count] = 0
    pairs = codes[: count + count % 2].view(-1, 2)
    target = out[start // 2 : start // 2 + len(pairs)]
    torch.bitwise_left_shift(pairs[:, 1], 4, out=target)
    target |= pairs[:, 0]


def _decode_blocks(payload: Tensor, out: Tensor, codec: _BlockCodec, subtract: Tensor | None = None) -> None:
    """Decode into `out`, or with scratch `subtract` [CHUNK] take the decoded values away from it."""
    numel = out.numel()
    scale_bytes, codes_in = _split(payload, numel)
    all_scales = _viewed(scale_bytes, torch.float32)
    scratch = torch.empty(CHUNK // BLOCK, BLOCK)
    codes = torch.empty(CHUNK, dtype=torch.uint8)
    for start in range(0, numel, CHUNK):
        count = min(CHUNK, numel - start)
        blocks = -(-count // BLOCK)
        _get_codes(codes_in, start, count, codes, codec.packed)
        values = scratch[:blocks]
        codec.dequantise(codes[: blocks * BLOCK].view(blocks, BLOCK), values)
        values *= all_scales[start // BLOCK : start // BLOCK + blocks].unsqueeze(1)
        if subtract is None:
            out[start : start + count].copy_(values.view(-1)[:count])
        else:
            out[start : start + count] -= values.view(-1)[:count]


def _get_codes(codes_in: Tensor, start: int, count: int, codes: Tensor, packed: bool) -> None:
    """Unpack `count` codes; those up to the end of their block are zero."""
    padded = -(-count // BLOCK) * BLOCK
    codes[count:padded] = 0
    if not packed:
        codes[:count].copy_(codes_in[start : start + count])
        return
    half = -(-count // 2)
    source = codes_in[start // 2 : start // 2 + half]
    pairs = codes[: 2 * half].view(half, 2)
    torch.bitwise_and(source, 0x0F, out=pairs[:, 0])
    torch.bitwise_right_shift(source, 4, out=pairs[:, 1])

"""Inline assembly on a CPU: the PTX instructions of our kernels, for many threads at once, each with its own branches.

Registers hold bits, in uint64 arrays of one element per thread; `memory` is gluon_emulator.py's.
"""

import functools
import operator
import re
from collections.abc import Callable

import numpy as np
import torch

Bits = np.ndarray  # uint64, one per thread
NAN = 0x7FFF


class Exit(Exception):
    """The thread ends here."""


def floats(bits: Bits) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def float_bits(values: np.ndarray) -> Bits:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)  # a float64 would be rounded twice
    return np.where(np.isnan(values), 0x7FFFFFFF, bits).astype(np.uint64)  # as arithmetic gives it


def bfloat16_value(bits: np.ndarray) -> np.ndarray:
    """uint16 bits -> float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float64 -> uint16 bits, to nearest even in one rounding."""
    with np.errstate(all="ignore"):
        near = values.astype(np.float32)
        bits = near.view(np.uint32).astype(np.int64)
        exact, away = near.astype(np.float64) == values, np.abs(near.astype(np.float64)) > np.abs(values)
        # to odd first: a second rounding then sees on which side of a tie the value was
        bits = np.where(exact | np.isinf(near), bits, (bits - away) | 1)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), NAN, rounded & 0xFFFF).astype(np.uint16)


def signed(bits: Bits, width: int = 32) -> np.ndarray:
    return bits.astype(f"u{width // 8}").view(f"i{width // 8}").astype(np.int64)


def halves(compute: Callable, *operands: Bits) -> Bits:
    """A bfloat16x2 instruction."""
    parts = []
    for shift in (0, 16):
        values = [bfloat16_value(((o >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.uint16)) for o in operands]
        with np.errstate(all="ignore"):
            parts.append(bfloat16_bits(compute(*values)).astype(np.uint64))
    return parts[0] | parts[1] << np.uint64(16)


def e4m3_value(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.array(bits, np.uint8)).view(torch.float8_e4m3fn).double().numpy()


def e4m3_bits(values: np.ndarray) -> np.ndarray:
    """Nearest, ties to even; what is too large becomes the largest."""
    clipped = torch.from_numpy(np.clip(values.astype(np.float32), -448, 448))
    return clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint64)


def pairs_of_half(words: Bits) -> list[np.ndarray]:
    """float16x2 -> the lower and the upper values."""
    parts = [(words >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16)]
    return [part.astype(np.uint16).view(np.float16) for part in parts]


def half_pair(lower: np.ndarray, upper: np.ndarray) -> Bits:
    bits = [part.astype(np.float16).view(np.uint16).astype(np.uint64) for part in (lower, upper)]
    return bits[0] | bits[1] << np.uint64(16)


def prmt(a: Bits, b: Bits, selector: Bits) -> Bits:
    both = (a & np.uint64(0xFFFFFFFF)) | b << np.uint64(32)
    out = np.zeros_like(a)
    for i in range(4):
        pick = (selector >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (pick & np.uint64(7)))) & np.uint64(0xFF)
        byte = np.where(pick & np.uint64(8), np.where(byte & np.uint64(0x80), 0xFF, 0), byte).astype(np.uint64)
        out |= byte << np.uint64(8 * i)
    return out


def lookup(a: Bits, b: Bits, c: Bits, table: int) -> Bits:
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


@functools.cache
def parse(asm: str) -> tuple[list[tuple], dict[str, int]]:
    """[(predicate, opcode, operands)], and where the labels are."""
    text = asm.strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    program, labels = [], {}
    for part in text.split(";"):
        line = " ".join(part.split())
        while found := re.match(r"([A-Z_]\w*):\s*(.*)", line):
            labels[found[1]] = len(program)
            line = found[2]
        if not line or line.startswith(".reg"):
            continue
        predicate, opcode, rest = re.fullmatch(r"(?:@(!?\w+) )?(\S+)\s*(.*)", line).groups()
        operands = [o.strip() for o in re.findall(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+)", rest)]
        program.append((predicate, opcode, operands))
    return program, labels


def run(asm: str, outputs: int, inputs: list[Bits], memory=None) -> list[Bits]:
    """The output registers. `memory` has load(addresses, bytes), store(...) and add(...), which may wait."""
    program, labels = parse(asm)
    threads = len(inputs[0]) if inputs else 1
    registers: dict[str, np.ndarray] = {f"${outputs + i}": bits.astype(np.uint64) for i, bits in enumerate(inputs)}
    at, here = np.zeros(threads, np.int64), 0
    together = not any(predicate or opcode.startswith(("bra", "exit")) for predicate, opcode, _ in program)
    on = np.ones(threads, bool)  # the threads that execute this instruction

    def value(name: str) -> np.ndarray:
        if name in registers:
            return registers[name] if together else registers[name][on]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(int(on.sum()), number & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def put(name: str, new: np.ndarray) -> None:
        if together:
            registers[name] = new
        else:
            registers.setdefault(name, np.zeros(threads, new.dtype))[on] = new

    while here < len(program):
        predicate, opcode, operands = program[here]
        if not together:
            on = at == here
        at[on] += 1
        if predicate:
            on = on & (registers[predicate.lstrip("!")] ^ predicate.startswith("!"))
        if opcode.startswith("bra"):
            if labels[operands[0]] <= here and on.any() and memory:
                memory.pause()
            at[on] = labels[operands[0]]
        elif on.any():
            _execute(opcode, operands, value, put, memory)
        here = int(at.min())
    return [registers[f"${i}"] for i in range(outputs)]


def _e2m1(codes: Bits) -> Bits:
    """Codes of four bits, as the format specification says -> bfloat16."""
    exponent, mantissa = (codes >> np.uint64(1)) & np.uint64(3), (codes & np.uint64(1)).astype(float)
    value = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent.astype(float) - 1))
    return bfloat16_bits(value).astype(np.uint64) | (codes >> np.uint64(3)) << np.uint64(15)


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{}").split(",")]


def _execute(opcode: str, operands: list[str], value, put, memory) -> None:
    name, *kinds = opcode.split(".")
    low = np.uint64(0xFFFFFFFF)
    if name in ("createpolicy", "prefetch", "fence", "bar", "griddepcontrol"):
        if name == "createpolicy":
            put(operands[0], value("0"))
        return
    if name == "exit":
        raise Exit
    if name in ("ld", "atom", "red"):
        _memory(name, kinds, operands, value, put, memory)
        return
    target, *sources = operands
    if name == "mov":
        if target.startswith("{"):
            names, bits = _names(target), value(sources[0])
            width = 32 // len(names)
            for i, part in enumerate(names):
                put(part, (bits >> np.uint64(width * i)) & np.uint64(2**width - 1))
        elif sources[0].startswith("{"):
            lo, hi = (value(n) & np.uint64(0xFFFF) for n in _names(sources[0]))
            put(target, lo | hi << np.uint64(16))
        else:
            put(target, value(sources[0]))
        return
    v = [value(s) for s in sources]
    if name == "setp":
        compare, kind = getattr(operator, kinds[0]), kinds[-1]
        pair = [floats(x) if kind == "f32" else signed(x) if kind == "s32" else x & low for x in v[:2]]
        result = compare(*pair)
        if len(kinds) == 3:
            result = result & v[2] if kinds[1] == "and" else result | v[2]
        put(target, result)
        return
    kind = kinds[-1]
    if kind == "bf16x2" and name in ("fma", "abs", "max", "min"):
        compute = {"fma": lambda a, b, c: a * b + c, "abs": np.abs, "max": np.fmax, "min": np.fmin}[name]
        put(target, halves(compute, *v))
    elif kind == "f16x2" and name == "mul":
        put(target, half_pair(*(a * b for a, b in zip(*map(pairs_of_half, v), strict=True))))
    elif name == "cvt" and kinds == ["rn", "f16x2", "e4m3x2"]:
        put(target, half_pair(*(e4m3_value((v[0] >> np.uint64(shift)) & np.uint64(0xFF)) for shift in (0, 8))))
    elif name == "cvt" and kinds == ["rn", "satfinite", "e4m3x2", "f16x2"]:
        lower, upper = (e4m3_bits(part) for part in pairs_of_half(v[0]))
        put(target, lower | upper << np.uint64(8))
    elif name == "cvt" and kinds == ["rn", "satfinite", "e4m3x2", "f32"]:
        upper, lower = (e4m3_bits(floats(x)) for x in v)
        put(target, lower | upper << np.uint64(8))
    elif name == "cvt" and kinds == ["u32", "u16"]:
        put(target, v[0] & np.uint64(0xFFFF))
    elif name == "cvt" and kinds == ["rn", "bf16x2", "e2m1x2"]:
        lo, hi = (_e2m1((v[0] >> np.uint64(shift)) & np.uint64(15)) for shift in (0, 4))
        put(target, lo | hi << np.uint64(16))
    elif name == "cvt" and kinds == ["rn", "bf16x2", "f32"]:
        hi, lo = (bfloat16_bits(floats(x).astype(np.float64)).astype(np.uint64) for x in v)
        put(target, lo | hi << np.uint64(16))
    elif kind == "f32":
        a = [floats(x) for x in v]
        with np.errstate(all="ignore"):
            made = {
                "mul": lambda: a[0] * a[1], "add": lambda: a[0] + a[1], "sub": lambda: a[0] - a[1],
                "div": lambda: a[0] / a[1], "min": lambda: np.fmin(*a), "max": lambda: np.fmax(*a),
                "rcp": lambda: np.float32(1) / a[0],
            }[name]()  # fmt: skip
        put(target, float_bits(made))
    elif name == "mad" and kinds == ["wide", "s32"]:
        put(target, (signed(v[0]) * signed(v[1]) + signed(v[2], 64)).astype(np.uint64))
    else:
        integer = {
            "and": lambda: v[0] & v[1], "or": lambda: v[0] | v[1], "xor": lambda: v[0] ^ v[1],
            "add": lambda: v[0] + v[1], "sub": lambda: v[0] - v[1], "mul": lambda: v[0] * v[1],
            "mad": lambda: v[0] * v[1] + v[2], "prmt": lambda: prmt(*v),
            "shl": lambda: v[0] << np.minimum(v[1], np.uint64(63)), "shr": lambda: (v[0] & low) >> v[1],
            "lop3": lambda: lookup(*v[:3], int(v[3][0])),
        }  # fmt: skip
        if name not in integer or kind not in ("b32", "u32", "b64"):
            raise NotImplementedError(opcode)
        put(target, integer[name]() & low)


def _memory(name: str, kinds: list[str], operands: list[str], value, put, memory) -> None:
    size = {"b16": 2, "b32": 4, "u32": 4}[kinds[-1]]
    if name == "red":
        address, amount = value(operands[0].strip("[]")), value(operands[1])
        memory.update(address, lambda old: (old + amount) & np.uint64(0xFFFFFFFF))
        return
    address = value(operands[1].strip("[]"))
    if name == "atom":
        if "inc" not in kinds:
            raise NotImplementedError(kinds)
        bound = value(operands[2])
        old = memory.update(address, lambda old: np.where(old >= bound, 0, old + np.uint64(1)).astype(np.uint64))
        put(operands[0], old)
        return
    if {"acquire", "volatile"} & set(kinds):
        memory.pause()
    for i, register in enumerate(_names(operands[0])):
        put(register, memory.load(address + np.uint64(size * i), size).astype(np.uint64))

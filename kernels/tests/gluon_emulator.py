"""Our Gluon kernels on a CPU, executed from their source: their results, and who waits for whom.

A partition is a thread; who goes on is drawn by lot, copies and `wgmma` come as late as they may: see HOW_IT_WORKS.md.
"""

import ast
import builtins
import ctypes
import functools
import importlib
import inspect
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ptx_emulator as ptx
import torch

NUMPY = {
    "i1": np.bool_, "u8": np.uint8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "f32": np.float32,
    "bf16": np.uint16, "i8": np.int8, "e4m3": np.uint8,
}  # fmt: skip
KINDS = {
    torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "i32", torch.int16: "i16", torch.uint8: "u8",
    torch.float8_e4m3fn: "e4m3",
}  # fmt: skip
BITS = {"u8": 8, "i8": 8, "e4m3": 8, "i16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64}


class Deadlock(Exception):
    """Everybody waits."""


def array(value, like: str = "i32") -> np.ndarray:
    return value.a if isinstance(value, Tensor) else np.asarray(value, NUMPY[like])


class Tensor:
    """A block of values, or of addresses of values (`to` is their kind); bfloat16 as its bits."""

    def __init__(self, a, kind: str, to: str | None = None) -> None:
        self.a, self.kind, self.to_kind = np.asarray(a), kind, to

    shape = property(lambda self: self.a.shape)
    type = property(lambda self: SimpleNamespace(layout=None))

    def _with(self, other, compute, kind: str | None = None):
        if self.to_kind:
            step = array(other, "i64").astype(np.int64) * (BITS[self.to_kind] // 8)
            assert compute in (np.add, np.subtract), "of addresses only these"
            return Tensor(compute(self.a, step), "i64", self.to_kind)
        assert self.kind != "bf16", "bfloat16 is converted before it is computed with"
        b = array(other, self.kind)
        common = self.kind if not isinstance(other, Tensor) else max(self.kind, other.kind, key=list(NUMPY).index)
        a = self.a.astype(NUMPY[common])
        with np.errstate(all="ignore"):
            return Tensor(compute(a, b.astype(NUMPY[common])), kind or common)

    __hash__ = None

    def __bool__(self):
        return bool(self.a)

    def __index__(self):
        return int(self.a)

    __int__ = __index__

    def __getitem__(self, at):
        return Tensor(self.a[at], self.kind, self.to_kind)

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return Tensor(self.a.reshape([int(s) for s in shape]), self.kind, self.to_kind)

    def permute(self, *order):
        return Tensor(self.a.transpose(order[0] if len(order) == 1 else order), self.kind, self.to_kind)

    def to(self, kind: str, bitcast: bool = False):
        if self.to_kind:
            assert kind == "i64"
            return Tensor(self.a, "i64")
        if bitcast:
            assert BITS[kind] == BITS[self.kind]
            return Tensor(np.ascontiguousarray(self.a).view(NUMPY[kind]).reshape(self.a.shape), kind)
        if kind == self.kind:
            return self
        if kind == "bf16":
            return Tensor(ptx.bfloat16_bits(self.a.astype(np.float64)), "bf16")
        if kind == "e4m3":
            return Tensor(ptx.e4m3_bits(self.a).astype(np.uint8), "e4m3")
        values = ptx.bfloat16_value(self.a) if self.kind == "bf16" else self.a
        return Tensor(values.astype(NUMPY[kind]), kind)


for _name, _compute in {
    "add": np.add, "radd": np.add, "sub": np.subtract,
    "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "lshift": np.left_shift, "rshift": np.right_shift, "rmul": np.multiply,
    "rand": np.bitwise_and, "rsub": lambda a, b: b - a, "rfloordiv": lambda a, b: b // a, "rmod": lambda a, b: b % a,
}.items():  # fmt: skip
    setattr(Tensor, f"__{_name}__", lambda self, other, compute=_compute: self._with(other, compute))
for _name, _compute in {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}.items():  # fmt: skip
    setattr(Tensor, f"__{_name}__", lambda self, other, compute=_compute: self._with(other, compute, "i1"))


class Pending(Tensor):
    """The result of a wgmma that was not waited for."""

    def __init__(self, shape) -> None:
        self.value, self.kind, self.to_kind, self.made = None, "f32", None, shape

    shape = property(lambda self: self.made)

    @property
    def a(self) -> np.ndarray:
        assert self.value is not None, "an accumulator is used before its wgmma was waited for"
        return self.value


class Shared:
    """Shared memory: a view of `data`."""

    def __init__(self, data: np.ndarray, kind: str) -> None:
        self.data, self.kind = data, kind

    def index(self, i):
        assert 0 <= int(i) < len(self.data), "no such stage"
        return Shared(self.data[int(i)], self.kind)

    def slice(self, start, length, dim):
        cut = [builtins.slice(None)] * self.data.ndim
        assert int(start) + length <= self.data.shape[dim]
        cut[dim] = builtins.slice(int(start), int(start) + length)
        return Shared(self.data[tuple(cut)], self.kind)

    def permute(self, order):
        return Shared(self.data.transpose(order), self.kind)

    def load(self, layout=None):
        machine.pause()
        return Tensor(self.data.copy(), self.kind)

    def store(self, x):
        assert x.shape == self.data.shape and x.kind == self.kind
        self.data[...] = x.a
        machine.pause()

    @property
    def key(self) -> int:
        return self.data.__array_interface__["data"][0]


def numbers(x) -> np.ndarray:
    """An operand of bfloat16 or e4m3, of registers or shared memory, as float32."""
    if x.kind == "e4m3":
        return ptx.e4m3_value(x.data if isinstance(x, Shared) else x.a).astype(np.float32)
    assert x.kind == "bf16"
    return ptx.bfloat16_value(x.data if isinstance(x, Shared) else x.a).astype(np.float32)


class Barrier:
    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.bytes, self.phase = 0, 0

    def settle(self) -> None:
        assert self.left >= 0, "more arrivals than the barrier was made for"
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase ^ 1


class Task(threading.Thread):
    """A partition of a program."""

    def __init__(self, fn, args, program) -> None:
        super().__init__(daemon=True)
        self.fn, self.args, self.program = fn, args, program
        self.turn, self.ready = threading.Semaphore(0), lambda: True
        self.products: list = []  # wgmma that were not waited for
        self.stores: list = []  # bulk copies to global memory
        self.group: list = []  # cp.async since the last commit
        self.groups: list = []  # those before
        self.done = False

    def run(self) -> None:
        self.turn.acquire()
        try:
            if not machine.dead:
                self.fn(*self.args)
        except ptx.Exit:
            pass
        except BaseException as error:  # raised by the machine
            machine.failed = machine.failed or error
        self.done = True
        machine.back.release()


class Machine:
    """Runs launches; also the memory of inline assembly."""

    def launch(
        self, fn, grid: tuple[int, ...], arguments: dict, seed: int, resident: int, later: list[torch.Tensor]
    ) -> None:
        self.lot, self.back, self.failed, self.dead = random.Random(seed), threading.Semaphore(0), None, False
        self.barriers: dict[int, Barrier] = {}
        self.copies: list = []  # bulk copies on their way
        self.kept: list = []  # shared memory: its addresses are names
        self.made, self.awaited = set(), set()  # groups of barriers, by the order in which a program makes them
        self.memory: dict[int, np.ndarray] = {}  # by address, in bytes
        flat = [a for value in arguments.values() for a in (value if isinstance(value, tuple) else (value,))]
        for a in flat:
            storage = getattr(a, "base", a).untyped_storage() if hasattr(a, "base") or torch.is_tensor(a) else None
            if storage is not None and storage.nbytes():
                raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
                self.memory[storage.data_ptr()] = np.frombuffer(raw, np.uint8)
        self.before = [(t, t.clone()) for t in later]  # the kernel before this one has not written it yet
        for t in later:
            t.view(torch.uint8).fill_(0xFF)
        kept = {name: self._argument(fn, name, a) for name, a in arguments.items()}
        waiting, self.tasks, self.grid = list(range(int(np.prod(grid)))), [], grid
        steps, patience = 0, self.lot.randrange(20, 600)  # who does not wait has time to do harm
        while True:
            running = {t.program.pid for t in self.tasks}
            while waiting and len(running) < resident:
                running.add(waiting[0])
                self.spawn(lambda: fn(**kept), (), SimpleNamespace(pid=waiting.pop(0)))
            able = [t for t in self.tasks if t.ready()]
            events = ["copy"] if self.copies else []
            if self.before and (steps > patience or not (able or self.copies)):
                events.append("before")
            if not able and not events:
                if not self.tasks and not waiting:
                    break
                self._stop(Deadlock(f"{len(self.tasks)} partitions wait, {len(waiting)} programs have not started"))
            choice = self.lot.choice(able + events * max(1, len(able) // 4))
            steps += 1
            if steps > 400_000:
                self._stop(Deadlock("no end"))
            if choice == "copy":
                self.copies.pop(self.lot.randrange(len(self.copies)))()
            elif choice == "before":
                self._end_of_the_kernel_before()
            else:
                self.current = choice
                choice.turn.release()
                self.back.acquire()
                if self.failed:
                    self._stop(self.failed)
                if choice.done:
                    for store in choice.stores:
                        store()
                    self.tasks.remove(choice)
        assert self.made == self.awaited, "barriers that nobody waits for: Triton gives their memory to something else"
        assert not self.before, "the launch ended before the one before it, which nobody waited for"

    def _end_of_the_kernel_before(self) -> None:
        for t, original in self.before:
            t.copy_(original)
        self.before = []

    def _stop(self, error: BaseException) -> None:
        self.dead = True
        for task in self.tasks:
            task.turn.release()
        raise error

    def _argument(self, fn, name, a):
        if isinstance(a, tuple) and not hasattr(a, "_fields"):
            return tuple(self._argument(fn, name, each) for each in a)
        if isinstance(a, torch.Tensor):
            return Tensor(np.int64(a.data_ptr()), "i64", KINDS[a.dtype])
        plain = inspect.signature(fn).parameters[name].annotation is not gl.constexpr
        if plain and isinstance(a, int) and not isinstance(a, bool):
            return Tensor(np.int32(a), "i32") if -(2**31) <= a < 2**31 else Tensor(np.int64(a), "i64")
        return a

    def pause(self, ready=None) -> None:
        """Others may run, until `ready` at least."""
        if ready is None:
            if self.lot.random() < 0.6:
                return
        elif ready() and self.lot.random() < 0.3:
            return
        task = self.current
        task.ready = ready or (lambda: True)
        self.back.release()
        task.turn.acquire()
        if self.dead:
            raise ptx.Exit
        task.ready = lambda: True

    def spawn(self, fn, args, program=None) -> None:
        task = Task(fn, args, program or self.current.program)
        self.tasks.append(task)
        task.start()

    # --- global memory

    def view(self, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The storage as unsigned integers of `size` bytes, and where in it."""
        address = np.asarray(address).astype(np.int64)
        for start, data in self.memory.items():
            length = len(data)
            if start <= address.min() and address.max() + size <= start + length:
                assert not ((address - start) % size).any(), "an address is no multiple of the size"
                return data[: length // size * size].view(f"u{size}"), (address - start) // size
        raise IndexError("an address outside of every tensor of the launch")

    def load(self, address, size: int):
        data, at = self.view(address, size)
        return data[at]

    def update(self, address, compute):
        """One after the other, as atomics do."""
        self.pause()
        data, at = self.view(address, 4)
        old = data[at].astype(np.uint64)
        assert len(set(at.tolist())) == len(at)
        data[at] = compute(old).astype(np.uint32)
        return old


machine = Machine()


# --- the language ---------------------------------------------------------------------------------


def constexpr(value):
    return value


def _where_on(ptr, mask, *others) -> tuple[tuple, np.ndarray]:
    """The shape, and where the mask is on."""
    mask = np.bool_(True) if mask is None else array(mask, "i1")
    shape = np.broadcast_shapes(ptr.shape, mask.shape, *others)
    return shape, np.broadcast_to(mask, shape)


def load(ptr, mask=None, other=0, **_):
    size = BITS[ptr.to_kind] // 8
    shape, on = _where_on(ptr, mask)
    out = np.zeros(shape, f"u{size}")
    if on.any():
        out[on] = machine.load(np.broadcast_to(ptr.a, shape)[on], size)
    out = out.view(NUMPY[ptr.to_kind])
    if other:
        out[~on] = other
    machine.pause()
    return Tensor(out, ptr.to_kind)


def store(ptr, value, mask=None):
    size, kind = BITS[ptr.to_kind] // 8, ptr.to_kind
    value = value.to(kind) if isinstance(value, Tensor) else Tensor(np.asarray(value, NUMPY[kind]), kind)
    shape, on = _where_on(ptr, mask, value.shape)
    if on.any():
        data, at = machine.view(np.broadcast_to(ptr.a, shape)[on], size)
        data[at] = np.ascontiguousarray(np.broadcast_to(value.a, shape)[on]).view(f"u{size}")
    machine.pause()


def atomic_add(ptr, value, sem=None):
    amount = np.uint64(int(value))
    old = machine.update(np.atleast_1d(ptr.a), lambda old: old + amount)
    return Tensor(np.int32(np.uint32(old[0])), "i32")


def where(condition, a, b):
    kind = next((x.kind for x in (a, b) if isinstance(x, Tensor)), "i32")
    return Tensor(np.where(array(condition, "i1"), array(a, kind), array(b, kind)), kind)


def _neighbours(args: list[np.ndarray], pack: int) -> int:
    """The axis along which `pack` values are neighbours: offsets differ by 1, or addresses by 4 bytes."""
    for a in args:
        for axis in reversed(range(a.ndim)):
            if a.shape[axis] % pack == 0 and a.dtype.kind == "i":
                groups = np.moveaxis(a, axis, -1).reshape(-1, pack).astype(np.int64)
                if (np.diff(groups, axis=1) == (4 if a.dtype == np.int64 else 1)).all():
                    return axis
    raise AssertionError("no neighbours among the operands of an instruction of several values")


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    shape = np.broadcast_shapes(*[a.shape for a in args]) if args else ()
    arrays = [np.broadcast_to(a.a, shape) for a in args]
    axis = None
    if pack > 1:
        narrow = all(BITS[a.kind] < 32 or a.kind == "f32" for a in args)
        axis = len(shape) - 1 if narrow else _neighbours(arrays, pack)
    inputs = []
    for a, given in zip(arrays, args, strict=True):
        bits = np.ascontiguousarray(a).view(f"u{BITS[given.kind] // 8}").astype(np.uint64)
        if pack == 1:
            inputs.append(bits.reshape(-1))
            continue
        groups = np.moveaxis(bits, axis, -1).reshape(-1, pack)
        each = max(1, 32 // BITS[given.kind])  # narrow values share a register
        for i in range(0, pack, each):
            inputs.append(sum(groups[:, i + j] << np.uint64(BITS[given.kind] * j) for j in range(each)))
    wanted = [c for c in constraints.split(",") if c.startswith("=")]
    assert len(constraints.split(",")) - len(wanted) == len(inputs), "constraints and arguments differ"
    found = ptx.run(asm, len(wanted), inputs, machine)
    outs = []
    for n, kind in enumerate(kinds):
        word = f"u{BITS[kind] // 8}"
        if pack == 1:
            outs.append(Tensor(found[n].astype(word).view(NUMPY[kind]).reshape(shape), kind))
            continue
        each = min(pack, 32 // BITS[kind])
        registers = found[n * (pack // each) : (n + 1) * (pack // each)]
        parts = [(r >> np.uint64(BITS[kind] * j)).astype(word) for r in registers for j in range(each)]
        moved = [s for i, s in enumerate(shape) if i != axis]
        whole = np.stack(parts, -1).view(NUMPY[kind]).reshape([*moved, shape[axis]])
        outs.append(Tensor(np.moveaxis(whole, -1, axis), kind))
    return tuple(outs) if isinstance(dtype, tuple) else outs[0]


def allocate_shared_memory(kind, shape, layout):
    size = [int(s) for s in shape]
    data = np.full(size, np.nan, np.float32) if kind == "f32" else np.full(size, -1).astype(NUMPY[kind])
    machine.kept.append(data)
    if kind == "i64":  # barriers
        made = machine.current.program.__dict__.setdefault("barriers", [])
        start = Shared(data, kind).key
        made.append((start, start + data.nbytes))
        machine.made.add(len(made) - 1)
    return Shared(data, kind)


def warp_specialize(partitions, warps, registers):
    assert len(warps) == len(registers) == len(partitions) - 1
    for fn, args in partitions[1:]:
        machine.spawn(fn, args)
    fn, args = partitions[0]
    fn(*args)


def _product(a, b, acc):
    with np.errstate(all="ignore"):  # rows that nobody wrote are multiplied too
        return np.matmul(numbers(a), numbers(b)) + acc


def warpgroup_mma(a, b, acc, is_async=False):
    left, made = Tensor(a.a, a.kind), Pending(acc.shape)

    def compute() -> None:
        made.value = _product(left, b, acc.a)

    machine.current.products.append(compute)
    if not is_async:
        warpgroup_mma_wait(0, [made])
    return made


def warpgroup_mma_wait(left, deps):
    machine.pause()
    products = machine.current.products
    while len(products) > left:
        products.pop(0)()
    return deps[0] if len(deps) == 1 else tuple(deps)


def async_load(desc, at, bar, target):
    box, size = desc.block_shape, BITS[KINDS[desc.base.dtype]] // 8
    assert list(target.data.shape) == list(box)
    first = [int(i) for i in at]
    key = bar.key

    def copy() -> None:
        source = desc.base.as_strided(desc.shape, desc.strides)
        whole = source.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]).numpy()
        out = np.zeros(box, whole.dtype)
        part = whole[first[0] : first[0] + box[0], first[1] : first[1] + box[1]]
        out[: part.shape[0], : part.shape[1]] = part
        target.data[...] = out.view(target.data.dtype)
        machine.barriers[key].bytes -= int(np.prod(box)) * size
        machine.barriers[key].settle()

    machine.copies.append(copy)
    machine.pause()


def async_store(desc, at, source):
    first = [int(i) for i in at]

    def copy() -> None:
        target = desc.base.as_strided(desc.shape, desc.strides).view(torch.int16).numpy().view(np.uint16)
        part = target[first[0] :, first[1] :][: source.data.shape[0], : source.data.shape[1]]
        part[...] = source.data[: part.shape[0], : part.shape[1]]

    machine.current.stores.append(copy)


def store_wait(left):
    while len(machine.current.stores) > left:
        machine.current.stores.pop(0)()


class async_copy:
    """`cp.async`: a copy arrives at any time until its group is waited for."""

    def copy(target, ptr):
        assert target.data.shape == ptr.shape
        address, size = ptr.a, BITS[ptr.to_kind] // 8
        target.data[...] = 0x7FC0 if target.kind == "bf16" else -1  # the old value is lost from now on

        def arrive() -> None:
            target.data[...] = machine.load(address, size).view(target.data.dtype)

        machine.current.group.append(arrive)
        machine.pause()

    def commit_group():
        machine.current.groups.append(machine.current.group)
        machine.current.group = []
        if machine.lot.random() < 0.3:
            async_copy.wait_group(len(machine.current.groups) - 1)

    def wait_group(left):
        machine.pause()
        while len(machine.current.groups) > left:
            for arrive in machine.current.groups.pop(0):
                arrive()


class mbarrier:
    def MBarrierLayout():
        return None

    def init(bar, count):
        machine.barriers[bar.key] = Barrier(int(count))

    def wait(bar, phase):
        barrier, phase = machine.barriers[bar.key], int(phase)
        made = machine.current.program.barriers
        machine.awaited |= {i for i, (start, end) in enumerate(made) if start <= bar.key < end}
        machine.pause(lambda: barrier.phase != phase)

    def arrive(bar, pred=True, count=1):
        if bool(pred):
            machine.barriers[bar.key].left -= count
            machine.barriers[bar.key].settle()
        machine.pause()

    def expect(bar, size, pred=True):
        machine.barriers[bar.key].bytes += int(size)
        mbarrier.arrive(bar)


def gdc_wait():
    machine.pause(lambda: not machine.before)


def program_id(axis):
    return Tensor(np.int32(np.unravel_index(machine.current.program.pid, machine.grid[::-1])[-1 - axis]), "i32")


def static_assert(condition, message=""):
    assert condition, message


class _Language(SimpleNamespace):
    """`gl` and `tl`; layouts are Triton's own, which the kernels ask for their sizes."""

    def __getattr__(self, name):
        if not name.endswith("Layout"):
            raise AttributeError(name)
        from triton.experimental.gluon import language

        return getattr(language, name)


def _record(cls):
    """A class with a constructor of its annotated fields."""
    names = tuple(cls.__annotations__)
    cls.__init__ = lambda self, *values: vars(self).update(zip(names, values, strict=True))
    return cls


def _jit(fn=None, **_):
    return fn if fn is not None else _jit


OWN = (
    constexpr, load, store, atomic_add, where, inline_asm_elementwise, allocate_shared_memory, warp_specialize,
    program_id, static_assert,
)  # fmt: skip
TYPES = {
    "float32": "f32", "bfloat16": "bf16", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "int8": "i8",
    "float8e4nv": "e4m3",
}  # fmt: skip
gl = _Language(
    **TYPES,
    **{function.__name__: function for function in OWN},
    static_range=range,
    tensor="a record's field",
    shared_memory_descriptor="a record's field",
    tuple=tuple,
    num_programs=lambda axis: Tensor(np.int32(machine.grid[axis]), "i32"),
    arange=lambda start, end, layout=None: Tensor(np.arange(start, end, dtype=np.int32), "i32"),
    zeros=lambda shape, kind, layout=None: Tensor(np.zeros([int(s) for s in shape], NUMPY[kind]), kind),
    zeros_like=lambda x: Tensor(np.zeros_like(x.a), x.kind),
    minimum=lambda a, b: where(a < b, a, b) if isinstance(a, Tensor) else where(b < a, b, a),
    maximum=lambda a, b: where(a > b, a, b) if isinstance(a, Tensor) else where(b > a, b, a),
    sum=lambda x, axis: Tensor(x.a.sum(axis, dtype=np.float32), "f32"),
    max=lambda x, axis: Tensor(x.a.max(axis), x.kind),
    abs=lambda x: Tensor(np.abs(x.a), x.kind),
    join=lambda a, b: Tensor(np.stack([a.a, b.a], -1), a.kind, a.to_kind),
    split=lambda x: tuple(Tensor(x.a[..., i], x.kind, x.to_kind) for i in (0, 1)),
    convert_layout=lambda x, layout=None, assert_trivial=False: x,
    div_rn=lambda a, b: Tensor(array(a, "f32") / array(b, "f32"), "f32"),
    dot=lambda a, b, acc: Tensor(_product(a, b, acc.a), "f32"),
    trans=lambda x: Tensor(x.a.T, x.kind),
    cdiv=lambda a, b: (a + b - 1) // b,
    debug_barrier=lambda: machine.pause(),
    broadcast_to=lambda x, shape: Tensor(np.broadcast_to(x.a, shape), x.kind),
)
FAKES = {
    "gluon": SimpleNamespace(jit=_jit, constexpr_function=lambda f: f), "triton": SimpleNamespace(jit=_jit), "gl": gl,
    "tl": gl, "mbarrier": mbarrier, "async_copy": async_copy, "copy_to_shared": async_copy.copy,
    "tma": SimpleNamespace(store_wait=store_wait), "mma_v2": gl.dot, "fence_async_shared": lambda: None,
    "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait, "gdc_wait": gdc_wait,
    "gdc_launch_dependents": lambda: None, "barrier": lambda: machine.pause(), "async_load": async_load,
    "async_store": async_store, "record": _record,
    "partitions": lambda groups, count, *others: [*groups[:count], *(each for other in others for each in other)],
}  # fmt: skip


#: multiprocessors of the emulated GPU
SMS = 5
#: files without a kernel
PLAIN = ("cost",)


class Source:
    """The functions of the kernels' files, with this language in the place of Triton's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, {}

    def __getitem__(self, name: str) -> dict:
        if name not in self.files:
            tree = ast.parse((self.folder / f"{name}.py").read_text())
            scope = self.files[name] = {"__name__": f"emulated.{name}"}
            imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
            for node in imports:
                for alias in node.names:
                    known = alias.asname or alias.name
                    if known in FAKES:
                        scope[known] = FAKES[known]
                    elif isinstance(node, ast.Import):
                        scope[known] = __import__(alias.name)
                    elif not node.level:
                        scope[known] = getattr(importlib.import_module(node.module), alias.name)
                    elif node.module in PLAIN:
                        scope[known] = getattr(importlib.import_module(f"qerl_nvfp4.{node.module}"), alias.name)
                    else:
                        scope[known] = self[node.module][alias.name]
            tree.body = [n for n in tree.body if n not in imports]
            exec(compile(tree, str(self.folder / f"{name}.py"), "exec"), scope)
        return self.files[name]

    def kernel(self, name: str):
        files = ("hopper", "hopper_wgmma", "ampere", "portable", "elementwise")
        return next(self[file][name] for file in files if name in self[file])


@functools.cache
def source() -> Source:
    """Of the package that is imported."""
    return Source(Path(importlib.import_module("qerl_nvfp4").__file__).parent)

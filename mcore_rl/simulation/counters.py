"""Counters of a simulated step: memory in use, kernels, matrix products and communication."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import traceback
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from mcore_rl import platform
from mcore_rl.platform import cpu

SIMULATION, PACKAGE = Path(__file__).parent, Path(__file__).parents[1]
STAND_INS = Path(cpu.__file__)
"""File that replaces functions of `torch.cuda`. A host read in this file is attributed to the function's caller."""

STATE, LOGITS, COMMUNICATION, ACTIVATIONS = "state", "logits", "communication buffers", "activations, workspace"
"""Kinds of storages.

STATE: weights, gradients and optimizer state.
LOGITS: tensors computed from hidden states and the LM head.
COMMUNICATION: receive buffers of collectives.
ACTIVATIONS: all others.
"""


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live tensors: those created in it and not yet freed.

    live: current number of bytes.
    peaks: largest number of bytes in each phase.
    at_peak: bytes by kind at the peak of each phase.

    Args:
        devices: device types whose memory is counted.
        kind_now: function that returns the kind of a new storage.
    """

    def __init__(self, *devices: str, kind_now: Callable[[], str] = lambda: ACTIVATIONS) -> None:
        super().__init__()
        self.devices, self.phase = devices, ""
        self.live = 0
        self.peaks: dict[str, int] = {}
        self.at_peak: dict[str, Counter[str]] = {}
        self._kind_now = kind_now
        self._kinds: dict[int, str] = {}
        self._of_kind = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type in self.devices:
                self.see(leaf)
        return out

    def see(self, tensor: Tensor) -> None:
        """Count the tensor's storage, unless it has been counted before."""
        storage = tensor.untyped_storage()
        key, size = platform.storage_id(tensor), storage.nbytes()
        if key in self._kinds or not size:
            return
        kind = self._kinds[key] = self._kind_now()
        self._of_kind[kind] += size
        self.live += size
        if self.live > self.peaks.get(self.phase, 0):
            self._note_peak()
        weakref.finalize(storage, self._forget, key, size)

    def is_state(self, tensor: Tensor) -> bool:
        """Return whether the tensor's storage belongs to weights, gradients or an optimizer."""
        return self._kinds.get(platform.storage_id(tensor)) == STATE

    def receives(self, tensor: Tensor) -> None:
        """From now on, count the tensor's storage as a communication buffer, unless it is of the kind `STATE`."""
        key, size = platform.storage_id(tensor), tensor.untyped_storage().nbytes()
        if key not in self._kinds or self.is_state(tensor):
            return
        self._of_kind[self._kinds[key]] -= size
        self._of_kind[COMMUNICATION] += size
        self._kinds[key] = COMMUNICATION
        if self.live == self.peaks.get(self.phase):  # the storage may have caused this peak
            self._note_peak()

    def _note_peak(self) -> None:
        self.peaks[self.phase] = self.live
        self.at_peak[self.phase] = self._of_kind.copy()

    def _forget(self, key: int, size: int) -> None:
        self._of_kind[self._kinds.pop(key)] -= size
        self.live -= size


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the number of bytes of the tensors' storages, counting each storage once."""
    return sum({platform.storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _grouped_product(rows: tuple[int, ...], weights: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Return the number of operations of a grouped product, a matrix product of each expert with its own tokens.

    Forward: each row of [T, in] is multiplied with its expert's matrix in [experts, in, out]. Gradient of the weights:
    for each expert, its columns of [out, T] are multiplied with its rows of [T, in].
    """
    return 2 * math.prod(rows) * weights[-1]


def _added_product(total: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Return the number of operations of `total` + `a` · `b`, for `a` [n, in] and `b` [in, out].

    PyTorch's FLOP counter has a function for this operator, but that function does not accept the argument `out_dtype`.
    """
    return 2 * math.prod(a) * b[-1]


_LEFT_OUT: dict[Any, Callable[..., int]] = {torch.ops.aten.addmm: _added_product}
"""Functions that return an operator's number of operations, for operators that torch's counter cannot handle."""
if hasattr(torch.ops.aten, "_grouped_mm"):
    _LEFT_OUT[torch.ops.aten._grouped_mm] = _grouped_product


PRODUCTS = {*flop_registry, *_LEFT_OUT}
"""Functions that compute matrix products."""
CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)
ADDED_PRODUCTS = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)
"""Functions of `PRODUCTS` that add the product to their first argument."""


class _Tracker(contextlib.nullcontext[None]):
    """Replaces the module tracker of torch's FLOP counter, so that operations are counted by phase and part.

    All operations are also counted under the name "Global". The hooks of torch's tracker would keep recomputed
    activations alive, and so use memory that a real run does not use.
    """

    def __init__(self, now: Callable[[], Hashable]) -> None:
        super().__init__()
        self._now = now

    @property
    def parents(self) -> set[Hashable]:
        return {"Global", self._now()}


class Product(NamedTuple):
    """Kind of a matrix product: phase and part in which it is computed, and the properties that determine its rate.

    For a grouped product, the sizes are those of one expert's product, as if all experts had equally many tokens.

    dtype: precision of the factors, as torch names it.
    narrow: the smaller dimension of the result.
    inner: size of the dimension that is summed over.
    """

    phase: str
    part: str
    dtype: str
    narrow: int
    inner: int

    @classmethod
    def of(cls, phase: str, part: str, a: Tensor, b: Tensor, ends: Tensor | None) -> Product:
        """Return the kind of the product a × b.

        Args:
            ends: for a grouped product, the end of each expert's tokens; None for any other product.
        """
        rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        if ends is not None and b.ndim == 3:
            rows = max(rows // len(ends), 1)
        elif ends is not None:
            inner = max(inner // len(ends), 1)
        return cls(phase, part, str(a.dtype).removeprefix("torch."), min(rows, columns), inner)


class ProductCounter(FlopCounterMode):
    """Dispatch mode that counts the operations of matrix products.

    counts: number of floating-point operations, by kind of product.
    operands: number of elements in the factors of matrix products, without weights, by phase and part.

    Args:
        now: function that returns the current phase and part.
        is_state: function that returns whether a tensor is a weight.
    """

    def __init__(self, now: Callable[[], tuple[str, str]], is_state: Callable[[Tensor], bool]) -> None:
        super().__init__(display=False, custom_mapping=_LEFT_OUT)
        self.mod_tracker = _Tracker(now)  # type: ignore[assignment]
        self.counts = Counter[Product]()
        self.operands = Counter[tuple[str, str]]()
        self._now, self._is_state = now, is_state

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet in self.flop_registry:
            a, b, *more = args[int(func_packet in ADDED_PRODUCTS) :]
            is_grouped = func_packet in _LEFT_OUT and func_packet not in ADDED_PRODUCTS
            ends = kwargs.get("offs", more[0] if more else None) if is_grouped else None
            if func_packet in CONVOLUTIONS:  # of the vision tower, whose patches do not overlap: a product of matrices
                a, b = a.flatten(1), b.flatten(1).T
            kind = Product.of(*self._now(), a, b, ends)
            self.counts[kind] += self.flop_registry[func_packet](*args, **kwargs, out_val=out)
            self.operands[kind.phase, kind.part] += sum(x.numel() for x in (a, b) if not self._is_state(x))
        return super()._count_flops(func_packet, out, args, kwargs)


ALLOCATES = ("empty", "new_empty", "resize_", "set_")
FILLS = ("zero", "ones", "full", "fill", "new_", "arange", "copy")
SELECTS = ("index_select", "embedding", "gather", "index")
ADDS_TO_PARTS = ("index_add_", "scatter_add_", "scatter_", "index_put_", "index_copy_")
"""Names of PyTorch functions that read or write less memory than all elements of their tensors.

ALLOCATES (beginnings of names): touch no memory.
FILLS (beginnings of names): write to a tensor without reading it.
SELECTS: read only some elements of their first tensor.
ADDS_TO_PARTS: change only some elements of their first tensor.
"""


def touched_bytes(tensor: Tensor) -> int:
    """Return the number of bytes in memory that a tensor refers to; a dimension with stride 0 counts once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


class _OneKernel:
    """Counts the memory that one kernel reads and writes. The kernel fuses several operations."""

    def __init__(self) -> None:
        self.made = set[int]()
        self.read: dict[int, dict[int, int]] = {}
        self.changed: dict[int, dict[int, int]] = {}
        self._sizes: dict[int, int] = {}

    def note(self, tensor: Tensor, of: dict[int, dict[int, int]]) -> None:
        """Note in `of` (`self.read` or `self.changed`) that the kernel reads or changes `tensor`.

        Tensors that the kernel itself has made are ignored. Several views of the same elements count once.
        """
        key = platform.storage_id(tensor)
        if key in self.made:
            return
        self._sizes[key] = tensor.untyped_storage().nbytes()
        places, start = of.setdefault(key, {}), int(tensor.storage_offset()) * tensor.element_size()
        places[start] = max(places.get(start, 0), touched_bytes(tensor))

    def bytes(self, results: Any) -> int:
        """Return the number of bytes that the kernel reads and writes, including the `results` that it returns."""
        outside = sum(
            min(sum(places.values()), self._sizes[key])
            for of in (self.read, self.changed)
            for key, places in of.items()
        )
        tensors = [x for x in _tensors(results) if platform.storage_id(x) in self.made]
        return outside + sum({platform.storage_id(x): touched_bytes(x) for x in tensors}.values())


class Kernels(TorchDispatchMode):
    """Dispatch mode that counts kernels, and the memory that they read and write.

    Every operation that computes counts as one kernel, and so does a call of a `fused` function. For a matrix product,
    only the bytes of result and summand are counted, and only if the result has a wider type than the factors. The time
    of all other bytes is part of the product's time.

    launches: number of kernels, by phase.
    bytes: bytes that kernels read and write, by phase and part.
    of_weights: the part of `bytes` that is read and written to copy weights.
    of_gradients: number of elements that are read and written to add gradients to their sums, by phase.

    Args:
        devices: device types whose kernels are counted.
        now: function that returns the current phase and part.
        is_state: function that returns whether a tensor is a weight, a gradient or part of an optimizer's state.
    """

    def __init__(
        self, *devices: str, now: Callable[[], tuple[str, str]], is_state: Callable[[Tensor], bool] = lambda _: False
    ) -> None:
        super().__init__()
        self.devices, self._now, self._is_state = devices, now, is_state
        self.bytes = Counter[tuple[str, str]]()
        self.of_weights = Counter[tuple[str, str]]()
        self.launches, self.of_gradients = Counter[str](), Counter[str]()
        self._kernel: _OneKernel | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        rest = [kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :]]
        given = zip(func._schema.arguments, [*args, *rest], strict=True)
        changed = _tensors([value for x, value in given if x.alias_info is not None and x.alias_info.is_write])
        if any(x.device.type in self.devices for x in [*_tensors(out), *changed]):
            read = _tensors((args, [value for name, value in kwargs.items() if name != "out"]))
            self._see(func.overloadpacket, args, read, changed, _tensors(out))
        return out

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that each call counts as one kernel.

        The kernel reads each of its input tensors once, and writes only the tensors that it returns or changes.
        """

        @functools.wraps(function)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            if self._kernel is not None:
                return function(*args, **kwargs)
            counted = self._kernel = _OneKernel()
            try:
                results = function(*args, **kwargs)
            finally:
                self._kernel = None
            self._add(counted.bytes(results))
            return results

        return kernel

    def _see(
        self, packet: Any, args: Any, inputs: Sequence[Tensor], changed: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        name, own = packet.__name__, {platform.storage_id(x) for x in [*inputs, *changed]}
        made = [x for x in results if platform.storage_id(x) not in own]
        if self._kernel is not None:
            self._kernel.made.update(map(platform.storage_id, made))
        if not (made or changed) or name.startswith(ALLOCATES):  # a view, or memory alone
            return
        if packet in PRODUCTS:
            first = int(packet in ADDED_PRODUCTS)
            is_wider = results[0].element_size() > args[first].element_size()
            self._add(sum(map(touched_bytes, [results[0], *args[:first]])) if is_wider else 0)
            return
        read = list(inputs)
        if name.startswith(FILLS):
            read = [x for x in inputs if changed and all(x is not y for y in changed)]
        if self._kernel is not None:
            for of, tensors in ((self._kernel.read, read), (self._kernel.changed, changed)):
                for tensor in tensors:
                    self._kernel.note(tensor, of)
            return
        sizes, written = [touched_bytes(x) for x in read], sum(map(touched_bytes, [*made, *changed]))
        if name in SELECTS:  # they read as much as they select
            sizes[0] = min(sizes[0], written)
        if name in ADDS_TO_PARTS:
            sizes[0] = written = min(sizes[0], max(sizes[1:], default=0))
        self._add(sum(sizes) + written)
        if made and read and all(map(self._is_state, read)):
            self.of_weights[self._now()] += sum(sizes) + written
        if changed and self._is_state(changed[0]):
            is_added = bool(read) and read[0] is changed[0]
            if is_added or changed[0].dtype == torch.float32:  # weights in bfloat16 are overwritten by an update
                moved = written + (sizes[0] if is_added else 0)
                self.of_gradients[self._now()[0]] += moved // changed[0].element_size()

    def _add(self, size: int) -> None:
        phase, part = self._now()
        self.bytes[phase, part] += size
        self.launches[phase] += 1


Tensors = Tensor | Sequence[Tensor]


class Transfer(NamedTuple):
    """Kind of a transfer between ranks.

    ranks: ranks of the group, or the two ranks of a message.
    phase: phase of the step.
    of_state: whether the tensors are weights, gradients or optimizer state.
    """

    operation: str
    ranks: tuple[int, ...]
    phase: str
    of_state: bool = False


class _Done:
    """Handle of an asynchronous collective that is already complete."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@dataclass
class Traffic:
    """Number of bytes and of calls of every kind of transfer.

    For a gather or scatter, the bytes of all ranks' parts together are counted. For an all-to-all, the larger
    of the bytes that this rank sends and receives is counted. For an all-reduce, broadcast or message, the bytes of the
    tensor are counted.
    """

    bytes: Counter[Transfer] = field(default_factory=Counter)
    calls: Counter[Transfer] = field(default_factory=Counter)
    phase: str = ""
    memory: LiveBytes | None = None
    """Counter of memory. It knows which tensors are state, and counts the receive buffers of collectives."""

    def add(self, operation: str, ranks: tuple[int, ...], whole: Tensors, received: Tensors) -> None:
        if len(ranks) == 1:
            return
        of_state = self.memory is not None and all(map(self.memory.is_state, _each(whole)))
        kind = Transfer(operation, ranks, self.phase, of_state)
        sizes = [sum(tensor.numel() * tensor.element_size() for tensor in _each(one)) for one in (whole, received)]
        self.bytes[kind] += max(sizes) if operation == "all_to_all" else sizes[0]
        self.calls[kind] += 1
        if self.memory is not None:
            for tensor in _each(received):
                self.memory.receives(tensor)


class Operation(NamedTuple):
    """How calls of a function of torch.distributed are counted: as which operation, and from which arguments.

    whole: name of the argument that contains the parts of all ranks.
    received: name of the argument for a buffer that is filled with received data; "" if there is no such buffer.
    peer: for functions that send or receive a message, name of the argument for the other rank; otherwise "".
    """

    name: str
    whole: str
    received: str = ""
    peer: str = ""


OPERATIONS = {
    "all_reduce": Operation("all_reduce", "tensor"),
    "broadcast": Operation("broadcast", "tensor"),
    "all_gather_into_tensor": Operation("all_gather", "output_tensor", "output_tensor"),
    "_all_gather_base": Operation("all_gather", "output_tensor", "output_tensor"),
    "all_gather": Operation("all_gather", "tensor_list", "tensor_list"),
    "reduce_scatter_tensor": Operation("reduce_scatter", "input", "output"),
    "_reduce_scatter_base": Operation("reduce_scatter", "input", "output"),
    "reduce_scatter": Operation("reduce_scatter", "input_list", "output"),
    "all_to_all_single": Operation("all_to_all", "input", "output"),
    "send": Operation("send", "tensor", peer="dst"),
    "isend": Operation("send", "tensor", peer="dst"),
    "recv": Operation("recv", "tensor", "tensor", peer="src"),
    "irecv": Operation("recv", "tensor", "tensor", peer="src"),
}
"""Operations by function name."""


def _ranks(arguments: Mapping[str, Any], peer: str) -> tuple[int, ...]:
    """Return the ranks that take part in a call of a function of torch.distributed.

    Args:
        arguments: arguments of the call, by name.
        peer: `Operation.peer` of the function. If it is "dst" or "src", the call may instead give the other rank's
            index in the group, as `group_dst` or `group_src`.
    """
    group = arguments.get("group") or torch.distributed.group.WORLD
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    if not peer:
        return ranks
    place = arguments.get(f"group_{peer}")
    return tuple(sorted((torch.distributed.get_rank(), arguments[peer] if place is None else ranks[place])))


def _each(tensors: Tensors) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def count_traffic(perform: bool = False) -> Traffic:
    """From now on, count every collective of this process; return the counter.

    Call this before `megatron.core` is imported, because it binds some of the functions.

    Args:
        perform: also run the collectives, as in a real run. Otherwise they do nothing.
    """
    traffic = Traffic()

    def counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        operation = OPERATIONS[name]
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def collective(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            received = arguments[operation.received] if operation.received else ()
            traffic.add(operation.name, _ranks(arguments, operation.peer), arguments[operation.whole], received)
            return plain(*args, **kwargs) if perform else _Done()

        return collective

    for name in OPERATIONS:
        replacement = counted(name, getattr(c10d, name))
        setattr(torch.distributed, name, replacement)
        setattr(c10d, name, replacement)
    if not perform:
        _have_no_peers()
    return traffic


def _have_no_peers() -> None:
    """Let collectives of objects return this rank's value for all ranks, and give new groups torch's backend `fake`."""
    distributed: Any = torch.distributed

    def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * len(values)

    new_group = c10d.new_group
    distributed.new_group = lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"})
    distributed.all_gather_object = all_gather_object
    distributed.broadcast_object_list = lambda *_, **__: None
    distributed.barrier = lambda *_, **__: None
    distributed.batch_isend_irecv = lambda messages: [
        message.op(message.tensor, message.peer, group=message.group) for message in messages
    ]


@dataclass
class HostReads:
    """Counts where in the code the host reads a value from the device, and therefore waits for the device."""

    phase: str = ""
    places: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of reads by (phase, file:line of this package)."""

    def note(self) -> None:
        where = "elsewhere"
        for frame in reversed(traceback.extract_stack()):
            file = Path(frame.filename)
            if PACKAGE in file.parents and SIMULATION not in file.parents and file != STAND_INS:
                where = f"{file.name}:{frame.lineno}"
                break
        self.places[self.phase, where] += 1


def note_host_reads(reads: HostReads) -> None:
    """From now on, record in `reads` where the host reads values of simulated tensors. Each value read is 1."""
    tensor_class: Any = Tensor

    def replaced(name: str, value: Any) -> None:
        plain = getattr(tensor_class, name)

        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.device.type != "meta":
                return plain(self, *args, **kwargs)
            reads.note()
            return value(self)

        setattr(tensor_class, name, read)

    def ones(tensor: Tensor) -> Tensor:
        return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")

    def number(tensor: Tensor) -> Any:
        return 1.0 if tensor.dtype.is_floating_point else 1

    replaced("item", number)
    replaced("__float__", lambda tensor: 1.0)
    replaced("__int__", lambda tensor: 1)
    replaced("__bool__", lambda tensor: True)
    replaced("tolist", lambda tensor: ones(tensor).tolist())
    replaced("cpu", ones)


class AttentionFlops:
    """Counts the floating-point operations of attention, forward and backward, in `total`.

    A simulation replaces the attention kernel by one that computes nothing, so these operations are counted separately.
    """

    def __init__(self) -> None:
        self.total = 0

    @staticmethod
    def forward(query_lengths: tuple[int, ...], key_lengths: tuple[int, ...], window: int | None, width: int) -> int:
        """Return the number of operations of the forward pass: two products over all visible pairs of query and key.

        Args:
            query_lengths, key_lengths: for each chunk, its number of queries and the number of keys that it sees.
            window: number of keys that a query sees at most; None for no limit.
            width: number of heads × head dimension.
        """
        pairs = 0
        for queries, keys in zip(query_lengths, key_lengths, strict=True):
            seen = range(keys - queries + 1, keys + 1)  # keys that each query sees without a window
            pairs += sum(min(n, window) for n in seen) if window else (seen[0] + seen[-1]) * queries // 2
        return 4 * pairs * width


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which the attribute `name` of `owner` has the value `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


LM_HEAD, OTHER = "LM head", "other"
TOWER = "visual"
"""Name of the vision tower among the modules. All modules in it are one part of the model."""
OF_MODULES = {
    TOWER: "vision tower",
    "self_attention": "projections",
    "mlp": "MLP",
    "router": "router",
    "experts": "experts",
    "shared_experts": "experts",
    "output_layer": "reward head",
}
"""Map from a module's name to the part of the model. If modules are nested, the innermost one in the map counts."""


def part_of(name: str) -> str:
    """Return which part of the model (MLP, experts, …) the module or parameter called `name` belongs to."""
    names = name.split(".")
    found = [TOWER] if TOWER in names else [one for one in reversed(names) if one in OF_MODULES]
    return OF_MODULES[found[0]] if found else OTHER


class Parts:
    """Tracks which part of the model is computing.

    In a forward pass, the part is that of the module entered last. In a backward pass, it is the part that created the
    current autograd node, which the node's sequence number shows.
    """

    def __init__(self) -> None:
        self._entered: list[str] = []
        self._numbers: list[int] = []  # number of the first autograd node of each stretch
        self._names: list[str] = []  # part that computed in each stretch

    def now(self) -> str:
        """Return the part of the model that is computing now."""
        if self._entered:
            return self._entered[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return OTHER
        place = bisect_right(self._numbers, node._sequence_nr())
        return self._names[place - 1] if place else OTHER

    def of_modules(self, models: Iterable[torch.nn.Module]) -> None:
        """From now on, track which modules of `models` are entered.

        Only forward hooks are used, because other hooks would keep the inputs and outputs of modules alive.
        """
        for name, module in (named for model in models for named in model.named_modules()):
            *outer, own = name.split(".")
            part = None if TOWER in outer else OF_MODULES.get(own)
            if part is not None:
                module.register_forward_pre_hook(lambda *_, part=part: self._enter(part))
                module.register_forward_hook(lambda *_: self._leave())

    @contextmanager
    def of_lm_head(self) -> Iterator[None]:
        """Context in which computations with the LM head are tracked as the part `LM_HEAD`."""
        from mcore_rl.distributed import divergences
        from mcore_rl.models.megatron.training import forward_step

        places: list[tuple[Any, str]] = [
            (forward_step, "linear_logprobs"),
            (forward_step, "linear_topk"),
            (forward_step.LossHead, "_from_logits"),
            (divergences, "linear_logprobs"),
            (divergences, "linear_divergences"),
        ]
        with ExitStack() as stack:
            for owner, name in places:
                stack.enter_context(replaced(owner, name, self._within(LM_HEAD, getattr(owner, name))))
            yield

    def _within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return wrapper

    def _enter(self, part: str) -> None:
        self._entered.append(part)
        self._note(part)

    def _leave(self) -> None:
        self._entered.pop()
        self._note(self._entered[-1] if self._entered else OTHER)

    def _note(self, part: str) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._names.append(part)

"""Backwards that enter a module in another way than through its outputs.

Hooks on a module's outputs tell the schedule that the module's backward begins. But a backward can also begin inside a module: at
a tensor that was kept from its forward, such as an auxiliary loss or a cache; at an output in an object of an unknown class; or in
the graph that an earlier backward made (`create_graph=True`). Without this feature, autograd would read freed parameters, or
nobody would reduce the gradients.

So before each backward, this feature walks over the graph, from the tensors where the backward begins to the outputs of the
outermost module. Usually these are the few nodes of a loss. A node on this walk that uses a parameter calls pre-backward.

Below the outputs, the hooks of the schedule suffice, with three exceptions, in which the walk goes on below them (1 to 3 µs per
node): a module returned an object of an unknown class; a module ran twice, because its second forward may have used tensors of its
first one; or a backward ran inside the forward. A graph that does not pass through a sharded model is walked whole.

Frozen parameters have no node in the graph. A node may use them if the forward of their module made it: autograd numbers the nodes
of each thread.

Parameters stay whole after a forward whose caller still needs them (`FSDPState.is_read_later`).
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.utils.rnn import PackedSequence

from hwfsdp.core.private_torch import base_of_view, in_backward, in_transforms
from hwfsdp.core.precision import map_tensors, tensors_with_grad
from hwfsdp.features import private_autograd
from hwfsdp.features.lookup import Living, parameter_of

if TYPE_CHECKING:
    from hwfsdp.features.schedule import FSDPState

# keys in the metadata of nodes: of one that made an output of the outermost module, whether the walk goes on; what it calls
OUTPUT, ENTRY = "hwfsdp: the walk goes on", "hwfsdp: calls pre-backward"
PENDING = 64  # the most forwards of a module whose nodes are known
_RETAINED = 4  # the most of them after their iteration has ended
PLAIN = (Tensor, PackedSequence, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
# The result of these operations has the memory of their input. Others compute new memory, which stays.
VIEW = re.compile(
    r"(T|Transpose|Permute|View|UnsafeView|ViewAs\w+|Reshape\w*|AsStrided|Select|Slice|Narrow|Split\w*|Chunk|Unbind|Expand|Squeeze"
    r"|Unsqueeze|Diagonal|Unfold|Alias|Flatten|Movedim|SwapAxes)Backward"
)
LAZY = (Iterator, AsyncIterator, Awaitable)

_with_frozen: Living[FSDPState] = Living()


class Made(NamedTuple):
    """The nodes that a forward made: the thread, and the numbers that it gave them."""

    thread: threading.Thread
    nodes: range


# --- Moments of a forward --------------------------------------------------------------------------------------


def note_begin(state: FSDPState) -> None:
    """Note where a forward begins among the nodes of the graph."""
    state.first_node = private_autograd.next_node_number()


def note_end(state: FSDPState, output: Any) -> None:
    """Note whether the outputs of this forward hide tensors, and which nodes it made, if frozen parameters have none."""
    if torch.is_grad_enabled():
        state.hid_outputs |= may_hide_tensors(output)
        if not all([p.sharded_param.requires_grad for group in state.groups for p in group.params]):
            _with_frozen.add(state)
            made = range(state.first_node, private_autograd.next_node_number())
            state.forwards.append(Made(threading.current_thread(), made))


def mark_outputs(state: FSDPState, output: Any) -> None:
    """Mark the nodes that made the outputs of the outermost module: does the walk go on below them?"""
    if torch.is_grad_enabled() and not in_backward():
        goes_on = is_entered_below(state)
        for tensor in tensors_with_grad(output):
            for made in (tensor, base_of_view(tensor)):
                if made is not None and made.grad_fn is not None:
                    private_autograd.notes_of(made.grad_fn)[OUTPUT] = goes_on


def is_entered_below(state: FSDPState) -> bool:
    """True if a backward may enter a module below the outputs of this forward, but not through outputs of its own."""
    ran = state.comm_ctx.post_forward_order
    had_backward = state.root.backwards > state.root.backwards_before
    return had_backward or len(ran) > len({*ran}) or any([each.hid_outputs for each in state.states])


def forget_forwards(state: FSDPState) -> None:
    """After an iteration, forget most forwards. A few stay, because their graphs may be retained."""
    state.hid_outputs = False
    while len(state.forwards) > _RETAINED:
        state.forwards.popleft()


# --- What a forward returned -----------------------------------------------------------------------------------


def may_hide_tensors(output: Any) -> bool:
    """True if `output` has an object of a class that `core.precision.map_tensors` does not know."""
    if isinstance(output, PLAIN):
        return False
    if isinstance(output, dict):
        return any(map(may_hide_tensors, output.values()))
    if isinstance(output, list | tuple):
        return any(map(may_hide_tensors, output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return any(
            map(may_hide_tensors, (getattr(output, field.name, None) for field in dataclasses.fields(output)))
        )
    return True


def has_parameter(output: Any) -> bool:
    """True if `output` has the whole parameter of a sharded module, or a view of one."""
    found = False

    def look(tensor: Tensor) -> Tensor:
        nonlocal found
        base = base_of_view(tensor)
        whole = tensor if base is None else base
        found |= whole.is_leaf and parameter_of(whole) is not None
        return tensor

    map_tensors(look, output)
    return found


# --- The walk ------------------------------------------------------------------------------------------------


def watch_entries(begin: Iterable[Node]) -> None:
    """Let nodes call pre-backward: those that use parameters, and that a backward from the nodes `begin` may reach first."""
    if in_backward() or in_transforms():
        return
    frozen = forwards_with_frozen()
    views: dict[Node, FSDPState] = {}  # nodes that made a view of a parameter → the parameter's state
    for node in walk(begin):
        children = [child for child, _ in node.next_functions if child is not None]
        used = [state for child in children if (state := views.get(child) or owner(child)) is not None]
        if used and VIEW.match(node.name()):
            views[node] = used[0]
        number = private_autograd.number_of(node) if frozen else 0
        used += [state for made, state in frozen if number in made]
        if used and private_autograd.notes_of(node).setdefault(ENTRY, used) is used:
            for state in dict.fromkeys(used):  # on every rank in the same order
                node.register_prehook(state.enter_backward)


def walk(begin: Iterable[Node]) -> Iterator[Node]:
    """Yield each node that leads from `begin` to the outputs of an outermost module, after the nodes to which it leads."""
    stack = [(node, False) for node in begin]
    seen = set[Node]()
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            if private_autograd.notes_of(node).get(OUTPUT, True):
                stack.append((node, True))
                stack += [(child, False) for child, _ in node.next_functions if child is not None]


def owner(node: Node) -> FSDPState | None:
    """Return the state whose parameter gets its gradient from this node; None if there is none."""
    param = parameter_of(node.variable) if isinstance(node, private_autograd.AccumulateGrad) else None
    return param.group.state if param is not None else None


def forwards_with_frozen() -> list[tuple[range, FSDPState]]:
    """Return the numbers of the nodes that this thread's forwards with frozen parameters made, with their states, the oldest first."""
    thread = threading.current_thread()  # the number of a thread that ended may be given again
    found = [
        (made.nodes, state)
        for state in _with_frozen.listed()
        for made in state.forwards
        if made.thread is thread
    ]
    return sorted(found, key=lambda each: each[0].start)

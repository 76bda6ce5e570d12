"""The autograd graph behind a module's outputs: which parameters it leads to, and hooks in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.modules import module as _torch_module

from hpcdist import _graph

# Private to torch: a torch without them fails at the import, not in backward.
will_execute = torch._C._will_engine_execute_node
_is_whole = torch.autograd.Variable._execution_engine.is_checkpoint_valid
_is_transformed = torch._C._are_functorch_transforms_active
# The class of the nodes at the ends of the graph, which add to a leaf's .grad.
_Accumulate = type(torch.autograd.graph.get_gradient_edge(torch.ones((), requires_grad=True)).node)


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in any nest of lists, tuples, mappings and dataclasses.

    Parameters
    ----------
    value : object
        What a forward returns. Other objects are not searched.

    Yields
    ------
    torch.Tensor
        In order.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from find_tensors(getattr(value, field.name))


def has_hooks(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether hooks of the program run in the backward of any of some modules.

    Parameters
    ----------
    modules : iterable of torch.nn.Module
        All of a model's. Hooks on tensors are not found.
    """
    if _torch_module._global_backward_hooks or _torch_module._global_backward_pre_hooks:
        return True
    return any(each._backward_hooks or each._backward_pre_hooks for each in modules)


def reached(outputs: Iterable[torch.Tensor]) -> dict[int, Any]:
    """Find the leaves whose gradients a backward from `outputs` would accumulate.

    Parameters
    ----------
    outputs : iterable of torch.Tensor
        Those without a graph are skipped, but a leaf that is itself an output counts.

    Returns
    -------
    dict
        ``id`` of the leaf tensor to its accumulating node (None for a leaf among `outputs`).
    """
    found: dict[int, Any] = {}
    nodes = []
    for tensor in outputs:
        if tensor.grad_fn is not None:
            nodes.append(tensor.grad_fn)
        elif tensor.requires_grad:
            found[id(tensor)] = None
    return found | _graph.leaves(nodes, _Accumulate)


def will_accumulate(nodes: Iterable[Any]) -> bool:
    """Return whether the current backward is going to add to the ``.grad`` of any leaf.

    Parameters
    ----------
    nodes : iterable
        Nodes from :func:`reached`.

    Returns
    -------
    bool
        False in :func:`torch.autograd.grad`. Valid only inside of a backward pass.
    """
    for node in nodes:
        try:
            if node is not None and will_execute(node):
                return True
        except RuntimeError:  # a leaf that is an input of torch.autograd.grad
            return False
    return False


class _Behind(torch.autograd.Function):
    """Makes a node whose next functions are the accumulating nodes of leaves."""

    @staticmethod
    def forward(_ctx: Any, *_leaves: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


def may_accumulate(leaves: Sequence[torch.Tensor]) -> bool:
    """Return whether the current backward may add to the ``.grad`` of any of some leaves.

    Parameters
    ----------
    leaves : sequence of torch.Tensor
        A module's parameters. A backward begins at, or goes through, what that module's forward
        returned.

    Returns
    -------
    bool
        True for a whole backward: its graph need not show the leaves, as re-entrant checkpoints
        run a backward of their own in it. False in :func:`torch.autograd.grad`, unless its inputs
        are such outputs themselves: the engine tells those from a whole backward only behind them.
        False in a transform of torch.func, which returns its gradients. Valid only inside of a
        backward pass.
    """
    if _is_whole():
        return True
    if _is_transformed():
        return False
    with torch.enable_grad():
        node: Any = _Behind.apply(*leaves).grad_fn  # at once: one leaf by itself takes 10 µs
    return node is not None and will_accumulate(each for each, _ in node.next_functions)

"""The operations of a group over NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdist import _nccl
from hpcdist._nccl import Communicator
from hpcdist.backends.aliasing import refuse_input_in_output, refuse_overlap
from hpcdist.errors import DistBackendError

from .launch import message, named, region
from .reductions import fits, same
from .staged import Staged, is_host

__all__ = ["NcclGroup"]


class NcclGroup(Staged):
    """A group whose tensors NCCL moves; ranks are group ranks.

    Host arrays are taken only from hpcdist's own operations on objects, which name themselves with
    ``api``: they go through a tensor on the device.
    """

    def create_group(
        self, ranks: Sequence[int], name: str, timeout_s: float, tag: int = 0
    ) -> NcclGroup:
        """Subgroups are made by :func:`hpcdist.backends.nccl.create`."""
        raise DistBackendError("a group over NCCL is made with backends.nccl.create")

    # --- what moves --------------------------------------------------------------------------

    def all_gather(
        self, tensor_list: Any, tensor: Any, async_op: bool = False, **about: Any
    ) -> Any:
        """Collect a tensor of each rank on all ranks; sizes may differ."""
        outputs = list(tensor_list)
        if is_host(tensor, about):
            return self._staged_gather(outputs, tensor)
        return self._gather_all("all_gather", [outputs], [tensor], async_op)

    def all_gather_coalesced(
        self, output_lists: Any, input_list: Any, async_op: bool = False
    ) -> Any:
        """Collect several tensors of each rank in one call."""
        lists, inputs = [list(each) for each in output_lists], list(input_list)
        fits("all_gather_coalesced", len(lists), self.size, "output_tensor_lists")
        turned = [[each[place] for each in lists] for place in range(len(inputs))]
        return self._gather_all("all_gather_coalesced", turned, inputs, async_op)

    def _gather_all(
        self, api: str, lists: list[list[Any]], inputs: list[Any], async_op: bool
    ) -> Any:
        """Each rank's tensor is broadcast to its place; NCCL fuses what starts together."""
        owns = [region(each, f"{api}: input", False) for each in inputs]
        outs = []
        for outputs, own in zip(lists, owns, strict=True):
            fits(api, len(outputs), self.size, "the list of outputs")
            found = [region(each, f"{api}: output") for each in outputs]
            same(api, [own, *found], "outputs and input")
            fits(api, found[self.rank].elements, own.elements, "this rank's output")
            outs.append(found)
        written = [out for found in outs for out in found]
        refuse_overlap(written, "output")
        own_place = {place: place * self.size + self.rank for place in range(len(owns))}
        refuse_input_in_output(owns, written, own_place, "input", "output")

        def enqueue(comm: Communicator, stream: int) -> None:
            with self.batch(comm):
                for own, found in zip(owns, outs, strict=True):
                    kind, lanes = _nccl.movement(own.dtype)
                    for root, out in enumerate(found):
                        source = own.address if root == self.rank else out.address
                        comm.broadcast(
                            source, out.address, out.elements * lanes, kind, root, stream
                        )

        parts = [*owns, *written]
        tensors = [*inputs, *(each for outputs in lists for each in outputs)]
        facts = ([[(out.elements, out.dtype) for out in found] for found in outs],)
        shown = (list(inputs), lists)
        return self.launch(api, parts, tensors, enqueue, async_op, facts=facts, shown=shown)

    def gather(
        self, tensor: Any, gather_list: Any, root: int, async_op: bool = False, **about: Any
    ) -> Any:
        """Collect a tensor of each rank on root; the list is None elsewhere."""
        outputs = list(gather_list or [])
        if is_host(tensor, about):
            return self._staged_exchange([tensor], [root], outputs, range(len(outputs)))
        places = range(len(outputs))
        return self._exchange("gather", [tensor], [root], outputs, places, {0: root}, async_op)

    def scatter(
        self, tensor: Any, scatter_list: Any, root: int, async_op: bool = False, **about: Any
    ) -> Any:
        """Give each rank its tensor of root's list; the list is None elsewhere."""
        inputs = list(scatter_list or [])
        if is_host(tensor, about):
            return self._staged_exchange(inputs, range(len(inputs)), [tensor], [root])
        places = range(len(inputs))
        return self._exchange("scatter", inputs, places, [tensor], [root], {root: 0}, async_op)

    def all_to_all(self, outputs: Any, inputs: Any, async_op: bool = False) -> Any:
        """Send the i-th input to rank i, receive the i-th output from it."""
        outs, ins = list(outputs), list(inputs)
        fits("all_to_all", len(outs), self.size, "output_tensor_list")
        fits("all_to_all", len(ins), self.size, "input_tensor_list")
        everyone, own = range(self.size), {self.rank: self.rank}
        return self._exchange("all_to_all", ins, everyone, outs, everyone, own, async_op)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_splits: Any = None,
        input_splits: Any = None,
        async_op: bool = False,
    ) -> Any:
        """The same with parts of one tensor, split along dimension 0."""
        api = "all_to_all_single"
        out = region(output, f"{api}: output")
        own = region(input, f"{api}: input", False)
        dtype = same(api, [out, own], "output and input")
        if not output_splits and not input_splits:
            fits(api, out.elements, own.elements, "output")
            if own.elements % self.size:
                raise ValueError(
                    f"{api}: {own.elements} elements do not divide by {self.size} ranks"
                )
            refuse_input_in_output([own], [out], {}, "input", "output")
            kind, lanes = _nccl.movement(dtype)
            n = own.elements // self.size * lanes

            def enqueue(comm: Communicator, stream: int) -> None:
                comm.all_to_all(own.address, out.address, n, kind, stream)

            facts, shown = (dtype,), ([input], [output])
            return self.launch(
                api, [out, own], [output, input], enqueue, async_op, facts=facts, shown=shown
            )
        outs = _split(api, output, output_splits, self.size, "output")
        ins = _split(api, input, input_splits, self.size, "input")
        everyone = range(self.size)
        return self._exchange(api, ins, everyone, outs, everyone, {}, async_op)

    def _exchange(
        self,
        api: str,
        sent: Sequence[Any],
        to: Sequence[int],
        received: Sequence[Any],
        sources: Sequence[int],
        own: dict[int, int],
        async_op: bool,
    ) -> Any:
        """Sends and receives that start together; `own`: what may stay where it is."""
        ins = [region(each, f"{api}: what is sent", False) for each in sent]
        outs = [region(each, f"{api}: what is received") for each in received]
        dtype = same(api, [*ins, *outs], "the tensors")
        refuse_overlap(outs, "output")
        refuse_input_in_output(ins, outs, own, "input", "output")
        kind, lanes = _nccl.movement(dtype)

        def enqueue(comm: Communicator, stream: int) -> None:
            with self.batch(comm):
                for peer, part in zip(to, ins, strict=True):
                    if part.elements:
                        comm.send(part.address, part.elements * lanes, kind, peer, stream)
                for peer, part in zip(sources, outs, strict=True):
                    if part.elements:
                        comm.recv(part.address, part.elements * lanes, kind, peer, stream)

        tensors, shown = [*sent, *received], (list(sent), list(received))
        if api == "all_to_all_single":
            shown = ([list(sent)], [list(received)])  # it was one tensor
        return self.launch(
            api, [*ins, *outs], tensors, enqueue, async_op, facts=(dtype,), shown=shown
        )

    # --- barrier and messages ----------------------------------------------------------------

    def barrier(self, async_op: bool = False, **about: Any) -> Any:
        """Wait until all ranks are here: this call waits, and not a stream alone."""
        api, extra = named("barrier", about)
        self._outside_graph(api)
        index = self._runtime.index()
        flag = self._runtime.upload(np.ones(1, np.int32), index)
        part = region(flag, "barrier")

        def enqueue(comm: Communicator, stream: int) -> None:
            comm.all_reduce(part.address, part.address, 1, _nccl.INT32, _nccl.SUM, stream)

        facts = (extra,)
        return self.launch(api, [part], [flag], enqueue, async_op, blocks=True, facts=facts)

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Any:
        """Begin to send; NCCL has no tags: messages between two ranks match in their order."""
        part = message(tensor, "isend: tensor", True)
        kind, lanes = _nccl.movement(part.dtype)

        def enqueue(comm: Communicator, stream: int) -> None:
            peer = 1 - comm.rank if comm.size == 2 else dst
            comm.send(part.address, part.elements * lanes, kind, peer, stream)

        return self.launch("isend", [part], [tensor], enqueue, True, peer=dst)

    def irecv(self, tensor: Any, src: int, tag: int = 0) -> Any:
        """Begin to receive from one rank."""
        self._named(src)
        part = message(tensor, "irecv: tensor", False)
        kind, lanes = _nccl.movement(part.dtype)

        def enqueue(comm: Communicator, stream: int) -> None:
            peer = 1 - comm.rank if comm.size == 2 else src
            comm.recv(part.address, part.elements * lanes, kind, peer, stream)

        return self.launch("irecv", [part], [tensor], enqueue, True, peer=src, source=src)

    def _named(self, src: int) -> None:
        if src < 0:
            raise ValueError(
                "NCCL cannot receive from any rank: name the source (src or group_src), or use a "
                "group over MPI"
            )

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Send on the current stream."""
        if isinstance(tensor, np.ndarray):
            self._block(self.isend(self._upload(tensor), dst, tag))
            return
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: Any, src: int, tag: int = 0) -> int:
        """Receive on the current stream; returns the sender's rank."""
        if isinstance(tensor, np.ndarray):
            copy = self._upload(tensor)
            self._block(self.irecv(copy, src, tag))
            self._runtime.download(copy, tensor)
            return src
        self.irecv(tensor, src, tag).wait()
        return src

    def batch_isend_irecv(self, operations: Sequence[tuple[bool, Any, int, int]]) -> list[Any]:
        """Messages that start together, on the communicator of all ranks.

        Parameters
        ----------
        operations : sequence of (bool, tensor, int, int)
            Whether it is sent, what, the other rank, and a tag, which NCCL does not have.

        Returns
        -------
        list
            One handle for each; they are done together.
        """
        parts = [message(each, "batch_isend_irecv: tensor", sends)
                 for sends, each, _, _ in operations]  # fmt: skip
        for sends, _, peer, _ in operations:
            if not sends:
                self._named(peer)

        def enqueue(comm: Communicator, stream: int) -> None:
            with self.batch(comm):
                for (sends, _, peer, _), part in zip(operations, parts, strict=True):
                    kind, lanes = _nccl.movement(part.dtype)
                    call = comm.send if sends else comm.recv
                    call(part.address, part.elements * lanes, kind, peer, stream)

        tensors = [each[1] for each in operations]
        shown: tuple[list[Any], list[Any]] = (list(operations), [])
        work = self.launch("batch_isend_irecv", parts, tensors, enqueue, True, shown=shown)
        return [work] * len(operations)


def _split(api: str, tensor: Any, splits: Any, size: int, what: str) -> list[Any]:
    """Parts of a tensor along dimension 0, for each rank."""
    rows = int(tensor.shape[0]) if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(f"{api}: {what} has {rows} rows, which do not divide by {size} ranks")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"{api}: {what}_split_sizes {list(splits)} do not add up to {what}'s {rows} rows, one "
            f"number for each of {size} ranks"
        )
    return list(tensor.split(list(splits)))

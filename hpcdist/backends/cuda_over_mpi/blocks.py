"""Operations in which each rank has a block of its own: gathering, scattering, exchanging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist._engine import Comm
from hpcdist.backends.aliasing import refuse_input_in_output, refuse_overlap

from . import aware, direct
from .aliasing import separate
from .core import Plan
from .device_tensor import DeviceTensor, describe, reducible, with_extra
from .exchange import Exchange, Exchanges, one_dtype, rounds, slices, views
from .pinned import Copy, Piece


def _even(copies: Sequence[Copy]) -> bool:
    return len({each.length for each in copies}) == 1


def _together(buffer: Any, copies: Sequence[Copy], kind: Any) -> Any:
    return buffer[: sum(each.length for each in copies)].view(kind)


def _check(what: str, found: int, wanted: int, why: str) -> None:
    if found != wanted:
        raise ValueError(f"{what} has {found} elements; it must have {wanted} ({why})")


def _same_form(one: DeviceTensor, other: DeviceTensor, role: str, place: str) -> None:
    if one.elements > 1 and (one.shape, one.order) != (other.shape, other.order):
        raise ValueError(
            f"{role} and {place} have different shapes, or their elements in different orders in "
            f"memory (strides), and nothing is copied silently: pass tensors of one shape, "
            f"{role}.contiguous() and contiguous tensors"
        )


def _sections(part: DeviceTensor, lengths: Sequence[int]) -> list[DeviceTensor]:
    """A contiguous tensor as blocks of so many elements."""
    item, at, found = part.dtype.itemsize, 0, []
    for length in lengths:
        begin, end = at * item, (at + length) * item
        found.append(
            part._replace(
                bytes=part.bytes[begin:end],
                address=part.address + begin,
                elements=length,
                shape=(length,),
                strides=None,
            )
        )
        at += length
    return found


class Blocks(Exchanges):
    """The part of a group whose operations give each rank a block."""

    # --- all blocks everywhere ---------------------------------------------------------------

    def all_gather_into_tensor(
        self, output: Any, input: Any, async_op: bool = False, **about: Any
    ) -> Any:
        api = about.get("api") or "all_gather_into_tensor"
        own = DeviceTensor.inspect(input, "input", False).contiguous("input")
        out = DeviceTensor.inspect(output, "output").contiguous("output")
        one_dtype(api, [own, out])
        _check("output", out.elements, own.elements * self.size, "input's times the group's size")
        blocks = _sections(out, [own.elements] * self.size)
        owns, copies = separate([own], blocks, {0: self.rank})
        straight = direct.all_gather(out, owns[0])
        tensors = [output, input, *copies]
        call = with_extra(str(own), about.get("extra"))
        return self._gather_all(api, call, owns, [blocks], tensors, tensors[:1], async_op, straight)

    def all_gather(
        self, tensor_list: Any, tensor: Any, async_op: bool = False, **about: Any
    ) -> Any:
        return self._lists("all_gather", [list(tensor_list)], [tensor], async_op)

    def all_gather_coalesced(
        self, output_lists: Any, input_list: Any, async_op: bool = False
    ) -> Any:
        lists, inputs = [list(each) for each in output_lists], list(input_list)
        self._whole(lists, "output_tensor_lists")
        if any(len(each) != len(inputs) for each in lists):
            raise ValueError(f"each of output_tensor_lists must have {len(inputs)} tensors")
        turned = [[each[place] for each in lists] for place in range(len(inputs))]
        return self._lists("all_gather_coalesced", turned, inputs, async_op)

    def _lists(self, api: str, lists: list[list[Any]], inputs: list[Any], async_op: Any) -> Any:
        if not inputs:
            raise ValueError("no input tensor")
        owns = [DeviceTensor.inspect(each, "tensor", False) for each in inputs]
        outs = []
        for own, outputs in zip(owns, lists, strict=True):
            self._whole(outputs, "tensor_list")
            found = [DeviceTensor.inspect(each, "tensor_list") for each in outputs]
            mine = found[self.rank]
            _check(f"tensor_list[{self.rank}]", mine.elements, own.elements, "as the input")
            _same_form(own, mine, "tensor", f"tensor_list[{self.rank}]")
            outs.append(found)
        listed = [each for found in outs for each in found]
        one_dtype(api, [*owns, *listed])
        refuse_overlap(listed, "tensor_list")
        places = {place: place * self.size + self.rank for place in range(len(owns))}
        owns, copies = separate(owns, listed, places)
        written = [each for outputs in lists for each in outputs]
        tensors = [*inputs, *written, *copies]
        straight = direct.all_gather_lists(outs, owns)
        return self._gather_all(
            api, describe(listed), owns, outs, tensors, written, async_op, straight
        )

    def _gather_all(
        self,
        api: str,
        about: str,
        owns: list[DeviceTensor],
        outs: list[list[DeviceTensor]],
        tensors: list[Any],
        written: list[Any],
        async_op: Any,
        straight: Any,
    ) -> Any:
        kind = owns[0].dtype.torch_dtype

        def pieces(comm: Comm, size: int) -> list[Piece]:
            width = self._width(size)
            return [
                one(comm, slices([own], width, number), slices(blocks, width, number))
                for own, blocks in zip(owns, outs, strict=True)
                for number in range(rounds(max(each.size for each in blocks), width))
            ]

        def one(comm: Comm, loads: list[Copy], stores: list[Copy]) -> Piece:
            def move(source: Any, target: Any) -> None:
                mine = _together(source, loads, kind)
                if _even(stores):
                    whole = _together(target, stores, kind)
                    comm.all_gather_into_tensor(whole, mine, api=f"{api} (cuda)")
                else:
                    comm.all_gather(views(target, stores, kind), mine, api=f"{api} (cuda)")

            return Piece(loads, move, stores)

        plan = Plan(pieces, True, straight)
        index = self._device(api, [*owns, *(each for blocks in outs for each in blocks)])
        return self._run(api, about, index, tensors, written, plan, async_op)

    # --- reduced blocks ----------------------------------------------------------------------

    def reduce_scatter(
        self, output: Any, input_list: Any, op: Any, async_op: bool = False, **about: Any
    ) -> Any:
        inputs = list(input_list)
        self._whole(inputs, "input_list")
        ins = [DeviceTensor.inspect(each, "input_list", False) for each in inputs]
        out = DeviceTensor.inspect(output, "output")
        one_dtype("reduce_scatter", [out, *ins])
        _check("output", out.elements, ins[self.rank].elements, f"as input_list[{self.rank}]")
        _same_form(out, ins[self.rank], "output", f"input_list[{self.rank}]")
        tensors = [output, *inputs]
        return self._reduce_blocks("reduce_scatter", out, ins, None, tensors, op, async_op)

    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: Any, async_op: bool = False, **about: Any
    ) -> Any:
        api = "reduce_scatter_tensor"
        whole = DeviceTensor.inspect(input, "input", False).contiguous("input")
        out = DeviceTensor.inspect(output, "output").contiguous("output")
        one_dtype(api, [whole, out])
        _check("input", whole.elements, out.elements * self.size, "output's times the group's size")
        ins = _sections(whole, [out.elements] * self.size)
        return self._reduce_blocks(api, out, ins, whole, [output, input], op, async_op)

    def _reduce_blocks(
        self,
        api: str,
        out: DeviceTensor,
        ins: list[DeviceTensor],
        whole: DeviceTensor | None,
        tensors: list[Any],
        op: Any,
        async_op: Any,
    ) -> Any:
        op = reducible(op, out)
        kind = out.dtype.torch_dtype
        about = f"{describe(ins)}, {op!r}"
        copies: list[Any]
        if not aware.takes_device_memory():
            ins, copies = separate(ins, [out], {self.rank: 0})
        elif whole is None:
            ins, copies = separate(ins, [out], {})
        else:  # the same call as on ranks that have nothing to copy
            (whole,), copies = separate([whole], [out], {})
            ins = _sections(whole, [out.elements] * self.size)
        straight = direct.reduce_scatter(out, ins, whole, op, self.size)

        def pieces(comm: Comm, size: int) -> list[Piece]:
            width = self._width(size)
            longest = max(each.size for each in ins)
            return [
                one(comm, slices(ins, width, number), slices([out], width, number))
                for number in range(rounds(longest, width))
            ]

        def one(comm: Comm, loads: list[Copy], stores: list[Copy]) -> Piece:
            def move(source: Any, target: Any) -> None:
                mine = _together(target, stores, kind)
                if _even(loads):
                    comm.reduce_scatter_tensor(mine, _together(source, loads, kind), op)
                else:
                    comm.reduce_scatter(mine, views(source, loads, kind), op)

            return Piece(loads, move, stores)

        index = self._device(api, [out, *ins])
        plan = Plan(pieces, True, straight)
        return self._run(api, about, index, [*tensors, *copies], tensors[:1], plan, async_op)

    # --- from each to each -------------------------------------------------------------------

    def gather(
        self, tensor: Any, gather_list: Any, root: int, async_op: bool = False, **about: Any
    ) -> Any:
        api = about.get("api") or "gather"
        own = DeviceTensor.inspect(tensor, "tensor", False)
        listed = list(gather_list or ()) if self.rank == root else []
        if self.rank == root:
            self._whole(listed, "gather_list")
        outs = [DeviceTensor.inspect(each, "gather_list") for each in listed]
        if outs:
            _check(f"gather_list[{root}]", outs[root].elements, own.elements, "as tensor")
            _same_form(own, outs[root], "tensor", f"gather_list[{root}]")
        refuse_overlap(outs, "gather_list")
        ins, copies = separate([own], outs, {0: root})

        def call(comm: Comm, sent: list[Any], received: list[Any]) -> None:
            comm.gather(sent[0], received or None, root, api=f"{api} (cuda)")

        blocks = [own if rank == root else None for rank in range(self.size)]
        tensors = [tensor, *listed, *copies]
        exchange = Exchange(api, call, ins, outs, tensors, listed, f"root {root}", sends=blocks)
        return self._exchange(exchange, async_op)

    def scatter(
        self, tensor: Any, scatter_list: Any, root: int, async_op: bool = False, **about: Any
    ) -> Any:
        api = about.get("api") or "scatter"
        out = DeviceTensor.inspect(tensor, "tensor")
        listed = list(scatter_list or ()) if self.rank == root else []
        if self.rank == root:
            self._whole(listed, "scatter_list")
        ins = [DeviceTensor.inspect(each, "scatter_list", False) for each in listed]
        if ins:
            _check(f"scatter_list[{root}]", ins[root].elements, out.elements, "as tensor")
            _same_form(out, ins[root], "tensor", f"scatter_list[{root}]")
        ins, copies = separate(ins, [out], {root: 0})

        def call(comm: Comm, sent: list[Any], received: list[Any]) -> None:
            comm.scatter(received[0], sent or None, root, api=f"{api} (cuda)")

        blocks = [out if rank == root else None for rank in range(self.size)]
        tensors = [tensor, *listed, *copies]
        exchange = Exchange(api, call, ins, [out], tensors, [tensor], f"root {root}", takes=blocks)
        return self._exchange(exchange, async_op)

    def all_to_all(self, outputs: Any, inputs: Any, async_op: bool = False, **about: Any) -> Any:
        outputs, inputs = list(outputs), list(inputs)
        self._whole(outputs, "output_list")
        self._whole(inputs, "input_list")
        outs = [DeviceTensor.inspect(each, "output_list") for each in outputs]
        ins = [DeviceTensor.inspect(each, "input_list", False) for each in inputs]
        refuse_overlap(outs, "output_list")
        rank, own = self.rank, {self.rank: self.rank}
        _same_form(ins[rank], outs[rank], f"input_list[{rank}]", f"output_list[{rank}]")
        refuse_input_in_output(ins, outs, own, "input_list", "output_list")
        tensors = [*outputs, *inputs]
        exchange = Exchange("all_to_all", _all_to_all, ins, outs, tensors, outputs)
        return self._exchange(exchange, async_op)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_splits: Any = None,
        input_splits: Any = None,
        async_op: bool = False,
        **about: Any,
    ) -> Any:
        ins = self._split(DeviceTensor.inspect(input, "input", False), input_splits, "input")
        outs = self._split(DeviceTensor.inspect(output, "output"), output_splits, "output")
        refuse_input_in_output(ins, outs, {}, "input", "output")
        tensors = [output, input]
        exchange = Exchange("all_to_all_single", _all_to_all, ins, outs, tensors, [output])
        return self._exchange(exchange, async_op)

    def _split(self, part: DeviceTensor, splits: Any, role: str) -> list[DeviceTensor]:
        part.contiguous(role)
        rows = part.shape[0] if part.shape else 1
        if not splits:
            if rows % self.size:
                raise ValueError(
                    f"{role} has {rows} rows, which do not divide by {self.size} ranks; give "
                    f"{role}_split_sizes"
                )
            splits = [rows // self.size] * self.size
        splits = [int(each) for each in splits]
        if len(splits) != self.size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"{role}_split_sizes {splits} do not add up to {role}'s {rows} rows, one number "
                f"for each of {self.size} ranks"
            )
        row = part.elements // rows if rows else 0
        return _sections(part, [row * each for each in splits])

    # --- helpers -----------------------------------------------------------------------------

    def _whole(self, listed: list[Any], role: str) -> None:
        if len(listed) != self.size:
            raise ValueError(f"{role} has {len(listed)} tensors; the group has {self.size} ranks")


def _all_to_all(comm: Comm, sent: list[Any], received: list[Any]) -> None:
    comm.all_to_all(received, sent)

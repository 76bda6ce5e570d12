"""Transfer of one bucket: an all-reduce, or a user's hook."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hpcdist._engine import Comm
from hpcdist.backends.dispatch import serving
from hpcdist.backends.hooked import Hooked
from hpcdist.errors import DistError, DistMismatchError
from hpcdist.groups.comparison import digest, naming
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.parallel.reducer.bucket import API_SKIPS, DIGEST, GIVEN_UP
from hpcdist.parallel.reducer.grad_bucket import GradBucket
from hpcdist.parallel.reducer.results import gradients_in

# A last bucket below this size does not justify the handover to the group's thread and back, about
# 60 µs: the computing thread reduces it at the end of backward.
_SMALL = 1 << 19

# Moved where only the entry check matters.
_NOTHING = np.empty(0, np.uint8)

# The name that peers see of the call with which a pass with a hook ends.
API_END = "DistributedDataParallel: end of a backward with a communication hook"

# And of the one in place of a last bucket that this rank leaves out.
API_LEFT_OUT = f"{API_SKIPS}: end of a backward without its last bucket"

#: Hooks that do not always communicate in DDP's group, each with a function of the hook's state and
#: that group. It returns the group in which the next pass does, or None: in none. The same on all
#: ranks. Pairs, since a hook of a program's may have no hash.
PLACES: list[tuple[Any, Callable[[Any, ProcessGroup], ProcessGroup | None]]] = []


class Transfer:
    """Starts the reductions of buckets, and distributes the results.

    Parameters
    ----------
    group : ProcessGroup
        Between whose ranks.
    skips : bool
        See the attribute.

    Attributes
    ----------
    skips : bool
        Whether this pass leaves out buckets whose parameters are all unused; the same ones on all
        ranks, as the entry check makes sure of.
    passes : int
        Backward passes so far; part of the entry check, so that a rank that had no gradients at all
        in one of them cannot pair its next one's buckets with its peers' last.
    given_up : int
        How many of them an exception ended on this rank when all averages were on their way. Other
        ranks may have those averages: what was not the same on all ranks is found in the next pass.
    divisor : int or None
        Divisor of the sums; None means the number of ranks.
    after_pass : list of callable
        Called when the averages of this pass are in place; a hook puts them there.
    broken : DistMismatchError or None
        What the hook or a layer raised in this pass because a peer made other calls than this rank.
    watched : bool
        Whether hooks of the program run in this pass, and may look at gradients or change them.
    without_copy : bool
        Whether long gradients are reduced from where they lie in this pass.
    left_out : int
        Buckets that this pass has left out so far, without a call in their place.
    unused : callable
        Returns the places in a bucket of parameters that no rank uses, for hooks.
    place : communicator or None
        Where the ranks make this pass's calls; None: a hook makes none.
    """

    def __init__(self, group: ProcessGroup, skips: bool = False) -> None:
        self.group, self.skips = group, skips
        self.passes = self.given_up = self.left_out = 0
        self.divisor: int | None = None
        self.after_pass: list[Callable[[], None]] = []
        self.broken: DistMismatchError | None = None
        self.watched = self.without_copy = False
        self.unused: Callable[[Any], Sequence[int] | None] = lambda _bucket: ()
        self.place: Any = group.carrier
        self._hook: tuple[Any, Callable[[Any, GradBucket], Any]] | None = None
        self._calls: int | None = None  # in the place in a pass with the hook, once that is known
        self._for_each = 1  # and for a bucket, at most
        self._first = 0  # the calls there before this pass
        self._given = 0  # buckets of this pass to the hook
        self._ended = False  # this rank has come to the call that ends this pass, or refused it
        self._generation = group.members.generation  # of the group in this pass

    @property
    def comm(self) -> Any:
        """The group's communicator."""
        return self.group.carrier

    def failure(self, bucket: Any) -> Exception | None:
        """Return the error of a bucket that failed after it was waited for.

        The stream waits for a reduction on a GPU: its failure shows only later.
        """
        failure = getattr(serving(self.comm, bucket.buffer), "failure", None)
        return failure() if failure is not None else None

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook is registered."""
        return self._hook is not None

    def set_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
        """Let `hook` move the buckets from now on."""
        self._hook = (state, hook)
        self._count_anew()

    def follow(self) -> None:
        """The group was reconfigured: all ranks count anew, whatever they have come to."""
        self.passes = self.given_up = 0
        self._count_anew()

    def _count_anew(self) -> None:
        self._calls, self._for_each = None, 1

    def begin(self) -> None:
        """A backward pass begins."""
        before, self.place = self.place, self._find_place()
        if self.place is not before:
            self._count_anew()
        self._first, self._ended = getattr(self.place, "seq", 0), False
        self.broken = None
        self._generation = self.group.members.generation
        self.without_copy = not self.watched and self._goes_through_memory()

    def _find_place(self) -> Any:
        """Return where the ranks make this pass's calls.

        It matters where buckets may be left out: a rank that leaves out all of them never calls the
        hook, and would not see it.
        """
        if self._hook is None or not self.skips:
            return self.comm
        state, hook = self._hook
        group: ProcessGroup | None = self.group
        for known, place_of in PLACES:
            if known is hook:
                group = place_of(state, self.group)
                break
        return None if group is None else group.carrier

    def _goes_through_memory(self) -> bool:
        """Whether each byte goes through the node's memory in any case: long gradients stay there.

        It does within a node, and over two levels. Elsewhere a bucket keeps memory that MPI has
        registered with the adapter. Hooks of the group are shown what a call reads.
        """
        native: Any = getattr(self.comm, "native", None)
        if self._hook is not None or native is None or isinstance(self.comm, Hooked):
            return False
        within = native.checks_through == "shared memory" and native.node_limit > 0
        return within or native.node_memory > 0

    def end(self) -> None:
        """It has ended well."""
        if self._hook is None and not self.skips:  # its calls have compared the number
            self.given_up = 0
        if self._hook is not None and self._given:  # else all buckets were left out
            self._calls = self._made() - self._ended
            self._for_each = max(1, -(-self._calls // self._given))

    def leave_out(self, calls: int) -> None:
        """Do not count some calls of the group, which moved no bucket of this pass."""
        if self.place is self.comm:
            self._first += calls

    def call_after_pass(self) -> None:
        """The averages are in place on all ranks: call what a hook has left for that."""
        for call in self.after_pass:
            call()

    def over(self) -> None:
        """The pass is over, in one way or another."""
        self.passes += 1
        self.left_out = 0
        self.after_pass, self._given = [], 0

    def agree(self, buckets: Sequence[Any], api: str = API_END) -> None:
        """Learn at the end of a pass with a hook whether all ranks end it in the same way.

        What a hook returns may fail on one rank alone, when the other ranks have their averages:
        they would go on with other parameters than that rank's. A hook that calls no collective of
        this group, such as one of local steps, lets the ranks go on alone after its first pass.

        Parameters
        ----------
        buckets : sequence of Bucket
            All of them.
        api : str
            How this rank ends it: with its futures complete, or by giving it up.

        Raises
        ------
        DistError
            If another rank ends it otherwise, or if the last collective of the pass has failed:
            then no rank comes here.
        """
        if (comm := self._ends_with_a_call(buckets)) is None:
            return
        if self._made() and not comm.last_agreed:
            raise DistError("the last collective of this backward failed on all ranks")
        before = comm.seq
        try:
            if self.skips and api == API_END:
                said = [(bucket.members, sorted(bucket.unused)) for bucket in buckets]
                with naming("the parameters without a gradient, by bucket"):
                    comm.all_reduce(_NOTHING, api=api, extra=digest(self.passes, said))
            else:
                comm.barrier(api=api)
        finally:
            self._ended = comm.seq != before

    def refuse(self, buckets: Sequence[Any], error: BaseException) -> None:
        """Tell the other ranks, if they are in :meth:`agree`, why this one does not come there.

        They are not if the last collective of the pass has failed, because that failed everywhere.
        """
        if (comm := self._ends_with_a_call(buckets)) is not None:
            self._ended = True
            comm.refuse(error, api=API_END, others_arrive="if agreed")

    def _ends_with_a_call(self, buckets: Sequence[Any]) -> Comm | None:
        """Where this pass ends with a call, or None: not on a GPU, whose stream it awaits."""
        if self._hook is None or self._ended or self._generation != self.group.members.generation:
            return None
        # A rank that leaves all buckets out cannot see whether the others' hooks call anything, so
        # then all end with a call. And in the first pass, a rank whose hook fails makes as many
        # calls as buckets.
        alone = self._calls == 0 or (self._calls is not None and self._given)
        alone = alone and not self.skips
        if not self._made() and (alone or not hasattr(self.place, "seq")):
            return None
        comm = serving(self.place, buckets[0].buffer).native
        return comm if comm is not None and comm.check > 0 else None

    def missing_calls(self, buckets: int, started: int, more: int) -> int:
        """Return how many of a pass's calls, in which the other ranks may wait, were not made.

        A hook may make any number, one after the other; then it counts what the last pass made, and
        in the first pass one for each bucket. Ranks that left out different buckets made different
        numbers: then it counts as if none had been left out.

        Parameters
        ----------
        buckets, started : int
            How many there are, and have been started.
        more : int
            Calls that follow the last bucket.
        """
        if self.place is None:
            return 0
        if self._hook is None or not hasattr(self.place, "seq"):
            # others may leave out other buckets: all ranks of a pass that fails make as many calls
            return buckets - started + self.left_out + (more if started < buckets else 0)
        calls = None if self.skips else self._calls
        due = self._for_each * buckets + more if calls is None else calls
        return max(0, due - self._made())

    def _made(self) -> int:
        return int(getattr(self.place, "seq", 0) - self._first) % 2**32

    def may_wait(self, bucket: Any) -> bool:
        """Whether a last bucket may be reduced at the end of backward."""
        return self._hook is None and not bucket.sparse and bucket.nbytes < _SMALL

    def start(self, bucket: Any, index: int, last: bool) -> Any:
        """Begin to move a packed bucket.

        Returns
        -------
        Work or torch.futures.Future
            For :meth:`finish`.
        """
        if self._hook is None:
            return bucket.reduce(self.comm, self.divisor, self._extra(bucket))
        state, hook = self._hook
        given = GradBucket(
            bucket,
            index,
            last,
            None,
            self.comm,
            self.after_pass,
            first=not self._given,
            unused=partial(self.unused, bucket),
        )
        self._given += 1
        try:
            work = hook(state, given)
        except DistMismatchError as error:  # of a call that it waited for
            self.broken = error
            raise
        is_work = callable(getattr(work, "get_future", None))  # its wait() returns no tensor
        if is_work or not callable(getattr(work, "wait", None)):
            raise TypeError(
                "the communication hook must return a torch.futures.Future of a tensor, not "
                f"{type(work).__name__}{': return its get_future()' if is_work else ''}"
            )
        return given._bounded(work)

    def closing(self, bucket: Any) -> Callable[[], Any] | None:
        """Return the call in place of a last bucket that this rank leaves out; None: no rank calls.

        A rank that made none would end its pass while others wait for it in that bucket, and go on.
        Ranks that reduce it need no more calls: they are in step once they have met there.
        """
        comm = serving(self.comm, bucket.buffer)
        if self._hook is None and comm.size > 1 and comm.check > 0:
            return partial(comm.barrier, api=API_LEFT_OUT)
        return None

    def run(self, bucket: Any) -> None:
        """Reduce a packed bucket in this thread, and wait."""
        bucket.reduce(self.comm, self.divisor, self._extra(bucket), wait=True)

    @property
    def number(self) -> int:
        """Of this pass, for the entry check: the same on all ranks that can go on."""
        if not self.given_up:
            return self.passes
        return GIVEN_UP | zlib.crc32(f"{self.passes} {self.given_up}".encode())

    def _extra(self, bucket: Any) -> int:
        """What the entry check compares beside the call."""
        number = self.number
        if not self.skips:
            return number
        # else ranks that leave out other parameters would add up different ones
        said = f"{number} {bucket.members} {sorted(bucket.unused)}"
        return number & GIVEN_UP | DIGEST | zlib.crc32(said.encode())

    def finish(self, bucket: Any, result: Any, keep: Sequence[int]) -> None:
        """Distribute the gradients of a reduced bucket.

        Parameters
        ----------
        bucket : Bucket or SparseBucket
            The one that was started.
        result : object
            The result of waiting for it.
        keep : sequence of int
            Indices of parameters that keep the gradients they had.
        """
        if self._hook is None and not bucket.sparse:
            bucket.take(None, keep, self.divisor)
            return
        bucket.take(gradients_in(result, bucket.buffer), keep, None)

"""Which ranks of the world a group has: a value, apart from what connects them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcdist.groups.numbers import whole


def short(ranks: tuple[int, ...]) -> str:
    """Return the ranks as one line of text, whatever their number."""
    if len(ranks) <= 16:
        return str(list(ranks))
    first, last = (", ".join(map(str, part)) for part in (ranks[:8], ranks[-4:]))
    return f"[{first}, ... {last}] ({len(ranks)} ranks)"


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a group.

    Attributes
    ----------
    ranks : tuple of int
        World ranks of the members, in group order.
    name : str
        Name of the group, the same on all members and unique to it.
    generation : int
        How often the group was reconfigured: what depends on its ranks compares this.
    index : dict
        World rank to the rank in the group.
    """

    ranks: tuple[int, ...]
    name: str
    generation: int = 0
    index: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {world: place for place, world in enumerate(self.ranks)}
        object.__setattr__(self, "index", index)

    def check(self, rank: int, what: str) -> int:
        """Return a rank in the group, or raise ValueError."""
        rank, size = whole(rank, what), len(self.ranks)
        if 0 <= rank < size:
            return rank
        raise ValueError(
            f"{what}={rank} is outside the group {self.name!r} of size {size}: ranks in it are 0 "
            f"to {size - 1}"
        )

    def place(self, rank: int | None, group_rank: int | None, what: str) -> int:
        """Return the group rank that `dst` (a world rank) or `group_dst` names; one is required."""
        if group_rank is not None:
            if rank is not None:
                raise ValueError(
                    f"give either {what} (a rank of the world) or group_{what} (a rank of the "
                    f"group), not both: got {what}={rank}, group_{what}={group_rank}"
                )
            return self.check(group_rank, "group_" + what)
        if rank is None:
            raise ValueError(f"{what} (a rank of the world) or group_{what} must be given")
        rank = whole(rank, what)
        try:
            return self.index[rank]
        except KeyError:
            raise ValueError(
                f"{what}={rank} is not in the group {self.name!r} of size {len(self.ranks)}, whose "
                f"ranks of the world are {short(self.ranks)}"
            ) from None

    def peer(
        self, own: int, rank: int | None, group_rank: int | None, what: str, advice: str
    ) -> int:
        """The same as :meth:`place`, for a rank that must not be this one, `own`."""
        place = self.place(rank, group_rank, what)
        if place == own:
            given = f"{what}={rank}" if rank is not None else f"group_{what}={place}"
            raise ValueError(
                f"{given} is this process itself, in the group {self.name!r}: it would wait for "
                f"itself for ever. {advice}"
            )
        return place

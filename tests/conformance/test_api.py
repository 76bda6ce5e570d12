"""The machine comparison of hpcdist's names, parameters and defaults with torch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

HERE = Path(__file__).parent
if str(HERE) not in sys.path:  # importlib mode leaves it out
    sys.path.insert(0, str(HERE))

from api import Explained, compared, table, wrong  # noqa: E402
from signatures import differing, signature  # noqa: E402


def test_every_difference_from_the_installed_torch_is_explained():
    done = subprocess.run(
        [sys.executable, str(HERE / "api.py")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def theirs(a, b=1, *, c=None):
    """torch's, so to speak."""


@pytest.mark.parametrize(
    ("ours", "rows"),
    [
        (lambda a, b=1, *, c=None, d=0: None, []),
        (lambda *args, **kwargs: None, []),
        (lambda a, b=1: None, ["f(c): missing"]),
        (lambda a, b=2, *, c=None: None, ["f(b): 1 in torch, here 2"]),
        (lambda a, b, *, c=None: None, ["f(b): required here"]),
        (lambda b=1, a=0, *, c=None: None, ["f(a): another place", "f(b): another place"]),
        (lambda a, b=1, *, c=None, d: None, ["f(d): required here, unknown in torch"]),
        (lambda a, b=1, /, *, c=None: None, ["f(a): no keyword here", "f(b): no keyword here"]),
    ],
)
def test_what_a_function_accepts_less_is_a_row(ours, rows):
    assert list(differing("f", signature(theirs), signature(ours))) == rows


def test_signatures_of_pybind11_are_read():
    class Bound:
        """f(*args, **kwargs)
        Overloaded function.

        1. f(self: x.Store, arg0: str, timeout: datetime.timedelta = datetime.timedelta(0)) -> None

        2. f(self: x.Store, keys: list[str], op: x.Op = <RedOpType.SUM: 0>) -> bytes
        """

        __signature__ = "none"

    lines = "\n".join(line.strip() for line in (Bound.__doc__ or "").splitlines())

    class Told:
        __doc__ = lines

    first, second = signature(Told())
    assert [(one.name, one.keyword, one.default) for one in first.parameters[1:]] == [
        ("arg0", False, "no default"),
        ("timeout", True, "datetime.timedelta(0)"),
    ]
    assert [one.default for one in second.parameters[1:]] == ["no default", "ReduceOp.SUM"]


def test_a_class_is_compared_member_by_member():
    class Torch:
        def f(self, a):
            """With an argument."""

        def g(self):
            """Without."""

    class Ours:
        def f(self):
            """Without."""

    rows = list(compared("C", Torch, Ours))
    assert rows == ["C.f(a): missing", "C.g: missing"]


TABLE = """
# a comment
why: on purpose
  a.b: missing
  a.c(* [from 2.14]
  a.d: missing [until 2.13]
  a.e: missing [from 2.15, with NCCL]
"""


def test_the_table_names_rows_versions_and_reasons():
    assert table(TABLE)[1] == Explained("a.c(*", (2, 14), (9999, 9999), False, "on purpose")
    rows = ["a.b: missing", "a.c(x): missing", "a.c(y): missing"]
    assert wrong(rows, table(TABLE), (2, 15)) == []
    assert wrong(rows, table(TABLE), (2, 13)) == [
        "unexplained: a.c(x): missing",
        "unexplained: a.c(y): missing",
        "needless: a.d: missing",
    ]
    assert wrong(rows, table(TABLE), (2, 15), nccl=True) == ["needless: a.e: missing"]
    assert wrong(["a.e: missing", *rows], table(TABLE), (2, 15), nccl=True) == []


@pytest.mark.parametrize("text", ["  a.b: missing", "why: x\nrow"])
def test_a_table_without_reasons_is_refused(text):
    with pytest.raises(ValueError, match="line"):
        table(text)


def test_a_missing_name_of_another_torch_is_needless_once_hpcdist_has_it():
    row = "torch.distributed.ProcessGroup.{}: missing [from 2.14]"
    lines = "\n".join(["why: a reason", *(f"  {row.format(name)}" for name in ("rank", "nothing"))])
    assert wrong([], table(lines), (2, 13)) == [
        "needless: torch.distributed.ProcessGroup.rank: missing"
    ]

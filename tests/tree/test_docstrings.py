"""Every public name says what it does, what it takes and gives, and who must call it."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types

import pytest
import torch.distributed

import hpcdist

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

SECTIONS = ("Parameters", "Returns", "Raises", "Notes", "Examples", "Attributes", "See Also")

#: Says whether all ranks must call it.
WHO = re.compile(
    r"(?i)\ball (ranks|processes|members)\b|\bmust (call|have|register|receive|send)\b|"
    r"\blocal to this process\b|\bnot collective\b|\bany rank may call\b|\banother rank sends\b"
)


def doc_of(thing: object) -> str:
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    # Cython may put the signature into the first line
    return re.sub(r"\A[\w.]+\(.*\)(?: -> .*)?\n+", "", text)


def section(text: str, name: str) -> str | None:
    """The body of one section, or None."""
    match = re.search(rf"^{name}\n-{{{len(name)}}}$\n(.*?)(?=^\w[\w ]*\n-+$|\Z)", text, re.M | re.S)
    return match[1] if match else None


def documented(body: str) -> set[str]:
    """Names at the left margin of a Parameters section: ``a, b : int`` is two."""
    heads = [line.partition(" : ")[0] for line in body.splitlines() if line[:1].strip()]
    return {name.strip().lstrip("*") for head in heads for name in head.split(",")}


def parameters(thing: object) -> list[str]:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return []
    return [
        name
        for name, parameter in signature.parameters.items()
        if name not in ("self", "cls")
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def raises(thing: object) -> bool:
    """Whether the function itself has a raise statement other than a bare one."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    except (OSError, TypeError):
        return False
    return any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(tree))


def returns(thing: object) -> bool:
    if inspect.isgeneratorfunction(inspect.unwrap(thing)):
        return False  # a context manager
    return getattr(thing, "__annotations__", {}).get("return", "None") not in ("None", None)


def is_function(thing: object) -> bool:
    return inspect.isroutine(thing)


FUNCTIONS = sorted(name for name in hpcdist.__all__ if is_function(getattr(hpcdist, name)))
CLASSES = sorted(name for name in hpcdist.__all__ if inspect.isclass(getattr(hpcdist, name)))
OTHERS = sorted(set(hpcdist.__all__) - set(FUNCTIONS) - set(CLASSES))


def members(cls: type) -> list[tuple[str, object]]:
    """Public methods and properties that our classes add to their foreign bases."""
    found = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] == "hpcdist":
            found.update(vars(base))
    return [(name, thing) for name, thing in sorted(found.items()) if not name.startswith("_")]


METHODS = [
    pytest.param(thing, id=f"{cls}.{name}")
    for cls in CLASSES
    for name, thing in members(getattr(hpcdist, cls))
    if is_function(thing) or isinstance(thing, (classmethod, staticmethod))
]
PROPERTIES = [
    pytest.param(thing, id=f"{cls}.{name}")
    for cls in CLASSES
    for name, thing in members(getattr(hpcdist, cls))
    if isinstance(thing, (property, types.GetSetDescriptorType))
]


def check_summary(text: str) -> None:
    assert text, "no docstring"
    first = text.split("\n\n", 1)[0]
    assert first.rstrip().endswith((".", ":")), f"the summary is no sentence: {first!r}"


def check_parameters(names: list[str], text: str) -> None:
    if names:
        body = section(text, "Parameters")
        assert body is not None, f"no Parameters section for {names}"
        missing = [name for name in names if name not in documented(body)]
        assert not missing, f"parameters without a word: {missing}"


def check_function(thing: object, text: str) -> None:
    check_summary(text)
    check_parameters(parameters(thing), text)
    if returns(thing):
        assert section(text, "Returns") is not None, "no Returns section"
    if raises(thing):
        assert section(text, "Raises") is not None, "it raises, and has no Raises section"


def test_all_kinds_are_covered():
    assert len(FUNCTIONS) > 50 and len(CLASSES) > 15 and len(METHODS) > 40
    assert OTHERS == ["GroupName", "group", "reduce_op"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    thing = getattr(hpcdist, name)
    text = doc_of(thing)
    check_function(thing, text)
    assert WHO.search(text), "does not say which ranks must call it"
    if hasattr(torch.distributed, name):
        assert "Source: ``torch.distributed." in text, "does not name its source"


@pytest.mark.parametrize("name", CLASSES)
def test_class(name):
    thing = getattr(hpcdist, name)
    text = doc_of(thing)
    check_summary(text)
    own = vars(thing).get("__init__") or vars(thing).get("__new__")
    if own is not None and not issubclass(thing, BaseException):
        check_parameters(parameters(own), text)


def check_reference(thing: object, function: str) -> None:
    """A method that refers to a function: what it takes is explained there."""
    check_summary(doc_of(thing))
    body = section(doc_of(getattr(hpcdist, function)), "Parameters") or ""
    missing = [name for name in parameters(thing) if name not in documented(body)]
    assert not missing, f"parameters of which hpcdist.{function} says nothing: {missing}"


@pytest.mark.parametrize("thing", METHODS)
def test_method(thing):
    inner = thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing
    text = doc_of(inner)
    reference = re.search(r"See :func:`hpcdist\.(\w+)`\.\s*\Z", text)
    if reference:
        check_reference(inner, reference[1])
    else:
        check_function(inner, text)


@pytest.mark.parametrize("thing", PROPERTIES)
def test_property(thing):
    text = doc_of(thing)
    if not text and not isinstance(thing, property):
        # Cython's readonly attributes cannot carry a docstring: their class speaks of them
        body = section(doc_of(thing.__objclass__), "Attributes")
        assert body and thing.__name__ in documented(body), "neither docstring nor attribute entry"
    else:
        check_summary(text)


@pytest.mark.parametrize("name", OTHERS)
def test_other(name):
    thing = getattr(hpcdist, name)
    check_summary(doc_of(thing if isinstance(thing, types.ModuleType) else type(thing)))


def test_sections_are_known_and_underlined():
    for name in FUNCTIONS + CLASSES:
        for title, line in re.findall(
            r"^(\w[\w ]*)\n(-{3,})$", doc_of(getattr(hpcdist, name)), re.M
        ):
            assert title in SECTIONS, f"{name}: unknown section {title!r}"
            assert len(title) == len(line), f"{name}: the line under {title!r} is too long or short"

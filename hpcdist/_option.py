"""The form of a setting: how the text of its environment variable is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Option:
    """One setting.

    Parameters
    ----------
    name : str
        Short name; the environment variable is ``HPCDIST_`` and this in capitals.
    kind : {"choice", "seconds", "share", "bytes", "int", "bool", "str"}
        How the text of the variable is read. ``bytes`` accepts the suffixes k, M and G (powers of
        1024).
    default : object
        Value when the variable is unset or empty.
    doc : str
        What it does, in a sentence or two.
    choices : tuple of str
        The allowed values of a ``choice``; compared without regard to case.
    minimum : float
        Smallest allowed value of a number.
    maximum : float
        Largest allowed value of a number.
    secret : bool
        Whether :func:`describe` keeps the value to itself.
    aliases : tuple of str
        Other programs' variables of the same meaning and form, read where its own is not set.
    """

    name: str
    kind: str
    default: Any
    doc: str
    choices: tuple[str, ...] = ()
    minimum: float = 0
    maximum: float = math.inf
    secret: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return "HPCDIST_" + self.name.upper()

    def source(self, environ: Mapping[str, str]) -> tuple[str, str]:
        """The variable that says something of this setting, and what it holds.

        Parameters
        ----------
        environ : mapping
            The environment.

        Returns
        -------
        tuple of str
            The setting's own variable if none is set; the text is then empty.
        """
        for name in (self.variable, *self.aliases):
            text = environ.get(name, "")
            if text.strip():
                return name, text
        return self.variable, ""

    def parse(self, text: str, variable: str = "") -> Any:
        """Turn the text of the variable into a value.

        Parameters
        ----------
        text : str
            What the variable holds.
        variable : str
            Its name for messages, where it is not the setting's own.

        Returns
        -------
        object
            A value of the option's kind.

        Raises
        ------
        ValueError
            If the text is not one; the message names the variable and what it accepts.
        """
        try:
            return self._value(text)
        except ValueError as error:
            if not variable or variable == self.variable:
                raise
            raise ValueError(str(error).replace(self.variable, variable, 1)) from None

    def _value(self, text: str) -> Any:
        value = text.strip()
        if self.kind == "str":
            return value
        if self.kind == "choice":
            lowered = value.lower()
            if lowered in self.choices:
                return lowered
            raise self._refuse(text, "one of " + ", ".join(self.choices))
        if self.kind == "bool":
            lowered = value.lower()
            if lowered in _TRUE or lowered in _FALSE:
                return lowered in _TRUE
            raise self._refuse(text, "0 or 1")
        return self._number(text, value)

    def _number(self, text: str, value: str) -> float | int:
        wanted = {"seconds": "a number of seconds", "bytes": "a number of bytes (k, M, G allowed)"}
        expected = f"{wanted.get(self.kind, 'a whole number')} of at least {self.minimum:g}"
        if self.maximum < math.inf:
            expected += f" and at most {self.maximum}"
        if self.kind == "share":
            expected = "a number from 0 to 1"
        factor = 1
        if self.kind == "bytes" and value[-1:].lower() in _SUFFIXES:
            factor = _SUFFIXES[value[-1].lower()]
            value = value[:-1]
        try:
            number = float(value) if self.kind in ("seconds", "share") else int(value) * factor
        except ValueError:
            raise self._refuse(text, expected) from None
        # "not >=" also refuses NaN, which compares false with everything
        most = 1 if self.kind == "share" else self.maximum
        if not self.minimum <= number <= most:
            raise self._refuse(text, expected)
        return number

    def _refuse(self, text: str, expected: str) -> ValueError:
        return ValueError(f"{self.variable}={text!r} is not valid: it must be {expected}")

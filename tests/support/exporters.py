"""Objects whose buffer is other memory each time they are asked for it, as a class may have it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_ssize_t, c_uint, c_void_p, py_object, pythonapi

#: Of ``Py_bf_getbuffer`` in CPython's typeslots.h.
_GET_BUFFER = 1

#: Bytes of each buffer.
BYTES = 50_000

#: What the buffers contain, one number each.
made: list[int] = []


class _Slot(ctypes.Structure):
    _fields_ = [("slot", c_int), ("function", c_void_p)]


class _Spec(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("size", c_int), ("item", c_int), ("flags", c_uint)]
    _fields_ += [("slots", POINTER(_Slot))]


@ctypes.PYFUNCTYPE(c_int, py_object, c_void_p, c_int)
def _get_buffer(_exporter: object, view: int, flags: int) -> int:
    made.append(len(made) % 200 + 1)
    each = bytearray(made[-1:] * BYTES)
    start = c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(each)))
    return pythonapi.PyBuffer_FillInfo(
        c_void_p(view), py_object(each), start, c_ssize_t(BYTES), 0, flags
    )


def exporter() -> object:
    """Return such an object. Classes written in Python can be such from 3.12 on only."""
    slots = (_Slot * 2)(_Slot(_GET_BUFFER, ctypes.cast(_get_buffer, c_void_p)), _Slot(0, None))
    spec = _Spec(b"exporters.Exporter", object.__basicsize__, 0, 0, slots)
    pythonapi.PyType_FromSpec.restype = py_object
    return pythonapi.PyType_FromSpec(ctypes.byref(spec))()

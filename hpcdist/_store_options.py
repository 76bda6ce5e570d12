"""The settings of the stores; config.py has the others."""

from __future__ import annotations

from hpcdist._option import Option

STORE_OPTIONS = (
    Option(
        "store_limit",
        "bytes",
        1 << 30,
        "Bytes that a store may hold: keys and values of a TCPStore's server, or the file of a "
        "FileStore. One more is an error, and the store goes on.",
        minimum=1 << 16,
        maximum=1 << 50,
    ),
    Option(
        "store_key",
        "str",
        "",
        "The job's key for TCPStore: 64 hexadecimal digits, the same on all ranks. Unset, the "
        "key in the user's own key file is taken.",
        secret=True,
    ),
    Option(
        "store_key_file",
        "str",
        "",
        "File of mode 0600 that holds a key for TCPStore where HPCDIST_STORE_KEY is unset; it is "
        "made if it is not there. By default ~/.config/hpcdist/store.key.",
    ),
    Option(
        "store_connections",
        "int",
        65536,
        "Connections that a TCPStore's server keeps; one more is turned away.",
        minimum=1,
        maximum=1 << 24,
    ),
    Option(
        "store_idle",
        "seconds",
        0.0,
        "Seconds after which a TCPStore's server closes a connection that asks for nothing; the "
        "client connects again when it needs to. 0 keeps it; less than 2 means 2.",
        maximum=10**9,
    ),
)

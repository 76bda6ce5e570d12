"""Backends: they move a group's data, each behind the same small interface.

``base`` is the interface, ``registry`` the names, ``create`` makes a group's backends and
``dispatch`` picks the one for a tensor. Third parties add a backend with
:meth:`hpcdist.Backend.register_backend`.
"""

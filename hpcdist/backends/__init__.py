"""Backends: what moves the data of a group, each behind the same small interface.

``base`` holds the interface and the registry, ``mpi`` the backend over MPI. A backend of a third
party joins with :meth:`hpcdist.Backend.register_backend`.
"""

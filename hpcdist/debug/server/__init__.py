"""A page that shows what the ranks of a running job do: see :mod:`hpcdist.debug.server.start`.

It is served by a process of its own on the first rank's node, which reads the flight recorders of
that node's ranks; a process on each other node reports to it. The ranks do nothing for it.
"""

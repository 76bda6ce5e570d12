"""The start and the end of the world: rendezvous, MPI's start, the default group."""

"""The start and the end of the world: how processes meet, how MPI starts, the default group."""

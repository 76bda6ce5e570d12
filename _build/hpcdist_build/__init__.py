"""How hpcdist is built: the PEP 517 hooks, the search for an MPI compiler, the extensions."""

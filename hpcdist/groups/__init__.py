"""Groups of ranks: which exist, how new ones are made, and what may be asked about them."""

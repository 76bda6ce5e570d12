"""Groups of ranks: their state, how to make new ones, and the queries about them."""

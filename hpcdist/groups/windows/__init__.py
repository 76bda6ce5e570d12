"""Windows: memory of each rank that the others of a group write and read without its help."""

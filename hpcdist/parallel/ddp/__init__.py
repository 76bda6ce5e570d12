"""DistributedDataParallel, one file per thing that it does around the reducer."""

"""DistributedDataParallel, one file per task around the reducer."""

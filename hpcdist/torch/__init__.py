"""The bridge between hpcdist and stock torch.distributed."""

"""The names of ``torch.distributed.device_mesh``."""

from hpcdist.mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]

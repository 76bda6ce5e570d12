"""Device meshes: ranks arranged in a grid, with a group along each of its dimensions."""

from .device_mesh import DeviceMesh
from .init import init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]

"""Many devices: a mesh, a batch that devices and micro-batches share, and layers on devices."""

from jaxrnn.parallel.gradients import Objective, sharded_gradients
from jaxrnn.parallel.mesh import EVERYWHERE, check_divides, make_mesh, put

__all__ = ["EVERYWHERE", "Objective", "check_divides", "make_mesh", "put", "sharded_gradients"]

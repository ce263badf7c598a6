"""The names that schedules and custom collectives outside the package import. `comm.transport` defines them."""

from hwfsdp.comm.transport import AllGather as AllGather
from hwfsdp.comm.transport import BackendAllGather as BackendAllGather
from hwfsdp.comm.transport import BackendReduceScatter as BackendReduceScatter
from hwfsdp.comm.transport import DefaultAllGather as DefaultAllGather
from hwfsdp.comm.transport import DefaultReduceScatter as DefaultReduceScatter
from hwfsdp.comm.transport import GroupAllocAllGather as GroupAllocAllGather
from hwfsdp.comm.transport import GroupAllocReduceScatter as GroupAllocReduceScatter
from hwfsdp.comm.transport import ReduceScatter as ReduceScatter
from hwfsdp.comm.transport import RingAllGather as RingAllGather
from hwfsdp.comm.transport import RingReduceScatter as RingReduceScatter
from hwfsdp.comm.transport import all_gather_flat as all_gather_flat
from hwfsdp.comm.transport import reduce_scatter_flat as reduce_scatter_flat

"""Ranks that you do not have: a step of training on any number of GPUs, in one process, in virtual time.

devices      figures of devices, each with its source
topology     how long a collective takes
costs        what an operator costs
clock        time that passes when an operator is called; streams and events in it
pools        how a caching allocator lays storages out
allocator    bytes of a device that is not there
kernels      what a device runs where a CPU runs something else
world        what stands in for the machine
programs     what is simulated
run          the public door: simulate
fitting      what would fit, when something does not
report       a simulation as text
calibration  this machine as a device
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwfsdp.doors import lazy_door

if TYPE_CHECKING:
    from hwfsdp.virtual.devices import DEVICES as DEVICES
    from hwfsdp.virtual.devices import Device as Device
    from hwfsdp.virtual.run import Simulation as Simulation
    from hwfsdp.virtual.run import simulate as simulate

_HOME = {"DEVICES": "devices", "Device": "devices", "Simulation": "run", "simulate": "run"}
__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_door(__name__, _HOME)

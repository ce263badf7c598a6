"""Simulation of a training step on any number of GPUs, in one process, in virtual time.

devices      the figures of devices, each with its source
topology     the duration of a collective
costs        the cost of an operator
clock        virtual time, with streams and events
pools        the memory layout of a caching allocator
allocator    the memory of a virtual device
kernels      operators that run differently on a device than on a CPU
world        stand-ins for the machine: process group, tensors, streams
programs     the simulated program: a model and a training step
run          the public door: simulate
fitting      settings that fit into memory, if the wanted settings do not
report       a simulation as text
calibration  this machine as a device
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwfsdp.doors import lazy_door

if TYPE_CHECKING:
    from . import allocator, calibration, clock, costs, devices, fitting, kernels, pools, programs, report
    from . import run, topology, world
    from hwfsdp.virtual.devices import DEVICES as DEVICES
    from hwfsdp.virtual.devices import Device as Device
    from hwfsdp.virtual.run import Simulation as Simulation
    from hwfsdp.virtual.run import simulate as simulate

_HOME = {"DEVICES": "devices", "Device": "devices", "Simulation": "run", "simulate": "run"}
__all__ = sorted(_HOME)
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_door(__name__, _HOME)

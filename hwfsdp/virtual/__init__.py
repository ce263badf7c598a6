"""Simulation of a training step on any number of GPUs, in one process, in virtual time.

devices      the figures of devices, each with its source
costs        the cost of an operator; the duration of a collective
clock        virtual time, with streams and events
allocator    the memory of a virtual device, and the segments of a caching allocator
world        stand-ins for the machine: process group, tensors, streams
programs     the simulated program: a model and a training step
run          the public function simulate, and its result as text
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwfsdp.lazy_imports import lazy_names

if TYPE_CHECKING:
    from . import allocator, clock, costs, devices, programs, run, world
    from hwfsdp.virtual.devices import DEVICES as DEVICES
    from hwfsdp.virtual.devices import Device as Device
    from hwfsdp.virtual.run import Simulation as Simulation
    from hwfsdp.virtual.run import simulate as simulate

_HOME = {"DEVICES": "devices", "Device": "devices", "Simulation": "run", "simulate": "run"}
__all__ = sorted(_HOME)
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_names(__name__, _HOME)

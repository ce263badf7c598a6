"""What the ranks import before the student's file runs: the probes, and everything that they need."""

from hwfsdp.course import facts as facts
from hwfsdp.course import machines as machines
from hwfsdp.course import watching as watching

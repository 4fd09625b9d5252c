"""Clusters on one machine: hosts are network namespaces on a bridge, every NIC limited both ways.

    with Lab(hosts=4, rate_mbit=100) as lab:
        worker = lab.hosts[1].popen(["python", "train.py"])
        lab.hosts[1].freeze()

`lab.py` builds and removes the network, `host.py` runs, kills, freezes and cuts off; `sweep.py` removes what
a killed owner left (`python -m tests.lab sweep`). It needs root and leaves the machine's network alone.
"""

from __future__ import annotations

from tests.lab.host import Counters, Host
from tests.lab.lab import Lab
from tests.lab.namespaces import LabError, lab_possible
from tests.lab.sweep import sweep

__all__ = ["Counters", "Host", "Lab", "LabError", "lab_possible", "sweep"]

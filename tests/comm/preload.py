"""Imported once by the fork server of `ranks.py`, so that forked ranks need not."""

from __future__ import annotations

import baguarun.comm.ddp
import baguarun.comm.extension
import baguarun.torch_api

baguarun.comm.extension.load_extension()

"""Imported once by the fork server of `ranks.py`, so that forked ranks need not."""

from __future__ import annotations

import gc

# Modules of tests import it.
import pytest  # noqa: F401

# Torch imports it when the first optimizer is made, which takes seconds.
import torch._dynamo

# Torch imports it when something is compiled first, with whatever backend.
import torch._inductor.compile_fx  # noqa: F401

import baguarun.comm.ddp
import baguarun.comm.extension
import baguarun.torch_api

baguarun.comm.extension.load_extension()
# A rank's collector leaves alone what is here already, so that the pages stay shared.
gc.freeze()
